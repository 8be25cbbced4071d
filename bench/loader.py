"""Speed of the training loader: pictures per second by number of workers and cache, and where a sample's time goes.

    python -m bench.loader --pictures ../datasets/coco/images/train2017
    python -m bench.loader --make 3200 --workers 0 1 2 4 8 16 --cache none ram --record

With --make the pictures are written first, into a temporary folder: JPEG files of 640 x 480 pixels and about 63 KB, cut
out of the given pictures (or drawn), so that the load is the same on any machine. The first batches of each setting are
outside the clock. Files are in the system's page cache, so the disk is not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.pictures import make_pictures
from bench.records import REPO_ROOT, append_record, hardware, versions
from utils.data.batching import BatchMaker
from utils.data.dataset import LoadImagesAndLabels, SampleKey
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.sampling import BatchStream
from utils.data.shared_memory import fit_shared_memory, process_memory_bytes, processor_seconds
from utils.data.workers import worker_count
from utils.log import LOGGER
from utils.options import Hyp

# Stages of a sample and the functions they consist of; whatever is not listed is "other".
STAGES = {
    "read and decode": ("imread_bgr", "read_jpeg_part"),
    "resize, letterbox": ("resize_long_side", "letterbox"),
    "mosaic": ("mosaic4", "draw_window", "cut_window", "mosaic_labels"),
    "copy-paste": ("copy_paste", "choose_copies", "paste_copies"),
    "affine": ("random_perspective", "apply_affine", "warp_window", "warp_targets"),
    "mixup": ("mixup",),
    "HSV, planes": ("augment_hsv", "rgb_planes"),
    "collate": ("collate",),
}
STAGE_BATCHES = 4  # batches over which the stages are averaged
GAP_EPOCHS = 3


@dataclass(frozen=True)
class Variant:
    """Which caches are in use; mosaics is the number of prepared ones, folder where caches may write."""

    cache: str
    mosaics: int
    folder: str

    def __str__(self) -> str:
        return self.cache + (f" + {self.mosaics} mosaics" if self.mosaics else "")


@dataclass(frozen=True)
class Speed:
    """Pictures per second of several runs; of all processes, memory in bytes and processor time per picture in ms.

    Shared pages count in each process. The processor time hardly depends on what else the machine does.
    """

    rates: tuple[float, ...]
    memory: int
    processor_ms: float

    @property
    def rate(self) -> float:
        """Median of the runs."""
        return statistics.median(self.rates)


# ------------------------------------------------------------------------------------------------ throughput


def measure_speed(loader: EpochLoader, seconds: float, runs: int) -> Speed:
    """Draw batches for some seconds, several times; the first batches only warm up."""
    batches = endless(loader)
    for _ in range(1 + 2 * loader.num_workers):
        next(batches)
    pids = [os.getpid(), *loader.worker_pids()]
    rates, pictures, before = [], 0, sum(map(processor_seconds, pids))
    for _ in range(runs):
        seen, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            seen += len(next(batches)[0])
        rates.append(seen / (time.perf_counter() - started))
        pictures += seen
    used = sum(map(processor_seconds, pids)) - before
    return Speed(tuple(rates), sum(map(process_memory_bytes, pids)), used / pictures * 1000)


def endless(loader: EpochLoader) -> Iterator[tuple]:
    """Batches of epoch after epoch, each announced while the one before runs."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        loader.announce(epoch + 1)
        yield from loader
        epoch += 1


def measure_gap(loader: EpochLoader, pause: float, announce: bool) -> float:
    """Mean seconds until an epoch's first batch is there, for a consumer that is slower than the loader."""
    waits = []
    for epoch in range(GAP_EPOCHS):
        loader.set_epoch(epoch)
        if announce:
            loader.announce(epoch + 1)
        started = time.perf_counter()
        for number, _ in enumerate(loader):
            if number == 0:
                waits.append(time.perf_counter() - started)
            time.sleep(pause)
    return statistics.mean(waits[1:])  # before the first epoch there is nothing that could have been prepared


# ------------------------------------------------------------------------------------------------ stages


class StageClock:
    """Counts the processor time of functions while it is active, each without what it calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = [0.0]  # time of timed calls inside the present one

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its time added to a stage."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            self._inner.append(0.0)
            started = time.thread_time()
            try:
                return function(*arguments, **keywords)
            finally:
                spent = time.thread_time() - started
                self.seconds[stage] += spent - self._inner.pop()
                self._inner[-1] += spent

        return timed

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Replace the functions of STAGES wherever a module of utils.data uses them by name."""
        modules = [module for name, module in sys.modules.items() if name.startswith("utils.data.")]
        replaced = [
            (module, name, getattr(module, name), stage)
            for stage, names in STAGES.items()
            for name in names
            for module in modules
            if callable(getattr(module, name, None))
        ]
        for module, name, function, stage in replaced:
            setattr(module, name, self.wrap(stage, function))
        try:
            yield
        finally:
            for module, name, function, _ in replaced:
                setattr(module, name, function)


def measure_stages(dataset: LoadImagesAndLabels, batch_size: int) -> dict[str, float]:
    """Processor time per sample in ms of each stage, in this process, 'other' and 'total' last."""
    maker, clock = BatchMaker(dataset), StageClock()
    size = min(batch_size, len(dataset))
    keys = [[SampleKey(e, (e * size + i) % len(dataset)) for i in range(size)] for e in range(STAGE_BATCHES + 1)]
    maker[keys[-1]]
    with clock.active():
        started = time.thread_time()
        for batch in keys[:-1]:
            maker[batch]
        total = time.thread_time() - started
    samples = STAGE_BATCHES * size
    stages = {stage: clock.seconds[stage] for stage in STAGES if clock.seconds[stage]}
    stages |= {"other": total - sum(stages.values()), "total": total}
    return {stage: seconds / samples * 1000 for stage, seconds in stages.items()}


# ------------------------------------------------------------------------------------------------ the program


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", nargs="+", type=Path, default=[], help="folders of pictures")
    parser.add_argument("--make", type=int, default=0, help="write this many JPEG files and measure with them")
    parser.add_argument("--workers", nargs="+", type=int, default=[n for n in (0, 1, 2, 4, 8, 16) if n <= cores])
    parser.add_argument("--cache", nargs="+", default=["none"], choices=("none", "ram", "disk"))
    parser.add_argument("--mosaic-cache", type=int, default=0, help="also measure with N prepared mosaics")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hyp", default=REPO_ROOT / "hyp/hyp.scratch-high.yaml")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one run")
    parser.add_argument("--runs", type=int, default=3, help="runs per setting; the median counts")
    parser.add_argument("--start-method", choices=("fork", "spawn", "forkserver"), help="how workers are started")
    parser.add_argument("--gap", action="store_true", help="also measure the wait at the start of an epoch")
    parser.add_argument("--record", action="store_true", help="add a row to bench/RECORDS.md")
    arguments = parser.parse_args(argv)
    if not arguments.make and not arguments.pictures:
        parser.error("nothing to load: give --pictures FOLDER, or --make N to write some")
    return arguments


def make_dataset(arguments: argparse.Namespace, pictures: Sequence[Path], variant: Variant) -> LoadImagesAndLabels:
    """The training set of a variant; cache files go below the temporary folder."""
    return create_dataloader(
        pictures,
        arguments.imgsz,
        arguments.batch,
        hyp=Hyp.from_yaml(arguments.hyp),
        augment=True,
        workers=0,
        cache=None if variant.cache == "none" else variant.cache,
        cache_dir=variant.folder if variant.cache == "disk" or variant.mosaics else "",
        mosaic_cache=variant.mosaics,
    )[1]


def make_loader(arguments: argparse.Namespace, dataset: LoadImagesAndLabels, workers: int) -> EpochLoader | None:
    """A loader with exactly this many workers, or None where that is not possible."""
    batch = min(arguments.batch, len(dataset))
    fitting = worker_count(workers, batch)
    fitting, prefetch = fit_shared_memory(fitting, batch * 3 * arguments.imgsz**2)
    if fitting != workers:
        return None
    stream = BatchStream(len(dataset), batch, shuffle=True)
    method = arguments.start_method
    return EpochLoader(dataset, stream, workers=workers, prefetch=prefetch, multiprocessing_context=method)


def report_speed(variant: Variant, workers: int, speed: Speed) -> str:
    """Print one row of the table and return its short form."""
    spread = f"{min(speed.rates):.0f}-{max(speed.rates):.0f}"
    sample_ms = max(workers, 1) * 1000 / speed.rate  # time that a process spends on a sample
    figures = (
        f"{speed.rate:>8.1f} {spread:>10} {sample_ms:>10.1f} {speed.processor_ms:>8.1f} {speed.memory / 2**30:>8.2f}"
    )
    print(f"{variant!s:<20} {workers:>7} {figures}", flush=True)
    return f"{workers} workers {speed.rate:.0f} img/s ({speed.processor_ms:.1f} CPU ms)"


def report_stages(name: str, stages: dict[str, float]) -> str:
    """Print the stages of a sample and return their short form."""
    print(f"\nprocessor time per sample, cache {name}:")
    for stage, milliseconds in stages.items():
        print(f"  {stage:<20} {milliseconds:7.2f} ms  {milliseconds / stages['total']:4.0%}")
    return "a sample there: " + ", ".join(f"{stage} {value:.1f}" for stage, value in stages.items()) + " ms"


def report_gap(loader: EpochLoader, rate: float) -> str:
    """Measure and print the wait at the start of an epoch, with and without announcing it."""
    pause = 1.2 * loader.batch_size / rate
    plain, announced = (measure_gap(loader, pause, announce) for announce in (False, True))
    text = f"first batch of an epoch after {plain:.2f} s, announced {announced:.2f} s ({loader.num_workers} workers)"
    print("\n" + text)
    return text


def run_variant(arguments: argparse.Namespace, dataset: LoadImagesAndLabels, variant: Variant) -> list[str]:
    """Measure one kind of caching with all numbers of workers; returns what belongs into the record."""
    stages = report_stages(str(variant), measure_stages(dataset, arguments.batch))
    print(f"\n{'cache':<20} {'workers':>7} {'img/s':>8} {'range':>10} {'ms/sample':>10} {'CPU ms':>8} {'RSS GB':>8}")
    rates, gap = [], []
    for workers in arguments.workers:
        loader = make_loader(arguments, dataset, workers)
        if loader is None:
            print(f"{workers} workers are more than there are cores or room for, left out")
            continue
        speed = measure_speed(loader, arguments.seconds, arguments.runs)
        rates.append(report_speed(variant, workers, speed))
        if arguments.gap and workers and workers == max(arguments.workers):
            gap.append(report_gap(loader, speed.rate))
        loader.close()
    return [f"cache {variant}: " + ", ".join(rates), stages, *gap]


def run(arguments: argparse.Namespace, pictures: Sequence[Path], folder: str) -> list[str]:
    """Measure all kinds of caching; returns what belongs into the record."""
    found = []
    for cache in arguments.cache:
        for mosaics in sorted({0, arguments.mosaic_cache}):
            variant = Variant(cache, mosaics, folder)
            found += run_variant(arguments, make_dataset(arguments, pictures, variant), variant)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Make the pictures where asked to, measure, print, record."""
    arguments = parse(argv)
    LOGGER.setLevel("WARNING")
    print(f"{hardware()}\n{versions()}")
    with tempfile.TemporaryDirectory() as name:
        pictures = arguments.pictures
        if arguments.make:
            started = time.perf_counter()
            pictures = [make_pictures(Path(name), arguments.make, arguments.pictures)]
            mean = statistics.mean(file.stat().st_size for file in pictures[0].iterdir())
            print(f"{arguments.make} pictures of {mean / 1000:.0f} KB in {time.perf_counter() - started:.0f} s")
        found = run(arguments, pictures, str(Path(name) / "cache"))
    if arguments.record:
        print("\n" + append_record("; ".join(found), arguments.runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
