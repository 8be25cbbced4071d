"""Where the time goes: measured on a clock moved by hand, judged by the table of diagnoses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from utils.train import probe
from utils.train.probe import STAGES, Profile, StepParts, diagnose, print_profile, profile_loader, report_lines

CPU = torch.device("cpu")


class World:
    """A loader and a model in which everything takes as long as it is told, in milliseconds."""

    def __init__(self, **durations_ms: float) -> None:
        self.durations = {name.replace("_", " "): value / 1000 for name, value in durations_ms.items()}
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def spend(self, name: str, result: object = None) -> object:
        self.now += self.durations.get(name, 0.0)
        self.calls.append(name)
        return result

    def batches(self, count: int) -> Iterator[list[int]]:
        for _ in range(count):
            self.spend("data wait")
            yield [0] * 8

    def parts(self) -> StepParts:
        return StepParts(
            copy=lambda batch: self.spend("copy", "inputs"),
            forward=lambda inputs: self.spend("forward", f"predictions of {inputs}"),
            loss=lambda predictions, inputs: self.spend("loss", f"loss of {predictions}"),
            backward=lambda loss: self.spend("backward"),
            optimise=lambda: self.spend("optimizer"),
            count=len,
        )

    def profile(self, count: int = 20, **options) -> Profile:
        return profile_loader(self.batches(count), self.parts(), CPU, clock=self.clock, **options)


def test_every_stage_is_measured_after_the_warm_up() -> None:
    world = World(data_wait=1, copy=2, forward=30, loss=7, backward=50, optimizer=10)
    profile = world.profile(steps=10, warmup=3)
    assert world.calls[: len(STAGES)] == list(STAGES)
    assert profile.steps == 10 and profile.images == 80
    assert profile.share("forward") == pytest.approx(0.3) and profile.share("data wait") == pytest.approx(0.01)
    assert profile.images_per_s() == pytest.approx(80)
    assert profile.launch_share() == pytest.approx(1.0)
    text = "\n".join(report_lines(profile, diagnose(profile, is_cuda=False)))
    assert "10 steps, 80.0 images/s" in text and "Verdict: the device is the limit" in text
    assert all(name in text for name in STAGES)


def test_a_short_loader_is_measured_as_far_as_it_goes_and_a_tiny_one_refused() -> None:
    assert World(forward=1).profile(count=4, warmup=3, steps=40).steps == 1
    with pytest.raises(ValueError, match="too few to profile.*--batch"):
        World(forward=1).profile(count=3, warmup=3)


@pytest.mark.parametrize(
    ("durations", "workers", "expected"),
    [
        ({"data_wait": 50, "forward": 50}, 0, "prepared by the trainer itself"),
        ({"data_wait": 50, "forward": 50}, 2, "too few loader processes"),
        ({"data_wait": 50, "forward": 50}, 64, "cannot prepare pictures fast enough"),
        ({"copy": 20, "forward": 80}, 8, "copying to the device"),
        ({"loss": 40, "forward": 60}, 8, "the loss is expensive"),
        ({"optimizer": 30, "forward": 70}, 8, "the optimizer is expensive"),
        ({"data_wait": 4, "forward": 96}, 8, "the device is the limit"),
    ],
)
def test_diagnoses(monkeypatch: pytest.MonkeyPatch, durations: dict, workers: int, expected: str) -> None:
    monkeypatch.setattr(probe.os, "cpu_count", lambda: 8)
    found = diagnose(World(**durations).profile(workers=workers), is_cuda=False)
    assert len(found) == 1 and expected in found[0].name
    assert found[0].advice


def test_bursts_of_waiting_are_told_from_slow_decoding() -> None:
    profile = World(data_wait=1, forward=10).profile(workers=8)
    profile.seconds["data wait"][4] = 0.5
    assert [diagnosis.name for diagnosis in diagnose(profile, is_cuda=True)] == ["pictures come in bursts"]


def test_a_card_that_waits_for_the_processor() -> None:
    profile = World(forward=50, backward=50).profile(workers=8)
    assert [diagnosis.name for diagnosis in diagnose(profile, is_cuda=True)] == ["the card waits for the processor"]
    profile.launch_s = [value * 0.5 for value in profile.launch_s]
    assert [diagnosis.name for diagnosis in diagnose(profile, is_cuda=True)] == ["the device is the limit"]


def test_profile_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("utils.log.LOGGER.info", lines.append)
    found = print_profile(World(data_wait=50, forward=50).profile(), CPU)
    assert any(line.startswith("Verdict") for line in lines)
    assert found[0].name in "\n".join(lines)
