"""Suppression against reference detections and a plain-Python oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.reference.nms import one_by_one, suppress
from utils import nms
from utils.nms import non_max_suppression

ROWS = [
    (50, 50, 40, 40, 0.9, 0.1, 0),
    (52, 50, 40, 40, 0.8, 0.3, 0),
    (50, 54, 40, 44, 0.2, 0.7, 0),
    (120, 60, 30, 30, 0, 0.6, 0.5),
    (121, 61, 30, 30, 0, 0.55, 0.6),
    (200, 200, 60, 20, 0.26, 0.26, 0.26),
    (200, 200, 60, 20, 0.24, 0.2, 0.1),
    (300, 300, 10, 10, 0, 0, 0.0009),
]
FIRST_FOUR = [(30, 30, 0.9, 0), (30, 32, 0.7, 1), (105, 45, 0.6, 1), (106, 46, 0.6, 2)]
LAST = (170, 190, 0.26)


def as_prediction(rows: list[tuple]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).T[None]  # (1, 4 + classes, boxes)


def random_prediction(seed: int, count: int = 120, classes: int = 4, size: float = 100) -> Tensor:
    """Boxes crowded enough to suppress each other, no two scores alike."""
    random = np.random.default_rng(seed)
    centres = random.uniform(0, size, (count, 2))
    sides = random.uniform(8, 40, (count, 2))
    scores = random.permutation(count * classes).reshape(count, classes) / (count * classes)
    return torch.from_numpy(np.concatenate((centres, sides, scores**3), 1)).float().T[None]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"conf_thres": 0.25, "iou_thres": 0.45}, [*FIRST_FOUR, (*LAST, 0)]),
        ({"agnostic": True}, [FIRST_FOUR[0], FIRST_FOUR[2], (*LAST, 0)]),
        (
            {"conf_thres": 0.001, "iou_thres": 0.7, "multi_label": True},
            [*FIRST_FOUR, (*LAST, 0), (*LAST, 1), (*LAST, 2)],
        ),
        ({"classes": [1]}, [FIRST_FOUR[1], FIRST_FOUR[2]]),
    ],
)
def test_known_picture(options: dict, expected: list[tuple]) -> None:
    (found,) = non_max_suppression(as_prediction(ROWS), **options)
    assert found.shape == (len(expected), 6)
    np.testing.assert_allclose(found[:, [0, 1, 4, 5]], expected, atol=1e-5)


def test_matches_reference(golden: Callable[[str], Path]) -> None:
    with np.load(golden("ops/nms.npz")) as file:
        reference = dict(file)
    for case, call in json.loads(str(reference["meta"])).items():
        counts, is_exact = call.pop("counts"), call.pop("exact_agrees")
        found = non_max_suppression(torch.from_numpy(reference[f"{case}.prediction"]), **call)
        if not is_exact:  # the reference moves boxes in float32 there and so rounds their coordinates
            continue
        assert [len(image) for image in found] == counts, case
        expected = reference[f"{case}.detections"]
        joined = torch.cat(found).numpy()
        np.testing.assert_array_equal(joined[:, 4:], expected[:, 4:], err_msg=case)
        np.testing.assert_allclose(joined[:, :4], expected[:, :4], atol=1e-3, err_msg=case)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("agnostic", [False, True])
def test_matches_the_oracle(seed: int, multi_label: bool, agnostic: bool) -> None:
    prediction = random_prediction(seed)
    options = {"conf_thres": 0.05, "iou_thres": 0.3 + 0.1 * seed, "agnostic": agnostic, "multi_label": multi_label}
    (found,) = non_max_suppression(prediction, **options)
    expected = suppress(prediction[0].T.double().tolist(), **options)
    assert len(found) == len(expected)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def crowd(seed: int, batch: int, count: int, classes: int, sharp: float) -> Tensor:
    """Boxes around a few centres, as a network gives them: long chains of candidates that overlap each other."""
    random = torch.Generator().manual_seed(seed)
    centre = torch.rand(batch, 2, 8, generator=random) * 300
    owner = torch.randint(0, 8, (batch, 1, count), generator=random).expand(-1, 2, -1)
    place = centre.gather(2, owner) + torch.randn(batch, 2, count, generator=random) * 6
    sides = torch.rand(batch, 2, count, generator=random) * 30 + 20
    scores = torch.rand(batch, classes, count, generator=random) ** sharp
    return torch.cat((place, sides, scores), 1)


@pytest.mark.parametrize("block", [4, 128])
@pytest.mark.parametrize(
    ("classes", "sharp", "options"),
    [
        (3, 4.0, {"multi_label": True}),
        (1, 1.0, {"multi_label": True}),
        (3, 1.0, {"agnostic": True, "max_det": 7}),
        (20, 30.0, {"multi_label": True, "max_det": 40}),
        (3, 2.0, {"multi_label": True, "half": True}),  # many equal scores: the order of the candidates decides
    ],
)
def test_equals_pictures_taken_one_by_one(
    monkeypatch: pytest.MonkeyPatch, classes: int, sharp: float, options: dict, block: int
) -> None:
    pytest.importorskip("torchvision")
    options = dict(options)
    prediction = crowd(classes, 5, 400, classes, sharp)
    prediction = prediction.half() if options.pop("half", False) else prediction
    prediction[1, 4:] = 0  # a picture without any candidate
    prediction[3, 4:, 20:] = 0  # and one with few
    monkeypatch.setattr(nms, "CPU_BLOCK", block)
    found = non_max_suppression(prediction, 0.001, 0.7, **options)
    expected = one_by_one(prediction, 0.001, 0.7, **options)
    assert [len(part) for part in found] == [len(part) for part in expected]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("crowded", [10, 10_000])
def test_only_the_best_candidates_enter(monkeypatch: pytest.MonkeyPatch, crowded: int) -> None:
    """Whether or not the worst are cut off beforehand."""
    pytest.importorskip("torchvision")
    monkeypatch.setattr(nms, "MAX_CANDIDATES", 50)
    monkeypatch.setattr(nms, "CROWDED", crowded)
    prediction = crowd(0, 3, 200, 2, 1.0).half()  # half precision: some scores are equal to the last that enters
    found = non_max_suppression(prediction, 0.001, 0.7, multi_label=True)
    expected = one_by_one(prediction, 0.001, 0.7, multi_label=True, max_candidates=50)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


class CountWaits(TorchDispatchMode):
    """Counts the operations for which the host has to wait for a device."""

    NAMES = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "repeat_interleave", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.waits += func.overloadpacket.__name__ in self.NAMES
        return func(*args, **(kwargs or {}))


def test_host_does_not_wait_for_each_picture() -> None:
    single = crowd(1, 1, 400, 3, 4.0)
    waits = []
    for copies in (1, 16):
        with CountWaits() as counter:
            non_max_suppression(single.repeat(copies, 1, 1), 0.001, 0.7, multi_label=True)
        waits.append(counter.waits)
    assert waits[0] == waits[1] < 60


def test_batch_equals_single_pictures_and_order_of_boxes_is_irrelevant() -> None:
    pictures = [random_prediction(seed) for seed in range(3)]
    together = non_max_suppression(torch.cat(pictures), 0.1, multi_label=True)
    for picture, found in zip(pictures, together, strict=True):
        shuffled = picture[:, :, torch.randperm(picture.shape[2], generator=torch.Generator().manual_seed(1))]
        torch.testing.assert_close(non_max_suppression(shuffled, 0.1, multi_label=True)[0], found, rtol=0, atol=0)


@pytest.mark.parametrize("label", [0, 79])
def test_high_classes_are_not_rounded(label: int) -> None:
    """In a wide picture an overlap of 0.40845 is told from thresholds a ten-thousandth away, whatever the class."""
    scores = torch.zeros(3, 80)
    scores[:, label] = torch.tensor([0.9, 0.8, 0.7])
    rows = torch.tensor([(10.0, 10, 10, 10), (14.2, 10, 10, 10), (5000, 10, 10, 10)])
    prediction = torch.cat((rows, scores), 1).T[None]
    assert len(non_max_suppression(prediction, iou_thres=0.4084)[0]) == 2
    assert len(non_max_suppression(prediction, iou_thres=0.4085)[0]) == 3


def test_classes_do_not_meet_in_huge_pictures() -> None:
    rows = [(9000, 50, 40, 40, 0.9, 0), (9000 - 7680, 50, 40, 40, 0, 0.8)]
    assert len(non_max_suppression(as_prediction(rows))[0]) == 2


def test_result_has_model_output_unwrapped_and_is_float32() -> None:
    lead, other = random_prediction(0), random_prediction(1)
    expected = non_max_suppression(lead)[0]
    maps = [torch.zeros(1, 67, 8, 8)]
    for output in (lead, (lead, maps), ([other, lead], [maps, maps]), [other, lead], (lead,)):
        torch.testing.assert_close(non_max_suppression(output)[0], expected, rtol=0, atol=0)
    half = non_max_suppression(lead.half())[0]
    assert half.dtype == torch.float32


def test_further_values_and_given_labels_travel_along() -> None:
    further = torch.arange(8.0).repeat(2, 1)[None]
    (found,) = non_max_suppression(torch.cat((as_prediction(ROWS), further), 1), nm=2)
    assert found.shape[1] == 8
    assert found[:, 6].tolist() == [0, 2, 3, 4, 5]
    label = torch.tensor([[2.0, 400.0, 400.0, 20.0, 10.0]])
    (found,) = non_max_suppression(as_prediction(ROWS), labels=[label])
    np.testing.assert_allclose(found[0], (390, 395, 410, 405, 1, 2))
    assert len(found) == 6


@pytest.mark.parametrize("count", [0, 1, 50])
def test_nothing_above_the_threshold(count: int) -> None:
    prediction = torch.zeros(2, 7, count)
    found = non_max_suppression(prediction, multi_label=True)
    assert [tuple(image.shape) for image in found] == [(0, 6), (0, 6)]


def test_non_finite_rows_are_left_out() -> None:
    prediction = random_prediction(0)
    expected = non_max_suppression(prediction[:, :, 2:])[0]
    prediction[0, 0, 0] = float("inf")
    prediction[0, 5, 1] = float("nan")
    torch.testing.assert_close(non_max_suppression(prediction)[0], expected)


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"conf_thres is 25.*0 to 1"):
        non_max_suppression(random_prediction(0), conf_thres=25)
    with pytest.raises(ValueError, match="iou_thres"):
        non_max_suppression(random_prediction(0), iou_thres=-1)
    with pytest.raises(ValueError, match="4 \\+ classes"):
        non_max_suppression(torch.zeros(1, 4, 10))


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("host_rows", [0, 1 << 30])
def test_card_and_processor_agree(monkeypatch: pytest.MonkeyPatch, host_rows: int, half: bool) -> None:
    monkeypatch.setattr(nms, "HOST_ROWS", host_rows)
    prediction = crowd(0, 4, 3000, 5, 4.0)
    prediction = prediction.half() if half else prediction
    options = {"conf_thres": 0.001, "iou_thres": 0.7, "multi_label": True}
    expected = non_max_suppression(prediction, **options)
    found = non_max_suppression(prediction.cuda(), **options)
    assert all(mine.is_cuda for mine in found)
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))


def test_rounds_on_a_device_are_as_large_as_the_number_of_pictures_allows() -> None:
    blocks = [nms._device_block(pictures) for pictures in (0, 1, 4, 5, 16, 17, 64, 65, 512, 1 << 20)]
    assert blocks == [2048, 2048, 2048, 1024, 1024, 512, 512, 256, 128, 128]


def test_a_rehearsal_suppresses_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes are chosen and thrown out, in both ways in which they may be chosen."""
    found = []
    suppress = nms._suppress

    def noted(*arguments: object) -> tuple[Tensor, list[int]]:
        found.append(suppress(*arguments))
        return found[-1]

    monkeypatch.setattr(nms, "_suppress", noted)
    nms.rehearse_suppression(torch.device("cpu"))
    assert [kept for _, kept in found] == [[1], [2]]  # one box, then the same box as two classes
