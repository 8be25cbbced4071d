"""The last step of a training picture: changed colours, and planes in the order of the network."""

from __future__ import annotations

import cv2
import numpy as np

from utils.data.augment import hsv_tables
from utils.data.images import FILL

VECTOR = 64  # pixels; OpenCV computes rows in vectors that divide this, and rounds differently in what is left over
MOSTLY = 0.6  # share of a picture from which on its grey borders are not worth a special case
CUT_SHIFT = 1 / 4096 - 0.5  # makes OpenCV's rounding cut fractions off
_ALL_VALUES = np.arange(256, dtype=np.uint8)[None]


def rgb_planes(image: np.ndarray, factors: np.ndarray | None = None) -> np.ndarray:
    """Planes (3, H, W) RGB of a picture (H, W, 3) BGR or (H, W, 4) BGR and filling, its colours changed by factors.

    The same pixels as `augment_hsv` followed by a reordering of the channels. Single planes are changed, for which
    OpenCV needs half the time, and grey borders of four-channel pictures are worked out once for all their pixels.
    """
    planes = np.empty((3, *image.shape[:2]), np.uint8)
    if factors is None:
        cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), list(planes))
        return planes
    rows, columns = inside_grey(image) if image.shape[2] == 4 else (slice(None), slice(None))
    if rows != slice(None):
        grey = np.full((1, VECTOR, 3), FILL[0], np.uint8)
        planes[:] = rgb_planes(grey, factors)[:, :, :1]
        image = image[rows, columns]
    if image.size:
        _recolour(image, [plane[rows, columns] for plane in planes], factors)
    return planes


def _recolour(image: np.ndarray, planes: list[np.ndarray], factors: np.ndarray) -> None:
    """Write the planes R, G, B (h, w) of a picture (h, w, 3 or 4) with changed hue, saturation and value."""
    hsv = cv2.cvtColor(image, cv2.COLOR_BGR2HSV)
    cv2.split(hsv, planes)
    for plane, table, factor, count in zip(planes, hsv_tables(factors), factors.tolist(), (180, 256, 256), strict=True):
        _apply_table(plane, table, factor, count)
    cv2.merge(planes, hsv)
    cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=hsv)
    cv2.split(hsv, planes)


def _apply_table(plane: np.ndarray, table: np.ndarray, factor: float, count: int) -> None:
    """Replace values (H, W) below count by those of a table (256,), in place; by a product where that gives the same.

    OpenCV multiplies several times as fast as it looks values up.
    """
    if np.array_equal(cv2.convertScaleAbs(_ALL_VALUES, alpha=factor, beta=CUT_SHIFT)[0, :count], table[:count]):
        cv2.convertScaleAbs(plane, dst=plane, alpha=factor, beta=CUT_SHIFT)
    else:
        cv2.LUT(plane, table[None], dst=plane)


def inside_grey(image: np.ndarray) -> tuple[slice, slice]:
    """Rows and columns inside the grey border of a (H, W, 4) picture; all where there is none to speak of.

    Only looked for where the first row or the last one is grey, as after a warp that made the mosaic smaller.
    """
    everything = (slice(None), slice(None))
    if not image.flags.c_contiguous or not image.size:
        return everything
    pixels = image.view(np.uint32)[..., 0]
    grey = np.full(4, FILL[0], np.uint8).view(np.uint32)[0]
    if (pixels[0] != grey).any() and (pixels[-1] != grey).any():
        return everything
    x, y, width, height = cv2.boundingRect((pixels != grey).view(np.uint8))  # zeros where all is grey
    x1, x2 = x // VECTOR * VECTOR, min(-(-(x + width) // VECTOR) * VECTOR, pixels.shape[1])
    return (slice(y, y + height), slice(x1, x2)) if (x2 - x1) * height < MOSTLY * pixels.size else everything
