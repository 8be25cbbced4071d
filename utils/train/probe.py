"""Where the time of a training step goes: a few dozen steps with a clock at every stage, and what to do about it.

Nothing is saved. The device is waited for after each stage, so a step takes a little longer than in training and the
loader has that much more time: waiting that is seen here is there in training as well.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from utils.log import LOGGER
from utils.runtime import synchronise

STAGES = ("data wait", "copy", "forward", "loss", "backward", "optimizer")
DEVICE_STAGES = STAGES[2:]
WAITING = 0.10  # share of the step from which waiting for pictures is the first thing to repair
SPIKE = 5.0  # a wait this many times the median step comes from a disk or from a restart, not from slow decoding
SLOW_COPY, SLOW_LOSS, SLOW_OPTIMIZER = 0.08, 0.25, 0.15
LAUNCH_BOUND = 0.85  # share of the device's stages in which the processor was still handing out work


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A training step cut into calls. The step's ``backward`` and ``optimise`` keep what they need to themselves."""

    copy: Callable[[Any], Any]  # batch of the loader -> what forward takes, on the device
    forward: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]  # predictions, copied batch -> loss
    backward: Callable[[Any], None]
    optimise: Callable[[], None]
    count: Callable[[Any], int]  # batch of the loader -> number of images


@dataclass
class Profile:
    """Seconds of every measured step per stage; ``launch_s`` until the call returned, before the device was done."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    launch_s: list[float] = field(default_factory=list)
    images: int = 0
    first_batch_s: float = 0.0
    workers: int = 0
    cores: int = 1

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return len(self.seconds[STAGES[0]])

    def total_s(self) -> float:
        """Return the time of all measured steps."""
        return sum(map(sum, self.seconds.values()))

    def share(self, stage: str) -> float:
        """Return the part of the time that went into ``stage``."""
        total = self.total_s()
        return sum(self.seconds[stage]) / total if total > 0 else 0.0

    def launch_share(self) -> float:
        """Return the part of forward to optimizer in which the processor was busy or waited inside a call."""
        device = sum(sum(self.seconds[name]) for name in DEVICE_STAGES)
        return sum(self.launch_s) / device if device > 0 else 0.0

    def images_per_s(self) -> float:
        """Return the speed of the measured steps."""
        total = self.total_s()
        return self.images / total if total > 0 else 0.0


@dataclass(frozen=True)
class Diagnosis:
    """One finding: how to recognise it in a profile, its name, and what to do."""

    name: str
    fits: Callable[[Profile], bool]
    advice: str


def _is_waiting(profile: Profile) -> bool:
    return profile.share("data wait") > WAITING


def _has_spikes(profile: Profile) -> bool:
    waits = profile.seconds["data wait"]
    steps = [sum(parts) for parts in zip(*profile.seconds.values(), strict=True)]
    return _is_waiting(profile) and max(waits) > SPIKE * statistics.median(steps)


DIAGNOSES = (
    Diagnosis(
        "pictures come in bursts",
        _has_spikes,
        "some batches take very long: a network folder, a full page cache or another program on the disk. "
        "Copy the data to a local disk or use --cache ram",
    ),
    Diagnosis(
        "pictures are prepared by the trainer itself",
        lambda profile: _is_waiting(profile) and profile.workers == 0,
        "no loader process is at work: --workers 8, at most the number of cores",
    ),
    Diagnosis(
        "too few loader processes",
        lambda profile: _is_waiting(profile) and 0 < profile.workers < profile.cores,
        "more --workers, up to the number of cores",
    ),
    Diagnosis(
        "the processor cannot prepare pictures fast enough",
        lambda profile: _is_waiting(profile) and profile.workers >= profile.cores,
        "all cores are at work: --cache ram saves decoding; shrink copies of large pictures to about --img; less mixup "
        "in the --hyp file; a machine with more cores for this card",
    ),
    Diagnosis(
        "copying to the device is slow",
        lambda profile: profile.share("copy") > SLOW_COPY,
        "batches should travel as whole-number pictures from pinned memory; look for another program that uses the bus",
    ),
    Diagnosis(
        "the loss is expensive",
        lambda profile: profile.share("loss") > SLOW_LOSS,
        "very many boxes in a picture, or a small model: check the labels for pictures with hundreds of boxes",
    ),
    Diagnosis(
        "the optimizer is expensive",
        lambda profile: profile.share("optimizer") > SLOW_OPTIMIZER,
        "many small steps: a larger --batch makes fewer of them",
    ),
)
LAUNCHING = Diagnosis(
    "the card waits for the processor",
    lambda profile: profile.launch_share() > LAUNCH_BOUND,
    "calls take as long as the work they start: a larger --batch gives the card more to do per call; other programs on "
    "the processor and too many --workers slow it down",
)
BALANCED = Diagnosis(
    "the device is the limit", lambda profile: True, "as it should be: a faster card or a smaller model is what is left"
)


def diagnose(profile: Profile, *, is_cuda: bool) -> list[Diagnosis]:
    """Return what fits the profile, the most urgent first; only the first of the kinds of waiting is named."""
    fitting = [diagnosis for diagnosis in (*DIAGNOSES, *([LAUNCHING] if is_cuda else [])) if diagnosis.fits(profile)]
    if _is_waiting(profile):
        return fitting[:1]
    return fitting or [BALANCED]


def profile_loader(
    batches: Iterable[Any],
    parts: StepParts,
    device: torch.device,
    *,
    steps: int = 40,
    warmup: int = 5,
    workers: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Run ``warmup`` and then ``steps`` training steps, fewer if the loader ends, and measure the latter.

    Raises:
        ValueError: the loader holds no batch beyond the warm-up.
    """
    profile = Profile(workers=workers, cores=os.cpu_count() or 1)
    source = iter(batches)
    for number in range(warmup + steps):
        start = clock()
        batch = next(source, None)
        if batch is None:
            break
        wait = clock() - start
        if number == 0:
            profile.first_batch_s = wait
        times, launched = _timed_step(batch, parts, device, clock)
        if number >= warmup:
            for name, value in zip(STAGES, (wait, *times), strict=True):
                profile.seconds[name].append(value)
            profile.launch_s.append(launched)
            profile.images += parts.count(batch)
    if not profile.steps:
        raise ValueError(
            f"the data set has no more than {warmup} batches, too few to profile: "
            "take a smaller --batch, or more pictures"
        )
    return profile


def _timed_step(
    batch: Any, parts: StepParts, device: torch.device, clock: Callable[[], float]
) -> tuple[list[float], float]:
    """Return the seconds of the five stages after the wait, and those of the last four until the calls returned."""
    times: list[float] = []
    launched = 0.0

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal launched
        start = clock()
        result = call(*arguments)
        returned = clock()
        synchronise(device)
        times.append(clock() - start)
        if len(times) > 1:  # the copy is no work of the device's processors
            launched += returned - start
        return result

    inputs = timed(parts.copy, batch)
    predictions = timed(parts.forward, inputs)
    loss = timed(parts.loss, predictions, inputs)
    timed(parts.backward, loss)
    timed(parts.optimise)
    return times, launched


def report_lines(profile: Profile, diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return the profile as a table, and the verdict with its advice."""
    lines = [f"{'stage':>12s}{'ms a step':>12s}{'share':>8s}{'longest':>12s}"]
    for name in STAGES:
        values = profile.seconds[name]
        mean, longest = 1000 * statistics.mean(values), 1000 * max(values)
        lines.append(f"{name:>12s}{mean:>12.2f}{profile.share(name):>8.0%}{longest:>12.2f}")
    lines.append(
        f"{profile.steps} steps, {profile.images_per_s():.1f} images/s, first batch after "
        f"{profile.first_batch_s:.1f} s, {profile.workers} workers on {profile.cores} cores"
    )
    lines += [f"Verdict: {diagnosis.name}. {diagnosis.advice}" for diagnosis in diagnoses]
    return lines


def print_profile(profile: Profile, device: torch.device) -> list[Diagnosis]:
    """Log the table and the verdict, and return the diagnoses."""
    diagnoses = diagnose(profile, is_cuda=device.type == "cuda")
    for line in report_lines(profile, diagnoses):
        LOGGER.info(line)
    return diagnoses
