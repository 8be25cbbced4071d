"""Slow, plain versions of the geometry, written from its description, to compare the fast code with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from utils.data.augment import AffineDraws


def mosaic_by_pixels(
    images: Sequence[np.ndarray], centre: tuple[int, int], size: int
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Place four pictures pixel by pixel; gives the canvas and the position of each picture's corner on it."""
    canvas = np.full((2 * size, 2 * size, 3), 114, np.uint8)
    corners = []
    for position, image in enumerate(images):
        height, width = image.shape[:2]
        left = centre[0] - width if position in (0, 2) else centre[0]
        top = centre[1] - height if position in (0, 1) else centre[1]
        corners.append((left, top))
        for y in range(height):
            for x in range(width):
                if 0 <= left + x < 2 * size and 0 <= top + y < 2 * size:
                    canvas[top + y, left + x] = image[y, x]
    return canvas, corners


def warp_point(
    x: float, y: float, draws: AffineDraws, in_shape: tuple[int, int], out_shape: tuple[int, int]
) -> tuple[float, float]:
    """Move one point through the five steps, one after the other."""
    x, y = x - in_shape[1] / 2, y - in_shape[0] / 2
    depth = draws.perspective_x * x + draws.perspective_y * y + 1
    angle = math.radians(draws.angle)
    cos, sin = math.cos(angle) * draws.scale, math.sin(angle) * draws.scale
    x, y = cos * x + sin * y, -sin * x + cos * y  # y points down: positive angles turn against the clock
    x, y = x + math.tan(math.radians(draws.shear_x)) * y, y + math.tan(math.radians(draws.shear_y)) * x
    x, y = x + draws.translate_x * out_shape[1] * depth, y + draws.translate_y * out_shape[0] * depth
    return x / depth, y / depth


def warped_box(
    box: Sequence[float], draws: AffineDraws, in_shape: tuple[int, int], out_shape: tuple[int, int]
) -> list[float]:
    """Envelope of the four warped corners of x1, y1, x2, y2, cut at the output's border."""
    corners = [(x, y) for x in (box[0], box[2]) for y in (box[1], box[3])]
    xs, ys = zip(*(warp_point(x, y, draws, in_shape, out_shape) for x, y in corners), strict=True)
    height, width = out_shape
    return [
        min(max(min(xs), 0), width), min(max(min(ys), 0), height),
        min(max(max(xs), 0), width), min(max(max(ys), 0), height),
    ]  # fmt: skip


def is_kept(old: Sequence[float], new: Sequence[float], scale: float, share: float) -> bool:
    """Whether a warped box is large enough to stay."""
    width, height = new[2] - new[0], new[3] - new[1]
    if width <= 2 or height <= 2:
        return False
    area = (old[2] - old[0]) * (old[3] - old[1]) * scale * scale
    return width * height / (area + 1e-16) > share and max(width / height, height / width) < 100
