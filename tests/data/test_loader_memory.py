"""Shared memory that is too small, memory figures, and main memory that stays flat."""

from __future__ import annotations

import gc
import os
import re
import time
from collections import namedtuple
from pathlib import Path

import pytest

from tests.data.loader_kit import loader_of, memory_of
from utils.data.shared_memory import (
    fit_shared_memory,
    memory_figures,
    process_memory_bytes,
    processor_seconds,
    shared_bytes,
)

Usage = namedtuple("Usage", "total used free")
BATCH_BYTES = 16 * 3 * 640 * 640
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr("utils.data.shared_memory.LOGGER.warning", messages.append)
    return messages


@pytest.mark.parametrize(
    ("free_mb", "wanted"),
    [(10_000, (8, 2)), (1000, (8, 2)), (300, (8, 1)), (144, (3, 1)), (64, (0, 0)), (0, (0, 0))],
)
def test_workers_and_batches_that_fit(free_mb: int, wanted: tuple[int, int], said: list[str]) -> None:
    assert fit_shared_memory(8, BATCH_BYTES, free_bytes=free_mb << 20) == wanted
    assert len(said) == (wanted != (8, 2))
    assert all("--shm-size" in text for text in said)
    assert shared_bytes(*wanted[:1], BATCH_BYTES, wanted[1]) <= free_mb << 20
    assert fit_shared_memory(0, BATCH_BYTES) == (0, 0)


def test_two_loaders_share(said: list[str]) -> None:
    free = int(shared_bytes(8, BATCH_BYTES) * 1.5)
    assert fit_shared_memory(8, BATCH_BYTES, free_bytes=free) == (8, 2)
    workers, prefetch = fit_shared_memory(8, BATCH_BYTES, share=0.5, free_bytes=free)
    assert 2 * shared_bytes(workers, BATCH_BYTES, prefetch) <= free
    assert "this loader may use 50%" in said[0]
    assert int(re.search(r"--shm-size=(\d+)g", said[0])[1]) << 30 >= 2 * shared_bytes(8, BATCH_BYTES)


def test_main_memory_can_be_the_limit(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr("utils.data.shared_memory.SHARED_MEMORY", Path.cwd())
    monkeypatch.setattr("utils.data.shared_memory.shutil.disk_usage", lambda _: Usage(0, 0, 64 << 30))
    monkeypatch.setattr("utils.data.shared_memory.available_memory_bytes", lambda: 300 << 20)
    assert fit_shared_memory(8, BATCH_BYTES) == (8, 1)
    assert "main memory has 300 MB free" in said[0]
    assert "--shm-size" not in said[0]


@pytest.mark.parametrize(("free_mb", "workers", "prefetch"), [(64, 2, 2), (0.4, 2, 1), (0, 0, None)])
def test_a_container_of_64_mb_still_loads(
    free_mb: float, workers: int, prefetch: int, shapes_dataset: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr("utils.data.loader.worker_count", lambda wanted, _: wanted)
    monkeypatch.setattr("utils.data.shared_memory.SHARED_MEMORY", Path.cwd())
    monkeypatch.setattr("utils.data.shared_memory.shutil.disk_usage", lambda _: Usage(1 << 26, 0, int(free_mb * 2**20)))
    loader = loader_of(shapes_dataset, 2)
    assert (loader.num_workers, loader._loader.prefetch_factor) == (workers, prefetch)
    assert len(said) == (prefetch != 2)
    assert sum(len(batch[0]) for batch in loader) == 24
    loader.close()


def test_without_dev_shm_nothing_is_reduced(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr("utils.data.shared_memory.SHARED_MEMORY", Path("no such folder"))
    assert fit_shared_memory(8, 1 << 40) == (8, 2)
    assert not said


@needs_proc
def test_memory_figures_tell_of_this_process_and_its_workers() -> None:
    assert process_memory_bytes() > 50 << 20
    assert process_memory_bytes(os.getpid()) > 50 << 20
    assert process_memory_bytes(1 << 30) == 0
    text = memory_figures([os.getpid(), 1 << 30])
    assert "main memory free" in text
    assert "this process holds" in text
    assert "its 1 living loader processes" in text


@needs_proc
def test_processor_time_of_a_process() -> None:
    assert processor_seconds() == pytest.approx(time.process_time(), abs=0.1)
    assert processor_seconds(os.getpid()) > 0
    assert processor_seconds(1 << 30) == 0


@needs_proc
@pytest.mark.slow
def test_memory_stays_flat_over_thirty_epochs(shapes_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.data.loader.worker_count", lambda wanted, _: wanted)
    loader = loader_of(shapes_dataset, 2, imgsz=160)  # a kept epoch would add 1.8 MB, all of them more than 3 %
    held = {}
    for epoch in range(30):
        loader.set_epoch(epoch)
        loader.announce(epoch + 1)
        for _ in loader:
            pass
        gc.collect()
        held[epoch] = memory_of([os.getpid(), *loader.worker_pids()])
    loader.close()
    assert held[29] < held[2] * 1.03, {epoch: size >> 20 for epoch, size in held.items()}
