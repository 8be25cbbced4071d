"""Time and memory of scanning a data set of many small files, without and with the label cache.

Writes pictures and label files into a temporary folder, then scans them twice, each time in a new process:

    python -m bench.scan --files 100000
    python -m bench.scan --files 100000 --record

The first scan reads every file (they are in the system's page cache, so this measures the program, not the disk); the
second one finds all outcomes in the label cache. Peak memory is the largest resident size of the scanning process;
the part that loading Python and the libraries takes is given beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

from bench.records import REPO_ROOT, append_record, hardware, versions
from utils.data.scan import scan_dataset

TEMPLATES = 16  # different pictures; the files are copies of them
PICTURES_PER_FOLDER = 10_000


def write_set(root: Path, files: int, objects: int, use_links: bool) -> None:
    """Write ``files`` pictures of 64 x 48 pixels with ``objects`` boxes each below images/ and labels/."""
    rng = np.random.default_rng(0)
    originals = []
    for number in range(TEMPLATES):
        done, data = cv2.imencode(".jpg", rng.integers(0, 255, (48, 64, 3), np.uint8))
        if not done:
            raise RuntimeError("OpenCV cannot write JPEG files here")
        original = root / f"template{number}.jpg"
        original.write_bytes(data.tobytes())
        originals.append((original, data.tobytes()))
    for number in range(files):
        part = f"part{number // PICTURES_PER_FOLDER}"
        image, label = root / "images" / part / f"{number:07d}.jpg", root / "labels" / part / f"{number:07d}.txt"
        if number % PICTURES_PER_FOLDER == 0:
            image.parent.mkdir(parents=True)
            label.parent.mkdir(parents=True)
        original, data = originals[number % TEMPLATES]
        if use_links:
            os.link(original, image)
        else:
            image.write_bytes(data)
        rows = np.concatenate((rng.uniform(0.3, 0.7, (objects, 2)), rng.uniform(0.05, 0.4, (objects, 2))), 1)
        label.write_text("".join(f"{i % 80} " + " ".join(f"{v:.6f}" for v in row) + "\n" for i, row in enumerate(rows)))


def measure(folder: Path) -> None:
    """Scan a folder in this process and print the figures as JSON."""
    import resource  # not on Windows, where peak memory is not told

    unit = 1 if sys.platform == "darwin" else 1024  # bytes or KiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    start = time.perf_counter()
    result = scan_dataset(folder)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    figures = {"seconds": seconds, "base_bytes": before, "peak_bytes": peak, "pictures": len(result)}
    print(json.dumps({**figures, "objects": result.counts.objects}))


def measure_in_new_process(folder: Path) -> dict[str, float]:
    """Return the figures of ``measure`` from a process of its own."""
    command = [sys.executable, "-m", "bench.scan", "--measure", str(folder)]
    run = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"the scan failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def describe(figures: dict[str, float]) -> str:
    """The figures of one scan in a line."""
    peak, base = (figures[key] / 2**20 for key in ("peak_bytes", "base_bytes"))
    rate = figures["pictures"] / figures["seconds"]
    return f"{figures['seconds']:.1f} s ({rate:.0f} pictures/s), peak memory {peak:.0f} MiB (before it {base:.0f} MiB)"


def main() -> None:
    """Make the files, scan twice, print one line per scan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000, help="pictures to write, each with a label file")
    parser.add_argument("--objects", type=int, default=3, help="boxes per picture")
    parser.add_argument("--links", action="store_true", help="hard links instead of copies: pictures share their bytes")
    parser.add_argument("--folder", help="where the temporary folder is made; default: the system's")
    parser.add_argument("--record", action="store_true", help="add a row to RECORDS.md")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(Path(arguments.measure))
        return
    print(f"{hardware()}; {versions()}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        start = time.perf_counter()
        write_set(Path(name), arguments.files, arguments.objects, arguments.links)
        print(f"{arguments.files} pictures and label files written in {time.perf_counter() - start:.0f} s")
        lines = []
        for title in ("first scan", "second scan"):
            lines.append(f"{title} {describe(measure_in_new_process(Path(name) / 'images'))}")
            print(lines[-1], flush=True)
    if arguments.record:
        append_record("; ".join(lines), 1)


if __name__ == "__main__":
    main()
