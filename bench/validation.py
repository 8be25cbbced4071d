"""Pictures per second that ``val_dual.py`` measures on a labelled split, pass after pass, in one process.

    python -m bench.validation --data bccd.yaml --weights best.pt --passes 9 --record

Loader, network and figures are those of ``val_dual.py`` without plots. A pass counts from the first batch asked for to
its figures. Before each there is a rest, in which loader processes begin to read, as they do in ``val_dual.py``
while the network warms up; ``--cold`` lets them begin with the pass, ``--kept`` has the pictures of an earlier pass in
memory, as trainings with few validation pictures. The first passes, in which kernels are loaded and passes of the
network recorded, are shown but not counted.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Sequence

import torch

from bench.records import append_record
from models.backend import DetectMultiBackend
from models.replay import PLAIN_CALLS, Replay
from utils.data.loader import create_dataloader
from utils.data.prefetch import DevicePrefetcher
from utils.data.spec import load_data_spec
from utils.evaluate.validator import Validator, ValResult
from utils.log import LOGGER
from utils.runtime import check_img_size, limit_threads, select_device, synchronise

WARM_UP = PLAIN_CALLS + 2  # passes, so that each shape of a batch is recorded


def measure(arguments: argparse.Namespace) -> tuple[list[float], str]:
    """Return pictures per second of each pass after the warm-up, and where the time of the last one went."""
    device = select_device(arguments.device)
    spec = load_data_spec(arguments.data)
    model = DetectMultiBackend(arguments.weights, device=device, data=arguments.data, cuda_graphs=False)
    loader, dataset = create_dataloader(
        spec.split(arguments.split),
        int(check_img_size(arguments.img, model.stride)),
        arguments.batch,
        model.stride,
        pad=0.5,
        rect=True,
        workers=arguments.workers,
        nc=spec.nc,
        names=spec.names,
    )
    if arguments.kept:
        loader.keep()
    waiting = DevicePrefetcher(loader, torch.device("cpu"))  # counts the waits and moves nothing
    replay = Replay(is_off=not model.pt, keeps_results=False)
    validator = Validator(waiting, names=spec.names, device=device, half=arguments.half, replay=replay)
    rates = []
    try:
        for number in range(WARM_UP + arguments.passes):
            if not (arguments.cold or arguments.kept):
                loader.begin()
            time.sleep(arguments.rest)
            synchronise(device)
            started = time.perf_counter()
            result = validator.run(model)
            seconds = time.perf_counter() - started
            rates.append(len(dataset) / seconds)
            print(f"pass {number}: {rates[-1]:.0f} img/s", flush=True)
    finally:
        loader.close()
    return rates[WARM_UP:], describe_parts(seconds, waiting.wait_s, result, len(dataset))


def describe_parts(seconds: float, wait_s: float, result: ValResult, pictures: int) -> str:
    """Milliseconds of a pass by what they went to."""
    copied, network, suppression = (each * pictures for each in result.speed_ms)
    figures = 1000 * (seconds - wait_s) - copied - network - suppression
    return (
        f"{1000 * seconds:.0f} ms in the last pass: {1000 * wait_s:.0f} waiting for pictures, "
        f"{copied:.0f} copying them, {network:.0f} network, {suppression:.0f} suppression, "
        f"{figures:.0f} matching and figures; mAP50 {result.map50:.3f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--device", default="")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--rest", type=float, default=0.3, help="seconds before each pass")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--cold", action="store_true", help="nothing is read in the rest")
    begin.add_argument("--kept", action="store_true", help="pictures stay in memory")
    parser.add_argument("--record", action="store_true", help="add a row to RECORDS.md")
    arguments = parser.parse_args(argv)
    if min(arguments.passes, arguments.batch) < 1 or arguments.rest < 0:
        parser.error("--passes and --batch have to be at least 1, --rest at least 0")
    LOGGER.setLevel(logging.WARNING)
    limit_threads()
    rates, parts = measure(arguments)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    text = f"{name}: median {statistics.median(rates):.0f} img/s ({min(rates):.0f}-{max(rates):.0f}); {parts}"
    print(text)
    if arguments.record:
        print(append_record(text, len(rates)))


if __name__ == "__main__":
    main()
