"""Loader processes: how many, with one thread each, and what to tell when one of them dies."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType

from utils.data.batching import Failure
from utils.data.cache_folder import CutFile
from utils.data.listing import printable
from utils.data.memory import keep_freed_memory, size_text
from utils.data.shared_memory import memory_figures
from utils.data.stall import StallWatch
from utils.log import LOGGER
from utils.runtime import worker_limit_threads

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
BUS_ERROR = getattr(signal, "SIGBUS", None)  # missing on Windows, like SIGKILL and SIGCHLD
CHILD_SIGNAL = getattr(signal, "SIGCHLD", None)
DEATH_WAIT_S = 1.0
END_GRACE_S = 5.0  # that loader processes get to end by themselves; a stopped one would take for ever
SHARED_MEMORY_ADVICE = "give the container more shared memory (--shm-size=8g or --ipc=host), or use fewer --workers"


class LoaderError(ChildProcessError):
    """A batch could not be made; the message says why and what to do."""


def worker_count(wanted: int, batch_size: int) -> int:
    """Loader processes to start: no more than usable CPUs and pictures in a batch, none for single pictures.

    A negative number asks for as many as there are CPUs.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = min(cpus, batch_size if batch_size > 1 else 0)
    return limit if wanted < 0 else min(wanted, limit)


def init_worker(worker_id: int) -> None:
    """Set a loader process up: one thread, as parallel work is spread over processes."""
    worker_limit_threads(worker_id)
    keep_freed_memory()
    leave_absent_readers()


def leave_absent_readers() -> None:
    """Say nothing of a reader that is gone while it is handed a batch: it has ended, and was told why if need be.

    The thread of Python's ``multiprocessing`` that hands memory over shows such an end as a fault, with a traceback.
    """
    told = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_handing_over = threading.current_thread() is not threading.main_thread()
        if not (is_handing_over and issubclass(kind, (ConnectionError, EOFError))):
            told(kind, error, trace)

    sys.excepthook = tell


@contextlib.contextmanager
def single_threaded_children() -> Iterator[None]:
    """Processes started inside read 1 as the size of their thread pools; spawned ones load their libraries anew."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class WorkerWatch:
    """Knows the processes of one loader and turns the death of one into a LoaderError.

    torch reports a dead worker by an exception out of whatever line the main thread is in, perhaps in the middle of
    writing a checkpoint. Here it comes out of the loader only.
    """

    def __init__(
        self, stall: StallWatch | None = None, cut_files: Callable[[], Sequence[CutFile]] | None = None
    ) -> None:
        """cut_files tells which files of prepared pictures are too short: reading those is a bus error."""
        self.processes: Sequence[BaseProcess] = ()
        self.stall, self._cut_files = stall, cut_files or list
        self._owner = os.getpid()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Note the processes that are started inside."""
        multiprocessing.util.get_temp_dir()  # they share this process's, which is removed even if they are killed
        before, handler = set(multiprocessing.active_children()), _child_handler()
        try:
            with single_threaded_children():
                yield
        finally:
            _set_child_handler(handler)
        self.processes = [child for child in multiprocessing.active_children() if child not in before]
        _STARTED.extend((os.getpid(), process) for process in self.processes)
        atexit.unregister(_end_all)  # the last one registered is the first one called: before those that only wait
        atexit.register(_end_all)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Let the processes be ended inside, which waits for them; those that outlive the grace are killed."""
        processes, self.processes = self.processes, ()
        _STARTED[:] = [(owner, process) for owner, process in _STARTED if process not in processes]
        is_owner = os.getpid() == self._owner  # the copy in a forked process ends nothing
        if is_owner and sys.is_finalizing():  # too late for the thread below, which would never begin to run
            for process in processes:
                process.kill()
        elif is_owner and any(process.exitcode is None for process in processes):
            with self._killing_late_ones(processes):
                yield
            return
        yield
        self.close()

    @contextlib.contextmanager
    def _killing_late_ones(self, processes: Sequence[BaseProcess]) -> Iterator[None]:
        """Kill the processes that the block does not end within the grace."""
        killer = threading.Timer(END_GRACE_S, kill_living, (processes,))
        killer.daemon = True
        killer.start()
        try:
            yield
        finally:
            killer.cancel()
            killer.join()
            kill_living(processes)
            self.close()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for a worker inside: one that dies, or has died, ends the wait with a LoaderError."""
        self._check()
        handler = _child_handler()
        if self.processes and handler is not None:
            _set_child_handler(self._on_child_signal)
        try:
            with self.stall.waiting() if self.stall is not None else contextlib.nullcontext():
                yield
        except LoaderError:
            raise
        except (RuntimeError, OSError, EOFError) as error:  # the last two: a batch whose maker is gone already
            self._wait_for_a_death()
            self._check(error)
            reason = f"{type(error).__name__}: {error}"
            raise LoaderError(f"the loader stopped: {reason} ({memory_figures(self._living())})") from error
        finally:
            _set_child_handler(handler)

    def close(self) -> None:
        """Watch over nothing any more."""
        self.processes = ()
        if self.stall is not None:
            self.stall.close()

    def _on_child_signal(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_name == "__del__":  # Python would print and forget the error; torch looks again soon
                return
            frame = frame.f_back
        self._check()

    def _wait_for_a_death(self) -> None:
        """A broken connection may be noticed a moment before the process behind it counts as ended."""
        ended = multiprocessing.connection.wait([process.sentinel for process in self.processes], timeout=DEATH_WAIT_S)
        for process in self.processes:
            if process.sentinel in ended:
                process.join(DEATH_WAIT_S)

    def _check(self, cause: BaseException | None = None) -> None:
        for process in self.processes:
            if process.exitcode is not None:
                cut = self._cut_files() if is_bus_error(process.exitcode) else ()
                raise LoaderError(
                    death_message(process.pid or 0, process.exitcode, len(self.processes), self._living(), cut)
                ) from cause

    def _living(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid and process.exitcode is None]


_STARTED: list[tuple[int, BaseProcess]] = []  # loader processes, each with the process that started it


def _end_all() -> None:
    """End the processes of loaders that were not closed: at its exit Python would wait for stopped ones for ever."""
    processes = [process for owner, process in _STARTED if owner == os.getpid() and process.is_alive()]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + END_GRACE_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
    kill_living(processes)


def kill_living(processes: Sequence[BaseProcess]) -> None:
    """Kill the processes that still run, also stopped ones, and say how many there were."""
    sentinels = [process.sentinel for process in processes]
    ended = set(multiprocessing.connection.wait(sentinels, timeout=0) if sentinels else ())
    living = [process for process in processes if process.sentinel not in ended]
    for process in living:
        process.kill()
    if living:
        multiprocessing.connection.wait([process.sentinel for process in living], timeout=DEATH_WAIT_S)
        LOGGER.warning(
            f"{len(living)} loader process(es) did not end within {END_GRACE_S:g} s (stopped, waiting for a disk, or "
            f"too busy) and were killed: {', '.join(str(process.pid) for process in living)}"
        )


def _child_handler() -> object:
    """The present handler of the signal for ended children; None where there is none or it cannot be changed.

    One that torch has left behind counts as the system's own: it would raise in any line of the main thread.
    """
    if CHILD_SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(CHILD_SIGNAL)
    return signal.SIG_DFL if str(getattr(handler, "__module__", "")).startswith("torch.utils.data") else handler


def _set_child_handler(handler: object) -> None:
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(CHILD_SIGNAL, handler)  # type: ignore[arg-type]


def is_bus_error(exit_code: int) -> bool:
    """Whether a process ended by reading memory whose file or shared memory was not there."""
    return BUS_ERROR is not None and exit_code == -BUS_ERROR


def death_message(
    pid: int, exit_code: int, workers: int, living: Sequence[int] = (), cut_files: Sequence[CutFile] = ()
) -> str:
    """Why a loader process ended and what to type next; a negative exit code is the number of a signal.

    cut_files: files of prepared pictures that are too short.
    """
    fewer = f"--workers {workers // 2} instead of {workers}"
    figures = memory_figures(living)
    start = f"a loader process (pid {pid}) has died: "
    if exit_code == -9:
        return (
            f"{start}it was killed from outside (SIGKILL), which is what the system does when main memory runs out. "
            f"Now: {figures}. Take {fewer}, leave --cache out, or use a smaller --batch"
        )
    if cut_files:
        cut = cut_files[0]
        return printable(
            f"{start}bus error, {cut.path} has {size_text(cut.size)} instead of {size_text(cut.needed)}: a file of "
            "prepared pictures was cut while it was in use, by another program or by the disk. To go on: delete "
            f"{cut.path.parent} while no run uses it, it is made anew; or leave {cut.option} out"
        )
    if is_bus_error(exit_code):
        return f"{start}bus error, shared memory is full. Now: {figures}. To go on: {SHARED_MEMORY_ADVICE}"
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            start += f"{signal.Signals(-exit_code).name}. "
        return (
            f"{start}It crashed or was stopped from outside. Now: {figures}. --workers 0 loads in the main process and "
            "shows where it happens"
        )
    return f"{start}exit code {exit_code}. Now: {figures}. Its own message stands above; --workers 0 shows more"


def raise_failure(failure: Failure, worker_pids: Sequence[int] = ()) -> None:
    """Raise what a worker reported as a LoaderError, with its traceback as the cause."""
    text = f"{failure.where} could not be prepared: {failure.reason}"
    if "No space left" in failure.reason or "shared memory" in failure.reason:
        text += f". Shared memory is full ({memory_figures(worker_pids)}): {SHARED_MEMORY_ADVICE}"
    elif "MemoryError" in failure.reason or "nsufficient memory" in failure.reason:
        text += f". Main memory ran out ({memory_figures(worker_pids)}): fewer --workers, no --cache, a smaller --batch"
    raise LoaderError(text) from RuntimeError(failure.details)
