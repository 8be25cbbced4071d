"""Speed of another program beside ours: the same pictures, batch, size and workers, in the same run.

    python -m bench.compare --checkout ../yolov9 --make 3200 --pictures ../datasets/coco --record
    python -m bench.compare --checkout . --command "yolo train model=yolov9s.yaml data={data} imgsz={img} batch={batch}
        workers={workers} epochs={epochs} val=False project={project}"

The other program runs as it is, in a process of its own that starts in --checkout. Nothing of it is read but the rows
that it adds to a results.csv below the project folder: the time between two rows is an epoch, the first epoch is left
out. So it has to write such a table, and should not validate in between. Use the flags of --command to switch that off.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import train_e2e
from bench.records import append_record
from utils.train.gpu_sampler import GpuSampler, summarise

UPSTREAM = (
    "{python} train_dual.py --data {data} --cfg models/detect/{cfg} --weights '' --hyp hyp.scratch-high.yaml "
    "--batch {batch} --img {img} --workers {workers} --epochs {epochs} --device 0 --noval --nosave --noplots "
    "--min-items 0 --project {project}"
)
POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """Seconds of each epoch but the first, and the mean utilisation of the card over them in percent."""

    epochs_s: tuple[float, ...]
    utilisation: float | None


def row_count(project: Path) -> int:
    """Rows below the header of the results table; 0 while there is none."""
    tables = sorted(project.rglob("results.csv"))
    if not tables:
        return 0
    return max(0, len([line for line in tables[-1].read_text(errors="replace").splitlines() if line.strip()]) - 1)


def watch(command: list[str], folder: Path, project: Path, *, epochs: int, sampler: GpuSampler, log: Path) -> Outcome:
    """Run a command until it has written ``epochs`` rows or ended.

    Raises RuntimeError with the end of its output where it ends before the third row.
    """
    times: list[float] = []
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            while len(times) < epochs:
                is_over = process.poll() is not None
                times += [time.perf_counter()] * (row_count(project) - len(times))
                if is_over:
                    break
                time.sleep(POLL_S)
        finally:
            process.terminate()
            process.wait(timeout=60)
    if len(times) < 3:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise RuntimeError(
            f"{shlex.join(command)} wrote {len(times)} rows into a results.csv below {project}; at least 3 epochs are "
            f"needed. The end of its output:\n{end}"
        )
    usage = summarise([sample for sample in sampler.since(times[0]) if sample.time_s <= times[-1]])
    return Outcome(tuple(later - earlier for earlier, later in zip(times, times[1:], strict=False)), usage.mean)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what our own training needs comes from bench.train_e2e."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="folder in which the other program starts")
    parser.add_argument("--command", default=UPSTREAM, help="how it starts; words in braces are filled in")
    parser.add_argument("--python", default=sys.executable, help="interpreter with its packages")
    parser.add_argument("--name", default="", help="what to call it; default: the folder's name")
    own, rest = parser.parse_known_args(argv)
    return argparse.Namespace(**vars(own), ours=train_e2e.parse(rest))


def main(argv: list[str] | None = None) -> None:
    """Measure the other program and ours on the same pictures."""
    arguments = parse(argv)
    ours = arguments.ours
    if not arguments.checkout.is_dir():
        raise SystemExit(f"--checkout {arguments.checkout}: no such folder")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = ours.data or str(train_e2e.made_data(folder, ours))
        other = measure_other(arguments, data, folder)
        print(other, flush=True)
        found = [other]
        found += train_e2e.measure_ways(ours, data, folder)
    if ours.record:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        print(append_record(f"{device}: " + "; ".join(found), ours.epochs))


def measure_other(arguments: argparse.Namespace, data: str, folder: Path) -> str:
    """Run the other program and describe its speed."""
    ours, project = arguments.ours, folder / "other"
    epochs = 1 + max(2, ours.epochs)
    words = {
        "python": shlex.quote(arguments.python),
        "data": shlex.quote(data),
        "cfg": shlex.quote(ours.cfg),
        "batch": ours.batch,
        "img": ours.img,
        "workers": ours.workers[0],
        "epochs": epochs,
        "project": shlex.quote(str(project)),
    }
    command = shlex.split(arguments.command.format(**words))
    sampler = GpuSampler.for_device(torch.device("cuda:0")) if torch.cuda.is_available() else GpuSampler(None)
    sampler.start()
    try:
        outcome = watch(command, arguments.checkout, project, epochs=epochs, sampler=sampler, log=folder / "output.txt")
    finally:
        sampler.stop()
    rates = [train_e2e.count_pictures(data) / seconds for seconds in outcome.epochs_s]
    usage = "" if outcome.utilisation is None else f", GPU-Util {outcome.utilisation:.0f} %"
    title = arguments.name or arguments.checkout.resolve().name
    return f"{title}: {statistics.mean(rates):.0f} img/s ({min(rates):.0f}-{max(rates):.0f}){usage}"


if __name__ == "__main__":
    main()
