"""A watchdog for loaders that live and give nothing, as on a network disk that does not answer: it warns, no more."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch.utils.data import get_worker_info

from utils.data.listing import printable
from utils.log import LOGGER

STALL_S = 300.0  # without a batch until the first warning; further ones follow after twice, four times … as long
CHECKS = 20  # looks within that time
SLOTS = 256  # processes whose reading is noted: the main one and its workers
_STATES = {"R": "computing", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "t": "traced", "Z": "ended"}


class Readings:
    """Index of the picture that each process of a data set began to read last; one table for all of them."""

    def __init__(self) -> None:
        self._indices = multiprocessing.RawArray("q", SLOTS)  # 0: none yet; the main process comes first

    def note(self, index: int) -> None:
        """Say that this process begins to read a picture."""
        worker = get_worker_info()
        slot = 0 if worker is None else worker.id + 1
        if slot < SLOTS:
            self._indices[slot] = index + 1

    def last(self, worker: int = -1) -> int:
        """Index that a worker (-1: the main process) began to read last; -1 where it has read nothing."""
        return self._indices[worker + 1] - 1 if worker + 1 < SLOTS else -1


class StallWatch:
    """Warns when a wait takes longer than limit_s (0: never), with what ``describe`` tells about it.

    One thread looks now and then, so that a wait costs nothing. It ends with `close`, and with the object that
    ``describe`` is a method of.
    """

    def __init__(self, describe: Callable[[], str], prefix: str = "", *, limit_s: float = STALL_S) -> None:
        self.limit_s, self.prefix = limit_s, prefix
        self._describe = weakref.WeakMethod(describe)
        self._since: float | None = None
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch over what is done inside."""
        if self.limit_s > 0 and self._thread is None and not self._is_closed.is_set():
            self._thread = threading.Thread(target=self._look, name="stall watch", daemon=True)
            self._thread.start()
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a watchdog stays in its process")

    def _look(self) -> None:
        begun, next_s = None, self.limit_s
        while not self._is_closed.wait(self.limit_s / CHECKS if self.limit_s > 0 else STALL_S / CHECKS):
            describe, since = self._describe(), self._since
            if describe is None:
                return
            if self.limit_s <= 0:  # switched off meanwhile
                continue
            if since != begun:
                begun, next_s = since, self.limit_s
            if since is not None and time.monotonic() - since >= next_s:
                LOGGER.warning(f"{self.prefix}no batch for {time.monotonic() - since:.0f} s. {describe()}")
                next_s *= 2
            del describe


def stall_text(processes: Sequence[tuple[int, str]], network: str = "") -> str:
    """What loader processes (pid, file that was last read or '') are doing, and what to try.

    network is the type of a network disk that the pictures lie on, or ''.
    """
    doing = [
        f"process {pid} ({process_state(pid)}) {f'began to read {path}' if path else 'has read nothing so far'}"
        for pid, path in processes
    ]
    path = next((path for _, path in processes if path), "")
    disk = f"the pictures lie on a network disk ({network}), is its server there" if network else "does the disk answer"
    look = f" (ls -l '{path}' in another terminal shows it)" if path else ""
    return printable(
        f"The run goes on waiting. Last known: {'; '.join(doing) or 'nothing'}. To find out more: {disk}{look}? py-spy "
        f"dump --pid {processes[0][0] if processes else 'PID'} shows where a process stands. A disk that is only slow "
        "is helped by --cache ram or a copy on a local disk"
    )


def process_state(pid: int) -> str:
    """What a process is doing as the kernel sees it, in words."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "state unknown"
    letter = text.rpartition(")")[2].split()[0]
    return _STATES.get(letter, f"state {letter}")
