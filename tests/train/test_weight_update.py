"""The optimizer step that is called off on the device, against the plain one that asks first."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from utils.train.ema import ModelEMA
from utils.train.optim import load_optimizer_state, smart_optimizer
from utils.train.weight_update import SkippedSteps, WeightUpdate, join_statistics

OPTIMIZERS = ("SGD", "Adam", "AdamW", "LION")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 1))


def make_update(name: str, *, is_deferred: bool, clip_limit: float = 10.0) -> WeightUpdate:
    """The update of a small model on the CPU, decided by the device's flag or by asking."""
    model = make_model()
    optimizer = smart_optimizer(model, name, 0.01, 0.9, 5e-4)
    if is_deferred and name != "LION":
        groups = [{**group, "fused": True} for group in optimizer.param_groups]
        optimizer = type(optimizer)(groups, lr=0.01, fused=True)
        if name == "SGD":
            for group in optimizer.param_groups:
                group["momentum"] = 0.9
                for weight in group["params"]:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    update = WeightUpdate(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), ModelEMA(model), clip_limit)
    update.is_deferred = is_deferred
    return update


def fill_gradients(update: WeightUpdate, seed: int, *, bad: float | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in update.trainable:
        weight.grad = torch.randn(weight.shape, generator=generator)
    if bad is not None:
        update.trainable[0].grad.view(-1)[0] = bad


def snapshot(update: WeightUpdate) -> list[Tensor]:
    states = [
        value.clone()
        for weight in update.trainable
        for name, value in sorted(update.optimizer.state[weight].items())
        if name != "step"
    ]
    tensors = [*update.model.state_dict().values(), *update.ema.ema.state_dict().values()]
    return [tensor.clone() for tensor in tensors] + states


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_deferred_steps_equal_plain_ones_with_bad_gradients_between(name: str) -> None:
    plain, deferred = (make_update(name, is_deferred=is_deferred) for is_deferred in (False, True))
    for update in (plain, deferred):
        for step, bad in enumerate((float("inf"), None, None, float("nan"), None)):
            fill_gradients(update, step, bad=bad)
            update()
    assert plain.ema.updates == deferred.ema.updates == 3
    for a, b in zip(plain.model.state_dict().values(), deferred.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    for a, b in zip(plain.ema.ema.state_dict().values(), deferred.ema.ema.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_step_from_bad_gradients_changes_nothing(name: str, is_deferred: bool, bad: float) -> None:
    update = make_update(name, is_deferred=is_deferred)
    fill_gradients(update, 0)
    update()  # so that every state exists
    before = snapshot(update)
    fill_gradients(update, 1, bad=bad)
    norm = update()
    assert not torch.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(update), strict=True))
    assert update.ema.updates == 1


@pytest.mark.parametrize("is_deferred", [False, True])
def test_statistics_spoilt_by_an_infinite_activation_come_back_from_the_average(is_deferred: bool) -> None:
    update = make_update("SGD", is_deferred=is_deferred)
    norm = update.model[1]
    update.ema.ema[1].running_mean.fill_(0.25)
    norm.running_mean[2] = float("nan")
    norm.running_var[1] = float("inf")
    kept = norm.running_mean[0].item()
    fill_gradients(update, 0, bad=float("nan"))
    update()
    assert torch.isfinite(norm.running_mean).all()
    assert torch.isfinite(norm.running_var).all()
    assert norm.running_mean[2] == 0.25
    assert norm.running_mean[0] == kept
    assert all(torch.isfinite(value).all() for value in update.ema.ema.state_dict().values())


def test_joined_statistics_stay_buffers_of_the_model() -> None:
    model = make_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    joined = join_statistics(model)
    assert joined.numel() == 8
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(torch.randn(2, 3, 8, 8))
    assert torch.equal(joined, torch.cat((model[1].running_mean, model[1].running_var)))
    assert not torch.equal(joined[:4], before["1.running_mean"])
    copied = deepcopy(model)
    copied(torch.randn(2, 3, 8, 8))
    assert torch.equal(joined[:4], model[1].running_mean)


def test_gradients_are_clipped_to_the_limit_and_the_norm_is_the_one_before() -> None:
    update = make_update("SGD", is_deferred=False, clip_limit=1.0)
    fill_gradients(update, 0)
    expected = torch.cat([weight.grad.flatten() for weight in update.trainable]).norm()
    before = [weight.detach().clone() for weight in update.trainable]
    norm = update()
    torch.testing.assert_close(norm, expected)
    assert norm > 1
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, update.trainable, strict=True)]).norm()
    assert moved < 0.01 * 1.91  # Nesterov adds nine tenths of the clipped gradient; decay adds a little


def test_a_state_from_another_kind_of_device_keeps_the_way_of_computing() -> None:
    model = make_model()
    source = smart_optimizer(model, "SGD", 0.01, 0.9, 5e-4)
    fused = torch.optim.SGD([{"params": group["params"]} for group in source.param_groups], lr=1.0, fused=True)
    state = deepcopy(source.state_dict())
    load_optimizer_state(fused, state)
    assert [group["fused"] for group in fused.param_groups] == [True] * 3
    assert [group["lr"] for group in fused.param_groups] == [0.01] * 3


def test_counters_of_steps_go_where_a_fused_optimizer_needs_them() -> None:
    """From a file of a run on the CPU: torch moves them only for groups that are fused already."""
    source = make_update("AdamW", is_deferred=False)
    fill_gradients(source, 0)
    source()
    target = make_model().to("meta")
    fused = torch.optim.AdamW([{"params": [weight]} for weight in target.parameters()], lr=1.0)
    for group in fused.param_groups:
        group["fused"] = True
    state = source.optimizer.state_dict()
    flat = {
        **state,
        "param_groups": [{**state["param_groups"][0], "params": [i]} for i in range(len(fused.param_groups))],
    }
    load_optimizer_state(fused, flat)
    steps = {values["step"].device.type for values in fused.state.values()}
    assert steps == {"meta"}


class TestSkippedSteps:
    def test_names_the_pictures_once_and_counts_the_rest(self, caplog: pytest.LogCaptureFixture) -> None:
        skipped = SkippedSteps()
        for value in (1.0, float("nan"), float("inf"), 2.0):
            skipped.add(torch.tensor(value), [("folder/a.jpg", "folder/b.jpg"), ("c.jpg",)])
        with caplog.at_level("INFO", logger="yolov9"):
            skipped.read(remark="; usual")
        assert len(caplog.records) == 1
        assert "a.jpg, b.jpg, c.jpg" in caplog.text
        assert "; usual" in caplog.text
        assert skipped.in_a_row == 0
        assert skipped.warnings.counts["optimizer steps skipped"] == 2

    def test_stops_after_too_many_in_a_row_across_readings(self) -> None:
        skipped = SkippedSteps(limit=4)
        for _ in range(3):
            skipped.add(torch.tensor(float("nan")), [("a.jpg",)])
            skipped.read()
        skipped.add(torch.tensor(float("nan")), [("last.jpg",)])
        with pytest.raises(FloatingPointError, match=r"4 optimizer steps in a row.*last\.jpg.*Kept.*--no-amp"):
            skipped.read(kept="Kept")

    def test_one_good_step_starts_the_count_anew(self) -> None:
        skipped = SkippedSteps(limit=3)
        for value in (float("nan"), float("nan"), 1.0, float("nan"), float("nan")):
            skipped.add(torch.tensor(value), [("a.jpg",)])
        skipped.read()
        assert skipped.in_a_row == 2
