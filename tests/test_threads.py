"""Chains of generators that run side by side: order, errors in their place, an end when the consumer leaves."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from utils.threads import ENDING_SIGNALS, Overlap, interrupts_wait, ordered_map


def test_links_keep_the_order() -> None:
    with Overlap(2) as overlap:
        doubled = (2 * number for number in overlap.ahead(range(50)))
        assert list(overlap.ahead(doubled)) == [2 * number for number in range(50)]


def test_links_run_side_by_side() -> None:
    """The step makes the next item while the consumer is still busy with this one."""
    made = [threading.Event() for _ in range(6)]

    def step() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    with Overlap(1) as overlap:
        for number in overlap.ahead(step()):
            assert made[min(number + 1, 5)].wait(5)


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()])
def test_errors_arrive_behind_what_was_finished(error: BaseException) -> None:
    def failing() -> Iterator[int]:
        yield from (1, 2)
        raise error

    received = []
    with pytest.raises(type(error)), Overlap(5) as overlap:
        for item in overlap.ahead(number for number in overlap.ahead(failing())):
            time.sleep(0.02)  # the error is there long before
            received.append(item)
    assert received == [1, 2]


@pytest.mark.parametrize("depth", [1, 4])
def test_threads_end_and_generators_close_when_the_consumer_leaves(
    depth: int, new_threads: Callable[[], list[str]]
) -> None:
    produced, closed = [], []

    def endless() -> Iterator[int]:
        try:
            while True:
                produced.append(len(produced))
                yield produced[-1]
        finally:
            closed.append(threading.current_thread())

    with Overlap(depth) as overlap:
        items = overlap.ahead(number for number in overlap.ahead(endless()))
        assert [next(items), next(items)] == [0, 1]
    assert new_threads() == [] and len(closed) == 1
    assert len(produced) <= 2 * depth + 6  # bounded: what waits, and what each link holds


def test_a_map_over_threads_keeps_the_order_and_is_bounded() -> None:
    started = []

    def work(number: int) -> int:
        started.append(number)
        time.sleep(0.01 * (number % 3 == 0))
        return number * number

    with ThreadPoolExecutor(3) as pool:
        results = ordered_map(pool, work, iter(range(30)), ahead=4)
        assert next(results) == 0
        assert len(started) <= 5
        assert list(results) == [number * number for number in range(1, 30)]


def test_an_error_in_a_map_arrives_in_its_place() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = ordered_map(pool, lambda number: 1 // (3 - number), range(9), ahead=4)
        assert [next(results) for _ in range(3)] == [0, 0, 1]
        with pytest.raises(ZeroDivisionError):
            next(results)


@pytest.mark.parametrize("name", ENDING_SIGNALS)
def test_an_interrupt_waits_for_the_end_of_what_belongs_together(name: str) -> None:
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"this system has no {name}")
    before = signal.signal(number, signal.default_int_handler)
    done = []
    try:
        with pytest.raises(KeyboardInterrupt):
            with interrupts_wait():
                signal.raise_signal(number)
                done.append("first half")
                done.append("second half")
            done.append("not reached")
        assert done == ["first half", "second half"]
        assert signal.getsignal(number) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt), interrupts_wait():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append("a second one does not wait")
        assert len(done) == 2 and signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_an_error_is_not_hidden_by_an_interrupt_that_waits() -> None:
    with pytest.raises(ZeroDivisionError), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError


def test_ignored_interrupts_stay_ignored_and_other_threads_are_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_wait():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    with ThreadPoolExecutor(1) as pool, interrupts_wait():
        held = signal.getsignal(signal.SIGINT)

        def in_another_thread() -> bool:
            with interrupts_wait():
                return signal.getsignal(signal.SIGINT) is held

        assert pool.submit(in_another_thread).result()
