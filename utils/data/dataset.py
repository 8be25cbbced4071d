"""LoadImagesAndLabels: from an index to a picture with its labels, augmented or not.

A sample depends on (seed, epoch, index) and the mosaic switch only, never on the worker that makes it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from utils.boxes import xyxy2xywhn
from utils.data.augment import (
    AugmentSettings,
    augment_hsv,
    copy_paste,
    draw_centre,
    flip_labels,
    mixup,
    mosaic4,
    random_perspective,
    to_pixels,
)
from utils.data.images import FILL, ImageError, imread_bgr, letterbox, resize_long_side
from utils.data.labels import rectangle_points
from utils.data.ram_cache import RamCache
from utils.data.scan import ScanResult, printable, scan_dataset
from utils.data.tables import RowTable, TextTable
from utils.log import LOGGER

MAX_REPLACEMENTS = 10  # pictures tried in place of one that cannot be read any more
CACHE_MODES = ("", "ram")

Shapes = tuple[tuple[int, int], tuple[tuple[float, float], tuple[float, float]]]
Sample = tuple[Tensor, Tensor, str, Shapes | None]


class SampleKey(NamedTuple):
    """What a sampler asks for: epoch and index fix all random draws, is_mosaic allows the mosaic path."""

    epoch: int
    index: int
    is_mosaic: bool = True


class Picture(NamedTuple):
    """A loaded picture (BGR, long side img_size), its size on disk (height, width), and the index whose labels fit."""

    image: np.ndarray
    original: tuple[int, int]
    index: int


class LoadImagesAndLabels(Dataset):
    """Pictures with labels for training or validation.

    `dataset[index]` or `dataset[(epoch, index, is_mosaic)]` gives (picture (3, H, W) uint8 RGB, labels (n, 6) float32
    with columns 0, class, x, y, w, h as fractions, path, shapes). Shapes is None after a mosaic, else
    ((height, width) on disk, ((ratio_h, ratio_w), (pad_w, pad_h))). `report` holds the outcome of the scan.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        img_size: int = 640,
        batch_size: int = 16,
        augment: bool = False,
        hyp: object = None,
        rect: bool = False,
        image_weights: bool = False,
        cache_images: bool | str = False,
        single_cls: bool = False,
        stride: int = 32,
        pad: float = 0.0,
        min_items: int = 0,
        prefix: str = "",
        *,
        cache: bool | str | None = None,
        seed: int = 0,
        nc: int | None = None,
    ) -> None:
        if image_weights:
            raise ValueError("image_weights is not supported: pictures are drawn evenly, remove the option")
        self.img_size, self.augment, self.rect = img_size, augment, rect
        self.stride, self.pad, self.seed, self.prefix = stride, pad, seed % 2**63, prefix
        self.settings = AugmentSettings.from_hyp(hyp) if augment else AugmentSettings()
        self.report: ScanResult = scan_dataset(path, prefix=prefix, nc=None if single_cls else nc)
        selected = _with_enough_objects(self.report, min_items, prefix)
        if rect:
            selected = selected.select(np.argsort(_aspect(selected.shapes), kind="stable"))
        self._scan = selected
        self.im_files: TextTable = selected.im_files
        self.label_files: TextTable = selected.label_files
        self.labels: RowTable = selected.labels
        self.shapes: np.ndarray = selected.shapes  # (N, 2) width, height
        if single_cls:
            self.labels.values[:, 0] = 0
        self.batch_shapes = _batch_shapes(self.shapes, batch_size, img_size, stride, pad) if rect else None
        self.batch_index = np.arange(len(self)) // batch_size
        self._broken = multiprocessing.RawArray("B", len(self))  # seen by all workers; 1 = could not be read
        self._pictures: RamCache | None = None
        self._pictures = self._fill_cache(cache_mode(cache_images if cache is None else cache))

    def __len__(self) -> int:
        return len(self.im_files)

    def __getitem__(self, key: int | SampleKey | tuple[int, int, bool]) -> Sample:
        epoch, index, is_mosaic = (0, int(key), True) if isinstance(key, (int, np.integer)) else key
        index = range(len(self))[index]
        rng = np.random.default_rng([self.seed, epoch, index])
        if self.augment and not self.rect and is_mosaic and rng.random() < self.settings.mosaic:
            image, labels = self.load_mosaic(index, rng)
            if rng.random() < self.settings.mixup:
                image, labels = mixup(image, labels, *self.load_mosaic(int(rng.integers(len(self))), rng), rng=rng)
            shapes = None
        else:
            image, labels, shapes = self._load_plain(index, rng)
        tensor, targets = self._finish(image, labels, rng)
        return tensor, targets, self.im_files[index], shapes

    def broken_files(self) -> list[str]:
        """Pictures that could not be read after the scan, in any loader process."""
        return [self.im_files[int(i)] for i in np.flatnonzero(np.frombuffer(self._broken, np.uint8))]

    # ------------------------------------------------------------------------------------------------ loading

    def load_image(self, index: int) -> tuple[np.ndarray, tuple[int, int]]:
        """Picture of an index (BGR, long side img_size, perhaps read-only) and its (height, width) on disk.

        Raises ImageError or OSError when the file cannot be read any more.
        """
        cached = self._pictures.get(index) if self._pictures is not None else None
        if cached is not None:
            width, height = self.shapes[index]
            return cached, (int(height), int(width))
        image = imread_bgr(self.im_files[index])
        return resize_long_side(image, self.img_size, smooth=self.augment), image.shape[:2]

    def _load(self, index: int, rng: np.random.Generator) -> Picture:
        """Picture of an index; in training another one, with its own labels, where the file went bad after the scan.

        Where that fails too, and in validation, it is a grey picture without labels (index -1).
        """
        wanted = index
        for _ in range(1 + (MAX_REPLACEMENTS if self.augment else 0)):
            picture = self._try_load(index)
            if picture is not None:
                return picture
            index = int(rng.integers(len(self)))
        if min(self._broken):
            raise RuntimeError(
                f"{self.prefix}none of the {len(self)} pictures can be read any more, is the disk still there?"
            )
        width, height = (int(value) for value in self.shapes[wanted])
        grey = np.full((height, width, 3), FILL[0], np.uint8)
        return Picture(resize_long_side(grey, self.img_size, smooth=True), (height, width), -1)

    def _try_load(self, index: int) -> Picture | None:
        if self._broken[index]:
            return None
        try:
            return Picture(*self.load_image(index), index)
        except (ImageError, OSError, cv2.error, MemoryError) as error:
            self._broken[index] = 1
            LOGGER.warning(
                printable(f"{self.prefix}{self.im_files[index]} cannot be read any more, replaced from now on: {error}")
            )
            return None

    def _rows(self, picture: Picture) -> tuple[np.ndarray, list[np.ndarray]]:
        """Labels (n, 5) as fractions and one polygon per row, or no polygons where all rows are boxes."""
        if picture.index < 0:
            return np.zeros((0, 5), np.float32), []
        rows = self.labels[picture.index]
        segments = self._scan.segments(picture.index) if len(self._scan.points[picture.index]) else []
        return rows, segments

    def load_mosaic(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Mosaic of the indexed and three random pictures, warped to img_size: picture and labels in pixel corners."""
        centre = draw_centre(rng, self.img_size)
        indices = [index, *rng.integers(len(self), size=3)]
        rng.shuffle(indices)
        pictures = [self._load(int(i), rng) for i in indices]
        parts = [(picture.image, *self._rows(picture)) for picture in pictures]
        if any(segments for _, _, segments in parts):  # box rows get their rectangle, so that row and segment agree
            parts = [(image, rows, _complete(rows, segments)) for image, rows, segments in parts]
        image, labels, segments = mosaic4(parts, centre, self.img_size)
        image, labels, segments = copy_paste(image, labels, segments, self.settings.copy_paste, rng=rng)
        border = (-self.img_size // 2, -self.img_size // 2)
        return self._affine(image, labels, segments, rng, border)

    def _affine(
        self,
        image: np.ndarray,
        labels: np.ndarray,
        segments: Sequence[np.ndarray],
        rng: np.random.Generator,
        border: tuple[int, int] = (0, 0),
    ) -> tuple[np.ndarray, np.ndarray]:
        s = self.settings
        change = (s.degrees, s.translate, s.scale, s.shear, s.perspective)
        return random_perspective(image, labels, segments, *change, border, rng=rng)

    def _load_plain(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Shapes]:
        """One letterboxed picture, warped when augmenting: picture, labels in pixel corners, shapes."""
        picture = self._load(index, rng)
        (full_h, full_w), (height, width) = picture.original, picture.image.shape[:2]
        target = self.img_size if self.batch_shapes is None else self.batch_shapes[self.batch_index[index]].tolist()
        image, ratio, pad = letterbox(picture.image, target, auto=False, scaleup=self.augment)
        rows, segments = self._rows(picture)
        labels = to_pixels(rows, ratio[0] * width, ratio[1] * height, pad)
        if self.augment:
            outlines = [
                points * np.float32((ratio[0] * width, ratio[1] * height)) + np.float32(pad)
                for points in (_complete(rows, segments) if segments else [])
            ]
            image, labels = self._affine(image, labels, outlines, rng)
        return image, labels, ((full_h, full_w), ((height / full_h, width / full_w), pad))

    def _finish(self, image: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Colour, flips, and the layout of the network: picture (3, H, W) RGB and targets (n, 6)."""
        height, width = image.shape[:2]
        targets = np.zeros((len(labels), 6), np.float32)
        if len(labels):
            targets[:, 1] = labels[:, 0]
            targets[:, 2:] = xyxy2xywhn(labels[:, 1:5], w=width, h=height, clip=True, eps=1e-3)
        if self.augment:
            s = self.settings
            if not image.flags.writeable:
                image = image.copy()
            augment_hsv(image, s.hsv_h, s.hsv_s, s.hsv_v, rng=rng)
            for probability, is_vertical in ((s.flipud, True), (s.fliplr, False)):
                if rng.random() < probability:
                    image = cv2.flip(image, 0 if is_vertical else 1)
                    flip_labels(targets[:, 1:], vertical=is_vertical)
        planes = np.empty((3, height, width), np.uint8)
        for channel in range(3):  # BGR -> RGB and HWC -> CHW in one pass per channel
            cv2.extractChannel(image, 2 - channel, planes[channel])
        return torch.from_numpy(planes), torch.from_numpy(targets)

    def _fill_cache(self, mode: str) -> RamCache | None:
        if mode != "ram":
            return None
        return RamCache.fill(self.shapes, self.img_size, self._load_or_none, self.prefix)

    def _load_or_none(self, index: int) -> np.ndarray | None:
        picture = self._try_load(index)
        return None if picture is None else picture.image


def cache_mode(value: bool | str | None) -> str:
    """Normalise --cache to '' or 'ram'; raises ValueError for modes that do not exist."""
    mode = "ram" if value is True else str(value or "").lower()
    if mode == "disk":
        raise ValueError("--cache disk is not available; use --cache ram, or leave it out to read the files each time")
    if mode not in CACHE_MODES:
        raise ValueError(f"--cache {value}: expected 'ram' or nothing")
    return mode


def _with_enough_objects(scan: ScanResult, min_items: int, prefix: str) -> ScanResult:
    """Leave out pictures with fewer than min_items labels; 0 keeps all, backgrounds included."""
    if min_items <= 0:
        return scan
    kept = np.flatnonzero(scan.labels.lengths() >= min_items)
    LOGGER.info(f"{prefix}--min-items {min_items}: {len(kept)} of {len(scan)} pictures kept")
    if not len(kept):
        most = int(scan.labels.lengths().max())
        raise ValueError(f"{prefix}--min-items {min_items} leaves no picture; the fullest one holds {most} objects")
    return scan.select(kept)


def _aspect(shapes: np.ndarray) -> np.ndarray:
    """Height over width (N,) of shapes (N, 2) width, height."""
    return shapes[:, 1] / shapes[:, 0]


def _batch_shapes(shapes: np.ndarray, batch_size: int, size: int, stride: int, pad: float) -> np.ndarray:
    """Picture shape (height, width) of every batch, int64 (batches, 2), for shapes sorted by aspect ratio."""
    aspect = _aspect(shapes)
    ratios = []
    for start in range(0, len(aspect), batch_size):
        low, high = aspect[start], aspect[min(start + batch_size, len(aspect)) - 1]
        ratios.append((high, 1.0) if high < 1 else (1.0, 1 / low) if low > 1 else (1.0, 1.0))
    return (np.ceil(np.array(ratios) * size / stride + pad) * stride).astype(np.int64)


def _complete(rows: np.ndarray, segments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One polygon per row as fractions: the given one, or the rectangle of a box row."""
    if not segments:
        return [rectangle_points(row[1:]) for row in rows]
    return [points if len(points) else rectangle_points(row[1:]) for row, points in zip(rows, segments, strict=True)]
