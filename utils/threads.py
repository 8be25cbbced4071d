"""Work that overlaps: items read ahead in a thread, and a function spread over threads, both in order and bounded.

And work that Ctrl+C must not tear apart.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_S = 0.1  # how soon a waiting thread notices that it should stop

ENDING_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # the last one is missing on Windows


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _End:
    """Marks the end of a queue."""


class Overlap:
    """Links of a chain of generators that run in threads of their own; a context manager that ends them all.

    Example: reading, computing and writing at the same time, at most two results waiting between them::

        with Overlap(depth=2) as overlap:
            frames = overlap.ahead(read(files))
            for result in overlap.ahead(compute(frame) for frame in frames):
                write(result)

    An error inside a link arrives at the consumer, behind everything that was finished before it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Overlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all links and wait for their threads; each finishes the item it is at."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def ahead(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items`` in their order while a thread takes up to ``depth`` of them ahead; starts at once."""
        waiting: queue.Queue[Item | _Failure | _End] = queue.Queue(self.depth)
        thread = threading.Thread(target=self._fill, args=(items, waiting), daemon=True)
        self._threads.append(thread)
        thread.start()
        return self._drain(waiting)

    def _fill(self, items: Iterable[Item], waiting: queue.Queue[Item | _Failure | _End]) -> None:
        iterator = iter(items)
        try:
            for item in iterator:
                if not self._put(waiting, item):
                    break
            else:
                self._put(waiting, _End())
        except BaseException as error:  # handed to the consumer, who raises it
            self._put(waiting, _Failure(error))
        finally:
            if hasattr(iterator, "close"):
                iterator.close()  # here, because a generator cannot be closed by another thread

    def _put(self, waiting: queue.Queue[Item | _Failure | _End], item: Item | _Failure | _End) -> bool:
        """Wait for room; False when the work was stopped instead."""
        while not self._stop.is_set():
            try:
                waiting.put(item, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def _drain(self, waiting: queue.Queue[Item | _Failure | _End]) -> Iterator[Item]:
        while not self._stop.is_set():
            try:
                item = waiting.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(item, _End):
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item


def ordered_map(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """Yield ``function(item)`` in the order of ``items``, up to ``ahead`` calls running or waiting at a time."""
    running: deque[Future[Result]] = deque()
    try:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl+C, and SIGTERM and SIGHUP where they are handled, wait until the block has ended, the first of them.

    Example: what belongs together is written together, or not at all::

        with interrupts_wait():
            table.add(row)
            video.write(frame)

    Signals arrive in the main thread only, so in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ENDING_SIGNALS if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if arrived:
        handlers[arrived[0]](arrived[0], None)
