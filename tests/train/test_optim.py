"""Optimizers: LION against its formula element by element, and what all four share."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import Tensor, nn

from models.graph import DetectionModel
from tests.reference.tiny import TINY_DUAL
from utils.log import LOGGER
from utils.train.optim import Lion, apply_plan, smart_optimizer
from utils.train.schedule import StepPlan

NAMES = ("SGD", "Adam", "AdamW", "LION")


def lion_by_hand(weights: list[float], gradients: list[list[float]], lr: float, b1: float, b2: float, decay: float):
    """Plain Python: one weight after the other, one step after the other."""
    weights, averages = list(weights), [0.0] * len(weights)
    for gradient in gradients:
        for index, slope in enumerate(gradient):
            mixed = b1 * averages[index] + (1 - b1) * slope
            direction = 0.0 if mixed == 0 else math.copysign(1.0, mixed)
            weights[index] = weights[index] * (1 - lr * decay) - lr * direction
            averages[index] = b2 * averages[index] + (1 - b2) * slope
    return weights, averages


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_lion_follows_its_formula(decay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(12, generator=generator, dtype=torch.float64)
    slopes = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    slopes[:, 3] = 0  # never a gradient: only the decay moves it
    parts = [nn.Parameter(start[:5].clone()), nn.Parameter(start[5:].clone().view(1, 7))]
    optimizer = Lion(parts, lr=0.01, betas=(0.937, 0.99), weight_decay=decay)
    for slope in slopes:
        parts[0].grad, parts[1].grad = slope[:5].clone(), slope[5:].clone().view(1, 7)
        optimizer.step()
    weights, averages = lion_by_hand(start.tolist(), slopes.tolist(), 0.01, 0.937, 0.99, decay)
    assert torch.cat([part.detach().flatten() for part in parts]).tolist() == pytest.approx(weights, rel=1e-12)
    found = torch.cat([optimizer.state[part]["average"].flatten() for part in parts])
    assert found.tolist() == pytest.approx(averages, rel=1e-12)


def test_lion_finds_a_minimum_and_leaves_what_has_no_gradient() -> None:
    target = torch.tensor([1.0, -2.0, 0.5])
    weight, idle = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(2))
    optimizer = Lion([weight, idle], lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight - target).square().sum()
        loss.backward()
        return loss

    for step in range(400):  # steps of one size circle around the minimum, so they have to shrink
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 400)
        loss = optimizer.step(closure)
    assert loss is not None and float(loss.detach()) < 1e-2
    assert torch.equal(idle, torch.ones(2)) and idle not in optimizer.state


@pytest.mark.parametrize(
    "values", [{"lr": -1.0}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}]
)
def test_lion_refuses_impossible_values(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Lion"):
        Lion([nn.Parameter(torch.zeros(1))], **values)


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_every_optimizer(name: str) -> None:
    model = DetectionModel(copy.deepcopy(TINY_DUAL))
    optimizer = smart_optimizer(model, name, lr=1e-4, momentum=0.9, decay=0.01)
    biases, weights, norms = optimizer.param_groups
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == sum(1 for _ in model.parameters())
    assert len(norms["params"]) == sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert len(biases["params"]) > 0 and len(weights["params"]) > 0
    if name == "LION":
        assert all(group["betas"] == (0.9, 0.99) for group in optimizer.param_groups)


@pytest.mark.parametrize("name", NAMES)
def test_continued_optimizer_equals_an_uninterrupted_one(name: str) -> None:
    torch.manual_seed(0)
    straight = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    images = torch.randn(2, 3, 8, 8)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()

    first = smart_optimizer(straight, name, lr=1e-3)
    train(straight, first, 3)
    resumed = copy.deepcopy(straight)
    second = smart_optimizer(resumed, name, lr=1e-3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(straight, first, 3)
    train(resumed, second, 3)
    for expected, found in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("name", NAMES)
def test_plan_sets_the_rates_and_the_momentum_of_sgd_only(name: str) -> None:
    optimizer = smart_optimizer(nn.Conv2d(1, 1, 1), name, lr=1e-4, momentum=0.9)
    apply_plan(optimizer, StepPlan(lr_bias=0.5, lr_other=0.25, momentum=0.8, accumulate=1))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25, 0.25]
    for group in optimizer.param_groups:
        assert group.get("momentum", 0.8) == 0.8
        assert group.get("betas", (0.9,))[0] == 0.9


def test_large_rate_of_lion_is_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    with caplog.at_level(logging.WARNING, logger=LOGGER.name):
        smart_optimizer(nn.Conv2d(1, 1, 1), "LION", lr=1e-4)
        assert not caplog.records
        smart_optimizer(nn.Conv2d(1, 1, 1), "LION", lr=0.01)
    assert "lr0 0.01 is large" in caplog.text


def test_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'Rprop'.*SGD, Adam, AdamW or LION"):
        smart_optimizer(nn.Conv2d(1, 1, 1), "Rprop")
