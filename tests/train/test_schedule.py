"""Learning-rate schedules against closed forms and recorded reference values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from utils.files import read_yaml
from utils.options import Hyp
from utils.train.schedule import (
    EPOCH_FACTORS,
    RESTARTS,
    Restarts,
    Schedule,
    accumulation,
    describe_mosaic,
    describe_restarts,
    has_mosaic,
    smoothing_at,
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


def restarting(epochs: int, *, stretch: bool = False, **changes: object) -> Schedule:
    restarts = Restarts(stretch_last_cycle=stretch)
    return make_schedule(kind=RESTARTS, epochs=epochs, lr0=0.02, lrf=0.001, restarts=restarts, **changes)


FIRST_CYCLES = [
    *(0.02, 0.018091, 0.013094, 0.006916, 0.001919),
    *(0.02, 0.019511, 0.018091, 0.015880, 0.013094, 0.010005, 0.006916, 0.004130, 0.001919, 0.000499),
    0.02,
]


def test_restarts_give_the_known_learning_rates() -> None:
    schedule = restarting(75, warmup_steps=0)
    found = [schedule.at(1000, epoch).lr_other for epoch in range(16)]
    assert found == pytest.approx(FIRST_CYCLES, abs=5e-7)
    assert [epoch for epoch in range(75) if schedule.factor(epoch) == 1.0] == [0, 5, 15, 35]


def test_restarts_equal_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.02)
    reference = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=2, eta_min=1e-5)
    schedule = restarting(100)
    for epoch in range(100):
        assert 0.02 * schedule.factor(epoch) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), epoch
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("growth", [1, 2, 3])
def test_cycles_follow_each_other(growth: int) -> None:
    cycles = Restarts(first_cycle=3, growth=growth).cycles(50)
    assert cycles[0] == (0, 3)
    assert all(sum(one) == two[0] and two[1] == one[1] * growth for one, two in zip(cycles, cycles[1:], strict=False))
    assert cycles[-1][0] < 50 <= sum(cycles[-1])


@pytest.mark.parametrize(("epochs", "last_start"), [(20, 5), (30, 15), (34, 15), (35, 15), (36, 15), (100, 35), (4, 0)])
def test_stretched_run_ends_at_the_lowest_rate(epochs: int, last_start: int) -> None:
    schedule, plain = restarting(epochs, stretch=True), restarting(epochs)
    rates = [0.02 * schedule.factor(epoch) for epoch in range(epochs)]
    assert rates[-1] == pytest.approx(1e-5)
    assert rates[:last_start] == pytest.approx([0.02 * plain.factor(epoch) for epoch in range(last_start)])
    assert max(range(epochs), key=lambda epoch: (rates[epoch], epoch)) == last_start
    assert all(later < earlier for earlier, later in zip(rates[last_start:], rates[last_start + 1 :], strict=False))


def test_stretching_one_epoch_trains_at_the_peak() -> None:
    assert restarting(1, stretch=True).factor(0) == 1.0


def test_warmup_is_kept_with_restarts() -> None:
    schedule = restarting(20)
    first, last = schedule.at(0, 0), schedule.at(150, 2)
    assert (first.lr_bias, first.lr_other, first.momentum) == (0.1, 0.0, 0.8)
    assert (last.lr_bias, last.lr_other) == pytest.approx((0.013094,) * 2, abs=5e-7)


@pytest.mark.parametrize("epochs", [5, 15, 35, 75])
def test_no_warning_where_a_cycle_ends(epochs: int) -> None:
    assert describe_restarts(restarting(epochs)) is None


def test_warning_where_the_run_ends_high() -> None:
    schedule = restarting(20)
    assert schedule.final_share == pytest.approx(0.9045, abs=1e-3)
    warning = describe_restarts(schedule)
    assert warning is not None
    assert all(text in warning for text in ("90%", "--stretch-last-cycle", "--epochs 15 or 35"))
    assert "--epochs 5" in (describe_restarts(restarting(3)) or "")
    assert describe_restarts(restarting(20, stretch=True)) is None
    typed = make_schedule(kind=RESTARTS, epochs=7, restarts=Restarts(first_cycle=5.0, growth=2.0))  # as typed
    assert "--epochs 5 or 15" in (describe_restarts(typed) or "")
    assert describe_restarts(make_schedule(kind="fixed")) is None


@pytest.mark.parametrize("changes", [{"first_cycle": 0}, {"growth": 0}, {"growth": 1.5}, {"lr_min": -1.0}])
def test_impossible_cycles_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"cosine restarts: {next(iter(changes))} is"):
        Restarts(**changes)


def test_hyper_parameters_for_restarts_differ_in_the_rates_only() -> None:
    file = Path(__file__).resolve().parents[2] / "hyp" / "hyp.stable.yaml"
    assert read_yaml(file) == {**Hyp().to_dict(), "lr0": 0.02, "lrf": 0.001}
    assert Hyp.from_yaml(file) == Hyp(lr0=0.02, lrf=0.001)


def test_lowest_rate_above_the_peak_is_refused() -> None:
    with pytest.raises(ValueError, match="above the peak"):
        make_schedule(kind=RESTARTS, lr0=1e-6)


def test_label_smoothing_decay() -> None:
    assert [smoothing_at(epoch, 10, 0.1) for epoch in (0, 9)] == [0.1, 0.1]
    assert [smoothing_at(epoch, 10, 0.1, "linear") for epoch in (0, 1, 5, 9)] == pytest.approx([0.1, 0.09, 0.05, 0.01])
    with pytest.raises(ValueError, match="'steps'.*none, linear"):
        smoothing_at(0, 10, 0.1, "steps")
