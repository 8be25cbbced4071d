"""Speed of the pictures that the GPU puts together: milliseconds per batch, and pictures per second from the files on.

    python -m bench.augment --make 3200 --workers 8 --record
    python -m bench.augment --pictures ../datasets/coco/images/train2017 --workers 8 --pool ring --slots 4096

`whole` keeps the set in the GPU's memory, so that loader processes only plan; in a `ring` they decode every picture
once. The composition is timed by CUDA events, with every batch planned before; feeding includes decoding, planning and
copying, and nothing else runs on the GPU. On a CPU plain torch does the work, which only shows that everything runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.pictures import make_pictures
from bench.records import REPO_ROOT, append_record, hardware, versions
from utils.data.dataset import SampleKey
from utils.data.gpu_augment import Composer
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.plan_batches import PlanBatch
from utils.data.plans import PlannedImagesAndLabels
from utils.data.pool import PoolSettings
from utils.data.prefetch import DevicePrefetcher
from utils.log import LOGGER
from utils.options import Hyp
from utils.runtime import synchronise

WARM_UP, TIMED_BATCHES = 3, 20
WHOLE_BYTES = 1 << 50  # a budget that holds any set


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", nargs="+", type=Path, default=[], help="folders of pictures")
    parser.add_argument("--make", type=int, default=0, help="write this many JPEG files and measure with them")
    parser.add_argument("--workers", nargs="+", type=int, default=[8])
    parser.add_argument("--pool", nargs="+", default=["whole", "ring"], choices=("whole", "ring"))
    parser.add_argument("--slots", type=int, default=1024, help="pictures that a ring holds")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hyp", default=REPO_ROOT / "hyp/hyp.scratch-high.yaml")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one run")
    parser.add_argument("--runs", type=int, default=3, help="runs per setting; the median counts")
    parser.add_argument("--record", action="store_true", help="add a row to bench/RECORDS.md")
    arguments = parser.parse_args(argv)
    if not arguments.make and not arguments.pictures:
        parser.error("nothing to load: give --pictures FOLDER, or --make N to write some")
    return arguments


def make_loader(arguments: argparse.Namespace, pictures: Sequence[Path], kind: str, workers: int) -> EpochLoader:
    """Loader with a pool of a kind on the device."""
    budget = WHOLE_BYTES if kind == "whole" else arguments.slots * 3 * arguments.imgsz**2
    settings = PoolSettings(torch.device(arguments.device), is_cached=True, budget_bytes=budget, is_required=True)
    return create_dataloader(
        pictures, arguments.imgsz, arguments.batch, hyp=Hyp.from_yaml(arguments.hyp), augment=True, shuffle=True,
        workers=workers, pool=settings,
    )[0]  # fmt: skip


def time_composing(composer: Composer, batches: Sequence[PlanBatch]) -> float:
    """Milliseconds that the device needs for the pictures of a batch whose plans it has."""
    on_device = [batch.moved_to(composer.device) for batch in batches] if composer.use_triton else list(batches)
    return statistics.median(
        milliseconds(composer.device, lambda batch=batch: composer.compose(batch)) for batch in on_device
    )


def milliseconds(device: torch.device, work: Callable[[], object]) -> float:
    """Time of some work on a device, after it has been done once."""
    work()
    synchronise(device)
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end)


def feeding_rates(loader: EpochLoader, device: torch.device, seconds: float, runs: int) -> list[float]:
    """Pictures per second of several runs; epochs follow each other as in training."""
    rates, epoch, seen, warm, started = [], 0, 0, WARM_UP + 2 * loader.num_workers, 0.0
    while len(rates) < runs:
        loader.set_epoch(epoch)
        loader.announce(epoch + 1)
        for images, *_ in DevicePrefetcher(loader, device):
            if warm:
                warm -= 1
                started = time.perf_counter()
                continue
            seen += len(images)
            if time.perf_counter() - started < seconds:
                continue
            synchronise(device)
            rates.append(seen / (time.perf_counter() - started))
            seen, started = 0, time.perf_counter()
        epoch += 1
    return rates


def plan_ms(dataset: PlannedImagesAndLabels, samples: int = 200) -> float:
    """Processor time in ms that one process needs to plan a sample, without decoding."""
    started = time.thread_time()
    for number in range(samples):
        dataset.plan(SampleKey(0, number % len(dataset)))
    return (time.thread_time() - started) / samples * 1000


def run(arguments: argparse.Namespace, pictures: Sequence[Path]) -> list[str]:
    """Measure all kinds of pools and numbers of workers; returns what belongs into the record."""
    device, found = torch.device(arguments.device), []
    for kind in arguments.pool:
        for workers in arguments.workers:
            loader = make_loader(arguments, pictures, kind, workers)
            started = time.perf_counter()
            loader.fill_pool()
            filled_s, layout = time.perf_counter() - started, loader.composer.pool.layout
            batches = [batch for batch, _ in zip(loader, range(TIMED_BATCHES), strict=False)]
            for batch in batches:
                loader.composer(batch)
            compose_ms = time_composing(loader.composer, batches)
            rates = feeding_rates(loader, device, arguments.seconds, arguments.runs)
            text = (
                f"{kind} ({layout.slots} pictures, {layout.total_bytes / 2**30:.2f} GB, filled in {filled_s:.1f} s), "
                f"{loader.num_workers} workers: composing {compose_ms:.2f} ms a batch of {arguments.batch}, "
                f"planning {plan_ms(loader.dataset):.2f} CPU ms a picture, "
                f"feeding {statistics.median(rates):.0f} img/s ({min(rates):.0f}-{max(rates):.0f})"
            )
            print(text, flush=True)
            found.append(text)
            loader.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Make the pictures where asked to, measure, print, record."""
    arguments = parse(argv)
    LOGGER.setLevel("WARNING")
    name = torch.cuda.get_device_name(arguments.device) if arguments.device.startswith("cuda") else "no GPU"
    print(f"{hardware()}, {name}\n{versions()}")
    with tempfile.TemporaryDirectory() as folder:
        pictures = arguments.pictures
        if arguments.make:
            pictures = [make_pictures(Path(folder), arguments.make, arguments.pictures)]
        found = run(arguments, pictures)
    if arguments.record:
        print("\n" + append_record(f"{name}: " + "; ".join(found), arguments.runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
