"""Confusion matrix of a detector: which class was predicted where which class was labelled, background included."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from utils.boxes import box_iou
from utils.evaluate import plots
from utils.files import write_text_atomic
from utils.log import LOGGER


class ConfusionMatrix:
    """Counts in ``matrix`` (nc + 1, nc + 1): rows are predictions, columns labels, the last of each is background.

    Predictions up to ``conf`` are left out. A prediction and a label pair up by overlap alone, above ``iou_thres``,
    whatever their classes. Labels without partner fall into the last row; predictions without partner always fall
    into the last column, also in images without labels or without a single pair (upstream forgets those).
    """

    def __init__(self, nc: int, conf: float = 0.25, iou_thres: float = 0.45) -> None:
        self.nc = nc
        self.conf = conf
        self.iou_thres = iou_thres
        self.matrix = np.zeros((nc + 1, nc + 1))
        self.ignored = 0  # labels and predictions whose class is outside 0 … nc - 1

    def process_batch(self, detections: Tensor | None, labels: Tensor) -> None:
        """Add one image: detections (N, 6) x1 y1 x2 y2 confidence class or None, labels (G, 5) class x1 y1 x2 y2."""
        if detections is None:
            detections = labels.new_zeros(0, 6)
        detections = detections[detections[:, 4] > self.conf]
        predicted, found = self._known(detections[:, 5])
        true, wanted = self._known(labels[:, 0])
        detections, labels = detections[found], labels[wanted]

        hit, partner = self._pair(box_iou(labels[:, 1:5], detections[:, :4]))
        free_predictions = np.setdiff1d(np.arange(len(predicted)), hit)
        free_labels = np.setdiff1d(np.arange(len(true)), partner)
        np.add.at(self.matrix, (predicted[hit], true[partner]), 1)
        np.add.at(self.matrix, (predicted[free_predictions], self.nc), 1)
        np.add.at(self.matrix, (self.nc, true[free_labels]), 1)

    def _known(self, classes: Tensor) -> tuple[np.ndarray, Tensor]:
        """Return the classes inside the matrix as integers, and the mask that selects their rows."""
        inside = (classes >= 0) & (classes < self.nc)
        outside = len(classes) - int(inside.sum())
        if outside and not self.ignored:
            LOGGER.warning(f"confusion matrix: a class outside 0 … {self.nc - 1} occurs and is left out")
        self.ignored += outside
        return classes[inside].long().cpu().numpy(), inside

    def _pair(self, overlap: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Pair by ``overlap`` (G, N): each prediction bids for its best label, the closest bidder gets it."""
        none = np.zeros(0, dtype=np.int64)
        if not overlap.numel():
            return none, none
        best, label = (part.cpu().numpy() for part in torch.max(overlap, 0))
        bidders = np.flatnonzero(best > self.iou_thres)
        bidders = bidders[np.argsort(-best[bidders], kind="stable")]
        partner, first = np.unique(label[bidders], return_index=True)
        return bidders[first], partner

    def tp_fp(self) -> tuple[np.ndarray, np.ndarray]:
        """Return true and false positives per class, (nc,) each."""
        right = self.matrix.diagonal()[:-1]
        return right.copy(), self.matrix[:-1].sum(1) - right

    def plot(
        self, normalize: bool = True, save_dir: str | Path = "", names: Mapping[int, str] | Sequence[str] = ()
    ) -> None:
        """Write ``confusion_matrix.png`` to ``save_dir``; ``normalize`` divides each column by its sum."""
        note = f"confidence > {self.conf:g}, IoU > {self.iou_thres:g}"
        plots.plot_confusion_matrix(
            self.matrix, names, Path(save_dir) / "confusion_matrix.png", normalize=normalize, note=note
        )

    def save_counts(self, path: str | Path, names: Mapping[int, str] | Sequence[str] = ()) -> None:
        """Write the counts as CSV: one row per predicted class, one column per true class, background last."""
        known = names if isinstance(names, Mapping) else dict(enumerate(names))
        titles = [str(known.get(number, number)) for number in range(self.nc)] + ["background"]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["predicted \\ true", *titles])
        writer.writerows([title, *row.astype(int)] for title, row in zip(titles, self.matrix, strict=True))
        write_text_atomic(Path(path), text.getvalue())

    def print(self) -> None:
        """Log the matrix, one row a line."""
        for row in self.matrix:
            LOGGER.info(" ".join(f"{count:g}" for count in row))
