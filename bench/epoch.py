"""Where the epochs of a small data set spend their time: training, validation, and what lies between them.

    python -m bench.epoch --data bccd.yaml --cfg yolov9-s.yaml --batch 32 --epochs 6 --record

The whole trainer runs, with checkpoints and the report, as `train_dual.py` does. `begin` is the time from the end of
one epoch to the first batch of the next, `end` what follows the last batch besides validation: tables, checkpoint,
report. Both together are the pause. The first epoch warms up and is shown, but not counted.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.records import append_record
from utils.evaluate.validator import ValResult
from utils.log import LOGGER
from utils.options import TrainOptions
from utils.runtime import synchronise
from utils.train.trainer import Trainer


@dataclass(frozen=True)
class Times:
    """Seconds of one epoch."""

    begin: float
    train: float
    validation: float
    end: float

    def __str__(self) -> str:
        pause = self.begin + self.end
        return f"training {self.train:.2f} s, validation {self.validation:.2f} s, pause {pause:.2f} s"


class Clock:
    """Trains epoch by epoch and reads the clock when the device has finished."""

    def __init__(self, options: TrainOptions) -> None:
        self.trainer = Trainer(options)
        self.validation_s = 0.0
        self.validate, self.trainer.validator.run = self.trainer.validator.run, self._timed_validation

    def now(self) -> float:
        """Seconds, after the device has done all it was given."""
        synchronise(self.trainer.device)
        return time.perf_counter()

    def _timed_validation(self, model: torch.nn.Module) -> ValResult:
        started = self.now()
        result = self.validate(model)
        self.validation_s = self.now() - started
        return result

    def epoch(self, number: int) -> Times:
        """Train, validate and save one epoch."""
        trainer, started = self.trainer, self.now()
        trainer.begin_epoch(number)
        record = trainer.run_epoch()
        trained = self.now()
        trainer.end_epoch(record)
        inside = trainer.monitor.total.elapsed_s  # from the first batch asked for to the last one read back
        return Times(trained - started - inside, inside, self.validation_s, self.now() - trained - self.validation_s)

    def close(self) -> None:
        """End the workers and threads."""
        self.trainer.close()


def measure(options: TrainOptions, epochs: int) -> tuple[list[Times], int]:
    """Return the times of ``epochs`` epochs after a first one, and the number of validation pictures."""
    clock = Clock(options)
    try:
        found = []
        for number in range(1 + epochs):
            found.append(clock.epoch(number))
            print(f"epoch {number}: {found[-1]}", flush=True)
        return found[1:], len(clock.trainer.val_set)
    finally:
        clock.close()


def describe(found: Sequence[Times], pictures: int) -> str:
    """Medians of the epochs in words."""
    middle = Times(*(statistics.median(getattr(times, name) for times in found) for name in Times.__annotations__))
    return f"{middle}; {pictures} validation pictures, {pictures / middle.validation:.0f} img/s"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--cfg", default="yolov9-s.yaml")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=6, help="measured ones")
    parser.add_argument("--more", default="", help="further options of train_dual.py, in quotes")
    parser.add_argument("--record", action="store_true", help="add a row to RECORDS.md")
    arguments = parser.parse_args(argv)
    LOGGER.setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--data", arguments.data, "--cfg", arguments.cfg, "--batch", str(arguments.batch)]
        words += ["--img", str(arguments.img), "--workers", str(arguments.workers), "--weights=", "--epochs", "1000"]
        words += ["--noplots", "--project", folder, *shlex.split(arguments.more)]
        text = describe(*measure(TrainOptions.from_cli(words), arguments.epochs))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{name}, {arguments.cfg}: {text}")
    if arguments.record:
        print(append_record(f"{name}: {text}", arguments.epochs))


if __name__ == "__main__":
    main()
