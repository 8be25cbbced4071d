"""The shown part of a mosaic, against the whole canvas."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from utils.data.augment import affine_matrix, draw_affine, draw_centre, hsv_tables, mosaic4
from utils.data.colour import inside_grey, rgb_planes
from utils.data.mosaic_view import (
    Window,
    align_tile,
    cut_window,
    draw_window,
    shrink_of,
    shrink_tile,
    shrunk_view,
    visible_window,
    warp_window,
)

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


@pytest.mark.parametrize("factors", [(0.99, 0.5, 1.3), (1.01, 1.7, 0.6), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize(
    "part", [(0, 0, 0, 0), (70, 5, 150, 60), (0, 0, 300, 20), (128, 50, 300, 100), (0, 0, 300, 99)]
)
def test_grey_borders_change_no_pixel(factors: tuple[float, ...], part: tuple[int, ...]) -> None:
    x1, y1, x2, y2 = part
    image = np.full((100, 300, 4), 114, np.uint8)
    image[y1:y2, x1:x2, :3] = np.random.default_rng(0).integers(0, 256, (y2 - y1, x2 - x1, 3))
    expected = rgb_planes(np.ascontiguousarray(image[..., :3]), np.array(factors))
    assert np.array_equal(rgb_planes(image, np.array(factors)), expected)
    rows, columns = inside_grey(image)
    assert ((rows, columns) == (slice(None), slice(None))) == ((y2 - y1) * (x2 - x1) > 0.5 * 100 * 300)


def test_how_much_smaller_a_mosaic_may_be_drawn() -> None:
    for scale, expected in [(0.51, 1), (0.5, 2), (0.26, 2), (0.25, 4), (0.1, 4)]:
        assert shrink_of(np.diag((scale, scale, 1.0)), 2 * SIZE) == expected
    assert shrink_of(np.diag((0.3, 0.8, 1.0)), 2 * SIZE) == 1
    assert shrink_of(np.diag((0.1, 0.1, 1.0)), 94) == 2
    angle = np.array([[0.3, -0.4, 0], [0.4, 0.3, 0], [0, 0, 1]])
    assert shrink_of(0.99 * angle, 2 * SIZE) == 2


@pytest.mark.parametrize("shrink", [2, 4])
@pytest.mark.parametrize("position", range(4))
def test_shrunk_pictures_stay_where_they_are(position: int, shrink: int) -> None:
    """A bright blob's centre of mass after the warp, within a seventh of a pixel, for sides that do not divide."""
    width, height, centre = 47, 41, (53, 46)
    y, x = np.mgrid[:height, :width]
    blob = 114 + 140 * np.exp(-((x - 24) ** 2 + (y - 19) ** 2) / 60)
    image = np.repeat(blob[..., None], 3, 2).astype(np.uint8)
    matrix = np.array([[0.25, 0, 3.3], [0, 0.25, 2.7], [0, 0, 1]])
    images = [image if k == position else None for k in range(4)]
    view, place = shrunk_view(matrix, centre, shrink)
    tile = align_tile(shrink_tile(image, shrink), position, (width, height), shrink)
    small = [tile if k == position else None for k in range(4)]
    masses = []
    for pictures, seen, at, side in ((images, matrix, centre, 96), (small, view, place, 96 // shrink)):
        drawn = draw_window(pictures, at, side, Window(0, 0, side, side))
        warped = warp_window(drawn, Window(0, 0, side, side), seen, SIZE)[..., 0].astype(float) - 114
        masses.append([(warped * grid).sum() / warped.sum() for grid in np.mgrid[:SIZE, :SIZE]])
    assert np.abs(np.subtract(*masses)).max() < 0.15
