"""Augmentations against reference numbers, slow oracles and properties."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.drawing import BOXES, colour_faults, paint, pattern
from tests.data.oracles import is_kept, mosaic_by_pixels, warped_box
from utils.boxes import resample_segments, segment2box
from utils.data.augment import (
    AffineDraws,
    AugmentSettings,
    affine_matrix,
    apply_affine,
    augment_hsv,
    box_candidates,
    copy_paste,
    draw_affine,
    draw_centre,
    flip_labels,
    mixup,
    mosaic4,
    outline_points,
    random_perspective,
    to_pixels,
    warp_targets,
)

# Matrix of a mosaic's warp, copied from reference numbers: input 256 x 192, border (-64, -48).
BORDER_DRAWS = AffineDraws(
    0.0, 0.0, 9.061374165206765, 0.8309550802389254, 0.0, 0.0, 0.39054883400966256, 0.6036326422565877
)


def test_affine_against_reference(golden: Callable[[str], Path]) -> None:
    with np.load(golden("ops/affine.npz"), allow_pickle=False) as stored:
        for name, case in json.loads(str(stored["meta"])).items():
            arrays = {key.split(".", 1)[1]: stored[key] for key in stored.files if key.split(".", 1)[0] == name}
            if name.startswith("box_candidates"):
                assert np.array_equal(box_candidates(arrays["box1"], arrays["box2"], **case), arrays["output"]), name
                continue
            ends = np.cumsum(case["lengths"]).astype(int)
            segments = np.split(arrays["segments"], ends[:-1]) if len(ends) else []
            draws = AffineDraws(*case["draws"].values())
            image, targets = apply_affine(
                pattern(case["image_shape"]), arrays["targets"].copy(), segments, draws, tuple(case["border"]),
                is_projective=case["perspective"],
            )  # fmt: skip
            assert list(image.shape[:2]) == case["out_shape"], name
            assert targets.shape == arrays["output"].shape, name
            np.testing.assert_allclose(targets, arrays["output"], atol=1e-3, err_msg=name)
            matrix = affine_matrix(draws, case["image_shape"], case["out_shape"])
            np.testing.assert_allclose(matrix[: len(arrays["matrix"])], arrays["matrix"], atol=1e-9, err_msg=name)
            y, x = arrays["pixel_yx"].T
            far = np.abs(image[y, x].astype(int) - arrays["pixels"]).max(1) > 1
            assert far.mean() < 0.05, name
            assert abs(image.mean() - case["mean"]) < 0.1, name


def test_matrix_of_a_known_warp() -> None:
    matrix = affine_matrix(BORDER_DRAWS, (256, 192), (128, 96))
    centre = matrix @ (96, 128, 1)
    np.testing.assert_allclose(centre, (BORDER_DRAWS.translate_x * 96, BORDER_DRAWS.translate_y * 128, 1))
    np.testing.assert_allclose(np.linalg.det(matrix[:2, :2]), BORDER_DRAWS.scale**2)
    assert matrix[0, 1] > 0  # turned against the clock
    assert matrix[0, 1] == -matrix[1, 0]


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("perspective", [0.0, 0.0005])
def test_affine_boxes_against_point_by_point(seed: int, perspective: float) -> None:
    rng = np.random.default_rng(seed)
    in_shape, border = (128, 96), (-20, -10)
    out_shape = (88, 76)
    draws = draw_affine(rng, 20, 0.2, 0.6, 10, perspective)
    corner = rng.uniform(0, (80, 110), (30, 2))
    boxes = np.concatenate((corner, corner + rng.uniform(1, 40, (30, 2))), 1)
    targets = np.concatenate((rng.integers(0, 5, (30, 1)), boxes), 1).astype(np.float32)
    image = np.zeros((*in_shape, 3), np.uint8)
    _, kept = apply_affine(image, targets.copy(), (), draws, border, is_projective=bool(perspective))
    expected = []
    for cls, *box in targets.astype(np.float64):
        new = warped_box(box, draws, in_shape, out_shape)
        if is_kept(box, new, draws.scale, 0.10):
            expected.append([cls, *new])
    assert len(kept) == len(expected)
    np.testing.assert_allclose(kept, np.array(expected).reshape(-1, 5), atol=1e-3)


def ragged_outlines(seed: int, side: int = 100) -> list[np.ndarray]:
    """Polygons of 1 to 40 vertices, some of them outside of a picture of this side."""
    rng = np.random.default_rng(seed)
    return [rng.uniform(-50, side + 50, (count, 2)).astype(np.float32) for count in (3, 1, 40, 7, 2, 12)]


def test_outlines_all_at_once() -> None:
    outlines = ragged_outlines(0)
    expected = np.stack(resample_segments(list(outlines)))
    found = outline_points(np.concatenate(outlines).astype(np.float64), outlines)
    assert found.shape == (6, 1000, 2)
    assert np.abs(found - expected).max() < 1e-10


@pytest.mark.parametrize("perspective", [0.0, 0.002])
@pytest.mark.parametrize("seed", range(5))
def test_warped_outlines_against_one_after_the_other(seed: int, perspective: float) -> None:
    outlines = ragged_outlines(seed)
    draws = draw_affine(np.random.default_rng(seed), 30, 0.3, 0.4, 10, perspective)
    matrix = affine_matrix(draws, (100, 100), (100, 100))
    expected = []
    for points in resample_segments(list(outlines)):
        moved = np.concatenate((points, np.ones((1000, 1))), 1) @ matrix.T
        expected.append(segment2box(moved[:, :2] / moved[:, 2:], 100, 100))
    corners = np.array([(*points.min(0), *points.max(0)) for points in outlines])
    targets = np.concatenate((np.arange(6.0)[:, None], corners), 1)
    kept = warp_targets(targets, outlines, matrix, draws.scale, (100, 100), is_projective=bool(perspective))
    assert len(kept)
    for row in kept:
        assert np.allclose(row[1:], expected[int(row[0])], atol=1e-6)


def test_affine_moves_pixels_and_boxes_together() -> None:
    image = paint(256, 192)
    targets = to_pixels(np.float32(BOXES), 256, 192)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        moved, kept = random_perspective(image, targets.copy(), (), 0, 0.1, 0.3, 0, 0.0, rng=rng)
        rows = kept.copy()
        rows[:, 1:3] = (kept[:, 1:3] + kept[:, 3:5]) / 2 / (256, 192)
        rows[:, 3:5] = (kept[:, 3:5] - kept[:, 1:3]) / (256, 192)
        assert colour_faults(moved, rows) == []


def test_signatures_that_users_know() -> None:
    names = "im targets segments degrees translate scale shear perspective border rng"
    parameters = inspect.signature(random_perspective).parameters
    assert list(parameters) == names.split()
    assert [parameters[name].default for name in names.split()[1:9]] == [(), (), 10, 0.1, 0.1, 10, 0.0, (0, 0)]
    assert list(inspect.signature(augment_hsv).parameters)[:4] == ["im", "hgain", "sgain", "vgain"]
    assert list(inspect.signature(mixup).parameters)[:4] == ["im", "labels", "im2", "labels2"]
    assert list(inspect.signature(copy_paste).parameters)[:4] == ["im", "labels", "segments", "p"]


def test_no_targets_and_identity() -> None:
    image = paint()
    same, targets = random_perspective(image, (), (), 0, 0, 0, 0, 0, rng=np.random.default_rng(0))
    assert same is image
    assert targets.shape == (0, 5)


def test_box_candidates_rules() -> None:
    old = np.array([[0, 0, 10, 10]] * 5, float).T
    new = np.array([[0, 0, 2, 10], [0, 0, 3, 3], [0, 0, 3, 4], [0, 0, 10, 2.1], [0, 0, 0, 0]], float).T
    assert box_candidates(old, new).tolist() == [False, False, True, True, False]
    thin = np.array([[0, 0, 300, 2.9]], float).T
    assert not box_candidates(thin, thin)[0]


# ----------------------------------------------------------------------------------------------------------- mosaic


@pytest.mark.parametrize("seed", range(12))
def test_mosaic_against_pixel_by_pixel(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = 32
    images = []
    for _ in range(4):
        short = int(rng.integers(1, size + 1))
        shape = (size, short) if rng.random() < 0.5 else (short, size)
        images.append(rng.integers(0, 255, (*shape, 3), dtype=np.uint8))
    rows = [np.float32([[k, 0.5, 0.5, 0.5, 0.5], [k, 0.9, 0.2, 0.2, 0.4]]) for k in range(4)]
    outlines = [[np.float32([[0.25, 0.25], [0.75, 0.25], [0.75, 0.75]])] * 2 for _ in range(4)]
    centre = draw_centre(rng, size)
    assert all(size // 2 <= value < 3 * size // 2 for value in centre)
    canvas, labels, segments = mosaic4(list(zip(images, rows, outlines, strict=True)), centre, size)
    expected, corners = mosaic_by_pixels(images, centre, size)
    assert np.array_equal(canvas, expected)
    for k, (left, top) in enumerate(corners):
        height, width = images[k].shape[:2]
        for row, (_, x, y, w, h) in enumerate(rows[k]):
            box = [(x - w / 2) * width + left, (y - h / 2) * height + top]
            box += [(x + w / 2) * width + left, (y + h / 2) * height + top]
            np.testing.assert_allclose(labels[2 * k + row], [k, *np.clip(box, 0, 2 * size)], atol=1e-4)
        points = np.clip(outlines[k][0] * (width, height) + (left, top), 0, 2 * size)
        np.testing.assert_allclose(segments[2 * k], points, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- the rest


def test_hsv_reference_formula() -> None:
    image = np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8)
    factors = np.random.default_rng(5).uniform(-1, 1, 3) ** 3 * (0.015, 0.7, 0.4) + 1
    hsv = cv2.cvtColor(image, cv2.COLOR_BGR2HSV).astype(np.float64)
    hsv[..., 0] = np.floor(hsv[..., 0] * factors[0] % 180)
    hsv[..., 1:] = np.floor(np.clip(hsv[..., 1:] * factors[1:], 0, 255))
    expected = cv2.cvtColor(hsv.astype(np.uint8), cv2.COLOR_HSV2BGR)
    changed = image.copy()
    augment_hsv(changed, 0.015, 0.7, 0.4, rng=np.random.default_rng(5))
    assert np.array_equal(changed, expected)
    same = image.copy()
    augment_hsv(same, 0, 0, 0)
    assert np.array_equal(same, image)


def test_mixup() -> None:
    one, two = np.full((4, 4, 3), 200, np.uint8), np.full((4, 4, 3), 100, np.uint8)
    ratio = np.random.default_rng(1).beta(32, 32)
    image, labels = mixup(one, np.zeros((2, 5)), two, np.ones((1, 5)), rng=np.random.default_rng(1))
    assert image.dtype == np.uint8
    assert image[0, 0, 0] == int(100 + 100 * ratio)
    assert labels[:, 0].tolist() == [0, 0, 1]


def test_flip_labels() -> None:
    rows = np.float32([[1, 0.2, 0.3, 0.1, 0.1]])
    flip_labels(rows, vertical=True)
    np.testing.assert_allclose(rows, [[1, 0.2, 0.7, 0.1, 0.1]])
    flip_labels(rows, vertical=False)
    np.testing.assert_allclose(rows, [[1, 0.8, 0.7, 0.1, 0.1]])


def outline(box: np.ndarray) -> np.ndarray:
    x1, y1, x2, y2 = box
    return np.float32([(x1, y1), (x2, y1), (x2, y2), (x1, y2)])


def test_copy_paste_mirrors_what_has_room() -> None:
    boxes: list[tuple[int, float, float, float, float]] = [(0, 0.2, 0.3, 0.2, 0.2), (1, 0.5, 0.8, 0.2, 0.2)]
    image = paint(100, 100, boxes)
    labels = to_pixels(np.float32(boxes), 100, 100)
    segments = [outline(row[1:]) for row in labels]
    out, rows, outlines = copy_paste(image.copy(), labels, segments, 1.0, rng=np.random.default_rng(0))
    assert rows[:, 0].tolist() == [0, 1, 0]  # the one in the middle would hide itself
    np.testing.assert_allclose(rows[2, 1:], [70, 20, 90, 40], atol=1e-4)
    assert len(outlines) == 3
    assert outlines[2][:, 0].min() == pytest.approx(70)
    assert (out[30, 80] == image[30, 20]).all()
    assert (out[:, :60] == image[:, :60]).all()


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_copy_paste_leaves_alone(p: float) -> None:
    image, labels = paint(), to_pixels(np.float32(BOXES), 96, 64)
    for segments in ([], [outline(row[1:]) for row in labels] if p == 0 else []):
        out, rows, _ = copy_paste(image, labels, segments, p)
        assert out is image
        assert rows is labels


def test_settings_from_mapping_object_and_nothing() -> None:
    class Values:
        mosaic = 0.5
        fliplr = 1

    assert AugmentSettings.from_hyp({"mosaic": 0.5, "fliplr": "1", "lr0": 3}) == AugmentSettings.from_hyp(Values())
    assert AugmentSettings.from_hyp(None) == AugmentSettings()


unit = st.floats(0, 1)


@settings(max_examples=60)
@given(
    boxes=st.lists(st.tuples(unit, unit, unit, unit), min_size=1, max_size=8),
    seed=st.integers(0, 10_000),
    has_segments=st.booleans(),
    perspective=st.sampled_from([0.0, 0.001]),
)
def test_warped_boxes_stay_in_the_picture(
    boxes: list[tuple[float, ...]], seed: int, has_segments: bool, perspective: float
) -> None:
    corners = np.array(boxes)
    low, high = np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])
    targets = np.concatenate((np.arange(len(boxes))[:, None], low * 64, high * 64), 1).astype(np.float32)
    segments = [outline(row[1:]) for row in targets] if has_segments else []
    image, kept = random_perspective(
        np.zeros((64, 64, 3), np.uint8), targets, segments, 30, 0.3, 0.9, 15, perspective, (-16, -8),
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    assert image.shape == (32, 48, 3)
    assert np.isfinite(kept).all()
    assert (np.diff(kept[:, 0]) > 0).all()  # order kept, nothing doubled
    assert (kept[:, 1:] >= 0).all()
    assert (kept[:, [1, 3]] <= 48).all()
    assert (kept[:, [2, 4]] <= 32).all()
    assert (kept[:, 3:] - kept[:, 1:3] > 2).all()
