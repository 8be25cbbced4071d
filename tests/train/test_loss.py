"""The loss against reference numbers, and what a training step relies on: precision, no host reads, bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from utils import loss_tal, loss_tal_dual
from utils.tal import assigner as old_assigner
from utils.train import assigner
from utils.train.assigner import Assignment
from utils.train.loss import ComputeLoss, DetectionLoss

STRIDES = (8, 16, 32)
HYP = {"box": 7.5, "cls": 0.5, "dfl": 1.5, "cls_pw": 1.0, "fl_gamma": 0.0, "label_smoothing": 0.0}
TARGETS = [
    (0, 0, 0.30, 0.40, 0.30, 0.50),
    (0, 2, 0.55, 0.45, 0.60, 0.40),
    (0, 1, 0.80, 0.80, 0.10, 0.12),
    (1, 1, 0.50, 0.50, 0.90, 0.90),
    (1, 0, 0.25, 0.75, 0.20, 0.20),
]
Heads = list[list[Tensor]]


def wave_heads(classes: int = 3, batch: int = 2, size: int = 64, dtype: torch.dtype = torch.float32) -> Heads:
    """Maps of two heads from a sine of the flat index, which anybody can recompute."""
    heads = []
    for head in (1, 2):
        maps = []
        for level, stride in enumerate(STRIDES):
            shape = (batch, 64 + classes, size // stride, size // stride)
            values = 1.5 * np.sin(0.37 * np.arange(np.prod(shape)) + 0.9 * level + 1.7 * head)
            maps.append(torch.from_numpy(values.reshape(shape)).to(dtype).requires_grad_())
        heads.append(maps)
    return heads


def make_loss(classes: int = 3, **options: Any) -> DetectionLoss:
    return DetectionLoss(strides=STRIDES, num_classes=classes, **options)


def make_model(hyp: dict, classes: int, strides: list[int], reg_max: int = 16) -> SimpleNamespace:
    head = SimpleNamespace(nc=classes, reg_max=reg_max, stride=torch.tensor(strides).float(), nl=len(strides))
    return SimpleNamespace(hyp={**HYP, **hyp}, model=[head])


def some_targets(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(TARGETS, dtype=dtype)


def record_assignment(monkeypatch: pytest.MonkeyPatch, loss: DetectionLoss) -> list[Assignment]:
    """Return a list that every later assignment of this loss is added to."""
    seen: list[Assignment] = []
    assign = loss.assigner.assign
    monkeypatch.setattr(
        loss.assigner, "assign", lambda *call, **options: seen.append(assign(*call, **options)) or seen[-1]
    )
    return seen


def absolute_gradients(heads: Heads) -> list[float]:
    return [sum(float(level.grad.double().abs().sum()) for level in maps) for maps in heads]


# ------------------------------------------------------------------------------------------------ reference numbers

KNOWN = [
    ({}, 227.557465, (7.628777, 100.139763, 6.010191), (26.627415, 102.274539)),
    ({"fl_gamma": 1.5}, 108.032135, (7.628777, 40.377098, 6.010191), (17.679488, 68.728971)),
    ({"cls_pw": 2.0}, 228.065659, (7.628777, 100.393860, 6.010191), (26.562152, 101.953479)),
]


@pytest.mark.parametrize(("options", "total", "items", "gradients"), KNOWN)
def test_known_values(options: dict, total: float, items: tuple, gradients: tuple) -> None:
    heads = wave_heads()
    result, parts = make_loss(**options)(heads, some_targets())
    result.backward()
    assert result.shape == ()
    assert not parts.requires_grad
    assert result.item() == pytest.approx(total, rel=1e-5)
    assert parts.tolist() == pytest.approx(items, rel=1e-5)
    assert absolute_gradients(heads) == pytest.approx(gradients, rel=1e-4)


@pytest.mark.parametrize(
    ("head", "total", "items"),
    [(1, 180.817657, (6.111369, 79.533516, 4.763946)), (0, 186.959183, (6.069630, 82.424980, 4.984978))],
)
def test_known_values_of_one_head(head: int, total: float, items: tuple) -> None:
    result, parts = make_loss()(wave_heads()[head], some_targets())
    assert result.item() == pytest.approx(total, rel=1e-5)
    assert parts.tolist() == pytest.approx(items, rel=1e-5)


def test_no_targets() -> None:
    heads = wave_heads()
    total, items = make_loss()(heads, torch.zeros(0, 6))
    total.backward()
    assert total.item() == pytest.approx(524.629700, rel=1e-5)
    assert items.tolist() == pytest.approx((0, 262.314850, 0), rel=1e-5)
    assert absolute_gradients(heads) == pytest.approx((62.928498, 254.151730), rel=1e-4)


@pytest.mark.parametrize(
    ("head", "first", "second", "score_sum"),
    [
        (0, "10 11 17 18 19 20 21 25 26 27 28 33 34 35 36 37 38 54", "25 26 27 28 29 41 42 43 44 45 49 50", 2.498947),
        (1, "9 10 18 19 20 21 25 26 27 28 29 33 34 35 36 37 54", "18 19 20 21 34 35 36 37 38 41 42 49 50", 2.633060),
    ],
)
def test_known_assignment(
    monkeypatch: pytest.MonkeyPatch, head: int, first: str, second: str, score_sum: float
) -> None:
    loss = make_loss()
    seen = record_assignment(monkeypatch, loss)
    loss(wave_heads()[head], some_targets())
    for image, expected in zip(seen[0].foreground, (first, second), strict=True):
        assert image.nonzero().view(-1).tolist() == [int(anchor) for anchor in expected.split()]
    assert seen[0].score.sum().item() == pytest.approx(score_sum, rel=1e-5)


def read_heads(reference: Any, case: str, levels: int) -> dict[str, list[Tensor]]:
    names = ("aux", "lead")
    return {
        name: [torch.from_numpy(reference[f"{case}.{name}_{level}"]).requires_grad_() for level in range(levels)]
        for name in names
    }


def check_gradient(gradient: Tensor, reference: Any, name: str) -> None:
    values = gradient.double().numpy().reshape(-1)
    total, absolute, square = reference[f"{name}_sums"]
    np.testing.assert_allclose(np.abs(values).sum(), absolute, rtol=1e-4)
    np.testing.assert_allclose((values**2).sum(), square, rtol=2e-4)
    np.testing.assert_allclose(values.sum(), total, atol=1e-4 * absolute)
    if name in reference.files:
        expected, actual = reference[name].reshape(-1), values
    else:
        expected, actual = reference[f"{name}_value"], values[reference[f"{name}_index"]]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max(), err_msg=name)


@pytest.mark.slow
def test_matches_reference(golden: Callable[[str], Path]) -> None:
    with np.load(golden("ops/loss.npz")) as reference:
        for case, options in json.loads(str(reference["meta"])).items():
            targets = torch.from_numpy(reference[f"{case}.targets"])
            for number, run in enumerate(options["runs"]):
                if {"box", "label_smoothing"} & set(run["hyp"]):  # without effect in the reference, live here
                    continue
                heads = read_heads(reference, case, len(options["strides"]))
                if run["kind"] != "dual":
                    heads = {"": heads[run["kind"].removeprefix("single_")]}
                loss = ComputeLoss(make_model(run["hyp"], options["nc"], options["strides"], options["reg_max"]))
                total, items = loss(list(heads.values()) if len(heads) > 1 else heads[""], targets)
                total.backward()
                assert total.item() == pytest.approx(run["total"], rel=1e-5), (case, run["kind"])
                assert items.tolist() == pytest.approx(run["items"], rel=1e-5, abs=1e-7), (case, run["kind"])
                for name, maps in heads.items():
                    for level, level_map in enumerate(maps):
                        key = "_".join(part for part in (f"{case}.r{number}_grad", name, str(level)) if part)
                        check_gradient(level_map.grad, reference, key)


def recipe_targets(recipe: dict) -> Tensor:
    """Objects spread by irrational steps, computed in float64."""
    rows, shift = [], recipe["shift"]
    for image in range(recipe["batch"]):
        for i in range(recipe["objects_per_image"]):
            w = 0.03 + 0.5 * (((i + 1) * 0.7548776662 + shift * (image + 1)) % 1) ** 2
            h = 0.03 + 0.5 * (((i + 1) * 0.5698402910 + shift * (image + 2)) % 1) ** 2
            x = w / 2 + (1 - w) * (((i + 1) * 0.6180339887 + 0.31 * image + shift) % 1)
            y = h / 2 + (1 - h) * (((i + 1) * 0.4142135624 + 0.17 * image + shift) % 1)
            rows.append((image, (7 * i + 3 * image) % recipe["nc"], x, y, w, h))
    return torch.tensor(rows, dtype=torch.float64).float()


@pytest.mark.slow
def test_full_size_matches_reference(golden: Callable[[str], Path]) -> None:
    reference = json.loads(golden("ops/assign_scale.json").read_text())
    recipe = reference["recipe"]
    targets = recipe_targets(recipe)
    np.testing.assert_allclose(targets[:3], reference["targets_first_rows"], rtol=1e-6)
    for run in reference["runs"]:
        heads = wave_heads(recipe["nc"], recipe["batch"], recipe["height"])
        used = heads if run["kind"] == "dual" else [heads[("single_aux", "single_lead").index(run["kind"])]]
        total, items = make_loss(recipe["nc"])(used if len(used) > 1 else used[0], targets)
        total.backward()
        assert total.item() == pytest.approx(run["total"], rel=1e-5)
        assert items.tolist() == pytest.approx(run["items"], rel=1e-5)
        assert absolute_gradients(used) == pytest.approx(run["grad_abs_sum"], rel=1e-4)


# ---------------------------------------------------------------------------------------------- options and nesting


def test_gains_are_live() -> None:
    plain = make_loss()(wave_heads(), some_targets())[1]
    scaled = make_loss(gains=(1.0, 2.0, 3.0))(wave_heads(), some_targets())[1]
    torch.testing.assert_close(scaled, plain * torch.tensor([1 / 7.5, 2 / 0.5, 3 / 1.5]))
    model = make_model({"box": 1.0, "cls": 2.0, "dfl": 3.0}, 3, list(STRIDES))
    assert torch.equal(ComputeLoss(model)(wave_heads(), some_targets())[1], scaled)
    assert ComputeLoss(model, use_dfl=False)(wave_heads(), some_targets())[1][2] == 0


def test_heads_are_told_apart_by_nesting() -> None:
    aux, lead = wave_heads()
    loss = make_loss()
    dual, single = loss([aux, lead], some_targets())[0], loss(lead, some_targets())[0]
    decoded = torch.zeros(2, 7, 84)
    assert torch.equal(loss((decoded, [aux, lead]), some_targets())[0], dual)
    assert torch.equal(loss(([decoded, decoded], [aux, lead]), some_targets())[0], dual)
    assert torch.equal(loss((decoded, lead), some_targets())[0], single)
    assert torch.equal(loss([lead], some_targets())[0], single)
    torch.testing.assert_close(dual, single + 0.25 * loss(aux, some_targets())[0])
    torch.testing.assert_close(loss([lead, lead], some_targets())[0], 1.25 * single)


def test_maps_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(2, 67, 8, 8\).*4\*16\+5=69 channels"):
        make_loss(classes=5)(wave_heads(), some_targets())
    with pytest.raises(ValueError, match="3 levels"):
        make_loss()([maps[:2] for maps in wave_heads()], some_targets())
    with pytest.raises(ValueError, match="label_smoothing is 1.5"):
        make_loss(label_smoothing=1.5)


def test_old_import_paths_lead_here() -> None:
    assert loss_tal.ComputeLoss is loss_tal_dual.ComputeLoss is ComputeLoss
    assert old_assigner.TaskAlignedAssigner is assigner.TaskAlignedAssigner


def test_environment_replaces_the_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model({}, 3, list(STRIDES))
    for name, value in (("YOLOM", "4"), ("YOLOA", "1.0"), ("YOLOB", "2.0")):
        monkeypatch.setenv(name, value)
    loss = ComputeLoss(SimpleNamespace(module=model, model=None, hyp=None))
    assert (loss.assigner.topk, loss.assigner.alpha, loss.assigner.beta) == (4, 1.0, 2.0)
    assert loss.gains == (7.5, 0.5, 1.5)


# ----------------------------------------------------------------------------------------------------- smoothing


def test_smoothing_follows_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class term is computed again from the assignment, entry by entry."""
    share, maps = 0.2, wave_heads()[1]
    loss = make_loss(gains=(0.0, 1.0, 0.0))
    seen = record_assignment(monkeypatch, loss)
    _, items = loss(maps, some_targets(), label_smoothing=share)
    logits = torch.cat([level.flatten(2) for level in maps], 2).transpose(1, 2)[..., 64:].detach()
    target = torch.zeros_like(logits)
    for image, anchor in seen[0].foreground.nonzero().tolist():
        label = TARGETS[int(seen[0].object_row[image, anchor])][1]
        score = seen[0].score[image, anchor]
        target[image, anchor] = score * share / 2
        target[image, anchor, label] = score * (1 - share / 2)
    expected = functional.binary_cross_entropy_with_logits(logits, target, reduction="sum") / seen[0].score.sum()
    torch.testing.assert_close(items[1], expected)


def test_no_smoothing_is_bit_identical_and_argument_beats_default() -> None:
    plain = make_loss()(wave_heads(), some_targets())[0]
    assert torch.equal(make_loss(label_smoothing=0.1)(wave_heads(), some_targets(), label_smoothing=0.0)[0], plain)
    smooth = make_loss(label_smoothing=0.1)(wave_heads(), some_targets())
    assert torch.equal(make_loss()(wave_heads(), some_targets(), label_smoothing=0.1)[0], smooth[0])
    assert smooth[0] != plain
    no_objects = torch.zeros(0, 6)
    assert torch.equal(
        make_loss(label_smoothing=0.1)(wave_heads(), no_objects)[0], make_loss()(wave_heads(), no_objects)[0]
    )


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_smoothing_may_lie_on_the_device_unread(share: float) -> None:
    """A recorded step reads it from memory, so that one recording serves every epoch."""
    expected = make_loss()(wave_heads(), some_targets(), label_smoothing=share)[0]
    with NoHostReads():
        total = make_loss()(wave_heads(), some_targets(), label_smoothing=torch.tensor(share))[0]
    assert torch.equal(total, expected)
    with pytest.raises(ValueError, match=r"label_smoothing has shape \(1,\)"):
        make_loss()(wave_heads(), some_targets(), label_smoothing=torch.tensor([share]))


# ------------------------------------------------------------------------------------------------------ precision


def test_half_maps_and_autocast_give_float32() -> None:
    half = wave_heads(dtype=torch.float16)
    rounded = [[level.detach().float().requires_grad_() for level in maps] for maps in half]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, items = make_loss()(half, some_targets())
    expected, _ = make_loss()(rounded, some_targets())
    assert total.dtype == items.dtype == torch.float32
    assert torch.equal(total, expected)
    total.backward()
    expected.backward()
    for one, other in zip(half[1], rounded[1], strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=2e-3, atol=1e-4)


def test_float64_is_kept_and_the_gradient_is_the_slope() -> None:
    heads = wave_heads(dtype=torch.float64)
    total, _ = make_loss()(heads, some_targets(torch.float64))
    total.backward()
    assert total.dtype == torch.float64
    level, step = heads[1][0], 1e-6
    generator = torch.Generator().manual_seed(0)
    direction = torch.zeros_like(level)
    direction[:, 64:] = torch.randn(level[:, 64:].shape, generator=generator, dtype=torch.float64)
    # Scores of the assignment take no gradient, so the slope is compared where they do not move: without objects.
    empty = torch.zeros(0, 6)
    for maps in heads:
        for other in maps:
            other.grad = None
    make_loss()(heads, empty)[0].backward()
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            moved = [heads[0], [level + sign * step * direction, *heads[1][1:]]]
            values.append(make_loss()(moved, empty)[0])
    slope = (values[0] - values[1]) / (2 * step)
    torch.testing.assert_close(slope, (level.grad * direction).sum(), rtol=1e-6, atol=1e-6)


def test_gradients_stay_finite_in_bad_corners() -> None:
    """Saturated logits, boxes without extent, boxes outside, a focal exponent below one."""
    for options in ({}, {"fl_gamma": 0.5}, {"cls_pw": 3.0}):
        heads = [[(level.detach() * 60).requires_grad_() for level in maps] for maps in wave_heads()]
        rows = [(0, 0, 0.5, 0.5, 0, 0), (0, 1, 1.4, 0.5, 0.2, 0.2), (1, 2, 0.5, 0.5, 3, 3), (1, 2, 0, 0, 0, 0)]
        total, _ = make_loss(**options)(heads, torch.tensor(rows))
        total.backward()
        assert total.isfinite()
        assert all(level.grad.isfinite().all() for maps in heads for level in maps)


# --------------------------------------------------------------------------------------------- batches and devices


def test_batch_equals_sum_of_single_images_up_to_the_normaliser() -> None:
    """An image without objects in the middle changes the class term alone."""
    heads, targets = wave_heads(batch=3), some_targets()
    targets[:, 0] *= 2  # images 0 and 2
    total, items = make_loss()(heads, targets)
    without = [[level[[0, 2]] for level in maps] for maps in heads]
    targets[:, 0] /= 2
    _, expected = make_loss()(without, targets)
    torch.testing.assert_close(items[[0, 2]], expected[[0, 2]])
    assert items[1] > expected[1]
    torch.testing.assert_close(total, items.sum() * 3)


def test_order_of_targets_and_memory_format_do_not_matter() -> None:
    total, items = make_loss()(wave_heads(), some_targets())
    shuffled = some_targets()[[3, 1, 4, 0, 2]]
    torch.testing.assert_close(make_loss()(wave_heads(), shuffled)[1], items)
    last = [[level.contiguous(memory_format=torch.channels_last) for level in maps] for maps in wave_heads()]
    torch.testing.assert_close(make_loss()(last, some_targets())[0], total)


class NoHostReads(TorchDispatchMode):
    """Refuse operations whose result the host has to wait for on a GPU."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "item", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name.removesuffix("_numpy").rstrip("2") in self.FORBIDDEN:
            raise AssertionError(f"the host reads from the device: {func}")
        if name in ("index", "index_put", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype is not torch.bool for index in indices), "index by a mask has to be counted first"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"fl_gamma": 1.5, "cls_pw": 2.0, "label_smoothing": 0.1}])
@pytest.mark.parametrize("rows", [5, 0])
def test_the_step_reads_nothing_back(options: dict, rows: int) -> None:
    heads, targets, loss = wave_heads(), some_targets()[:rows], make_loss(**options)
    with NoHostReads():
        total, _ = loss(heads, targets)
        total.backward()
    assert heads[0][0].grad is not None


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x[x > 0], lambda x: bool(x > 0), lambda x: x.nonzero()])
def test_the_guard_notices_reads(read: Callable[[Tensor], Any]) -> None:
    with NoHostReads(), pytest.raises(AssertionError):
        read(torch.ones(1))


@pytest.mark.gpu
def test_the_step_does_not_wait_for_the_gpu() -> None:
    expected, _ = make_loss()(wave_heads(), some_targets())
    heads = [[level.detach().cuda().requires_grad_() for level in maps] for maps in wave_heads()]
    for device in ("cpu", "cuda"):
        targets, loss = some_targets().to(device), make_loss(fl_gamma=0.0, label_smoothing=0.0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            total, _ = loss(heads, targets)
            total.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(total.cpu(), expected, rtol=1e-5, atol=0)


class LargestTensor(TorchDispatchMode):
    """Remember the number of elements of the largest result of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                storage = item.untyped_storage()  # an expanded view takes no memory of its own
                self.elements = max(self.elements, storage.nbytes() // item.element_size())
        return result


def test_memory_does_not_grow_with_crowded_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assigner, "PAIRS_PER_CHUNK", 84 * 20)
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand((400, 6), generator=generator)
    rows[:, 0], rows[:, 1] = 0, (rows[:, 1] * 3).floor()
    with LargestTensor() as seen:
        make_loss()(wave_heads(batch=1), rows)
    slots = 400 * 10 * 64  # what the candidates of all objects take
    assert seen.elements <= slots < 400 * 84 * 10
    assert seen.elements >= 84 * 20
