"""The report on speed: its lines add up, and each step counts its own work only."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from utils.deploy import speed
from utils.deploy.speed import STEPS, StepClock


def test_steps_in_turn_add_up_to_the_whole() -> None:
    clock = StepClock(seconds=dict.fromkeys(STEPS, 0.5), wall_s=4.0, warmup_s=0.3)
    shares = clock.per_image_ms(10)
    assert shares == {**dict.fromkeys(STEPS, 50.0), "other": 100.0} and sum(shares.values()) == 400
    text = clock.table(10)
    assert "sum                400.00   100%" in text
    assert "10 image(s) in 4.00 s: 2.5 img/s, 400.00 ms per image" in text and "warm-up 0.30 s apart" in text


def test_printed_lines_add_up_to_the_printed_sum() -> None:
    clock = StepClock(seconds={step: 0.0012345 * (number + 1) for number, step in enumerate(STEPS)}, wall_s=0.05)
    for overlapped in (False, True):
        clock.is_overlapped = overlapped
        lines = clock.table(7).splitlines()[1:-1]
        values = [float(line.split()[1]) for line in lines]
        assert sum(values[:-1]) == pytest.approx(values[-1], abs=1e-9)


def test_overlapped_steps_exceed_the_whole_and_the_longest_is_named() -> None:
    clock = StepClock(seconds=dict.fromkeys(STEPS, 0.5) | {"write": 0.9}, wall_s=1.0, is_overlapped=True)
    text = clock.table(10)
    assert "other" not in clock.per_image_ms(10) and "steps overlap; the longest is write" in text
    assert "10.0 img/s, 100.00 ms per image" in text and "warm-up" not in text


def test_only_the_work_of_a_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = StepClock(warmup_s=5.0), [100.0]
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow() -> Iterator[int]:
        for _ in range(3):
            now[0] += 10
            yield 0

    with clock.whole():
        for _ in clock.timed_items("read", slow()):
            with clock.timed("draw"):
                now[0] += 20
            now[0] += 1
    assert (clock.seconds["read"], clock.seconds["draw"], clock.wall_s) == (30, 60, 88)
