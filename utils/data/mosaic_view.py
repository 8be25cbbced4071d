"""The part of a mosaic that its warp shows: only that part is read, drawn and warped.

The plain way draws the canvas of 2s x 2s pixels and lets the warp cut s x s pixels from it. Here the warp is known
first. Tiles that stay outside need not be decoded, and pictures get a fourth, meaningless channel, because OpenCV warps
four channels in about half the time that it needs for three.

A mosaic that the warp makes at most half as large can be drawn smaller to begin with (`shrunk_view`). Its pixels are
then means of all those that fall together, where bilinear interpolation takes a few and skips the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from utils.data.augment import mosaic_tile
from utils.data.images import FILL

MARGIN = 2  # pixels around the shown part that interpolation may touch
MOSTLY = 0.9  # share of the output from which on all of it is warped
SHRINKS = (4, 2)  # how many times smaller a mosaic may be drawn


class Window(NamedTuple):
    """Rectangle of a canvas: x1, y1 inclusive, x2, y2 exclusive."""

    x1: int
    y1: int
    x2: int
    y2: int

    def shows(self, position: int, width: int, height: int, centre: tuple[int, int], side: int) -> bool:
        """Whether any pixel of the tile for a width x height picture lies in the window."""
        x1, y1, x2, y2 = mosaic_tile(position, width, height, centre, side).canvas
        return max(x1, self.x1) < min(x2, self.x2) and max(y1, self.y1) < min(y2, self.y2)


def visible_window(matrix: np.ndarray, side: int, size: int, *, is_projective: bool = False) -> Window:
    """Part of a side x side canvas that a matrix (3, 3) moves into size x size pixels; all of it with perspective."""
    if is_projective:
        return Window(0, 0, side, side)
    last = size - 1
    corners = np.linalg.inv(matrix) @ np.array([(0, last, 0, last), (0, 0, last, last), (1, 1, 1, 1)])  # (3, 4)
    low = np.floor(corners[:2].min(1)).astype(int) - MARGIN
    high = np.ceil(corners[:2].max(1)).astype(int) + 1 + MARGIN
    x1, y1 = (int(value) for value in low.clip(0, side - 1))
    x2, y2 = (int(value) for value in high.clip(0, side))
    return Window(x1, y1, max(x2, x1 + 1), max(y2, y1 + 1))


def shrink_of(matrix: np.ndarray, side: int) -> int:
    """How many times smaller a canvas can be drawn (4, 2 or 1) so that the matrix (3, 3) still does not enlarge it."""
    (a, b), (c, d) = matrix[:2, :2].tolist()
    squares, area = a * a + b * b + c * c + d * d, a * d - b * c
    largest = math.sqrt((squares + math.sqrt(max(squares**2 - 4 * area**2, 0))) / 2)  # the larger singular value
    return next((shrink for shrink in SHRINKS if largest * shrink <= 1 and side % shrink == 0), 1)


def shrunk_view(matrix: np.ndarray, centre: tuple[int, int], shrink: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Matrix (3, 3) and centre for a mosaic drawn `shrink` times smaller, whose centre lies between whole pixels again.

    A pixel of the smaller canvas stands for shrink x shrink pixels, hence the shift by half of what is between them.
    """
    small = (round(centre[0] / shrink), round(centre[1] / shrink))
    grow = np.diag((float(shrink), float(shrink), 1.0))
    grow[:2, 2] = [(shrink - 1) / 2 + whole - shrink * part for whole, part in zip(centre, small, strict=True)]
    return matrix @ grow, small


def shrink_tile(image: np.ndarray, shrink: int) -> np.ndarray:
    """Picture made `shrink` times smaller by averaging, its sides rounded up, as a JPEG decoder does it."""
    height, width = image.shape[:2]
    bottom, right = -height % shrink, -width % shrink
    if bottom or right:
        image = cv2.copyMakeBorder(image, 0, bottom, 0, right, cv2.BORDER_REPLICATE)
    small = ((width + right) // shrink, (height + bottom) // shrink)
    return cv2.resize(image, small, interpolation=cv2.INTER_AREA)


def align_tile(image: np.ndarray, position: int, size: tuple[int, int], shrink: int) -> np.ndarray:
    """Move a shrunk picture whose (width, height) did not divide, so that it touches the mosaic's centre exactly."""
    dx = -size[0] % shrink / shrink if position in (0, 2) else 0.0
    dy = -size[1] % shrink / shrink if position in (0, 1) else 0.0
    if not (dx or dy):
        return image
    shift = np.array([(1, 0, dx), (0, 1, dy)])
    return cv2.warpAffine(image, shift, image.shape[1::-1], borderMode=cv2.BORDER_REPLICATE)


def draw_window(images: Sequence[np.ndarray | None], centre: tuple[int, int], side: int, window: Window) -> np.ndarray:
    """Draw the windowed part (h, w, 4) of the mosaic of four pictures; None stands for one outside the window.

    Pictures below the centre may lack rows that the window does not show.
    """
    drawn = np.empty((window.y2 - window.y1, window.x2 - window.x1, 4), np.uint8)
    column = min(max(centre[0] - window.x1, 0), drawn.shape[1])
    row = min(max(centre[1] - window.y1, 0), drawn.shape[0])
    for position, image in enumerate(images):
        is_left, is_top = position in (0, 2), position in (0, 1)
        quarter = drawn[:row] if is_top else drawn[row:]
        quarter = quarter[:, :column] if is_left else quarter[:, column:]
        if not quarter.size:
            continue
        if image is None:
            quarter[:] = FILL[0]
            continue
        height, width = image.shape[:2]
        tile = mosaic_tile(position, width, height, centre, side)
        x1, y1 = max(tile.canvas[0], window.x1), max(tile.canvas[1], window.y1)
        x2, y2 = min(tile.canvas[2], window.x2), min(tile.canvas[3], window.y2)
        if x1 >= x2 or y1 >= y2:
            quarter[:] = FILL[0]
            continue
        # Only what the picture leaves free is filled: the outer rows, and the outer columns beside the picture.
        free_rows, free_columns = quarter.shape[0] - (y2 - y1), quarter.shape[1] - (x2 - x1)
        quarter[slice(0, free_rows) if is_top else slice(y2 - y1, None)] = FILL[0]
        quarter[:, slice(0, free_columns) if is_left else slice(x2 - x1, None)] = FILL[0]
        dx, dy = tile.shift
        target = drawn[y1 - window.y1 : y2 - window.y1, x1 - window.x1 : x2 - window.x1]
        cv2.cvtColor(image[y1 - dy : y2 - dy, x1 - dx : x2 - dx], cv2.COLOR_BGR2BGRA, dst=target)
    return drawn


def cut_window(canvas: np.ndarray, window: Window) -> np.ndarray:
    """The windowed part (h, w, 4) of a whole canvas (2s, 2s, 3)."""
    return cv2.cvtColor(canvas[window.y1 : window.y2, window.x1 : window.x2], cv2.COLOR_BGR2BGRA)


def warp_window(
    drawn: np.ndarray, window: Window, matrix: np.ndarray, size: int, *, is_projective: bool = False
) -> np.ndarray:
    """Warp the drawn window to size x size pixels by the matrix that belongs to the whole canvas."""
    shifted = matrix @ np.array([(1, 0, window.x1), (0, 1, window.y1), (0, 0, 1)])
    fill = (*FILL, FILL[0])
    if is_projective:
        return cv2.warpPerspective(drawn, shifted, dsize=(size, size), borderValue=fill)
    x1, y1, x2, y2 = covered_part(shifted, drawn.shape[1], drawn.shape[0], size)
    if (x2 - x1) * (y2 - y1) > MOSTLY * size**2:
        return cv2.warpAffine(drawn, shifted[:2], dsize=(size, size), borderValue=fill)
    warped = np.full((size, size, 4), FILL[0], np.uint8)
    if x1 < x2 and y1 < y2:
        inner = shifted[:2] - np.array([(0, 0, x1), (0, 0, y1)])
        cv2.warpAffine(drawn, inner, dsize=(x2 - x1, y2 - y1), dst=warped[y1:y2, x1:x2], borderValue=fill)
    return warped


def covered_part(matrix: np.ndarray, width: int, height: int, size: int) -> Window:
    """Part of a size x size output that can show pixels of a width x height picture moved by a matrix (3, 3)."""
    corners = matrix @ np.array([(-1, width, -1, width), (-1, -1, height, height), (1, 1, 1, 1)])  # (3, 4)
    low = (np.floor(corners[:2].min(1)) - 1).clip(0, size).astype(int).tolist()
    high = (np.ceil(corners[:2].max(1)) + 2).clip(0, size).astype(int).tolist()
    return Window(*low, *high)
