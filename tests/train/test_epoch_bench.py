"""Times of an epoch: its parts add up to the whole, and the trainer does in it what it always does."""

from __future__ import annotations

import time
from collections.abc import Callable

from bench import epoch
from models.checkpoint import load_checkpoint
from utils.options import TrainOptions


def test_parts_add_up_to_the_whole(make_options: Callable[..., TrainOptions]) -> None:
    clock = epoch.Clock(make_options(epochs=9))
    clock.epoch(0)
    started = time.perf_counter()
    times = clock.epoch(1)
    whole = time.perf_counter() - started
    clock.close()
    parts = (times.begin, times.train, times.validation, times.end)
    assert min(parts) > 0 and abs(sum(parts) - whole) < 0.1 * whole
    assert load_checkpoint(clock.trainer.last).epoch == 1
    text = epoch.describe([times, times], 8)
    assert f"validation {times.validation:.2f} s" in text and f"{8 / times.validation:.0f} img/s" in text
