"""Sampling a card: which one, what is read, how it is summed up, and that nothing happens without one."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
import pytest
import torch

from utils.train.gpu_sampler import (
    CELL_PIXELS,
    GpuSampler,
    NvmlDevice,
    Sample,
    Usage,
    describe_others,
    device_names,
    open_device,
    summarise,
    utilisation_map,
    visible_entry,
)


class FakeNvml:
    """Stand-in for the shared object: two cards, the second at 70 % with 5 GB used by processes 10 and 11."""

    UUIDS = ("GPU-aaaa", "GPU-bbbb")

    def __init__(self) -> None:
        self.is_open = False
        self.has_utilisation = True
        self.is_lost = False

    def nvmlInit_v2(self) -> int:
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:
        if uuid.decode() not in self.UUIDS:
            return 6
        handle._obj.value = self.UUIDS.index(uuid.decode()) + 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> int:
        if index.value >= len(self.UUIDS):
            return 2
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, rates) -> int:
        rates._obj.gpu = 70
        return 0 if self.has_utilisation else 3

    def nvmlDeviceGetMemoryInfo(self, handle, memory) -> int:
        memory._obj.used = 5_000_000_000
        return 15 if self.is_lost else 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, entries) -> int:
        count._obj.value = 2
        entries[0].pid, entries[0].used_bytes = 10, 3_000_000_000
        entries[1].pid, entries[1].used_bytes = 11, ctypes.c_ulonglong(-1).value
        return 0


@pytest.mark.parametrize(
    ("index", "uuid", "visible", "expected"),
    [
        (0, "aaaa", None, ["GPU-aaaa", "MIG-aaaa", "0"]),
        (1, "", None, ["1"]),
        (0, "", "3,1", ["3"]),
        (1, "", "GPU-cccc, GPU-dddd", ["GPU-dddd"]),
        (0, "MIG-eeee", "MIG-eeee", ["MIG-eeee"]),
    ],
)
def test_names_of_a_card(index, uuid, visible, expected) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert device_names(index, uuid, environ) == expected
    assert visible_entry(index, environ) == expected[-1]


def test_card_is_found_by_uuid_before_number() -> None:
    library = FakeNvml()
    assert open_device(["GPU-bbbb", "0"], library).handle.value == 2
    assert open_device(["GPU-zzzz", "0"], library).handle.value == 1
    assert open_device(["GPU-zzzz", "9"], library) is None
    assert not library.is_open
    assert open_device(["0"], None) is None


def test_card_is_read() -> None:
    card = open_device(["1"], FakeNvml())
    assert card.utilisation() == 70
    assert card.used_bytes() == 5_000_000_000
    assert card.processes() == {10: 3_000_000_000, 11: 0}


def test_samples_are_summed_up() -> None:
    samples = [
        Sample(0, 50, 4_000_000_000, 3_000_000_000),
        Sample(1, None, 6_000_000_000, 5_000_000_000),
        Sample(2, 100, 7_500_000_000, 5_000_000_000),
    ]
    usage = summarise(samples)
    assert (usage.mean, usage.lowest, usage.highest) == (75, 50, 100)
    assert usage.device_gb == 7.5
    assert usage.swing_gb == pytest.approx(1.5)  # our own growth from 3 to 5 GB is no swing
    assert summarise([]) == Usage()


def test_other_processes() -> None:
    assert describe_others({10: 2_000_000_000, 20: 1}, own_pid=20) == "process 10 (2.0 GB)"
    assert describe_others({20: 1}, own_pid=20) == ""
    assert describe_others({7: 1}, own_pid=20) == ""  # a container: the one entry is this process
    assert describe_others({7: 1, 8: 1}, own_pid=20) == "1 other process(es)"


def wait_for(condition, limit_s: float = 5.0) -> bool:
    end = time.perf_counter() + limit_s
    while not condition() and time.perf_counter() < end:
        time.sleep(0.005)
    return condition()


def test_thread_samples_until_it_is_stopped() -> None:
    library = FakeNvml()
    sampler = GpuSampler(open_device(["0"], library), interval_s=0.01, own_bytes=lambda: 7)
    sampler.start()
    sampler.start()
    assert [thread.name for thread in threading.enumerate()].count("gpu-sampler") == 1
    assert wait_for(lambda: len(sampler.since(0)) >= 3)
    assert "10 (3.0 GB)" in sampler.others() or os.getpid() in (10, 11) or "other" in sampler.others()
    sampler.stop()
    assert "gpu-sampler" not in [thread.name for thread in threading.enumerate()]
    assert not library.is_open
    samples = sampler.since(0)
    assert samples[0].utilisation == 70 and samples[0].own_bytes == 7
    middle = samples[1].time_s
    assert sampler.since(middle) == samples[1:]
    sampler.forget_before(middle)
    assert sampler.since(0) == samples[1:]
    sampler.stop()  # a second time does no harm


def test_slice_without_utilisation_and_card_that_is_lost() -> None:
    library = FakeNvml()
    library.has_utilisation = False
    sampler = GpuSampler(NvmlDevice(library, ctypes.c_void_p(1)), interval_s=0.005)
    sampler.start()
    assert wait_for(lambda: len(sampler.since(0)) >= 1)
    assert sampler.since(0)[0].utilisation is None
    library.is_lost = True
    assert wait_for(lambda: "gpu-sampler" not in [thread.name for thread in threading.enumerate()])
    sampler.stop()


def test_without_a_card_nothing_happens() -> None:
    sampler = GpuSampler.for_device(torch.device("cpu"))
    sampler.start()
    assert sampler.since(0) == [] and sampler.others() == ""
    assert "gpu-sampler" not in [thread.name for thread in threading.enumerate()]
    sampler.stop()


def test_heat_map_goes_from_red_to_green() -> None:
    image = utilisation_map([[0.0] * 10, [100.0], [], [0.0, 100.0]])
    assert image.dtype == np.uint8 and image.shape[0] == 4 * CELL_PIXELS and image.shape[2] == 3
    idle, busy, unknown = image[0, 0], image[CELL_PIXELS, 0], image[2 * CELL_PIXELS, 0]
    assert idle[0] > idle[1] and busy[1] > busy[0]
    assert len(set(unknown.tolist())) == 1
    assert np.array_equal(image[-1, 0], idle) and np.array_equal(image[-1, -1], busy)


@pytest.mark.gpu
def test_a_real_card_is_sampled() -> None:
    device = torch.device("cuda:0")
    held = torch.zeros(1 << 28, device=device)
    sampler = GpuSampler.for_device(device, interval_s=0.05)
    if sampler.device is None:
        pytest.skip("no NVML on this machine")
    sampler.start()
    assert wait_for(lambda: len(sampler.since(0)) >= 5)
    sampler.stop()
    usage = summarise(sampler.since(0))
    assert usage.device_gb > held.nbytes / 1e9
    assert usage.mean is None or 0 <= usage.mean <= 100
