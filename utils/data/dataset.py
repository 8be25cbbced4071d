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

from utils.data.augment import (
    AffineDraws,
    AugmentSettings,
    affine_matrix,
    apply_affine,
    augment_hsv,
    choose_copies,
    copy_paste,
    draw_affine,
    draw_centre,
    draw_flips,
    draw_hsv,
    flip_labels,
    mixup,
    mosaic4,
    mosaic_labels,
    network_targets,
    paste_copies,
    to_pixels,
    warp_targets,
)
from utils.data.cache_folder import CutFile
from utils.data.colour import rgb_planes
from utils.data.disk_cache import DiskCache
from utils.data.images import (
    FILL,
    ImageError,
    aspect_ratios,
    fitted_size,
    imread_bgr,
    letterbox,
    rectangle_shapes,
    resize_long_side,
)
from utils.data.jpeg_part import decoded_rows, read_jpeg_part
from utils.data.labels import rectangle_points
from utils.data.mosaic_cache import Mosaic, MosaicCache, is_idle
from utils.data.mosaic_view import (
    Window,
    cut_window,
    draw_window,
    shrink_of,
    shrunk_view,
    visible_window,
    warp_window,
)
from utils.data.pictures import Part, Picture, Unread, shrunk_part, tell_unreadable
from utils.data.ram_cache import RamCache
from utils.data.scan import ScanResult, scan_dataset, with_min_items
from utils.data.stall import Readings
from utils.data.tables import RowTable, TextTable

MAX_REPLACEMENTS = 10  # pictures tried in place of one that cannot be read any more
REPEAT_STREAM = 1 << 44  # keeps the draws of a picture's later showings in an epoch apart from all others
CACHE_MODES = ("", "ram", "disk")

Shapes = tuple[tuple[int, int], tuple[tuple[float, float], tuple[float, float]]]
Drawn = tuple[np.ndarray, np.ndarray]  # picture (H, W, 3 or 4) and labels (n, 5) in pixel corners
Sample = tuple[Tensor, Tensor, str, Shapes | None]


class SampleKey(NamedTuple):
    """What a sampler asks for: epoch, index and repeat fix all random draws, is_mosaic allows the mosaic path.

    repeat: how often the epoch has had the picture before. partners: pictures for the other places of a mosaic and of
    the one mixed with it, where weights decide what is drawn; () draws them evenly.
    """

    epoch: int
    index: int
    is_mosaic: bool = True
    repeat: int = 0
    partners: tuple[int, ...] = ()


class LoadImagesAndLabels(Dataset):
    """Pictures with labels for training or validation.

    `dataset[index]` or `dataset[(epoch, index, is_mosaic)]` gives (picture (3, H, W) uint8 RGB, labels (n, 6) float32
    with columns 0, class, x, y, w, h as fractions, path, shapes). Shapes is None after a mosaic, else
    ((height, width) on disk, ((ratio_h, ratio_w), (pad_w, pad_h))). `report` holds the outcome of the scan;
    `told` that of another set, whose warnings were logged and are not repeated for files of both.

    cache 'ram' or 'disk' keeps decoded pictures, mosaic_cache N prepares N mosaics; both below cache_dir where on disk.
    With image_weights the sampler repeats pictures, so that rect has no effect. `is_fast = False` draws every mosaic in
    full before it is warped, which gives the same samples but for rounding. Mosaics that are warped to half their size
    or less are drawn smaller from the start, and so better filtered; `is_exact = True` has them drawn like the others.
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
        cache_dir: str | Path = "",
        mosaic_cache: int = 0,
        seed: int = 0,
        nc: int | None = None,
        told: ScanResult | None = None,
    ) -> None:
        mode = cache_mode(cache_images if cache is None else cache)
        self.img_size, self.augment, self.rect = img_size, augment, rect and not image_weights
        self.is_fast, self.is_exact = True, False
        self.stride, self.pad, self.seed, self.prefix = stride, pad, seed % 2**63, prefix
        self.settings = AugmentSettings.from_hyp(hyp) if augment else AugmentSettings()
        self.report: ScanResult = scan_dataset(path, prefix=prefix, nc=None if single_cls else nc, told=told)
        selected = with_min_items(self.report, min_items, prefix)
        if self.rect:
            selected = selected.select(np.argsort(aspect_ratios(selected.shapes), kind="stable"))
        self._scan = selected
        self.im_files: TextTable = selected.im_files
        self.label_files: TextTable = selected.label_files
        self.labels: RowTable = selected.labels
        self.shapes: np.ndarray = selected.shapes  # (N, 2) width, height
        if single_cls:
            self.labels.values[:, 0] = 0
        self.batch_shapes = rectangle_shapes(self.shapes, batch_size, img_size, stride, pad) if self.rect else None
        self.batch_index = np.arange(len(self)) // batch_size
        self.readings = Readings()
        self._broken = multiprocessing.RawArray("B", len(self))  # seen by all workers; 1 = could not be read
        self._pictures: RamCache | DiskCache | None = None
        self._pictures = self._fill_cache(mode, cache_dir)
        self._mosaics = self._open_mosaics(mosaic_cache, cache_dir)

    def __len__(self) -> int:
        return len(self.im_files)

    def __getitem__(self, key: int | SampleKey | tuple[int, int, bool]) -> Sample:
        key = SampleKey(0, int(key)) if isinstance(key, (int, np.integer)) else SampleKey(*key)
        index, rng = range(len(self))[key.index], self.generator(key)
        if self.augment and not self.rect and key.is_mosaic and rng.random() < self.settings.mosaic:
            image, labels = self.load_mosaic(index, rng, key.epoch, key.partners[:3])
            if rng.random() < self.settings.mixup:
                other = self.load_mosaic(int(rng.integers(len(self))), rng, key.epoch, key.partners[3:])
                image, labels = mixup(image, labels, *other, rng=rng)
            shapes = None
        else:
            image, labels, shapes = self._load_plain(index, rng)
        return *self._finish(image, labels, rng), self.im_files[index], shapes

    def generator(self, key: SampleKey) -> np.random.Generator:
        """Source of all random draws of a sample."""
        repeat = [key.repeat + REPEAT_STREAM] if key.repeat else []
        return np.random.default_rng([self.seed, key.epoch, range(len(self))[key.index], *repeat])

    def broken_files(self) -> list[str]:
        """Pictures that could not be read after the scan, in any loader process."""
        return [self.im_files[int(i)] for i in np.flatnonzero(np.frombuffer(self._broken, np.uint8))]

    def cut_files(self) -> list[CutFile]:
        """Files of prepared pictures and mosaics that are shorter than what was stored in them."""
        kept = [cache for cache in (self._pictures, self._mosaics) if isinstance(cache, (DiskCache, MosaicCache))]
        return [cut for cache in kept for cut in cache.cut_files()]

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
        across, down = fitted_size(width, height, self.img_size)
        return Picture(np.full((down, across, 3), FILL[0], np.uint8), (height, width), -1)

    def _try_load(self, index: int) -> Picture | None:
        if self._broken[index]:
            return None
        self.readings.note(index)
        try:
            return Picture(*self.load_image(index), index)
        except (ImageError, OSError, cv2.error, MemoryError) as error:
            is_known, self._broken[index] = self._broken[index], 1
            if not is_known:  # by another process that tried at the same time
                tell_unreadable(self.im_files[index], error, len(self.broken_files()), len(self), self.prefix)
            return None

    def _rows(self, index: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Labels (n, 5) as fractions and one polygon per row, or no polygons where all rows are boxes."""
        if index < 0:
            return np.zeros((0, 5), np.float32), []
        return self.labels[index], self._scan.segments(index) if len(self._scan.points[index]) else []

    def _rows_of_all(self, indices: Sequence[int]) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """`_rows` of several pictures; where one has polygons, box rows get their rectangle, one segment per row."""
        parts = [self._rows(index) for index in indices]
        return [(rows, _complete(rows, segments)) for rows, segments in parts] if any(s for _, s in parts) else parts

    def load_mosaic(self, index: int, rng: np.random.Generator, epoch: int = 0, partners: Sequence[int] = ()) -> Drawn:
        """Mosaic of the indexed and three pictures (random if not given), warped to img_size; labels in pixel corners.

        The picture is (s, s, 4) with a meaningless last channel, or (s, s, 3) with `is_fast` off. Of prepared mosaics
        the one is taken that the schedule gives to (epoch, index).
        """
        if self._mosaics is not None:
            return self._warp_prepared(self._mosaics.get(epoch, index, self._build_mosaic), rng)
        centre = draw_centre(rng, self.img_size)
        indices = [index, *(partners or rng.integers(len(self), size=3))]
        rng.shuffle(indices)
        draws = self._draw_affine(rng)
        if self.is_fast:
            return self._warp_visible([int(i) for i in indices], centre, draws, rng)
        pictures = [self._load(int(i), rng) for i in indices]
        rows = self._rows_of_all([picture.index for picture in pictures])
        parts = [(picture.image, *part) for picture, part in zip(pictures, rows, strict=True)]
        canvas = copy_paste(*mosaic4(parts, centre, self.img_size), self.settings.copy_paste, rng=rng)
        border = (-self.img_size // 2, -self.img_size // 2)
        return apply_affine(*canvas, draws, border, is_projective=bool(self.settings.perspective))

    def _draw_affine(self, rng: np.random.Generator) -> AffineDraws:
        s = self.settings
        return draw_affine(rng, s.degrees, s.translate, s.scale, s.shear, s.perspective)

    def _warp_visible(
        self, indices: Sequence[int], centre: tuple[int, int], draws: AffineDraws, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw and warp only what is seen of a mosaic; all of it where objects are to be copied across."""
        matrix, window = self._view(draws)
        side, may_copy = 2 * self.img_size, self._may_copy()
        is_whole = may_copy or self.is_exact or bool(self.settings.perspective)
        shrink = 1 if is_whole else shrink_of(matrix, side)
        pictures = self._load_seen(indices, centre, window, shrink, rng, is_cut=not may_copy)
        sizes = [picture.size for picture in pictures]
        rows_of_all = self._rows_of_all([picture.index for picture in pictures])
        labels, segments = mosaic_labels(sizes, rows_of_all, centre, self.img_size)
        chosen = choose_copies(labels, segments, side, self.settings.copy_paste, rng=rng)
        if len(chosen):
            whole = [self._load(p.index, rng) if isinstance(p, Unread) else p for p in pictures]
            tiles = [(p.image, *part) for p, part in zip(whole, rows_of_all, strict=True)]
            canvas, *copied = paste_copies(mosaic4(tiles, centre, self.img_size)[0], labels, segments, chosen)
            return self._warp_drawn(cut_window(canvas, window), window, matrix, draws, *copied)
        view, place = (matrix, centre) if shrink == 1 else shrunk_view(matrix, centre, shrink)
        window = window if shrink == 1 else visible_window(view, side // shrink, self.img_size)
        drawn = draw_window([picture.image for picture in pictures], place, side // shrink, window)
        image = warp_window(drawn, window, view, self.img_size, is_projective=bool(self.settings.perspective))
        return image, self._warp_targets(matrix, draws, labels, segments)

    def _load_seen(
        self,
        indices: Sequence[int],
        centre: tuple[int, int],
        window: Window,
        shrink: int,
        rng: np.random.Generator,
        *,
        is_cut: bool,
    ) -> list[Picture | Part | Unread]:
        """The four pictures of a mosaic as far as the window shows them; is_cut allows to leave lower rows out."""
        pictures: list[Picture | Part | Unread] = []
        for position, index in enumerate(indices):
            size = fitted_size(*self.shapes[index].tolist(), self.img_size)
            if not window.shows(position, *size, centre, 2 * self.img_size):
                pictures.append(Unread(size, index))
                continue
            rows = min(window.y2 - centre[1], size[1]) if position >= 2 and is_cut else size[1]
            part = self._load_part(index, size, rows, shrink) or self._load(index, rng)
            pictures.append(shrunk_part(part, position, shrink) if shrink > 1 else part)
        return pictures

    def _may_copy(self) -> bool:
        """Whether objects may be copied across a mosaic, which takes all of it: of any set that has polygons."""
        return bool(self.settings.copy_paste) and len(self._scan.points.values) > 0

    def _load_part(self, index: int, size: tuple[int, int], rows: int, shrink: int) -> Part | None:
        """The first rows of a picture, or a shrunk one, where that takes less than reading all of it; else None."""
        is_kept = self._pictures is not None and self._pictures.get(index) is not None
        is_all = shrink == 1 and decoded_rows(rows, size[1]) >= size[1]
        if is_all or is_kept or self._broken[index] or tuple(self.shapes[index].tolist()) != size:
            return None
        self.readings.note(index)
        try:
            image = read_jpeg_part(self.im_files[index], size, rows, shrink)
        except (OSError, MemoryError):
            return None  # the attempt to read all of it reports what is wrong
        return None if image is None else Part(image, size, index)

    def _warp_prepared(self, mosaic: Mosaic, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        draws = self._draw_affine(rng)
        matrix, window = self._view(draws)
        rows = self._rows_of_all(mosaic.indices)
        labels, segments = mosaic_labels(mosaic.sizes, rows, mosaic.centre, self.img_size)
        canvas = mosaic.canvas
        chosen = choose_copies(labels, segments, 2 * self.img_size, self.settings.copy_paste, rng=rng)
        if len(chosen):
            canvas, labels, segments = paste_copies(canvas.copy(), labels, segments, chosen)
        return self._warp_drawn(cut_window(canvas, window), window, matrix, draws, labels, segments)

    def _view(self, draws: AffineDraws) -> tuple[np.ndarray, Window]:
        """Matrix (3, 3) of a mosaic's warp, and the part of the canvas that it shows."""
        size, is_projective = self.img_size, bool(self.settings.perspective)
        matrix = affine_matrix(draws, (2 * size, 2 * size), (size, size))
        return matrix, visible_window(matrix, 2 * size, size, is_projective=is_projective)

    def _warp_drawn(
        self,
        drawn: np.ndarray,
        window: Window,
        matrix: np.ndarray,
        draws: AffineDraws,
        labels: np.ndarray,
        segments: Sequence[np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        image = warp_window(drawn, window, matrix, self.img_size, is_projective=bool(self.settings.perspective))
        return image, self._warp_targets(matrix, draws, labels, segments)

    def _warp_targets(
        self, matrix: np.ndarray, draws: AffineDraws, labels: np.ndarray, segments: Sequence[np.ndarray]
    ) -> np.ndarray:
        shape, is_projective = (self.img_size, self.img_size), bool(self.settings.perspective)
        return warp_targets(labels, segments, matrix, draws.scale, shape, is_projective=is_projective)

    def _build_mosaic(self, indices: Sequence[int], rng: np.random.Generator) -> Mosaic:
        """Draw a mosaic to be kept."""
        centre = draw_centre(rng, self.img_size)
        pictures = [self._load(index, rng) for index in indices]
        empty = np.zeros((0, 5), np.float32)
        canvas = mosaic4([(picture.image, empty, []) for picture in pictures], centre, self.img_size)[0]
        return Mosaic(canvas, centre, tuple(p.index for p in pictures), tuple(p.size for p in pictures))

    def _load_plain(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Shapes]:
        """One letterboxed picture, warped when augmenting: picture, labels in pixel corners, shapes."""
        picture = self._load(index, rng)
        (full_h, full_w), (height, width) = picture.original, picture.image.shape[:2]
        target = self.img_size if self.batch_shapes is None else self.batch_shapes[self.batch_index[index]].tolist()
        image, ratio, pad = letterbox(picture.image, target, auto=False, scaleup=self.augment)
        rows, segments = self._rows(picture.index)
        size = (ratio[0] * width, ratio[1] * height)
        labels = to_pixels(rows, *size, pad)
        if self.augment:
            outlines = outlines_in_pixels(rows, segments, size, pad)
            if self.is_fast:
                image = cv2.cvtColor(image, cv2.COLOR_BGR2BGRA)  # warped in half the time
            is_projective = bool(self.settings.perspective)
            image, labels = apply_affine(image, labels, outlines, self._draw_affine(rng), is_projective=is_projective)
        return image, labels, ((full_h, full_w), ((height / full_h, width / full_w), pad))

    def _finish(self, image: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Colour, flips, and the layout of the network: picture (3, H, W) RGB and targets (n, 6)."""
        targets, factors = network_targets(labels, *image.shape[:2]), None
        if self.augment:
            s = self.settings
            if self.is_fast:
                factors = draw_hsv(rng, s.hsv_h, s.hsv_s, s.hsv_v)
            else:
                image = image.copy()
                augment_hsv(image, s.hsv_h, s.hsv_s, s.hsv_v, rng=rng)
            for is_flipped, axis in zip(draw_flips(rng, s.flipud, s.fliplr), (0, 1), strict=True):
                if is_flipped:
                    image = cv2.flip(image, axis)
                    flip_labels(targets[:, 1:], vertical=axis == 0)
        return torch.from_numpy(rgb_planes(image, factors)), torch.from_numpy(targets)

    def _fill_cache(self, mode: str, cache_dir: str | Path) -> RamCache | DiskCache | None:
        if mode == "ram":
            return RamCache.fill(self.shapes, self.img_size, self._load_or_none, self.prefix)
        if mode == "disk":
            return DiskCache.fill(
                self.im_files, self.shapes, self.img_size, self._load_or_none, smooth=self.augment,
                cache_dir=cache_dir, prefix=self.prefix,
            )  # fmt: skip
        return None

    def _open_mosaics(self, count: int, cache_dir: str | Path) -> MosaicCache | None:
        if count < 0:
            raise ValueError(f"--mosaic-cache {count}: expected a number of mosaics to prepare, or 0 for none")
        if not count or is_idle(count, self.settings.mosaic, augment=self.augment, rect=self.rect, prefix=self.prefix):
            return None
        tables = (self.labels.values, self.labels.offsets, self._scan.points.values, self._scan.points.offsets)
        return MosaicCache.open(
            count, self.img_size, self.seed, tables, self.im_files, cache_dir=cache_dir, prefix=self.prefix
        )

    def _load_or_none(self, index: int) -> np.ndarray | None:
        picture = self._try_load(index)
        return None if picture is None else picture.image


def cache_mode(value: bool | str | None) -> str:
    """Normalise --cache to '', 'ram' or 'disk'; raises ValueError for modes that do not exist."""
    mode = "ram" if value is True else str(value or "").lower()
    if mode not in CACHE_MODES:
        raise ValueError(f"--cache {value}: expected 'ram', 'disk' or nothing")
    return mode


def outlines_in_pixels(
    rows: np.ndarray, segments: Sequence[np.ndarray], size: tuple[float, float], pad: tuple[float, float]
) -> list[np.ndarray]:
    """One polygon per row in a picture of a (width, height) moved by pad (x, y); none where no row has one."""
    outlines = _complete(rows, segments) if segments else []
    return [points * np.float32(size) + np.float32(pad) for points in outlines]


def _complete(rows: np.ndarray, segments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One polygon per row as fractions: the given one, or the rectangle of a box row."""
    if not segments:
        return [rectangle_points(row[1:]) for row in rows]
    return [points if len(points) else rectangle_points(row[1:]) for row, points in zip(rows, segments, strict=True)]
