"""What one batch shows and what a whole split has shown: detections and labels in pixels of the original images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from utils.boxes import xywh2xyxy
from utils.evaluate.matching import BatchMatch, match_batch
from utils.evaluate.size_ap import Instances

Shape = tuple[tuple[int, int], tuple[tuple[float, float], tuple[float, float]]]
THRESHOLDS = 10  # columns of ``correct``


@dataclass(frozen=True)
class Scene:
    """Detections and labels of one batch in original pixels, grouped by image."""

    detections: Tensor  # (R, 6) x1 y1 x2 y2 confidence class, float32, by falling confidence within an image
    found: list[int]  # detections of each image
    labels: Tensor  # (M, 5) class x1 y1 x2 y2, float64, in host memory
    wanted: list[int]  # labels of each image
    shapes: list[tuple[int, int]]  # height, width of each original image

    @classmethod
    def build(
        cls, found: Sequence[Tensor], targets: Tensor, shapes: Sequence[Shape], input_shape: Sequence[int]
    ) -> Scene:
        """Undo the letterbox of a batch.

        Args:
            found: detections (n, 6) of each image in input pixels; they stay on their device.
            targets: (T, 6) image, class, x, y, w, h normalised to the input.
            shapes: per image ((height, width) of the original, ((gain y, gain x), (pad x, pad y))).
            input_shape: height, width of the network's input.
        """
        height, width = input_shape
        targets = targets.cpu().double()
        targets = targets[targets[:, 0].argsort(stable=True)]
        corners = xywh2xyxy(targets[:, 2:] * torch.tensor([width, height, width, height]))
        counts, wanted = [len(part) for part in found], torch.bincount(targets[:, 0].long(), minlength=len(shapes))
        detections = torch.cat(list(found) or [torch.zeros(0, 6)]).float()
        table = _letterboxes(shapes)
        detections[:, :4] = _to_original(detections[:, :4], torch.tensor(counts, dtype=torch.int64), table)
        corners = _to_original(corners, wanted, table)
        sizes = [(int(shape[0][0]), int(shape[0][1])) for shape in shapes]
        return cls(detections, counts, torch.cat((targets[:, 1:2], corners), 1), wanted.tolist(), sizes)

    def merged(self) -> Scene:
        """Return the scene with all classes as class 0."""
        detections, labels = self.detections.clone(), self.labels.clone()
        detections[:, 5] = labels[:, 0] = 0
        return replace(self, detections=detections, labels=labels)

    def match(self, thresholds: Tensor) -> BatchMatch:
        """Match detections with labels, on the device of the detections."""
        device = self.detections.device
        labels = self.labels.float().to(device)
        return match_batch(self.detections, self.found, labels, self.wanted, thresholds.to(device))

    def cpu(self) -> Scene:
        """Return the scene in host memory; one transfer."""
        return replace(self, detections=self.detections.cpu())

    def images(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield detections (n, 6) and labels (g, 5), float32, of one image after the other."""
        yield from zip(self.detections.split(self.found), self.labels.float().split(self.wanted), strict=True)


def _letterboxes(shapes: Sequence[Shape]) -> Tensor:
    """Return original size, gain and padding of each image, for x y x y, (3, B, 4)."""
    rows = [(width, height, *gain[::-1], *pad) for (height, width), (gain, pad) in shapes]
    table = torch.from_numpy(np.array(rows, np.float64).reshape(-1, 3, 2))
    return table.transpose(0, 1).repeat(1, 1, 2)


def _to_original(boxes: Tensor, counts: Tensor, letterboxes: Tensor) -> Tensor:
    """Take boxes (R, 4) xyxy in input pixels, ``counts`` (B,) of each image, to the originals, and clip them there."""
    size, gain, pad = letterboxes.to(boxes.dtype).repeat_interleave(counts, 1).to(boxes.device)  # (R, 4) each
    return ((boxes - pad) / gain).clamp(min=0).minimum(size)


@dataclass
class Findings:
    """Everything a validation has seen, image by image; rows of detections, and rows of labels, belong together."""

    paths: list[str] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)  # height, width
    found: list[int] = field(default_factory=list)  # detections of each image
    wanted: list[int] = field(default_factory=list)  # labels of each image
    boxes: list[np.ndarray] = field(default_factory=list)  # (n, 4) of detections
    confidence: list[np.ndarray] = field(default_factory=list)  # (n,)
    predicted: list[np.ndarray] = field(default_factory=list)  # (n,) class
    correct: list[np.ndarray] = field(default_factory=list)  # (n, 10) bool
    label_boxes: list[np.ndarray] = field(default_factory=list)  # (m, 4)
    true: list[np.ndarray] = field(default_factory=list)  # (m,) class
    pairs: list[np.ndarray] = field(default_factory=list)  # (p, 2) rows counted over everything seen so far

    def add(self, scene: Scene, match: BatchMatch, paths: Sequence[str]) -> None:
        """Take a batch, in host memory."""
        start = torch.tensor([sum(map(len, self.boxes)), sum(map(len, self.true))])
        self.pairs.append((match.pairs + start).numpy())
        self.paths += map(str, paths)
        self.shapes += scene.shapes
        self.found += scene.found
        self.wanted += scene.wanted
        self.boxes.append(scene.detections[:, :4].numpy())
        self.confidence.append(scene.detections[:, 4].numpy())
        self.predicted.append(scene.detections[:, 5].numpy().astype(np.int32))
        self.correct.append(match.correct.numpy())
        self.label_boxes.append(scene.labels[:, 1:].numpy())
        self.true.append(scene.labels[:, 0].numpy().astype(np.int32))

    def joined(self) -> AllFindings:
        """Return whole arrays, also when nothing came in."""
        empty = {"boxes": np.zeros((0, 4), np.float32), "correct": np.zeros((0, THRESHOLDS), bool)}
        empty |= {"confidence": np.zeros(0, np.float32), "predicted": np.zeros(0, np.int32)}
        empty |= {"label_boxes": np.zeros((0, 4)), "true": np.zeros(0, np.int32), "pairs": np.zeros((0, 2), np.int64)}
        arrays = {name: np.concatenate((start, *getattr(self, name))) for name, start in empty.items()}
        lists = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in empty}
        return AllFindings(**lists, **arrays)


@dataclass(frozen=True)
class AllFindings:
    """The whole split: N detections and M labels of I images."""

    paths: list[str]
    shapes: list[tuple[int, int]]
    found: list[int]
    wanted: list[int]
    boxes: np.ndarray  # (N, 4) x1 y1 x2 y2
    confidence: np.ndarray  # (N,)
    predicted: np.ndarray  # (N,)
    correct: np.ndarray  # (N, T)
    label_boxes: np.ndarray  # (M, 4)
    true: np.ndarray  # (M,)
    pairs: np.ndarray  # (P, 2)

    @property
    def detection_image(self) -> np.ndarray:
        """Number of the image of each detection, (N,)."""
        return np.repeat(np.arange(len(self.found)), self.found)

    @property
    def label_image(self) -> np.ndarray:
        """Number of the image of each label, (M,)."""
        return np.repeat(np.arange(len(self.wanted)), self.wanted)

    def detections(self) -> Instances:
        """Return the detections as ``size_figures`` takes them."""
        return Instances(self.detection_image, self.predicted, self.boxes, self.confidence)

    def labels(self) -> Instances:
        """Return the labels as ``size_figures`` takes them."""
        return Instances(self.label_image, self.true, self.label_boxes)
