"""Box formats, clipping, scaling and overlaps against reference numbers, a plain oracle and their own inverses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import iou as oracle
from utils import augmentations, boxes, general

KINDS = {"IoU": {}, "GIoU": {"GIoU": True}, "DIoU": {"DIoU": True}, "CIoU": {"CIoU": True}}
FORMAT_CALLS = {
    "xywhn2xyxy": ("w", "h", "padw", "padh"),
    "xyn2xy": ("w", "h", "padw", "padh"),
    "xyxy2xywhn": ("w", "h", "clip", "eps"),
}
side = st.floats(0.5, 300, width=32)
place = st.floats(-300, 300, width=32)
box = st.builds(lambda x, y, w, h: (x, y, x + w, y + h), place, place, side, side)


@pytest.fixture(scope="module")
def reference(golden: Callable[[str], Path]) -> dict[str, np.ndarray]:
    with np.load(golden("ops/boxes.npz")) as file:
        return dict(file)


def settings_of(reference: dict[str, np.ndarray], *starts: str) -> dict[str, dict]:
    return {k: v for k, v in json.loads(str(reference["meta"])).items() if k.rsplit("_", 1)[0] in starts or k in starts}


def same(actual: np.ndarray | torch.Tensor, expected: np.ndarray, atol: float = 1e-5) -> None:
    assert tuple(actual.shape) == expected.shape
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", ["xyxy2xywh", "xywh2xyxy"])
def test_formats_match_reference(reference: dict[str, np.ndarray], name: str) -> None:
    given_boxes = reference[f"{name}.input"]
    convert = getattr(boxes, name)
    same(convert(given_boxes), reference[f"{name}.output"])
    same(convert(torch.from_numpy(given_boxes)), reference[f"{name}.torch_output"])


def test_three_axes(reference: dict[str, np.ndarray]) -> None:
    same(boxes.xyxy2xywh(reference["xyxy2xywh_3d.input"]), reference["xyxy2xywh_3d.output"])


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", list(FORMAT_CALLS))
def test_normalised_formats_match_reference(reference: dict[str, np.ndarray], name: str, as_tensor: bool) -> None:
    for case, options in settings_of(reference, name).items():
        x = reference[f"{case}.input"].copy()
        x = torch.from_numpy(x) if as_tensor else x
        same(getattr(boxes, name)(x, *(options[key] for key in FORMAT_CALLS[name])), reference[f"{case}.output"])
        if f"{case}.input_afterwards" in reference:
            same(x, reference[f"{case}.input_afterwards"])


def test_clip_and_scale_match_reference(reference: dict[str, np.ndarray]) -> None:
    for case, options in settings_of(reference, "clip_boxes").items():
        x = reference[f"{case}.input"]
        same(boxes.clip_boxes(x.copy(), options["shape"]), reference[f"{case}.output"])
        tensor = torch.from_numpy(x.copy())
        assert boxes.clip_boxes(tensor, options["shape"]) is tensor
        same(tensor, reference[f"{case}.torch_output"])
    for case, options in settings_of(reference, "scale_boxes").items():
        x, call = reference[f"{case}.input"], (options["img0_shape"], options["ratio_pad"])
        same(boxes.scale_boxes(options["img1_shape"], x.copy(), *call), reference[f"{case}.numpy_output"], 1e-4)
        same(boxes.scale_boxes(options["img1_shape"], torch.tensor(x), *call), reference[f"{case}.output"], 1e-4)


def test_polygons_match_reference(reference: dict[str, np.ndarray]) -> None:
    for case, options in settings_of(reference, "segment2box").items():
        same(boxes.segment2box(reference[f"{case}.input"], **options), reference[f"{case}.output"])
    for case, options in settings_of(reference, "resample_segments").items():
        same(boxes.resample_segments([reference[f"{case}.input"]], **options)[0], reference[f"{case}.output"])
    lengths = settings_of(reference, "segments2boxes")["segments2boxes"]["lengths"]
    parts = np.split(reference["segments2boxes.input"], np.cumsum(lengths)[:-1])
    same(boxes.segments2boxes(parts), reference["segments2boxes.output"])


@pytest.mark.parametrize("case", ["iou_random", "iou_edge"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_overlaps_match_reference(reference: dict[str, np.ndarray], case: str, kind: str) -> None:
    pairs = {
        False: (reference[f"{case}.box1"], reference[f"{case}.box2"]),
        True: (reference[f"{case}.box1_xywh"], reference[f"{case}.box2_xywh"]),
    }
    for xywh, (first, second) in pairs.items():
        value = boxes.bbox_iou(torch.from_numpy(first), torch.from_numpy(second), xywh=xywh, **KINDS[kind])
        expected = reference[f"{case}.{kind}_{'xywh' if xywh else 'xyxy'}"]
        assert value.shape == (len(first), 1)
        assert value.isfinite().all()
        known = np.isfinite(expected)
        same(value.squeeze(-1)[known], expected[known], atol=1e-6)


@pytest.mark.parametrize("case", ["iou_random", "iou_edge"])
def test_ciou_gradient_matches_reference(reference: dict[str, np.ndarray], case: str) -> None:
    pair = [torch.from_numpy(reference[f"{case}.{name}"]).requires_grad_() for name in ("box1", "box2")]
    (1 - boxes.bbox_iou(*pair, xywh=False, CIoU=True)).sum().backward()
    for index, part in enumerate(pair, 1):
        expected = reference[f"{case}.grad_1_minus_CIoU_box{index}"]
        np.testing.assert_allclose(part.grad, expected, rtol=1e-4, atol=1e-6)


def test_tables_of_pairs_match_reference(reference: dict[str, np.ndarray]) -> None:
    first, second = reference["matrix.box1"], reference["matrix.box2"]
    same(boxes.box_iou(torch.from_numpy(first), torch.from_numpy(second)), reference["matrix.box_iou"], 1e-6)
    same(boxes.bbox_ioa(first, second), reference["matrix.bbox_ioa"], 1e-6)
    same(boxes.bbox_ioa(first[0], second), reference["matrix.bbox_ioa"][0], 1e-6)
    first, second = (torch.from_numpy(reference[f"broadcast_ciou.box{i}"]) for i in (1, 2))
    value = boxes.bbox_iou(first[:, None], second[None], xywh=False, CIoU=True).squeeze(-1)
    same(value, reference["broadcast_ciou.CIoU"], 1e-6)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((0, 0, 10, 10), (5, 5, 20, 12), 0.010300), ((0, 0, 10, 10), (30, 30, 40, 45), -0.539901)],
)
def test_ciou_of_known_pairs(first: tuple, second: tuple, expected: float) -> None:
    value = boxes.bbox_iou(torch.tensor([first]).float(), torch.tensor([second]).float(), xywh=False, CIoU=True)
    assert value.item() == pytest.approx(expected, abs=1e-6)


@settings(max_examples=60)
@given(box, box)
def test_overlaps_match_the_oracle(first: tuple, second: tuple) -> None:
    a, b = (torch.tensor([x], dtype=torch.float64) for x in (first, second))
    assert boxes.bbox_iou(a, b, xywh=False, GIoU=True).item() == pytest.approx(oracle.giou(first, second), abs=1e-9)
    assert boxes.bbox_iou(a, b, xywh=False, DIoU=True).item() == pytest.approx(oracle.diou(first, second), abs=1e-9)
    assert boxes.bbox_iou(a, b, xywh=False, CIoU=True).item() == pytest.approx(oracle.ciou(first, second), abs=1e-9)
    assert boxes.box_iou(a, b).item() == pytest.approx(oracle.iou(first, second), abs=1e-6)


@settings(max_examples=60)
@given(box, box)
def test_overlaps_are_symmetric_and_bounded(first: tuple, second: tuple) -> None:
    a, b = (torch.tensor([x], dtype=torch.float64) for x in (first, second))
    values = {kind: boxes.bbox_iou(a, b, xywh=False, **options).item() for kind, options in KINDS.items()}
    assert values["CIoU"] == pytest.approx(boxes.bbox_iou(b, a, xywh=False, CIoU=True).item(), abs=1e-9)
    assert 0 <= values["IoU"] <= 1
    guard = 2e-6  # the guards of the divisions count for more in the smallest boxes
    assert -1 - guard <= values["GIoU"] <= values["IoU"] + guard
    assert -2 - guard <= values["CIoU"] <= values["DIoU"] <= values["IoU"]
    assert boxes.bbox_iou(a, a, xywh=False, CIoU=True).item() == pytest.approx(1, abs=1e-5)


@settings(max_examples=60)
@given(st.lists(box, min_size=1, max_size=4), st.integers(1, 2000), st.integers(1, 2000))
def test_formats_are_inverses(rows: list[tuple], width: int, height: int) -> None:
    corners = np.array(rows)
    np.testing.assert_allclose(boxes.xywh2xyxy(boxes.xyxy2xywh(corners)), corners, atol=1e-9)
    normalised = boxes.xyxy2xywhn(corners, width, height)
    np.testing.assert_allclose(boxes.xywhn2xyxy(normalised, width, height), corners, atol=1e-9)
    np.testing.assert_allclose(boxes.xyxy2xywhn(torch.from_numpy(corners), width, height), normalised, atol=1e-12)


@settings(max_examples=40)
@given(st.integers(10, 1500), st.integers(10, 1500))
def test_scaling_undoes_a_letterbox(width: int, height: int) -> None:
    gain = min(640 / height, 640 / width)
    pad = ((640 - width * gain) / 2, (640 - height * gain) / 2)
    corners = np.array([[0.1 * width, 0.2 * height, 0.7 * width, 0.9 * height]])
    moved = corners * gain + np.array([*pad, *pad])
    restored = boxes.scale_boxes((640, 640), moved.copy(), (height, width))
    np.testing.assert_allclose(restored, corners, atol=1e-6)
    given_pad = boxes.scale_boxes((640, 640), moved.copy(), (height, width), ((gain, gain), pad))
    np.testing.assert_allclose(given_pad, corners, atol=1e-6)


def test_conversions_leave_their_input_and_further_columns_alone() -> None:
    rows = np.array([[10.0, 20.0, 30.0, 60.0, 0.5, 2.0]])
    before = rows.copy()
    assert boxes.xyxy2xywh(rows).tolist() == [[20, 40, 20, 40, 0.5, 2]]
    assert boxes.xywhn2xyxy(rows, 1, 1).tolist() == [[-5, -10, 25, 50, 0.5, 2]]
    assert (rows == before).all()


def test_no_boxes() -> None:
    empty = np.zeros((0, 4))
    assert boxes.xyxy2xywhn(empty, clip=True).shape == (0, 4)
    assert boxes.segments2boxes([]).shape == (0, 4)
    assert boxes.bbox_ioa(empty, np.ones((3, 4))).shape == (0, 3)
    assert boxes.box_iou(torch.zeros(0, 4), torch.ones(3, 4)).shape == (0, 3)
    assert boxes.scale_boxes((64, 64), torch.zeros(0, 6), (32, 32)).shape == (0, 6)


def test_polygon_outside_gives_an_empty_box_and_one_on_the_border_does_not() -> None:
    assert boxes.segment2box(np.full((3, 2), 900.0)).tolist() == [0, 0, 0, 0]
    assert boxes.segment2box(np.array([[0.0, 5.0], [0.0, 9.0]])).tolist() == [0, 5, 0, 9]


def test_ciou_gradient_is_the_slope() -> None:
    """In float64, with the aspect weight held: DIoU has no held part, so its gradient can be checked outright."""
    generator = torch.Generator().manual_seed(3)
    first = torch.rand((5, 4), generator=generator, dtype=torch.float64).requires_grad_()
    second = torch.rand((5, 4), generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: boxes.bbox_iou(a, b, xywh=True, DIoU=True), (first, second))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (general, "xyxy2xywh xywh2xyxy xywhn2xyxy xyxy2xywhn xyn2xy clip_boxes scale_boxes segment2box segments2boxes"),
        (
            general,
            "resample_segments non_max_suppression check_img_size check_dataset increment_path init_seeds LOGGER",
        ),
        (augmentations, "letterbox random_perspective augment_hsv mixup copy_paste"),
    ],
)
def test_old_import_paths_offer_the_known_names(module: ModuleType, names: str) -> None:
    for name in names.split():
        assert name in module.__all__
        assert hasattr(module, name)
