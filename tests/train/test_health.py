"""Advice: silent inside the ranges, one message with a way out for each figure outside of them."""

from __future__ import annotations

import math

import pytest

from utils.train.health import HealthCheck, HealthyRanges

HEALTHY = {
    "train/grad_norm_per_image": 2.5,
    "train/box_cls_ratio": 1.4,
    "train/skipped_share": 0.0,
    "train/data_wait": 0.02,
    "gpu/utilisation": 97.0,
    "gpu/swing_gb": 0.3,
    "gpu_gb": 12.0,
    "gpu/allocated_gb": 10.0,
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr("utils.log.LOGGER.warning", messages.append)
    return messages


def test_a_healthy_or_unknown_epoch_is_passed_over(said: list[str]) -> None:
    HealthCheck().check_epoch(HEALTHY)
    HealthCheck().check_epoch({})
    HealthCheck().check_epoch(dict.fromkeys(HEALTHY, math.nan))
    assert said == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("train/grad_norm_per_image", 40.0, ["40", "lr0", "warmup_epochs"]),
        ("train/grad_norm_per_image", 0.01, ["0.01", "--freeze", "labels"]),
        ("train/box_cls_ratio", 6.0, ["6.00", "lower `box`"]),
        ("train/box_cls_ratio", 0.5, ["0.50", "lower `cls`"]),
        ("train/skipped_share", 0.4, ["40%", "--no-amp"]),
        ("train/data_wait", 0.35, ["35%", "--workers", "--cache ram"]),
        ("gpu/utilisation", 40.0, ["40 %", "--batch"]),
        ("gpu/swing_gb", 3.0, ["3.0 GB", "process 7"]),
        ("gpu_gb", 30.0, ["30.0 GB", "10.0 GB", "expandable_segments"]),
    ],
)
def test_each_figure_out_of_range_has_its_advice(said: list[str], name: str, value: float, words: list[str]) -> None:
    check = HealthCheck()
    for _ in range(3):
        check.check_epoch({**HEALTHY, name: value}, others="process 7 (2.0 GB)")
    assert len(said) == 1
    assert all(word in said[0] for word in words), said[0]
    check.warnings.summarise()
    assert "3 times" in said[1]


def test_waiting_explains_an_idle_card(said: list[str]) -> None:
    HealthCheck().check_epoch({**HEALTHY, "train/data_wait": 0.5, "gpu/utilisation": 30.0})
    assert len(said) == 1 and "waiting for pictures" in said[0]


def test_ranges_can_be_changed(said: list[str]) -> None:
    HealthCheck(HealthyRanges(box_cls_ratio=(1.5, 2.5))).check_epoch(HEALTHY)
    assert len(said) == 1 and "1.5 to 2.5" in said[0]


def test_a_model_that_finds_nothing_is_told_once_and_in_time(said: list[str]) -> None:
    check = HealthCheck()
    for _ in range(4):
        check.check_validation(0.0004)
    assert said == []
    for _ in range(3):
        check.check_validation(0.0)
    assert len(said) == 1 and "0.0004 after 5 validated epochs" in said[0] and "train_batch0.jpg" in said[0]
    learning = HealthCheck()
    for map50 in (0.0, 0.0, 0.2, 0.0, 0.0, 0.0):
        learning.check_validation(map50)
    assert len(said) == 1
