"""Validation of large pictures at their full size: whole pictures with their labels, and how slices of them are seen.

Slices are cut, fitted into the network's input and merged as detection does it, so that both find the same boxes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from torch import Tensor

from utils.boxes import scale_boxes
from utils.data.augment import network_targets, to_pixels
from utils.data.dataset import LoadImagesAndLabels, Sample, SampleKey, Shapes
from utils.data.images import imread_bgr, letterbox
from utils.slicing import Detect, detect_sliced, slice_windows

READ_AHEAD = 2  # pictures read while one is looked at; the network takes longer for one, and each may be very large


class WholeImagesAndLabels(LoadImagesAndLabels):
    """Pictures at the size they have on disk, for validation: ``dataset[index]``.

    Gives what ``LoadImagesAndLabels`` does: picture (3, H, W) uint8 RGB, labels (n, 6), path, shapes. A picture that
    cannot be read any more is a grey one without labels.
    """

    def load_image(self, index: int) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the picture (H, W, 3) BGR as it is, and its height and width.

        Raises:
            ImageError, OSError: it cannot be read any more.
        """
        image = imread_bgr(self.im_files[index])
        return image, image.shape[:2]

    def __getitem__(self, index: int) -> Sample:
        index = range(len(self))[index]
        picture = self._load(index, self.generator(SampleKey(0, index)))
        (full_height, full_width), (height, width) = picture.original, picture.image.shape[:2]
        rows, _ = self._rows(picture.index)
        targets = network_targets(to_pixels(rows, width, height), height, width)
        image = torch.from_numpy(cv2.cvtColor(picture.image, cv2.COLOR_BGR2RGB)).permute(2, 0, 1)  # (3, H, W), a view
        shapes = ((full_height, full_width), ((height / full_height, width / full_width), (0.0, 0.0)))
        return image, torch.from_numpy(targets), self.im_files[index], shapes


class WholeImageLoader:
    """Batches of one whole picture: images (1, 3, H, W) uint8, targets (T, 6), paths, shapes; in order, read ahead."""

    def __init__(self, dataset: LoadImagesAndLabels) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, tuple[str], tuple[Shapes | None]]]:
        waiting: deque[Future[Sample]] = deque()
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            for index in range(len(self.dataset) + READ_AHEAD):
                if index < len(self.dataset):
                    waiting.append(pool.submit(self.dataset.__getitem__, index))
                if index >= READ_AHEAD:
                    image, targets, path, shapes = waiting.popleft().result()
                    yield image[None], targets, (path,), (shapes,)


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """How whole pictures are looked at.

    Attributes:
        size: side of slices in pixels of the picture.
        overlap: share of it that neighbours have in common.
        imgsz: side of the network's input, into which slices and the whole picture are fitted.
        stride: of the network.
        auto: pad to a multiple of the stride only, as detection does for files that take any shape.
        batch_size: slices per call of the network.
    """

    size: int
    overlap: float
    imgsz: int
    stride: int = 32
    auto: bool = True
    batch_size: int = 16

    def passes(self, shapes: np.ndarray) -> np.ndarray:
        """Return how many parts of each picture the network looks at, (n,); ``shapes`` (n, 2) are width, height."""
        sides, place = np.unique(shapes, return_inverse=True)
        along = np.array([len(slice_windows(int(side), 1, self.size, self.overlap)) for side in sides], np.int64)
        slices = along[place.reshape(np.shape(shapes))].prod(1)
        return slices + (slices > 1)  # where there are several, the whole picture as well

    def fit(self, parts: Sequence[np.ndarray]) -> Tensor:
        """Return parts (H, W, 3) of one size as input of the network (B, 3, H, W) uint8, a view."""
        boxed = [letterbox(part, self.imgsz, auto=self.auto, stride=self.stride)[0] for part in parts]
        return torch.from_numpy(np.stack(boxed)).permute(0, 3, 1, 2)

    def unfit(
        self, found: Sequence[Tensor], input_shape: Sequence[int], parts: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return detections (n, 6) of each part in its own pixels, in host memory, from those in input pixels."""
        rows = torch.cat(list(found)).cpu().split([len(part) for part in found])  # one transfer for all parts
        return [
            np.concatenate((scale_boxes(input_shape, row[:, :4].clone(), part.shape), row[:, 4:]), 1)
            for row, part in zip(rows, parts, strict=True)
        ]

    def detect(self, look: Detect, image: Tensor, *, iou_thres: float, agnostic: bool, max_det: int) -> Tensor:
        """Return the detections (n, 6) of a picture (3, H, W) in its pixels, merged from those of its slices.

        Args:
            look: gives the detections of parts (H, W, 3) of one size, each in its own pixels.
            image: as ``WholeImagesAndLabels`` gives it.
            iou_thres, agnostic, max_det: as in suppression.
        """
        rows = detect_sliced(
            look,
            image.permute(1, 2, 0).numpy(),
            size=self.size,
            overlap=self.overlap,
            iou_thres=iou_thres,
            agnostic=agnostic,
            max_det=max_det,
            batch_size=self.batch_size,
        )
        return torch.from_numpy(rows)
