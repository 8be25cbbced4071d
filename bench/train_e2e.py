"""Speed of whole training: from JPEG files to optimizer steps, with mosaic and mixup, without validation.

    python -m bench.train_e2e --make 3200 --pictures ../datasets/coco --workers 4 8 --record
    python -m bench.train_e2e --data my.yaml --ways "--augment gpu" "--cache gpu" "--no-cuda-graphs --plain-kernels"

Each way is a set of options of train_dual.py, measured with each number of --workers. The first epoch warms up (files
into the page cache, cuDNN's trials, the recording of the step); the others are measured by the run's own monitor, whose
clock is read when the device has finished. Between the epochs lie no validation and no checkpoint: `pause` is what an
epoch costs beyond its batches. The step alone is measured beside it, in the same process, on the run's own model and a
batch of its data.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import shlex
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.pictures import CLASSES, make_pictures
from bench.records import append_record
from utils.data.listing import list_images
from utils.data.prefetch import DevicePrefetcher
from utils.data.spec import load_data_spec
from utils.files import write_yaml
from utils.log import LOGGER, counted
from utils.options import TrainOptions
from utils.train.trainer import Trainer

STEPS_ALONE = 20


@dataclass(frozen=True)
class Figures:
    """Means over the measured epochs."""

    images_per_s: tuple[float, ...]  # by epoch
    wait: float
    utilisation: float
    flop_utilisation: float
    peak_gib: float
    pause_s: float
    step_alone: float  # images per second
    start_s: float  # until all was set up, scan of the data included
    workers: int  # loader processes that there were: at most one per core

    def __str__(self) -> str:
        rate = statistics.mean(self.images_per_s)
        return (
            f"{rate:.0f} img/s ({min(self.images_per_s):.0f}-{max(self.images_per_s):.0f}), step alone "
            f"{self.step_alone:.0f} img/s (ratio {rate / self.step_alone:.2f}), data wait {self.wait:.1%}, GPU-Util "
            f"{self.utilisation:.0f} %, MFU {self.flop_utilisation:.1%}, peak {self.peak_gib:.1f} GiB, "
            f"pause {self.pause_s:.2f} s, start {self.start_s:.0f} s"
        )


def measure(options: TrainOptions, epochs: int) -> Figures:
    """Train the first epoch and then some more; return the figures of the latter."""
    started = time.perf_counter()
    trainer = Trainer(options)
    start_s = time.perf_counter() - started
    try:
        records, pauses = [], []
        for epoch in range(1 + epochs):
            begun = time.perf_counter()
            trainer.begin_epoch(epoch)
            record = trainer.run_epoch()
            torch.cuda.synchronize(trainer.device)
            records.append(record)
            if epoch:  # the monitor counts from the first batch asked for to the last one read back
                pauses.append(time.perf_counter() - begun - trainer.monitor.total.elapsed_s)
        step_alone = measure_step(trainer)
    finally:
        trainer.close()
    measured = records[1:]
    mean = {name: statistics.mean(record[name] for record in measured) for name in measured[0]}
    return Figures(
        tuple(record["train/img_per_s"] for record in measured),
        mean["train/data_wait"],
        mean["gpu/utilisation"],
        mean["train/mfu"],
        max(record["gpu_gb"] for record in measured) * 1e9 / 2**30,
        statistics.mean(pauses),
        step_alone,
        start_s,
        trainer.train_loader.num_workers,
    )


def measure_step(trainer: Trainer) -> float:
    """Images per second of steps on one batch that lies on the device."""
    trainer.begin_epoch(trainer.epoch + 1)
    for images, targets, paths, _ in DevicePrefetcher(trainer.train_loader, trainer.device):  # noqa: B007
        if len(images) == trainer.batch_size:
            break
    images, targets = images.clone(), targets.clone()
    started = 0.0
    for number in range(5 + STEPS_ALONE):
        if number == 5:
            torch.cuda.synchronize(trainer.device)
            started = time.perf_counter()
        trainer.step(images, targets, paths)
    torch.cuda.synchronize(trainer.device)
    return STEPS_ALONE * len(images) / (time.perf_counter() - started)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="data set YAML; else pictures are made")
    parser.add_argument("--make", type=int, default=3200, help="pictures to make without --data")
    parser.add_argument("--pictures", type=Path, nargs="*", default=[], help="folders to cut them from")
    parser.add_argument("--cfg", default="yolov9-s.yaml")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument("--workers", type=int, nargs="+", default=[8], help="loader processes; one or more numbers")
    parser.add_argument("--epochs", type=int, default=2, help="measured ones")
    parser.add_argument("--ways", nargs="+", default=["--augment cpu", "--augment gpu", "--cache gpu"])
    parser.add_argument("--loud", action="store_true", help="show what training says")
    parser.add_argument("--record", action="store_true", help="add a row to RECORDS.md")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure and print every way."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = arguments.data or str(made_data(folder, arguments))
        found = measure_ways(arguments, data, folder)
    if arguments.record:
        print(append_record(f"{torch.cuda.get_device_name()}: " + "; ".join(found), arguments.epochs))


def measure_ways(arguments: argparse.Namespace, data: str, folder: Path) -> list[str]:
    """Measure every way with every number of workers on a data set, print and return a line for each.

    Runs are written below ``folder``.
    """
    if not torch.cuda.is_available():
        raise SystemExit("bench.train_e2e measures CUDA devices; none was found")
    if not arguments.loud:
        LOGGER.setLevel(logging.WARNING)
    found = []
    for way, workers in itertools.product(arguments.ways, arguments.workers):
        common = f"--data {data} --cfg {arguments.cfg} --batch {arguments.batch} --img {arguments.img} "
        common += f"--workers {workers} --project {folder}/runs --noplots --noval --nosave --weights= "
        common += "--hyp hyp.scratch-high.yaml --epochs 1000"
        options = TrainOptions.from_cli(shlex.split(common) + shlex.split(way))
        figures = measure(options, arguments.epochs)
        found.append(f"`{way}`, {counted(figures.workers, 'worker')}: {figures}")
        print(found[-1], flush=True)
        torch.cuda.empty_cache()
    return found


def count_pictures(data: str) -> int:
    """Number of training pictures of a data set."""
    return len(list_images(load_data_spec(data).train).files)


def made_data(folder: Path, arguments: argparse.Namespace) -> Path:
    """Make pictures with labels and return their data YAML; a few of them stand for the validation set."""
    train = make_pictures(folder / "set", arguments.make, arguments.pictures)
    listed = folder / "val.txt"
    listed.write_text("\n".join(str(file) for file in sorted(train.iterdir())[:8]), encoding="utf-8")
    content = {"train": str(train), "val": str(listed), "nc": CLASSES, "names": [str(i) for i in range(CLASSES)]}
    write_yaml(folder / "data.yaml", content)
    return folder / "data.yaml"


if __name__ == "__main__":
    main()
