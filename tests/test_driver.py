"""The context that a GPU's driver makes while torch is loaded: when, for which device, and what cannot go wrong."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from utils import driver
from utils.driver import begin_context, is_automatic, short_device

REPO_ROOT = Path(__file__).resolve().parents[1]


class FakeDriver:
    """Notes calls of the driver; devices are 0 and 1."""

    def __init__(self, initialised: int = 0) -> None:
        self.calls: list[object] = []
        self.initialised = initialised

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's names
        self.calls.append("init")
        return self.initialised

    def cuDeviceGet(self, device: object, index: int) -> int:  # noqa: N802 - as above
        device._obj.value = 100 + index
        return 0 if index < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: object, device: ctypes.c_int) -> int:  # noqa: N802 - as above
        self.calls.append(device.value)
        return 0


@pytest.fixture()
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[object]]:
    """Begin the context of a device with a fake driver; give the calls it got."""

    def call(device: object, initialised: int = 0, *, is_for_cuda: bool = True) -> list[object]:
        fake = FakeDriver(initialised)
        monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: fake)
        monkeypatch.setattr(driver, "_is_torch_for_cuda", lambda: is_for_cuda)
        monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # so that it will be as it was
        monkeypatch.delenv("CUDA_MODULE_LOADING")
        thread = begin_context(device)
        if thread is not None:
            thread.join()
            assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"  # else old drivers load every kernel at once
        return fake.calls

    return call


@pytest.mark.parametrize("device", ["", "auto", "cuda", -1, "0", 0, "cuda:0", "CUDA:0", torch.device("cuda:0")])
def test_the_first_device_is_taken_without_a_number(device: object, begin: Callable[..., list[object]]) -> None:
    assert begin(device) == ["init", 100]


def test_the_chosen_device_is_taken(begin: Callable[..., list[object]]) -> None:
    assert begin("1") == ["init", 101]
    assert begin("7") == ["init"]  # torch will say that there is none
    assert begin("4294967296") == begin("1" * 5000) == []


@pytest.mark.parametrize("device", ["cpu", "mps", "0,1", "gpu", "½", "--"])
def test_other_devices_leave_the_driver_alone(device: str, begin: Callable[..., list[object]]) -> None:
    assert begin(device) == []


def test_nothing_is_done_where_torch_has_no_use_for_it(begin: Callable[..., list[object]]) -> None:
    assert begin("0", is_for_cuda=False) == []
    assert begin("0", initialised=999) == ["init"]


@pytest.mark.parametrize("error", [OSError("no such library"), AttributeError("no such function")])
def test_a_missing_driver_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load(name: str) -> None:
        raise error

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    monkeypatch.setattr(driver, "_is_torch_for_cuda", lambda: True)
    begin_context("0").join()  # pytest makes an exception of the thread an error


def test_a_driver_that_hangs_does_not_delay_the_end() -> None:
    code = (
        "import threading, utils.driver as driver; driver._is_torch_for_cuda = lambda: True; "
        "driver._make_context = lambda index: threading.Event().wait(); assert driver.begin_context('0').is_alive()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, check=True, timeout=60)


def test_it_is_known_whether_torch_is_for_cuda() -> None:
    assert driver._is_torch_for_cuda() == torch.backends.cuda.is_built()


def test_torch_is_not_loaded_for_it() -> None:
    code = (
        "import sys, utils.driver as driver; thread = driver.begin_context('0'); thread and thread.join(); "
        "driver._is_torch_for_cuda(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, check=True)


def test_names_of_devices() -> None:
    assert [short_device(text) for text in ("cuda:1", " CPU ", 2, torch.device("cuda:3"))] == ["1", "cpu", "2", "3"]
    assert all(map(is_automatic, ("", "auto", "cuda", -1)))
    assert not any(map(is_automatic, ("0", 0, "cpu", "cuda:0")))


@pytest.mark.gpu
def test_torch_takes_the_context_that_is_there() -> None:
    code = (
        "import utils.driver as driver; driver.begin_context('0').join(); import torch; "
        "assert float(torch.ones(3, device='cuda:0').sum()) == 3"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, check=True, timeout=300)
