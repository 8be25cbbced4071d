"""Learning-rate schedules against closed forms and recorded reference values."""

from __future__ import annotations

import json
import math

import pytest

from utils.train.schedule import (
    EPOCH_FACTORS,
    Schedule,
    accumulation,
    describe_mosaic,
    has_mosaic,
    warmup_steps,
)

REFERENCE_KINDS = {"linear": "linear", "cos": "cosine", "flat_cos": "flat-cosine"}


def make_schedule(**changes: object) -> Schedule:
    values = {
        "kind": "linear",
        "epochs": 20,
        "lr0": 0.01,
        "lrf": 0.01,
        "momentum": 0.937,
        "warmup_steps": 150,
        "warmup_bias_lr": 0.1,
        "warmup_momentum": 0.8,
        "accumulate": 4,
    }
    return Schedule(**{**values, **changes})


@pytest.mark.parametrize(
    ("kind", "epoch", "expected"),
    [
        ("linear", 0, 1.0),
        ("linear", 1, 0.9505),
        ("linear", 10, 0.505),
        ("linear", 19, 0.0595),
        ("cosine", 1, 0.99391),
        ("cosine", 10, 0.505),
        ("cosine", 19, 0.01609),
        ("flat-cosine", 1, 1.0),
        ("flat-cosine", 10, 1.0),
        ("flat-cosine", 19, 0.03423),
        ("fixed", 19, 1.0),
    ],
)
def test_factors_of_a_twenty_epoch_run(kind: str, epoch: int, expected: float) -> None:
    assert EPOCH_FACTORS[kind](epoch, 20, 0.01) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("kind", EPOCH_FACTORS)
@pytest.mark.parametrize("epochs", [1, 2, 3, 17, 300])
def test_every_factor_stays_between_lrf_and_one_and_never_rises(kind: str, epochs: int) -> None:
    factors = [EPOCH_FACTORS[kind](epoch, epochs, 0.05) for epoch in range(epochs)]
    assert factors[0] == pytest.approx(1.0)
    assert all(0.05 - 1e-9 <= factor <= 1.0 + 1e-9 for factor in factors)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(factors, factors[1:], strict=False))


def test_epoch_runs_with_its_own_factor() -> None:
    schedule = make_schedule(warmup_steps=0)
    for epoch in range(20):
        assert schedule.at(1000 + epoch, epoch).lr_other == pytest.approx(
            0.01 * EPOCH_FACTORS["linear"](epoch, 20, 0.01)
        )


def test_warmup_ramps_from_its_start_values_to_the_schedule() -> None:
    schedule = make_schedule()
    first, last, after = schedule.at(0, 0), schedule.at(150, 3), schedule.at(151, 3)
    assert (first.lr_bias, first.lr_other, first.momentum, first.accumulate) == (0.1, 0.0, 0.8, 1)
    assert last.lr_other == pytest.approx(after.lr_other)
    assert (last.lr_bias, last.lr_other) == pytest.approx((0.01 * schedule.factor(3),) * 2)
    assert last.momentum == pytest.approx(0.937)
    assert last.accumulate == 4


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, 64), (4, 16), (8, 8), (16, 4), (20, 3), (24, 3), (32, 2), (48, 1), (64, 1), (128, 1)]
)
def test_accumulation_aims_at_64_images(batch: int, expected: int) -> None:
    assert accumulation(batch) == expected


@pytest.mark.parametrize(("epochs", "batches", "expected"), [(3, 50, 150), (3, 3, 100), (0, 500, 0), (2.5, 101, 252)])
def test_warmup_has_at_least_a_hundred_steps(epochs: float, batches: int, expected: int) -> None:
    assert warmup_steps(epochs, batches) == expected


def test_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'spiral'.*linear"):
        make_schedule(kind="spiral")


@pytest.mark.parametrize("close", [0, 3, 10, 25])
@pytest.mark.parametrize("start", [0, 4, 30])
def test_mosaic_epochs(close: int, start: int) -> None:
    active = {epoch for epoch in range(10) if has_mosaic(epoch, 10, close, start)}
    assert active == set(range(start, max(10 - close, 0)))


def test_mosaic_line_names_the_epochs() -> None:
    assert "epochs 0 to 4 of 0 to 19" in describe_mosaic(20, 15, 0, 1.0)
    assert "epochs 10 to 99" in describe_mosaic(100, 0, 10, 1.0)
    assert "off in all epochs" in describe_mosaic(10, 10, 0, 1.0)
    assert "--open-mosaic" in describe_mosaic(10, 3, 0, 0.0)


def test_factors_match_the_recorded_ones(golden) -> None:
    record = json.loads(golden("models/schedules.json").read_text())
    for their_kind, kind in REFERENCE_KINDS.items():
        for epochs, factors in record["lr_factor"][their_kind].items():
            ours = [EPOCH_FACTORS[kind](epoch, int(epochs), record["lrf"]) for epoch in range(int(epochs) + 1)]
            assert ours == pytest.approx(factors, abs=1e-12)


def test_warmup_matches_the_recorded_one(golden) -> None:
    """The reference agrees step by step during warm-up and lags one epoch behind ours afterwards."""
    for record in json.loads(golden("models/schedules.json").read_text())["warmup"]:
        kind = {"linear": "linear", "cos": "cosine", "flat_cos": "flat-cosine"}[record["kind"]]
        nb = record["nb"]
        schedule = make_schedule(kind=kind, epochs=record["epochs"], warmup_steps=record["nw"])
        assert warmup_steps(3.0, nb) == record["nw"]
        pending, stepped = 0, []
        for step in range(len(record["lr_bias"])):
            epoch = step // nb - (step // nb > record["nw"] // nb)
            plan = schedule.at(step, epoch)
            pending += 1
            if pending >= plan.accumulate:
                stepped.append(step)
                pending = 0
            assert plan.lr_bias == pytest.approx(record["lr_bias"][step], abs=1e-12), step
            assert plan.lr_other == pytest.approx(record["lr_other"][step], abs=1e-12), step
            assert plan.momentum == pytest.approx(record["momentum"][step], abs=1e-12), step
            assert plan.accumulate == record["accumulate"][step], step
        upto = [step for step in record["stepped_at"] if step < len(record["lr_bias"])]
        assert stepped == upto
        assert math.isfinite(record["lr_after_last_epoch"][0])
