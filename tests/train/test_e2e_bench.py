"""The measurement of whole training: which runs it makes, and what its lines are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import train_e2e
from utils.options import TrainOptions

CORES = 6


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[TrainOptions]:
    """The options of every run that is asked for; nothing is trained. The machine has CORES cores."""
    options: list[TrainOptions] = []

    def measure(run: TrainOptions, epochs: int) -> train_e2e.Figures:
        options.append(run)
        workers = min(run.workers, CORES)
        return train_e2e.Figures((90.0, 110.0), 0.1, 80.0, 0.2, 3.0, 0.5, 200.0, 4.0, workers)

    monkeypatch.setattr(train_e2e, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return options


def lines_of(folder: Path, words: str) -> list[str]:
    return train_e2e.measure_ways(train_e2e.parse(words.split()), "my.yaml", folder)


def test_every_way_is_measured_with_every_number_of_workers(tmp_path: Path, measured: list[TrainOptions]) -> None:
    lines = lines_of(tmp_path, "--workers 1 4 --ways=--plain-kernels")
    assert [(run.workers, run.plain_kernels) for run in measured] == [(1, True), (4, True)]
    assert [line.partition(":")[0] for line in lines] == ["`--plain-kernels`, 1 worker", "`--plain-kernels`, 4 workers"]
    assert "100 img/s (90-110), step alone 200 img/s (ratio 0.50)" in lines[0]


def test_the_lines_name_the_workers_that_there_were(tmp_path: Path, measured: list[TrainOptions]) -> None:
    lines = lines_of(tmp_path, "--workers 4 8 --ways=")
    assert [line.partition(":")[0] for line in lines] == ["``, 4 workers", f"``, {CORES} workers"]


def test_without_a_number_there_are_eight_workers(tmp_path: Path, measured: list[TrainOptions]) -> None:
    ways = train_e2e.parse([]).ways
    assert len(lines_of(tmp_path, "")) == len(measured) == len(ways)
    assert {run.workers for run in measured} == {8}
    assert [run.augment for run in measured] == ["cpu", "gpu", "auto"]


def test_without_a_card_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="measures CUDA devices; none was found"):
        lines_of(tmp_path, "")
