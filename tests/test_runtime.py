"""Device choice, seeds, threads, image sizes."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable

import cv2
import numpy as np
import pytest
import torch

from utils import runtime
from utils.runtime import (
    autocast,
    check_img_size,
    foreseen_device,
    init_seeds,
    limit_threads,
    memory_gb,
    select_device,
    wake,
    worker_limit_threads,
)


@pytest.mark.parametrize("name", ["cpu", "CPU", " cpu "])
def test_cpu_by_name(name: str) -> None:
    assert select_device(name) == torch.device("cpu")


@pytest.mark.parametrize("name", ["", "-1", "auto"])
def test_automatic_takes_what_is_there(name: str) -> None:
    assert select_device(name).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("name", "message"), [("0,1", "one device only"), ("gpu", "expected"), ("99", "99"), ("-2", "expected")]
)
def test_wrong_devices_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_device(name)


def test_seeds_repeat_all_three_generators() -> None:
    draws = []
    for seed in (3, 3, 4):
        init_seeds(seed)
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
    assert draws[0] == draws[1] != draws[2]


def test_deterministic_switch_goes_both_ways() -> None:
    init_seeds(0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    init_seeds(0)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    init_seeds(0, autotune=False)
    assert not torch.backends.cudnn.benchmark


def test_threads_of_main_process_and_workers() -> None:
    limit_threads()
    assert cv2.getNumThreads() == 1
    before = torch.get_num_threads()
    try:
        worker_limit_threads(0)
        assert torch.get_num_threads() == 1
        assert cv2.getNumThreads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("given", "used"), [(640, 640), (650, 672), (608, 608), (70, 96), (20, 64)])
def test_image_size_is_rounded_up(given: int, used: int) -> None:
    assert check_img_size(given, 32, floor=64) == used
    assert check_img_size([given, 640], 32, floor=64) == [used, 640]


@pytest.mark.parametrize(
    ("side", "floor", "said"),
    [
        (32, 64, "--img 32 is smaller than 64, the smallest side for the stride 32: 64 is used"),
        (20, 64, "smaller than 64"),
        (40, 64, "--img 40 is no multiple of the stride 32: 64 is used"),
        (650, 64, "no multiple of the stride 32: 672"),
        (64, 64, ""),
    ],
)
def test_reason_of_another_image_size_is_the_true_one(
    side: int, floor: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(runtime.LOGGER, "info", lines.append)
    check_img_size(side, 32, floor=floor)
    assert bool(lines) == bool(said) and said in "".join(lines)
    lines.clear()
    check_img_size([side, side], 32, floor=floor)
    assert len(lines) == bool(said)  # not once for the height and once more for the width


@pytest.mark.parametrize(("count", "is_refused"), [(None, False), ("1", False), ("2", True), ("odd", False)])
def test_several_processes_of_one_training_are_refused(
    monkeypatch: pytest.MonkeyPatch, count: str | None, is_refused: bool
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if count is not None:
        monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(ValueError, match="WORLD_SIZE=2: .*--device 0") if is_refused else contextlib.nullcontext():
        runtime.refuse_distributed()


def test_autocast_is_off_without_a_type() -> None:
    a = torch.ones(4, 4)
    with autocast(torch.device("cpu"), None):
        assert (a @ a).dtype == torch.float32
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    assert memory_gb(torch.device("cpu")) == 0.0


def test_waking_a_device_that_fails_leaves_the_error_to_its_user(
    monkeypatch: pytest.MonkeyPatch, new_threads: Callable[[], list[str]]
) -> None:
    asked = []

    def zeros(*_: object, device: torch.device, **__: object) -> torch.Tensor:
        asked.append(device)
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(runtime, "_awake", set())
    wake(torch.device("cpu"))
    assert not new_threads()
    wake(torch.device("cuda:0"), lambda _: pytest.fail("the computation before it has failed"))
    wake(torch.device("cuda:0"))
    for thread in [thread for thread in threading.enumerate() if thread.name == "wake"]:
        thread.join()
    assert asked == [torch.device("cuda:0")]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("name", ["", "auto", "cuda", "cpu", "mps", "0", "1", "cuda:1", 1, "7", "0,1", "gpu"])
def test_the_device_is_foreseen_as_it_will_be_chosen(
    monkeypatch: pytest.MonkeyPatch, name: str | int, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(runtime, "_announce", lambda device, _="": device)
    try:
        chosen = select_device(name)
    except ValueError:
        chosen = torch.device("cpu")
    assert foreseen_device(name) == chosen


def test_what_comes_after_the_first_computation_is_rehearsed() -> None:
    rehearsed: list[torch.device] = []
    runtime._first_computation(torch.device("cpu"), rehearsed.append)
    assert rehearsed == [torch.device("cpu")]

    def fail(_: torch.device) -> None:
        raise RuntimeError("out of memory")

    runtime._first_computation(torch.device("cpu"), fail)  # whoever needs the device will say it


@pytest.mark.gpu
def test_waking_a_device(new_threads: Callable[[], list[str]]) -> None:
    wake(torch.device("cuda:0"))
    assert float(torch.ones(3, device="cuda:0").sum()) == 3
    for thread in [thread for thread in threading.enumerate() if thread.name == "wake"]:
        thread.join()
    assert not new_threads()


@pytest.mark.parametrize("error", [RuntimeError("no room\nat all"), RuntimeError()], ids=repr)
def test_graphs_that_are_given_up_free_their_memory_and_say_so_once(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    handles = iter([(0, 1), (0, 2)])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    pool, recordings = runtime.GraphPool(), {"shape": object()}
    assert pool.handle() == pool.handle() == (0, 1)
    pool.give_up(recordings, "the work", error)
    assert not recordings and pool.handle() == (0, 2)
    (line,) = messages
    reason = "no room" if error.args else "RuntimeError"
    assert line.startswith(f"CUDA graphs are off, the work goes on without them: {reason}. --no-cuda-graphs")
