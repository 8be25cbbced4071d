"""Exponential moving average: closed form, recorded track, what is and is not averaged."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from utils.train.ema import ModelEMA, ema_decay


class Numbers(nn.Module):
    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(values))
        self.register_buffer("running", torch.tensor([2.0]))
        self.register_buffer("counter", torch.tensor(0))


@pytest.mark.parametrize(
    ("updates", "expected"), [(1, 0.0005), (100, 0.0488), (1000, 0.3934), (2000, 0.6321), (10000, 0.9932)]
)
def test_decay_rises_towards_its_limit(updates: int, expected: float) -> None:
    assert ema_decay(updates) == pytest.approx(expected, abs=5e-5)


def test_average_follows_the_definition_for_parameters_and_statistics() -> None:
    model = Numbers([1.0, -3.0])
    ema = ModelEMA(model, updates=5000)
    expected_value, expected_running = model.value.detach().double(), model.running.double()
    for update in range(5001, 5011):
        with torch.no_grad():
            model.value += 0.25
            model.running -= 0.5
            model.counter += 1
        ema.update(model)
        decay = ema_decay(update)
        expected_value = decay * expected_value + (1 - decay) * model.value.detach().double()
        expected_running = decay * expected_running + (1 - decay) * model.running.double()
    assert torch.allclose(ema.ema.value.double(), expected_value, atol=1e-6)
    assert torch.allclose(ema.ema.running.double(), expected_running, atol=1e-6)
    assert int(ema.ema.counter) == 0
    assert ema.updates == 5010
    assert not ema.ema.value.requires_grad
    assert not ema.ema.training


def test_model_itself_is_not_touched() -> None:
    model = Numbers([1.0])
    ModelEMA(model).update(model)
    assert model.value.tolist() == [1.0]
    assert model.training
    assert model.value.requires_grad


def test_attributes_are_copied_by_name() -> None:
    model = Numbers([1.0])
    ema = ModelEMA(model)
    model.names, model.hyp, model._private = {0: "bolt"}, {"lr0": 0.1}, 3
    ema.update_attr(model, exclude=("hyp",))
    assert ema.ema.names == {0: "bolt"}
    assert not hasattr(ema.ema, "hyp")
    assert not hasattr(ema.ema, "_private")


def test_track_matches_the_recorded_one(golden) -> None:
    record = json.loads(golden("models/schedules.json").read_text())
    for updates, decay in record["ema_decay"].items():
        assert ema_decay(int(updates)) == pytest.approx(decay, abs=1e-12)
    track = record["ema_track"]
    model = Numbers(track["start"])
    ema = ModelEMA(model)
    for expected in track["ema"]:
        with torch.no_grad():
            model.value += track["add_per_update"]
        ema.update(model)
        assert ema.ema.value.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
