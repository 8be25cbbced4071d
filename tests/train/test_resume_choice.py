"""Which run a bare ``--resume`` goes on with: the newest with epochs left, and what happens where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from models.checkpoint import Checkpoint, save_checkpoint
from utils.options import TrainOptions
from utils.train.setup import prepare_run


def write_run(folder: Path, name: str, epoch: int, age_s: int) -> Path:
    """A run of three epochs that has done those up to ``epoch``."""
    last = folder / name / "weights" / "last.pt"
    options = TrainOptions(epochs=3, data="shapes.yaml").to_dict()
    save_checkpoint(last, Checkpoint(model={"a": torch.zeros(1)}, epoch=epoch, optimizer={"state": {}}, opt=options))
    os.utime(last, (1e9 - age_s, 1e9 - age_s))
    return last


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_newest_unfinished_run_goes_on(folder: Path) -> None:
    write_run(folder, "older", 0, age_s=30)
    wanted = write_run(folder, "newer", 1, age_s=20)
    write_run(folder, "finished", 2, age_s=10)
    for weights in ("", "start.pt"):
        options, checkpoint, _ = prepare_run(TrainOptions(resume=True, weights=weights))
        assert Path(options.resume) == wanted and checkpoint.epoch == 1


def test_with_finished_runs_only_weights_begin_a_new_one(folder: Path) -> None:
    write_run(folder, "finished", 2, age_s=10)
    options, checkpoint, run_folder = prepare_run(TrainOptions(resume=True, weights="start.pt"))
    assert checkpoint is None and run_folder is None and options.weights == "start.pt"


def test_with_finished_runs_only_and_no_weights_the_newest_can_be_extended(folder: Path) -> None:
    write_run(folder, "older", 2, age_s=30)
    wanted = write_run(folder, "newer", 2, age_s=10)
    with pytest.raises(ValueError, match=f"{wanted}: all 3 epochs are done.*--epochs N extends"):
        prepare_run(TrainOptions(resume=True))
    options, _, _ = prepare_run(TrainOptions.from_cli(["--resume", "--epochs", "5"]))
    assert Path(options.resume) == wanted and options.epochs == 5
