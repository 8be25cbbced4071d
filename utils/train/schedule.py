"""Learning rate, momentum, accumulation, label smoothing and picture size as pure functions of the step and the epoch.

Differs from upstream in one point: epoch ``e`` runs with the factor of epoch ``e``, not with that of the epoch before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NOMINAL_BATCH = 64  # images per optimizer step that weight decay and learning rate are meant for
MIN_WARMUP_STEPS = 100
SMOOTHING_DECAYS = ("none", "linear")


def linear(epoch: float, epochs: int, lrf: float) -> float:
    """Fall from 1 to ``lrf`` in equal steps."""
    return (1 - epoch / epochs) * (1 - lrf) + lrf


def cosine(epoch: float, epochs: int, lrf: float) -> float:
    """Fall from 1 to ``lrf`` along half a cosine."""
    return (1 - math.cos(math.pi * epoch / epochs)) / 2 * (lrf - 1) + 1


def flat_cosine(epoch: float, epochs: int, lrf: float) -> float:
    """Stay at 1 for the first half, then follow the cosine over the second half."""
    half = epochs // 2
    if epoch <= half or half == 0:
        return 1.0
    return cosine(epoch - half, half, lrf)


def fixed(epoch: float, epochs: int, lrf: float) -> float:
    """Stay at 1."""
    return 1.0


EPOCH_FACTORS = {"linear": linear, "cosine": cosine, "flat-cosine": flat_cosine, "fixed": fixed}
RESTARTS = "cosine-restarts"
HIGH_END = 0.1  # share of the peak; the last epoch of a whole cycle of five is at 0.096


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """Cosine annealing with warm restarts (Loshchilov and Hutter 2017, equation 5), one value per epoch.

    Attributes:
        first_cycle: epochs of the first cycle.
        growth: length of each further cycle in lengths of the one before.
        lr_min: learning rate (not a factor) towards which every cycle falls.
        stretch_last_cycle: let the last cycle reach ``lr_min`` in the last epoch of the run. A cycle that the run's
            end would cut before its middle is not begun, the one before it is lengthened instead; a cycle that would
            be cut later is shortened.
    """

    first_cycle: int = 5
    growth: int = 2
    lr_min: float = 1e-5
    stretch_last_cycle: bool = False

    def __post_init__(self) -> None:
        for name in ("first_cycle", "growth"):
            value = getattr(self, name)
            if value != int(value) or value < 1:
                raise ValueError(f"cosine restarts: {name} is {value}, expected a whole number of at least 1")
            object.__setattr__(self, name, int(value))  # the command line gives 5.0
        if not 0 <= self.lr_min < math.inf:
            raise ValueError(f"cosine restarts: lr_min is {self.lr_min}, expected a learning rate such as 1e-5")

    def check_peak(self, lr0: float) -> None:
        """Raise ValueError where the learning rate would have to rise from the peak ``lr0`` to its lowest value."""
        if self.lr_min > lr0:
            raise ValueError(
                f"--cos-restarts: the lowest learning rate eta_min {self.lr_min:g} is above the peak lr0 {lr0:g}; "
                f"lower it, for example --cos-restarts 5 2 {lr0 / 1000:g}, or raise lr0 in the --hyp file"
            )

    def cycles(self, epochs: int) -> list[tuple[int, int]]:
        """Return (first epoch, length) of the cycles of a run, the last one at its full length."""
        found = [(0, self.first_cycle)]
        while sum(found[-1]) < epochs:
            start, length = found[-1]
            found.append((start + length, length * self.growth))
        return found

    def lr(self, epoch: int, epochs: int, lr0: float) -> float:
        """Return the learning rate of ``epoch`` in a run of ``epochs`` with the peak ``lr0``."""
        start, length = next(cycle for cycle in reversed(self.cycles(max(epochs, epoch + 1))) if cycle[0] <= epoch)
        if self.stretch_last_cycle:
            last = self._start_of_stretched(epochs)
            if epoch >= last:
                start, length = last, max(epochs - 1 - last, 1)
        share = min((epoch - start) / length, 1.0)
        return self.lr_min + (lr0 - self.lr_min) * (1 + math.cos(math.pi * share)) / 2

    def _start_of_stretched(self, epochs: int) -> int:
        *earlier, (start, length) = self.cycles(epochs)
        return earlier[-1][0] if earlier and epochs - start < length / 2 else start


def interpolate(t: float, start: float, end: float) -> float:
    """Return the point at share ``t`` (clamped to 0 … 1) of the way from ``start`` to ``end``."""
    return start + (end - start) * min(max(t, 0.0), 1.0)


@dataclass(frozen=True)
class StepPlan:
    """What the optimizer should use at one step."""

    lr_bias: float
    lr_other: float
    momentum: float
    accumulate: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up followed by one factor per epoch.

    Attributes:
        kind: a key of ``EPOCH_FACTORS``, or ``RESTARTS``.
        lr0, lrf: first learning rate, and the last one as a fraction of it (without effect with restarts).
        warmup_steps: batches of warm-up, counted over the whole run.
        accumulate: batches per optimizer step after the warm-up.
        restarts: cycles of the kind ``RESTARTS``.
    """

    kind: str
    epochs: int
    lr0: float
    lrf: float
    momentum: float
    warmup_steps: int
    warmup_bias_lr: float
    warmup_momentum: float
    accumulate: int
    restarts: Restarts = Restarts()

    def __post_init__(self) -> None:
        if self.kind not in EPOCH_FACTORS and self.kind != RESTARTS:
            raise ValueError(f"schedule '{self.kind}': expected one of {', '.join((*EPOCH_FACTORS, RESTARTS))}")
        if self.kind == RESTARTS:
            self.restarts.check_peak(self.lr0)

    def factor(self, epoch: int) -> float:
        """Return the epoch's learning rate divided by ``lr0``."""
        if self.kind == RESTARTS:
            return self.restarts.lr(epoch, self.epochs, self.lr0) / self.lr0 if self.lr0 else 1.0
        return EPOCH_FACTORS[self.kind](epoch, self.epochs, self.lrf)

    @property
    def final_share(self) -> float:
        """Learning rate of the last epoch as a share of the peak."""
        return self.factor(self.epochs - 1)

    @property
    def final_lr(self) -> float:
        """Learning rate of the last epoch."""
        return self.lr0 * self.final_share

    def at(self, step: int, epoch: int) -> StepPlan:
        """Return the plan of batch number ``step`` (counted from 0 over the run) in ``epoch``."""
        lr = self.lr0 * self.factor(epoch)
        if step > self.warmup_steps:
            return StepPlan(lr, lr, self.momentum, self.accumulate)
        t = step / self.warmup_steps if self.warmup_steps else 1.0
        return StepPlan(
            lr_bias=interpolate(t, self.warmup_bias_lr, lr),
            lr_other=interpolate(t, 0.0, lr),
            momentum=interpolate(t, self.warmup_momentum, self.momentum),
            accumulate=max(1, round(interpolate(t, 1, self.accumulate))),
        )


def warmup_steps(warmup_epochs: float, batches_per_epoch: int) -> int:
    """Return the batches of warm-up: at least 100, whatever the size of the data set; none if the epochs are 0."""
    return max(round(warmup_epochs * batches_per_epoch), MIN_WARMUP_STEPS) if warmup_epochs > 0 else 0


def accumulation(batch_size: int) -> int:
    """Return how many batches make about 64 images."""
    return max(round(NOMINAL_BATCH / batch_size), 1)


def describe_restarts(schedule: Schedule) -> str | None:
    """Return a warning if a run with restarts would stop at a high learning rate, else None."""
    share = schedule.final_share
    if schedule.kind != RESTARTS or share <= HIGH_END:
        return None
    *whole, (start, length) = schedule.restarts.cycles(schedule.epochs)
    lengths = f"{start} or {start + length}" if whole else f"{start + length}"
    return (
        f"the run ends in the middle of a cycle, at {share:.0%} of the peak learning rate, where weights are rough: "
        f"--stretch-last-cycle lets it end at {schedule.restarts.lr_min:g}, or choose --epochs {lengths}"
    )


def smoothing_at(epoch: int, epochs: int, start: float, decay: str = "none") -> float:
    """Return the label smoothing of ``epoch``: ``start`` throughout, or falling to 0 in equal steps per epoch.

    Raises:
        ValueError: ``decay`` is not in ``SMOOTHING_DECAYS``.
    """
    if decay not in SMOOTHING_DECAYS:
        raise ValueError(f"label-smoothing decay '{decay}': expected one of {', '.join(SMOOTHING_DECAYS)}")
    return start * (1 - epoch / epochs) if decay == "linear" else start


def has_mosaic(epoch: int, epochs: int, close_mosaic: int, open_mosaic: int) -> bool:
    """Tell whether mosaics are made in ``epoch``: not in the first ``open_mosaic`` nor the last ``close_mosaic``."""
    return open_mosaic <= epoch < epochs - close_mosaic


def describe_mosaic(epochs: int, close_mosaic: int, open_mosaic: int, probability: float) -> str:
    """Return the start-up line that spells out which epochs have mosaic."""
    if probability <= 0:
        hint = " (the hyper-parameter mosaic is 0; --open-mosaic N switches it off for the first N epochs only)"
        return "Mosaic: off in all epochs" + (hint if close_mosaic or open_mosaic else "")
    active = [e for e in range(epochs) if has_mosaic(e, epochs, close_mosaic, open_mosaic)]
    if not active:
        return "Mosaic: off in all epochs (--close-mosaic and --open-mosaic cover the whole run)"
    return f"Mosaic: on in epochs {active[0]} to {active[-1]} of 0 to {epochs - 1}"


def random_size(generator: np.random.Generator, shape: Sequence[int], imgsz: int, stride: int) -> tuple[int, int]:
    """Draw a longer side from 0.5 to 1.5 times ``imgsz``; return ``shape`` (H, W) scaled to it, in whole strides."""
    side = int(generator.integers(imgsz // 2, imgsz * 3 // 2 + stride)) // stride * stride
    factor = max(side, stride) / max(shape)
    height, width = (math.ceil(length * factor / stride) * stride for length in shape)
    return height, width
