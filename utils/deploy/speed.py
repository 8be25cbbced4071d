"""Where the time of a run of detection goes: seconds of each step, and a table whose lines add up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")

STEPS = ("read", "pre-process", "network", "NMS", "draw", "write")


@dataclass
class StepClock:
    """Seconds spent in each step. A step runs in one thread at a time, so nothing is locked.

    Attributes:
        seconds: step → seconds of work in it, waiting for other steps not included.
        warmup_s: the first call of the network, which loads kernels; in none of the steps.
        wall_s: time of the whole run without the warm-up.
        is_overlapped: steps ran side by side, so that the sum of their times exceeds ``wall_s``.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    warmup_s: float = 0.0
    wall_s: float = 0.0
    is_overlapped: bool = False

    def add(self, step: str, seconds: float) -> None:
        """Count seconds of work for a step."""
        self.seconds[step] += seconds

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Count the time of the block for a step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[step] += time.perf_counter() - started

    def timed_items(self, step: str, items: Iterator[Item]) -> Iterator[Item]:
        """Yield ``items``, counting the time it takes to get each of them for a step."""
        while True:
            with self.timed(step):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Measure the whole run."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.wall_s = time.perf_counter() - started - self.warmup_s

    def per_image_ms(self, frames: int) -> dict[str, float]:
        """Return milliseconds per image of each step, to two decimals; without overlap ``other`` fills up to the whole.

        ``other`` is what no step claims: passing pictures on and writing log lines.
        """
        shares = {step: round(1000 * seconds / frames, 2) for step, seconds in self.seconds.items()}
        if not self.is_overlapped:
            shares["other"] = round(max(1000 * self.wall_s / frames - sum(shares.values()), 0.0), 2)
        return shares

    def table(self, frames: int) -> str:
        """Return the times of ``frames`` images (at least one) as text of several lines."""
        shares = self.per_image_ms(frames)
        total = sum(shares.values())
        lines = [f"{'step':<12} ms per image  share"]
        for step, milliseconds in [*shares.items(), ("sum", total)]:
            lines.append(f"{step:<12} {milliseconds:>12.2f} {milliseconds / max(total, 1e-9):>6.0%}")
        rate = frames / max(self.wall_s, 1e-9)
        lines.append(
            f"{frames} image(s) in {self.wall_s:.2f} s: {rate:.1f} img/s, {1000 / rate:.2f} ms per image"
            + (f", because steps overlap; the longest is {max(shares, key=shares.__getitem__)}" * self.is_overlapped)
            + (f"; warm-up {self.warmup_s:.2f} s apart" if self.warmup_s else "")
        )
        return "\n".join(lines)
