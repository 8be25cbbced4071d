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

CONFIDENCE, IOU = 0.25, 0.45  # upstream's: above them a prediction counts, and may belong to a label


class ConfusionMatrix:
    """Counts in ``matrix`` (nc + 1, nc + 1): rows are predictions, columns labels, the last of each is background.

    Predictions up to ``conf`` are left out. A prediction and a label pair up by overlap alone, above ``iou_thres``,
    whatever their classes. Labels without partner fall into the last row; predictions without partner always fall
    into the last column, also in images without labels or without a single pair (upstream forgets those).
    """

    def __init__(self, nc: int, conf: float = CONFIDENCE, iou_thres: float = IOU) -> None:
        self.nc = nc
        self.conf = conf
        self.iou_thres = iou_thres
        self.matrix = np.zeros((nc + 1, nc + 1))
        self.ignored = 0  # labels and predictions whose class is outside 0 … nc - 1

    def process_batch(self, detections: Tensor | None, labels: Tensor) -> None:
        """Add one image: detections (N, 6) x1 y1 x2 y2 confidence class or None, labels (G, 5) class x1 y1 x2 y2."""
        if detections is None:
            detections = labels.new_zeros(0, 6)
        overlap = box_iou(labels[:, 1:5], detections[:, :4])  # (G, N)
        nothing = detections.new_zeros(len(detections))
        nearest, label = torch.max(overlap, 0) if len(labels) else (nothing, nothing.long())
        parts = (detections[:, 4], detections[:, 5], labels[:, 0], nearest, label)
        self.add(*(part.cpu().numpy() for part in parts))

    def add(
        self, confidence: np.ndarray, predicted: np.ndarray, true: np.ndarray, nearest: np.ndarray, label: np.ndarray
    ) -> None:
        """Add any number of images at once.

        Args:
            confidence, predicted: (N,) of the detections, the more confident first within an image.
            true: (G,) class of the labels.
            nearest: (N,) largest IoU of each detection with a label of its image, whatever the classes.
            label: (N,) row of that label.
        """
        confident = confidence > self.conf
        predicted, nearest, label = predicted[confident], nearest[confident], label[confident]
        is_shown, is_wanted = self._known(predicted), self._known(true)
        predicted, true = predicted.astype(np.int64), true.astype(np.int64)
        bidders = np.flatnonzero(is_shown & (nearest > self.iou_thres))
        bidders = bidders[is_wanted[label[bidders]]]
        bidders = bidders[np.argsort(-nearest[bidders], kind="stable")]  # the closest bidder gets the label
        partner, first = np.unique(label[bidders], return_index=True)
        hit = bidders[first]
        np.add.at(self.matrix, (predicted[hit], true[partner]), 1)
        is_shown[hit] = is_wanted[partner] = False
        np.add.at(self.matrix, (predicted[is_shown], self.nc), 1)
        np.add.at(self.matrix, (self.nc, true[is_wanted]), 1)

    def _known(self, classes: np.ndarray) -> np.ndarray:
        """Return which of the classes are inside the matrix; others are counted and warned of."""
        inside = (classes >= 0) & (classes < self.nc)
        outside = len(classes) - int(inside.sum())
        if outside and not self.ignored:
            LOGGER.warning(f"confusion matrix: a class outside 0 … {self.nc - 1} occurs and is left out")
        self.ignored += outside
        return inside

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
