"""Detection of small objects in large pictures: overlapping slices, looked at one by one, and their boxes merged.

A detector shrinks a picture to its input size, and with it objects of a few pixels vanish. Slices keep them at full
size. The whole picture is looked at as well, for objects that fit into no slice. The idea of slicing is from Akyon,
Altinuc and Temizel 2022 (Slicing Aided Hyper Inference); the rule for borders is our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from utils.boxes import clip_boxes

BORDER_SHARE = 0.01  # of a slice's side: a box that ends closer to a border may go on behind it
MAX_PAIRS = 1 << 20  # pairs of boxes whose overlap is computed at a time
COVERED_SHARE = 0.5  # of the area of an unsure box: so much of it inside a sure box of its class, and it is dropped

Detect = Callable[[list[np.ndarray]], Sequence[np.ndarray]]


class Window(NamedTuple):
    """Part of a picture: left upper corner and size in pixels."""

    left: int
    top: int
    width: int
    height: int

    def cut(self, image: np.ndarray) -> np.ndarray:
        """Return this part of ``image`` (H, W, ...) without copying it."""
        return image[self.top : self.top + self.height, self.left : self.left + self.width]


def slice_windows(height: int, width: int, size: int, overlap: float) -> list[Window]:
    """Cover a picture with windows of ``size`` pixels whose neighbours share ``overlap`` of their side or more.

    Rows come from top to bottom. A side shorter than ``size`` is covered by one window of its own length. A picture
    that fits into one window gives just that.

    Raises:
        ValueError: a size below 1, or an overlap outside 0 … 0.9.
    """
    if size < 1:
        raise ValueError(f"slices of {size} pixels: should be at least 1")
    if not 0 <= overlap <= 0.9:
        raise ValueError(f"overlap {overlap} of slices: should lie between 0 and 0.9")
    return [
        Window(left, top, min(size, width), min(size, height))
        for top in _starts(height, size, overlap)
        for left in _starts(width, size, overlap)
    ]


def picture_windows(height: int, width: int, size: int, overlap: float) -> list[Window]:
    """Return the windows of :func:`slice_windows` and, where there are several, the whole picture behind them."""
    windows = slice_windows(height, width, size, overlap)
    return windows if len(windows) == 1 else [*windows, Window(0, 0, width, height)]


def _starts(length: int, size: int, overlap: float) -> list[int]:
    """Return where windows begin along a side, spread evenly from its beginning to its end."""
    if length <= size:
        return [0]
    count = math.ceil((length - size) / max(size * (1 - overlap), 1)) + 1
    return [round(start) for start in np.linspace(0, length - size, count)]


def merge_slices(
    found: Sequence[np.ndarray],
    windows: Sequence[Window],
    shape: Sequence[int],
    *,
    size: int,
    overlap: float,
    iou_thres: float,
    agnostic: bool = False,
    max_det: int = 1000,
) -> np.ndarray:
    """Return the detections (N, 6) of a picture, best first, from those of its windows.

    Each object that is smaller than the overlap lies whole in at least one slice. So a box that ends at a border inside
    the picture is unsure: it may be a part of an object that a neighbour shows whole. Unsure, too, are boxes from the
    whole picture that a slice would have shown larger. Sure boxes go through class-wise suppression first; of the
    unsure ones only those stay that no sure box of their class covers: parts of an object too large for a slice, which
    the whole picture did not show. Parts that overlap become one box.

    Args:
        found: per window (n, 6) x1 y1 x2 y2 confidence class, in pixels of the window.
        windows: as :func:`picture_windows` gives them.
        shape: height and width of the picture.
        size, overlap, iou_thres: side of slices, shared part of it, and the threshold of suppression.
    """
    rows = [np.zeros((0, 6), np.float32)]
    is_sure = [np.zeros(0, bool)]
    for part, window in zip(found, windows, strict=True):
        moved = np.array(part, np.float32).reshape(-1, 6)
        moved[:, :4] += np.array((window.left, window.top) * 2, np.float32)
        rows.append(clip_boxes(moved, shape))
        is_sure.append(_is_sure(moved, window, shape, size, overlap))
    table, sure = np.concatenate(rows), np.concatenate(is_sure)
    best, rest = table[sure], table[~sure]
    best = best[suppress(best, iou_thres, agnostic)]
    rest = rest[~_is_covered(rest, best, agnostic)]
    merged = np.concatenate((best, _joined(rest, agnostic)))
    return merged[np.argsort(-merged[:, 4], kind="stable")[:max_det]]


def _is_sure(rows: np.ndarray, window: Window, shape: Sequence[int], size: int, overlap: float) -> np.ndarray:
    """Return for each box (N, 6), in pixels of the picture, whether its window is the right one to judge it."""
    height, width = shape[:2]
    if (window.width, window.height) == (width, height) and max(height, width) > size:
        sides = rows[:, 2:4] - rows[:, :2]
        return sides.max(1, initial=0) > size * overlap
    margin = max(BORDER_SHARE * size, 1)
    right, bottom = window.left + window.width, window.top + window.height
    is_cut = (rows[:, 0] < window.left + margin) & (window.left > 0)
    is_cut |= (rows[:, 1] < window.top + margin) & (window.top > 0)
    is_cut |= (rows[:, 2] > right - margin) & (right < width)
    is_cut |= (rows[:, 3] > bottom - margin) & (bottom < height)
    return ~is_cut


def _areas(rows: np.ndarray) -> np.ndarray:
    return (rows[:, 2] - rows[:, 0]) * (rows[:, 3] - rows[:, 1])


def _shared(row: np.ndarray, others: np.ndarray, agnostic: bool) -> np.ndarray:
    """Return the area that one box shares with each of (N, 6); 0 for other classes."""
    sides = np.minimum(row[2:4], others[:, 2:4]) - np.maximum(row[:2], others[:, :2])
    area = sides.clip(0).prod(1)
    return area if agnostic else area * (others[:, 5] == row[5])


def _overlaps(rows: np.ndarray, agnostic: bool) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the pairs of boxes (N, 6) that share an area: numbers of both, the lower first, and the area, (P,) each.

    Only boxes whose ranges of x overlap are compared, which are few in a large picture of small objects.
    """
    order = np.argsort(rows[:, 0], kind="stable")
    left, count = rows[order, 0], np.arange(len(rows)) + 1
    partners = (np.searchsorted(left, rows[order, 2]) - count).clip(0)  # that begin behind it, and before its end
    ends = partners.cumsum()
    start = 0
    while start < len(rows):
        stop = max(int(np.searchsorted(ends, ends[start] - partners[start] + MAX_PAIRS, "right")), start + 1)
        number = partners[start:stop]
        first = np.repeat(np.arange(start, stop), number)
        second = first + 1 + np.arange(len(first)) - np.repeat(number.cumsum() - number, number)
        first, second = order[first], order[second]
        is_possible = (rows[first, 1] < rows[second, 3]) & (rows[second, 1] < rows[first, 3])
        if not agnostic:
            is_possible &= rows[first, 5] == rows[second, 5]
        first, second = first[is_possible], second[is_possible]
        one, other = rows[first], rows[second]
        sides = np.minimum(one[:, 2:4], other[:, 2:4]) - np.maximum(one[:, :2], other[:, :2])
        yield np.minimum(first, second), np.maximum(first, second), sides.clip(0).prod(1)
        start = stop


def _is_covered(rows: np.ndarray, by: np.ndarray, agnostic: bool) -> np.ndarray:
    """Return for each box (N, 6) whether one of ``by`` holds half of it or more."""
    most = np.zeros(len(rows), np.float32)
    for first, second, shared in _overlaps(np.concatenate((rows, by)), agnostic):
        is_between = (first < len(rows)) & (second >= len(rows))
        np.maximum.at(most, first[is_between], shared[is_between])
    return most >= (COVERED_SHARE * _areas(rows)).clip(1e-9)


def _joined(rows: np.ndarray, agnostic: bool) -> np.ndarray:
    """Join each box (N, 6), from the most confident on, with those of which it shares half the smaller area."""
    rows = rows[np.argsort(-rows[:, 4], kind="stable")]
    results = [np.zeros((0, 6), np.float32)]
    while len(rows):
        areas = _areas(rows)
        is_part = _shared(rows[0], rows, agnostic) >= COVERED_SHARE * np.minimum(areas[0], areas)
        is_part[0] = True
        corners = (rows[is_part, :2].min(0), rows[is_part, 2:4].max(0), rows[0, 4:])
        results.append(np.concatenate(corners)[None])
        rows = rows[~is_part]
    return np.concatenate(results)


def suppress(rows: np.ndarray, iou_thres: float, agnostic: bool) -> np.ndarray:
    """Return the indices of boxes (N, 6) that survive greedy suppression, best first."""
    order = np.argsort(-rows[:, 4], kind="stable")
    rows = rows[order]
    areas = _areas(rows)
    pairs = [np.zeros((0, 2), np.int64)]
    for better, worse, shared in _overlaps(rows, agnostic):
        is_same = ~(shared <= iou_thres * (areas[better] + areas[worse] - shared))
        pairs.append(np.stack((better[is_same], worse[is_same]), 1))
    table = np.concatenate(pairs)
    table = table[np.argsort(table[:, 0], kind="stable")]
    number, start = np.unique(table[:, 0], return_index=True)
    is_kept = np.ones(len(rows), bool)
    for better, worse in zip(number.tolist(), np.split(table[:, 1], start[1:]), strict=False):
        if is_kept[better]:
            is_kept[worse] = False
    return order[is_kept]


def detect_sliced(
    detect: Detect,
    image: np.ndarray,
    *,
    size: int,
    overlap: float = 0.2,
    iou_thres: float = 0.45,
    agnostic: bool = False,
    max_det: int = 1000,
    batch_size: int = 16,
) -> np.ndarray:
    """Return the detections (N, 6) of ``image`` (H, W, ...), found in its slices and merged.

    Example::

        rows = detect_sliced(lambda parts: [predictor(part) for part in parts], image, size=640)

    Args:
        detect: gives for each of some pictures its detections (n, 6) x1 y1 x2 y2 confidence class in pixels.
        size, overlap, iou_thres, agnostic, max_det: as in :func:`merge_slices`.
        batch_size: pictures per call of ``detect``; those of one call have one size.
    """
    windows = picture_windows(*image.shape[:2], size, overlap)
    found: list[np.ndarray] = []
    slices = windows[:-1] if len(windows) > 1 else windows
    for start in range(0, len(slices), batch_size):
        found += detect([window.cut(image) for window in slices[start : start + batch_size]])
    if len(windows) > 1:
        found += detect([image])
    return merge_slices(
        found,
        windows,
        image.shape,
        size=size,
        overlap=overlap,
        iou_thres=iou_thres,
        agnostic=agnostic,
        max_det=max_det,
    )
