"""Learning rate, momentum and accumulation as pure functions of the step and the epoch.

Differs from upstream in one point: epoch ``e`` runs with the factor of epoch ``e``, not with that of the epoch before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NOMINAL_BATCH = 64  # images per optimizer step that weight decay and learning rate are meant for
MIN_WARMUP_STEPS = 100


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
        kind: a key of ``EPOCH_FACTORS``.
        lr0, lrf: first learning rate, and the last one as a fraction of it.
        warmup_steps: batches of warm-up, counted over the whole run.
        accumulate: batches per optimizer step after the warm-up.
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

    def __post_init__(self) -> None:
        if self.kind not in EPOCH_FACTORS:
            raise ValueError(f"schedule '{self.kind}': expected one of {', '.join(EPOCH_FACTORS)}")

    def factor(self, epoch: int) -> float:
        """Return the epoch's learning rate divided by ``lr0``."""
        return EPOCH_FACTORS[self.kind](epoch, self.epochs, self.lrf)

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
