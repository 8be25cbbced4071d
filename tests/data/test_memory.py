"""Free memory under container limits, and bytes shared between processes."""

from __future__ import annotations

import copy
import multiprocessing
import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.drawing import label_text, paint, write_set
from utils.data.dataset import LoadImagesAndLabels
from utils.data.memory import UNKNOWN, SharedBytes, available_memory_bytes, keep_freed_memory, size_text

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="no shared buffers on Windows")


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (0, "0 KB"),
        (700, "1 KB"),
        (18_000, "18 KB"),
        (5 << 20, "5.0 MB"),
        (99 << 20, "99.0 MB"),
        (107 << 20, "0.10 GB"),
        (3 << 29, "1.50 GB"),
        (150 << 30, "150.00 GB"),
    ],
)
def test_sizes_are_never_printed_as_nothing(size: int, wanted: str) -> None:
    assert size_text(size) == wanted


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_small_caches_are_told_in_small_units(tmp_path: Path, messages: list[str], cache: str) -> None:
    images = write_set(tmp_path, {"a.png": (paint(), label_text())})
    LoadImagesAndLabels(images, 64, True, {"mosaic": 1.0}, cache=cache, mosaic_cache=1, cache_dir=tmp_path / "kept")
    assert not any(re.search(r"\b0\.0+ GB", message) for message in messages)
    assert any(re.search(r"[\d.]+ [KM]B", message) for message in messages)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 64000 kB\nMemAvailable: 9000 kB\n"}
CASES = {
    "no container": ({}, 9000 * 1024),
    "version 2, own group": (
        {
            "proc/self/cgroup": "0::/run/job\n",
            "sys/fs/cgroup/run/job/memory.max": "5000\n",
            "sys/fs/cgroup/run/job/memory.current": "3000\n",
            "sys/fs/cgroup/run/job/memory.stat": "anon 1500\ninactive_file 700\n",
        },
        2700,
    ),
    "version 2, limit of a group above": (
        {
            "proc/self/cgroup": "0::/run/job\n",
            "sys/fs/cgroup/run/job/memory.max": "max\n",
            "sys/fs/cgroup/run/job/memory.current": "10\n",
            "sys/fs/cgroup/run/memory.max": "900\n",
            "sys/fs/cgroup/run/memory.current": "100\n",
        },
        800,
    ),
    "version 1, own group mounted as the top": (
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/memory.stat": "cache 5\ntotal_inactive_file 50\n",
        },
        3050,
    ),
    "used up": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "150\n",
        },
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_limits(tmp_path: Path, name: str) -> None:
    files, expected = CASES[name]
    assert available_memory_bytes(write(tmp_path, {**MEMINFO, **files})) == expected


def test_this_machine_and_an_unknown_one(tmp_path: Path) -> None:
    assert 1 << 20 < available_memory_bytes() < UNKNOWN
    assert available_memory_bytes(tmp_path) > 1 << 20


def add_one(shared: SharedBytes) -> None:
    shared.array[3] += 1


@needs_posix
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_see_one_copy(method: str) -> None:
    shared = SharedBytes(10)
    context = multiprocessing.get_context(method)
    for _ in range(2):
        process = context.Process(target=add_one, args=(shared,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    assert shared.array.tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 0]


def count_faults(results: multiprocessing.SimpleQueue) -> None:
    """Page faults while blocks of a picture's size are taken, filled and freed."""
    import resource

    done = keep_freed_memory()
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            blocks = [np.full(3 << 20, 7, np.uint8) for _ in range(4)]
            del blocks
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    results.put((done, faults))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of the GNU C library")
def test_freed_memory_is_reused() -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=count_faults, args=(results,))
    process.start()
    process.join(60)
    done, faults = results.get()
    assert done
    assert faults < 20 * 4 * (3 << 20) / 4096 / 20


@needs_posix
def test_copies_share_the_bytes_and_none_is_allowed() -> None:
    shared = SharedBytes(4)
    other = copy.deepcopy(shared)
    other.array[0] = 7
    del other
    assert shared.array[0] == 7
    assert SharedBytes(0).array.shape == (0,)
