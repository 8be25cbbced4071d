"""Fixtures for whole runs: a model small enough to train in a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reference.tiny import TINY_DUAL
from utils.files import write_yaml
from utils.log import LOGGER
from utils.options import TrainOptions
from utils.train.trainer import Trainer


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """Benchmarks quieten the log for their process; a test that runs one must not do so for those after it."""
    level = LOGGER.level
    yield
    LOGGER.setLevel(level)


@pytest.fixture
def make_options(tmp_path: Path, shapes_dataset: Path) -> Callable[..., TrainOptions]:
    """Return a function that gives options for a run of seconds; keywords override."""
    write_yaml(tmp_path / "tiny.yaml", TINY_DUAL)

    def make(**changes: Any) -> TrainOptions:
        values = {
            "data": str(shapes_dataset),
            "cfg": str(tmp_path / "tiny.yaml"),
            "hyp": "hyp/hyp.demo.yaml",
            "epochs": 2,
            "batch_size": 8,
            "imgsz": 64,
            "workers": 0,
            "device": "cpu",
            "noplots": True,
            "project": str(tmp_path / "runs"),
        }
        return TrainOptions(**{**values, **changes})

    return make


@pytest.fixture
def interrupt_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainOptions, int], Path]:
    """Return a function that runs a training until Ctrl+C comes before an epoch, and returns its last.pt."""

    def run(options: TrainOptions, stop_epoch: int) -> Path:
        begin_epoch = Trainer.begin_epoch

        def begin_or_stop(self: Trainer, epoch: int) -> None:
            if epoch == stop_epoch:
                raise KeyboardInterrupt
            begin_epoch(self, epoch)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "begin_epoch", begin_or_stop)
            with pytest.raises(KeyboardInterrupt):
                Trainer(options).fit()
        return Path(options.project) / options.name / "weights" / "last.pt"

    return run
