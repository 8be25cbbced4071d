"""Slices of large pictures: they cover everything, and each object is reported once whatever border it lies on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from utils.slicing import Window, detect_sliced, merge_slices, picture_windows, slice_windows, suppress


def rows(*boxes: Sequence[float]) -> np.ndarray:
    return np.array(boxes, np.float32).reshape(-1, 6)


@pytest.mark.parametrize("overlap", [0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize(("height", "width"), [(640, 640), (641, 640), (4000, 3000), (100, 4000), (1, 1), (777, 1234)])
def test_windows_cover_the_picture_and_share_enough(height: int, width: int, overlap: float) -> None:
    windows = slice_windows(height, width, 640, overlap)
    seen = np.zeros((height, width), np.uint8)
    for window in windows:
        assert (window.width, window.height) == (min(640, width), min(640, height))
        assert window.cut(seen).shape == (window.height, window.width)  # inside the picture
        window.cut(seen)[:] = 1
    assert seen.all() and len(set(windows)) == len(windows)
    for side in (0, 1):
        starts = sorted({window[side] for window in windows})
        assert all(640 - (after - before) >= round(640 * overlap) - 1 for before, after in pairwise(starts))


def test_the_whole_picture_comes_last_unless_it_is_one_slice() -> None:
    assert picture_windows(600, 640, 640, 0.2) == [Window(0, 0, 640, 600)]
    windows = picture_windows(1000, 640, 640, 0.2)
    assert windows == [Window(0, 0, 640, 640), Window(0, 360, 640, 640), Window(0, 0, 640, 1000)]


@pytest.mark.parametrize(("size", "overlap"), [(0, 0.2), (640, 1.0), (640, -0.1)])
def test_impossible_slices_are_refused(size: int, overlap: float) -> None:
    with pytest.raises(ValueError, match="should"):
        slice_windows(100, 100, size, overlap)


class Finder:
    """Finds every rectangle of a picture whose pixels hold its number; too small ones after shrinking are missed."""

    def __init__(self, side: int, smallest: float) -> None:
        self.side, self.smallest, self.shapes = side, smallest, []

    def __call__(self, images: list[np.ndarray]) -> list[np.ndarray]:
        self.shapes.append([image.shape[:2] for image in images])
        return [self.find(image) for image in images]

    def find(self, image: np.ndarray) -> np.ndarray:
        scale = min(self.side / max(image.shape[:2]), 1)
        found = []
        for number in np.unique(image[image > 0]):
            ys, xs = np.nonzero(image == number)
            box = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
            if min(box[2] - box[0], box[3] - box[1]) * scale >= self.smallest:
                # parts that are cut off are found with more confidence than whole objects: the harder case
                confidence = 0.5 + 0.4 / (1 + (box[2] - box[0]) * (box[3] - box[1]))
                found.append((*box, confidence, number % 3))
        return rows(*found)


def scene(boxes: Sequence[Sequence[int]], height: int = 1500, width: int = 2000) -> np.ndarray:
    picture = np.zeros((height, width), np.int32)
    for number, (x1, y1, x2, y2) in enumerate(boxes, start=1):
        picture[y1:y2, x1:x2] = number
    return picture


@pytest.mark.parametrize("seed", range(5))
def test_every_object_is_reported_once_in_its_place(seed: int) -> None:
    """Small ones anywhere, also on borders of slices, and large ones that fit into no slice."""
    random = np.random.default_rng(seed)
    places = random.permutation(20 * 15)[:60]  # cells of 100 pixels, so that objects do not touch
    boxes = []
    for place in places:
        x, y = 100 * (place % 20) + random.integers(2, 40), 100 * (place // 20) + random.integers(2, 40)
        width, height = random.integers(8, 58, 2)
        boxes.append((x, y, x + width, y + height))
    image = scene(boxes)
    finder = Finder(640, 4)
    found = detect_sliced(finder, image, size=400, overlap=0.25, batch_size=7)
    wanted = sorted((*box, number % 3) for number, box in enumerate(boxes, start=1))
    assert sorted(tuple(int(value) for value in (*row[:4], row[5])) for row in found) == wanted
    assert all(len(set(call)) == 1 and len(call) <= 7 for call in finder.shapes)
    assert len(finder.find(image)) < len(boxes)  # which is why pictures are sliced


def test_large_objects_come_from_the_whole_picture() -> None:
    boxes = [(100, 100, 1500, 1300), (1600, 20, 1612, 30)]
    found = detect_sliced(Finder(640, 4), scene(boxes), size=400, overlap=0.25)
    assert {tuple(map(int, row[:4])) for row in found} == set(boxes)


def test_parts_of_what_nobody_shows_whole_are_joined() -> None:
    windows = picture_windows(100, 700, 400, 0.25)  # starts 0 and 300
    left, right = rows((100, 10, 400, 90, 0.8, 0)), rows((0, 10, 200, 90, 0.7, 0))
    merged = merge_slices([left, right, rows()], windows, (100, 700), size=400, overlap=0.25, iou_thres=0.45)
    np.testing.assert_allclose(merged, rows((100, 10, 500, 90, 0.8, 0)))
    apart = rows((0, 60, 200, 99, 0.7, 0))
    assert len(merge_slices([left, apart, rows()], windows, (100, 700), size=400, overlap=0.25, iou_thres=0.45)) == 2


def test_classes_stay_apart_unless_agnostic() -> None:
    windows = picture_windows(400, 700, 400, 0.25)
    whole, cut = rows((310, 10, 350, 50, 0.5, 0)), rows((0, 10, 50, 50, 0.9, 1))
    options = {"size": 400, "overlap": 0.25, "iou_thres": 0.45}
    assert len(merge_slices([whole, cut, rows()], windows, (400, 700), **options)) == 2
    merged = merge_slices([whole, cut, rows()], windows, (400, 700), agnostic=True, **options)
    assert merged[:, 5].tolist() == [0]


def test_best_first_and_not_more_than_asked_for() -> None:
    windows = picture_windows(400, 700, 400, 0.25)
    parts = [rows((10, 10, 20, 20, 0.3, 0), (50, 50, 60, 60, 0.9, 0)), rows((200, 50, 220, 70, 0.6, 0)), rows()]
    options = {"size": 400, "overlap": 0.25, "iou_thres": 0.45}
    scores = merge_slices(parts, windows, (400, 700), **options)[:, 4].tolist()
    assert scores == pytest.approx([0.9, 0.6, 0.3])
    assert len(merge_slices(parts, windows, (400, 700), max_det=2, **options)) == 2
    assert merge_slices([rows()] * 3, windows, (400, 700), **options).shape == (0, 6)


def test_suppression() -> None:
    table = rows((0, 0, 100, 100, 0.5, 0), (10, 10, 40, 40, 0.9, 0), (12, 10, 42, 40, 0.8, 0), (12, 10, 42, 40, 0.7, 1))
    assert suppress(table, 0.45, False).tolist() == [1, 3, 0]
    assert suppress(table, 0.45, True).tolist() == [1, 0]
    assert suppress(table, 0.05, True).tolist() == [1]
