"""The shown part of a mosaic, against the whole canvas."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from utils.data.augment import affine_matrix, draw_affine, draw_centre, hsv_tables, mosaic4, rgb_planes
from utils.data.mosaic_view import Window, cut_window, draw_window, visible_window, warp_window

SIZE = 48


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("change", [(0, 0.1, 0.9, 0, 0), (40, 0.4, 0.9, 20, 0), (10, 0.2, 0.5, 5, 0.001)])
def test_same_pixels_as_from_the_whole_canvas(seed: int, change: tuple[float, ...]) -> None:
    rng = np.random.default_rng(seed)
    centre, draws, is_projective = draw_centre(rng, SIZE), draw_affine(rng, *change), bool(change[-1])
    shapes = [(SIZE, int(rng.integers(9, SIZE))) if k % 2 else (int(rng.integers(9, SIZE)), SIZE) for k in range(4)]
    images = [cv2.resize(rng.integers(0, 256, (6, 6, 3), np.uint8), shape[::-1]) for shape in shapes]
    canvas = mosaic4([(image, np.zeros((0, 5), np.float32), []) for image in images], centre, SIZE)[0]
    matrix = affine_matrix(draws, (2 * SIZE, 2 * SIZE), (SIZE, SIZE))
    warp = (lambda: cv2.warpPerspective(canvas, matrix, (SIZE, SIZE), borderValue=(114, 114, 114))) if is_projective \
        else (lambda: cv2.warpAffine(canvas, matrix[:2], (SIZE, SIZE), borderValue=(114, 114, 114)))  # fmt: skip
    expected = warp()
    window = visible_window(matrix, 2 * SIZE, SIZE, is_projective=is_projective)
    seen = [
        image if window.shows(k, image.shape[1], image.shape[0], centre, 2 * SIZE) else None
        for k, image in enumerate(images)
    ]
    drawn = draw_window(seen, centre, 2 * SIZE, window)
    assert np.array_equal(drawn[..., :3], cut_window(canvas, window)[..., :3])
    result = warp_window(drawn, window, matrix, SIZE, is_projective=is_projective)
    assert result.shape == (SIZE, SIZE, 4)
    far = np.abs(result[..., :3].astype(int) - expected).max(-1) > 1
    assert far.mean() < 0.001


def test_warp_that_leaves_the_canvas_is_grey() -> None:
    matrix = np.array([[1.0, 0, 10 * SIZE], [0, 1, 0], [0, 0, 1]])
    window = visible_window(matrix, 2 * SIZE, SIZE)
    drawn = draw_window([np.zeros((SIZE, SIZE, 3), np.uint8)] * 4, (SIZE, SIZE), 2 * SIZE, window)
    assert (warp_window(drawn, window, matrix, SIZE)[..., :3] == 114).all()


def test_window_shows_what_overlaps() -> None:
    window = Window(0, 0, 40, 40)
    assert window.shows(0, 30, 30, (41, 41), 96)
    assert not window.shows(3, 30, 30, (41, 41), 96)
    assert window.shows(3, 30, 30, (39, 39), 96)
    assert not window.shows(1, 30, 30, (40, 39), 96)


@pytest.mark.parametrize("channels", [3, 4])
def test_planes_against_the_formula(channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (30, 40, channels), np.uint8)
    assert np.array_equal(rgb_planes(image), image[..., 2::-1].transpose(2, 0, 1))
    factors = np.array([1.01, 0.5, 1.3])
    hsv = cv2.cvtColor(np.ascontiguousarray(image[..., :3]), cv2.COLOR_BGR2HSV)
    for channel, table in enumerate(hsv_tables(factors)):
        hsv[..., channel] = table[hsv[..., channel]]
    assert np.array_equal(rgb_planes(image, factors), cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB).transpose(2, 0, 1))
