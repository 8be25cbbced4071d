"""Loader processes: their number, one thread each, light imports, and what is told when one dies."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.data.loader_kit import Probe, loader_of, probe_loader
from utils.data.batching import Failure
from utils.data.cache_folder import CutFile
from utils.data.dataset import Sample, SampleKey
from utils.data.loader import EpochLoader
from utils.data.sampling import BatchStream
from utils.data.workers import (
    THREAD_VARIABLES,
    LoaderError,
    death_message,
    leave_absent_readers,
    raise_failure,
    single_threaded_children,
    worker_count,
)

REPO_ROOT = Path(__file__).resolve().parents[2]
needs_kill = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no such signals")


def test_worker_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert worker_count(8, 16) == 6
    assert worker_count(2, 16) == 2
    assert worker_count(8, 1) == 0
    assert worker_count(8, 3) == 3
    assert worker_count(-1, 16) == 6


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_one_thread_per_worker(context: str) -> None:
    loader = probe_loader(2, multiprocessing_context=context)
    rows = [row for batch in loader for row in batch[1].tolist()]
    assert {row[1] for row in rows} == {1}  # OpenCV, where 0 and 1 read back as 1
    assert {row[2] for row in rows} == {1}  # torch
    assert max(row[3] for row in rows) <= 4  # the worker itself and the threads that feed its queues
    loader.close()


def test_children_are_told_to_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREAD_VARIABLES[0], "5")
    monkeypatch.delenv(THREAD_VARIABLES[1], raising=False)
    with single_threaded_children():
        assert [os.environ[name] for name in THREAD_VARIABLES] == ["1"] * len(THREAD_VARIABLES)
    assert os.environ[THREAD_VARIABLES[0]] == "5"
    assert THREAD_VARIABLES[1] not in os.environ


@pytest.mark.slow
def test_workers_import_nothing_heavy() -> None:
    heavy = {"matplotlib", "pandas", "seaborn", "scipy", "torchvision", "tensorboard", "models", "utils.train"}
    code = f"import sys, utils.data.loader; print('HEAVY', sorted({heavy!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=120)
    assert "HEAVY []" in run.stdout, run.stdout + run.stderr


# ------------------------------------------------------------------------------------------------ dying workers


@needs_kill
def test_a_killed_worker_ends_the_pass_with_a_reason() -> None:
    loader = probe_loader(2, length=400)
    started, handler = time.perf_counter(), signal.getsignal(signal.SIGCHLD)
    with pytest.raises(LoaderError, match=r"pid \d+\) has died.*SIGKILL.*main memory.*--workers 1 instead of 2"):
        for number, _ in enumerate(loader):
            if number == 3:
                os.kill(loader.worker_pids()[0], signal.SIGKILL)
    assert time.perf_counter() - started < 30  # not the minute that a sample would take
    assert signal.getsignal(signal.SIGCHLD) == handler
    with pytest.raises(LoaderError, match="has died"):  # and it does not come back by itself
        next(iter(loader))
    loader.close()


class Sleeping(Probe):
    """Every sample takes a minute."""

    def __getitem__(self, key: SampleKey) -> Sample:
        time.sleep(60)
        return super().__getitem__(key)


@needs_kill
def test_a_worker_killed_while_it_is_waited_for() -> None:
    loader = EpochLoader(Sleeping(), BatchStream(16, 2), workers=1)
    batches = iter(loader)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(loader.worker_pids()[0], signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    started = time.perf_counter()
    with pytest.raises(LoaderError, match="SIGKILL"):
        next(batches)
    assert time.perf_counter() - started < 30  # not the minute that a sample would take
    loader.close()


@needs_kill
def test_a_death_between_two_batches_interrupts_nothing_else() -> None:
    loader = probe_loader(1, length=400)
    batches = iter(loader)
    next(batches)
    os.kill(loader.worker_pids()[0], signal.SIGKILL)
    time.sleep(0.3)  # here an exception out of nowhere would show
    with pytest.raises(LoaderError):
        next(batches)
    loader.close()


@needs_kill
@pytest.mark.slow
def test_a_script_ends_with_a_sentence_and_a_failure_code(shapes_dataset: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from tests.data.loader_kit import loader_of
        from utils.cli import run_script
        import utils.data.loader

        def main():
            utils.data.loader.worker_count = lambda wanted, _: wanted
            loader = loader_of(Path({str(shapes_dataset)!r}), 2)
            for epoch in range(50):
                for batch in loader:
                    os.kill(loader.worker_pids()[1], signal.SIGKILL)

        run_script(main)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=REPO_ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    assert re.search(
        r"ERROR: a loader process \(pid \d+\) has died.*SIGKILL.*--workers 1 instead of 2", run.stdout + run.stderr
    )
    assert "Traceback" not in run.stdout + run.stderr


def test_death_messages_fit_the_cause() -> None:
    assert "main memory runs out" in death_message(5, -9, 8)
    assert "--workers 4 instead of 8" in death_message(5, -9, 8)
    assert "--cache" in death_message(5, -9, 8)
    assert "--shm-size" in death_message(5, -signal.SIGBUS, 8)
    assert "SIGSEGV" in death_message(5, -signal.SIGSEGV, 8)
    assert "exit code 3" in death_message(5, 3, 8)
    assert "free" in death_message(5, -9, 8, [os.getpid()])


class Cut(Probe):
    """Reads a mapped file that has become shorter, in the worker, as prepared pictures may do."""

    def __init__(self, path: Path, is_cut: bool) -> None:
        super().__init__()
        self.path, self.is_cut = path, is_cut
        path.write_bytes(bytes(1 << 16))

    def cut_files(self) -> list[CutFile]:
        return [CutFile(self.path, 0, 1 << 16, "--mosaic-cache")] if self.is_cut else []

    def __getitem__(self, key: SampleKey) -> Sample:
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.truncate(self.path, 0)
        return super().__getitem__(key)[: mapped[1 << 15]]


@needs_kill
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_bus_error_is_explained_by_what_is_there(tmp_path: Path, is_cut: bool) -> None:
    loader = EpochLoader(Cut(tmp_path / "7.mosaics", is_cut), BatchStream(16, 2), workers=1)
    with pytest.raises(LoaderError, match="bus error") as caught:
        next(iter(loader))
    loader.close()
    text = str(caught.value)
    assert ("7.mosaics" in text, "--shm-size" in text) == (is_cut, not is_cut)
    if is_cut:
        assert "0 KB instead of 64 KB" in text
        assert f"delete {tmp_path}" in text and "--mosaic-cache" in text


# ------------------------------------------------------------------------------------------------ failing workers


class Breaking(Probe):
    """Fails on the picture with index 3."""

    def __getitem__(self, key: SampleKey) -> Sample:
        if key.index == 3:
            raise ZeroDivisionError("by zero")
        return super().__getitem__(key)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_in_a_worker_names_the_picture(workers: int) -> None:
    loader = EpochLoader(Breaking(), BatchStream(16, 2), workers=workers)
    with pytest.raises(
        LoaderError, match="the picture 3.jpg could not be prepared: ZeroDivisionError: by zero"
    ) as info:
        list(loader)
    assert "__getitem__" in str(info.value.__cause__)
    loader.close()


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left", "--shm-size"),
        ("MemoryError: ", "fewer --workers"),
        ("error: Insufficient memory", "fewer --workers"),
        ("KeyError: 'x'", "KeyError"),
    ],
)
def test_reported_failures_come_with_advice(reason: str, advice: str) -> None:
    with pytest.raises(LoaderError, match=advice):
        raise_failure(Failure("the picture a.jpg", reason, "traceback"))


def test_pictures_that_vanish_all_at_once_are_told(shapes_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(shapes_dataset)

    def gone(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr("utils.data.dataset.imread_bgr", gone)
    with pytest.raises(LoaderError, match="none of the 24 pictures can be read"):
        list(loader)


@pytest.mark.parametrize("error", [ConnectionResetError("reset by peer"), BrokenPipeError(), EOFError()], ids=repr)
def test_a_reader_that_ends_is_no_fault_of_a_worker(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does so while a batch is handed over depends on the moment; other faults are shown as ever."""
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    leave_absent_readers()

    def fail(fault: Exception) -> None:
        sys.excepthook(type(fault), fault, None)

    for fault in (error, other := ValueError("no batch")):
        thread = threading.Thread(target=fail, args=(fault,))
        thread.start()
        thread.join()
    assert shown == [other]
    fail(error)
    assert shown == [other, error]
