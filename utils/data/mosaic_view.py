"""The part of a mosaic that its warp shows: only that part is read, drawn and warped.

The plain way draws the canvas of 2s x 2s pixels and lets the warp cut s x s pixels from it. Here the warp is known
first. Tiles that stay outside need not be decoded, and pictures get a fourth, meaningless channel, because OpenCV warps
four channels in about half the time that it needs for three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from utils.data.augment import mosaic_tile
from utils.data.images import FILL

MARGIN = 2  # pixels around the shown part that interpolation may touch


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


def draw_window(images: Sequence[np.ndarray | None], centre: tuple[int, int], side: int, window: Window) -> np.ndarray:
    """Draw the windowed part (h, w, 4) of the mosaic of four pictures; None stands for one outside the window."""
    drawn = np.full((window.y2 - window.y1, window.x2 - window.x1, 4), FILL[0], np.uint8)
    for position, image in enumerate(images):
        if image is None:
            continue
        height, width = image.shape[:2]
        tile = mosaic_tile(position, width, height, centre, side)
        x1, y1 = max(tile.canvas[0], window.x1), max(tile.canvas[1], window.y1)
        x2, y2 = min(tile.canvas[2], window.x2), min(tile.canvas[3], window.y2)
        if x1 < x2 and y1 < y2:
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
    return cv2.warpAffine(drawn, shifted[:2], dsize=(size, size), borderValue=fill)
