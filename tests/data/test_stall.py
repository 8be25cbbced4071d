"""Loaders that live and give nothing: a warning says who is reading what; the run is never ended."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.drawing import label_text, paint, write_set
from tests.data.loader_kit import Probe, probe_loader
from utils.data import stall
from utils.data.dataset import LoadImagesAndLabels
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.sampling import BatchStream
from utils.data.stall import Readings, StallWatch, process_state, stall_text

needs_fifo = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(stall.LOGGER, "warning", messages.append)
    return messages


def wait_until(is_done: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not is_done() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_done()


class Owner:
    def describe(self) -> str:
        return "details"


@pytest.fixture
def watch_threads(new_threads: Callable[[], list[str]]) -> Callable[[], int]:
    """Count the watching threads that came since the test began; loaders of other tests may still live."""
    return lambda: new_threads().count("stall watch")


def test_long_waits_are_told_at_growing_distances(said: list[str], watch_threads: Callable[[], int]) -> None:
    owner = Owner()
    watch = StallWatch(owner.describe, "val: ", limit_s=0.1)
    for _ in range(2):
        said.clear()
        begun = time.monotonic()
        with watch.waiting():
            wait_until(lambda: len(said) == 3)
        assert time.monotonic() - begun >= 0.4  # after 0.1, 0.2 and 0.4 seconds
        assert all(text.startswith("val: no batch for 0 s. details") for text in said)
    watch.close()
    wait_until(lambda: not watch_threads())


def test_short_waits_and_pauses_are_not_told(said: list[str]) -> None:
    owner = Owner()
    watch = StallWatch(owner.describe, limit_s=0.3)
    for _ in range(8):
        with watch.waiting():
            time.sleep(0.05)
    time.sleep(0.4)  # nobody waits
    assert said == []
    watch.close()


def test_switched_off_there_is_no_thread(said: list[str], watch_threads: Callable[[], int]) -> None:
    owner = Owner()
    with StallWatch(owner.describe, limit_s=0).waiting():
        time.sleep(0.05)
    assert said == []
    assert watch_threads() == 0


def test_switching_off_on_the_way_neither_warns_nor_spins(said: list[str]) -> None:
    owner = Owner()
    watch = StallWatch(owner.describe, limit_s=0.1)
    with watch.waiting():
        watch.limit_s = 0
        before = time.process_time()
        time.sleep(0.3)
    assert said == []
    assert time.process_time() - before < 0.1
    watch.close()


def test_the_thread_ends_with_its_loader(watch_threads: Callable[[], int]) -> None:
    loader = probe_loader(0)
    list(loader)
    assert watch_threads() == 1
    loader.stall.limit_s = 0.2
    del loader
    gc.collect()
    owner = Owner()
    watch = StallWatch(owner.describe, limit_s=0.2)
    with watch.waiting():
        pass
    del owner
    gc.collect()
    wait_until(lambda: not watch._thread.is_alive())


@needs_fifo
@pytest.mark.parametrize("workers", [0, 1])
def test_a_reader_that_hangs_is_named_and_the_pass_goes_on(tmp_path: Path, said: list[str], workers: int) -> None:
    images = write_set(tmp_path, {f"{i}.png": (paint(), label_text()) for i in range(4)})
    loader, dataset = create_dataloader(images, 64, 2, workers=workers, prefix="train: ")
    loader.stall.limit_s = 0.3
    assert loader.num_workers == workers
    (images / "3.png").unlink()
    os.mkfifo(images / "3.png")  # opening it waits for somebody who writes
    batches = iter(loader)
    next(batches)

    def answer() -> None:
        wait_until(lambda: said)
        with open(images / "3.png", "wb") as file:
            file.write(b"no picture")

    helper = threading.Thread(target=answer)
    helper.start()
    images_of_batch = next(batches)[0]
    helper.join()
    assert images_of_batch.shape == (2, 3, 64, 64)
    assert [Path(path).name for path in dataset.broken_files()] == ["3.png"]
    pids = loader.worker_pids() or [os.getpid()]
    assert said[0].startswith("train: no batch for 0 s. The run goes on waiting.")
    assert f"process {pids[0]}" in said[0] and f"began to read {images / '3.png'}" in said[0]
    assert f"py-spy dump --pid {pids[0]}" in said[0]
    list(loader)  # and the next pass is like any other
    loader.close()


class Hanging(Probe):
    """Its samples take a moment, and nothing is known about them."""

    def __getitem__(self, key: object) -> object:
        time.sleep(0.5)
        return super().__getitem__(key)


def test_data_sets_that_tell_nothing(said: list[str]) -> None:
    loader = EpochLoader(Hanging(2), BatchStream(2, 2))
    loader.stall.limit_s = 0.2
    list(loader)
    assert "has read nothing so far" in said[0]


def test_readings_are_kept_per_process(tmp_path: Path) -> None:
    data = LoadImagesAndLabels(write_set(tmp_path, {f"{i}.png": (paint(), None) for i in range(3)}), 64)
    assert [data.readings.last(worker) for worker in (-1, 0, 10_000)] == [-1, -1, -1]
    data[2]
    assert data.readings.last() == 2
    table = Readings()
    table.note(0)
    assert table.last() == 0


def test_message_fits_the_disk() -> None:
    text = stall_text([(os.getpid(), "/nas/a b.jpg")], "nfs4")
    assert "network disk (nfs4)" in text and "ls -l '/nas/a b.jpg'" in text
    assert f"process {os.getpid()} (computing)" in text
    assert process_state(2**30) == "state unknown"
    assert "network" not in stall_text([])
