"""The optimizer step that is called off on the device, against the plain one that asks first."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.train.ema import ModelEMA
from utils.train.optim import load_optimizer_state, smart_optimizer
from utils.train.weight_update import SkippedSteps, WeightUpdate, join_statistics

OPTIMIZERS = ("SGD", "Adam", "AdamW", "LION")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 1))


def make_update(
    name: str,
    *,
    is_deferred: bool,
    clip_limit: float = 10.0,
    is_joined: bool = False,
    has_scale: bool = False,
    frozen: tuple[str, ...] = (),
) -> WeightUpdate:
    """The update of a small model on the CPU, decided by the device's flag or by asking.

    With ``has_scale`` the loss is scaled by 8, and by half or twice as much after one bad or two good steps.
    """
    model = make_model()
    for key, weight in model.named_parameters():
        weight.requires_grad_(not key.startswith(frozen or ("none",)))
    optimizer = smart_optimizer(model, name, 0.01, 0.9, 5e-4)
    if is_deferred and name != "LION":
        groups = [{**group, "fused": True} for group in optimizer.param_groups]
        optimizer = type(optimizer)(groups, lr=0.01, fused=True)
        if name == "SGD":
            for group in optimizer.param_groups:
                group["momentum"] = 0.9
                for weight in group["params"]:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=has_scale)
    scaler.scale(torch.zeros(()))  # it makes its state at the first loss
    update = WeightUpdate(model, optimizer, scaler, ModelEMA(model), clip_limit, is_joined=is_joined)
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


BAD_STEPS = (None, float("inf"), None, None, float("nan"), None)


def add_gradients(update: WeightUpdate, seed: int, *, bad: float | None = None) -> None:
    """As backward does it: into the gradients that are there, else as new ones, laid out like the weights."""
    generator = torch.Generator().manual_seed(seed)
    for index, weight in enumerate(update.trainable):
        fresh = torch.randn(weight.shape, generator=generator) * 8
        if bad is not None and index == 0:
            fresh.view(-1)[0] = bad
        weight.grad = fresh if weight.grad is None else weight.grad.add_(fresh)
    update.model[1].running_mean.add_(0.125)


class TestJoined:
    """Gradients and averages worked on as single tensors, against one tensor per weight."""

    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("has_scale", [False, True])
    @pytest.mark.parametrize("frozen", [(), ("0.", "1.")])
    def test_gives_the_same_bits(self, name: str, has_scale: bool, frozen: tuple[str, ...]) -> None:
        plain, joined = (
            make_update(name, is_deferred=True, is_joined=kind, has_scale=has_scale, frozen=frozen, clip_limit=1e9)
            for kind in (False, True)
        )
        for step, bad in enumerate(BAD_STEPS):
            for update in (plain, joined):
                add_gradients(update, step, bad=bad)
            torch.testing.assert_close(plain(), joined(), equal_nan=True)
            assert plain.scaler.get_scale() == joined.scaler.get_scale()
        assert joined.gradients is not None
        assert joined.gradients.are_in_place()
        assert plain.ema.updates == joined.ema.updates == 4
        assert all(torch.equal(a, b) for a, b in zip(snapshot(plain), snapshot(joined), strict=True))

    def test_clips_as_before(self) -> None:
        plain, joined = (make_update("SGD", is_deferred=True, is_joined=kind, clip_limit=0.5) for kind in (False, True))
        for step, bad in enumerate(BAD_STEPS):
            for update in (plain, joined):
                add_gradients(update, step, bad=bad)
                update()
        for a, b in zip(snapshot(plain), snapshot(joined), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)

    def test_gradients_are_cleared_where_they_are_whatever_they_were(self) -> None:
        update = make_update("SGD", is_deferred=True, is_joined=True)
        addresses = [weight.grad.data_ptr() for weight in update.trainable]
        for step, bad in enumerate(BAD_STEPS):
            add_gradients(update, step, bad=bad)
            update()
            assert not update.gradients.flat.any()
        assert [weight.grad.data_ptr() for weight in update.trainable] == addresses
        assert all(address % 64 == addresses[0] % 64 for address in addresses)

    def test_parts_have_the_layout_of_the_weights(self) -> None:
        model = make_model().to(memory_format=torch.channels_last)
        optimizer = smart_optimizer(model, "LION", 1e-4, 0.9, 0.0)
        ema = ModelEMA(model)
        update = WeightUpdate(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), ema, 10.0, is_joined=True)
        averages = ema.ema.parameters()
        for weight, average in zip(model.parameters(), averages, strict=True):
            assert weight.stride() == weight.grad.stride() == average.stride()
            assert torch.equal(weight, average)
        assert update.gradients.are_in_place()

    def test_new_gradients_are_used_all_the_same(self) -> None:
        """As any that somebody has put there: they are slower then, not lost."""
        plain, joined = (make_update("SGD", is_deferred=True, is_joined=kind) for kind in (False, True))
        for step in range(3):
            for update in (plain, joined):
                fill_gradients(update, step)
                update()
        assert all(torch.equal(a, b) for a, b in zip(snapshot(plain), snapshot(joined), strict=True))

    @pytest.mark.parametrize("exchange", ["move", "assign", "other model"])
    def test_exchanged_tensors_are_averaged_all_the_same(self, exchange: str) -> None:
        update = make_update("SGD", is_deferred=True, is_joined=True)
        model, average = update.model, update.ema.ema
        if exchange == "move":
            average.to("meta").to_empty(device="cpu").load_state_dict(make_model().state_dict())
        elif exchange == "assign":
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
        else:
            model = make_model()
            model[0].weight.data += 1
        expected = {name: value.clone() for name, value in average.state_dict().items()}
        update.ema.update(model)
        share = 1 - update.ema.decay(1)
        for name, value in average.state_dict().items():
            if value.is_floating_point():
                new = expected[name] * (1 - share) + model.state_dict()[name] * share
                torch.testing.assert_close(value, new)

    def test_a_state_that_is_loaded_goes_on_alike(self) -> None:
        whole, resumed = (make_update("AdamW", is_deferred=True, is_joined=True, has_scale=True) for _ in range(2))
        for step in range(2):
            add_gradients(whole, step)
            whole()
        buffer = io.BytesIO()
        torch.save([part.state_dict() for part in (whole.model, whole.ema.ema, whole.optimizer, whole.scaler)], buffer)
        states = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        resumed.model.load_state_dict(states[0])
        resumed.ema.ema.load_state_dict(states[1])
        load_optimizer_state(resumed.optimizer, states[2])
        resumed.scaler.load_state_dict(states[3])
        resumed.ema.updates = whole.ema.updates
        for update in (whole, resumed):
            add_gradients(update, 9)
            update()
        assert all(torch.equal(a, b) for a, b in zip(snapshot(whole), snapshot(resumed), strict=True))
        assert whole.scaler.get_scale() == resumed.scaler.get_scale() == 16.0

    def test_a_copied_average_stays_as_it_is(self) -> None:
        update = make_update("SGD", is_deferred=True, is_joined=True)
        copied = deepcopy(update.ema.ema)
        before = [weight.clone() for weight in copied.parameters()]
        add_gradients(update, 0)
        update()
        assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), before, strict=True))
        assert not torch.equal(update.ema.ema[0].weight, before[0])

    def test_models_with_other_types_are_left_alone(self) -> None:
        model = make_model()
        model[3].double()
        ema = ModelEMA(model)
        optimizer = smart_optimizer(model, "LION", 1e-4, 0.9, 0.0)
        update = WeightUpdate(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), ema, 10.0, is_joined=True)
        assert update.gradients is None
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        update()
        assert ema.updates == 1

    def test_few_tensors_are_handed_over_for_each_weight(self) -> None:
        """What the processor hands over one by one is what keeps a fast device waiting."""

        def count(depth: int) -> int:
            model = nn.Sequential(*(make_model() for _ in range(depth)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.zeros(()))
            update = WeightUpdate(model, optimizer, scaler, ModelEMA(model), 10.0, is_joined=True)
            for _ in range(2):  # the first step makes the momentum
                for weight in update.trainable:
                    weight.grad = torch.ones_like(weight) if weight.grad is None else weight.grad.fill_(1)
                with CountedTensors() as handed:
                    update()
            return handed.number

        weights = len(list(make_model().parameters()))
        assert count(9) - count(2) <= 7 * weights * (3 + 2)  # the fused step's lists and those of one copy


class CountedTensors(TorchDispatchMode):
    """Counts the tensors that operations inside take and return."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.number += sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs, result)))
        return result


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
