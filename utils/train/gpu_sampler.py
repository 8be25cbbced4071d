"""What the graphics card reports about itself while training runs: utilisation and memory, once a second.

The figures come from NVML, the library behind nvidia-smi, called through ctypes: no package, no process, no shell.
Where it is missing (a CPU, an AMD card, a container without the driver) there are no samples and everything is None.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NVML_LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")
GB = 1e9
MAP_CELLS, CELL_PIXELS = 60, 8  # a heat map's columns per epoch, and the side of each cell
IDLE_RGB, HALF_RGB, BUSY_RGB = (178, 34, 34), (240, 200, 60), (40, 140, 70)


class NvmlError(RuntimeError):
    """NVML answered with an error code."""


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class NvmlDevice:
    """One card of NVML. ``library`` is the loaded shared object, ``handle`` NVML's pointer to the card."""

    MAX_PROCESSES = 64

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self.library = library
        self.handle = handle

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(self.handle, *arguments)
        if code != 0:
            raise NvmlError(f"{name} returned {code}")

    def utilisation(self) -> float:
        """Return the percentage of the last moments in which a kernel was running."""
        rates = _Utilisation()
        self._call("nvmlDeviceGetUtilizationRates", ctypes.byref(rates))
        return float(rates.gpu)

    def used_bytes(self) -> int:
        """Return the memory in use on the card, by whomever."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", ctypes.byref(memory))
        return int(memory.used)

    def processes(self) -> dict[int, int]:
        """Return the memory in bytes of every computing process, by process id of the machine (not the container)."""
        entries, count = (_Process * self.MAX_PROCESSES)(), ctypes.c_uint(self.MAX_PROCESSES)
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", ctypes.byref(count), entries)
        unknown = ctypes.c_ulonglong(-1).value  # NVML's word for "may not be told"
        found = entries[: count.value]
        return {entry.pid: 0 if entry.used_bytes == unknown else entry.used_bytes for entry in found}

    def close(self) -> None:
        """Leave NVML; a later call of this object fails."""
        self.library.nvmlShutdown()


def visible_entry(index: int, environ: Mapping[str, str]) -> str:
    """Return how the machine calls torch's CUDA device ``index``: a number or a UUID from CUDA_VISIBLE_DEVICES."""
    entries = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return entries[index] if index < len(entries) else str(index)


def device_names(index: int, uuid: str, environ: Mapping[str, str]) -> list[str]:
    """Return the names under which NVML may know torch's device ``index``, the surest first.

    ``uuid`` as torch shows it, without NVML's prefix, or empty. A number comes last: CUDA may count the cards in
    another order than NVML does.
    """
    by_uuid = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"] if uuid else []
    entry = visible_entry(index, environ)
    return list(dict.fromkeys([*by_uuid, entry]))


def load_nvml() -> Any | None:
    """Load NVML's shared object, or return None where there is none."""
    for name in NVML_LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def open_device(names: Sequence[str], library: Any | None) -> NvmlDevice | None:
    """Return the first card that NVML knows under one of ``names``, or None."""
    if library is None or library.nvmlInit_v2() != 0:
        return None
    for name in names:
        handle = ctypes.c_void_p()
        if name.isdigit():
            code = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if code == 0:
            return NvmlDevice(library, handle)
    library.nvmlShutdown()
    return None


@dataclass(frozen=True)
class Sample:
    """One look at the card: seconds of ``time.perf_counter``, percent or None, bytes on the card, bytes of torch."""

    time_s: float
    utilisation: float | None
    used_bytes: int
    own_bytes: int


@dataclass(frozen=True)
class Usage:
    """A stretch of samples in figures: utilisation in percent, memory in GB of 1e9 bytes; None = not known.

    ``swing_gb`` is the spread of the memory that torch has *not* reserved: what other programs took and gave back.
    """

    mean: float | None = None
    lowest: float | None = None
    highest: float | None = None
    device_gb: float | None = None
    swing_gb: float | None = None


def summarise(samples: Sequence[Sample]) -> Usage:
    """Return mean, extremes and memory of ``samples``."""
    if not samples:
        return Usage()
    rates = [sample.utilisation for sample in samples if sample.utilisation is not None]
    foreign = [sample.used_bytes - sample.own_bytes for sample in samples]
    return Usage(
        mean=sum(rates) / len(rates) if rates else None,
        lowest=min(rates, default=None),
        highest=max(rates, default=None),
        device_gb=max(sample.used_bytes for sample in samples) / GB,
        swing_gb=(max(foreign) - min(foreign)) / GB,
    )


def utilisation_map(epochs: Sequence[Sequence[float]]) -> np.ndarray:
    """Draw utilisations in percent as a heat map: one line per epoch, time to the right, red idle to green busy.

    Returns:
        (epochs * CELL_PIXELS, MAP_CELLS * CELL_PIXELS, 3) uint8 RGB; an epoch without samples is grey.
    """
    places = np.linspace(0, 1, MAP_CELLS)
    image = np.full((len(epochs), MAP_CELLS, 3), 128, dtype=np.uint8)
    for row, rates in enumerate(epochs):
        if len(rates):
            line = np.interp(places, np.linspace(0, 1, len(rates)), rates)
            for channel, stops in enumerate(zip(IDLE_RGB, HALF_RGB, BUSY_RGB, strict=True)):
                image[row, :, channel] = np.interp(line, (0, 50, 100), stops).round()
    return image.repeat(CELL_PIXELS, axis=0).repeat(CELL_PIXELS, axis=1)


def describe_others(processes: Mapping[int, int], own_pid: int) -> str:
    """Return which other processes use the card, or an empty text when none is seen.

    In a container the own number is not in the list, because the list holds the machine's numbers: one entry is
    then taken for this process.
    """
    if own_pid not in processes:
        return f"{len(processes) - 1} other process(es)" if len(processes) > 1 else ""
    others = {pid: size for pid, size in processes.items() if pid != own_pid}
    return ", ".join(f"process {pid} ({size / GB:.1f} GB)" for pid, size in sorted(others.items()))


class GpuSampler:
    """Look at the card every ``interval_s`` seconds in a thread of its own, from ``start`` to ``stop``.

    Without a card it does nothing and ``since`` is always empty, so that callers need no second path.
    """

    def __init__(
        self, device: NvmlDevice | None, *, interval_s: float = 1.0, own_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self.device = device
        self.interval_s = interval_s
        self.own_bytes = own_bytes
        self._samples: list[Sample] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def for_device(cls, device: torch.device, interval_s: float = 1.0) -> GpuSampler:
        """Return a sampler for the card behind a torch device; an idle one for other devices."""
        if device.type != "cuda":
            return cls(None)
        index = torch.cuda.current_device() if device.index is None else device.index
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        card = open_device(device_names(index, uuid, os.environ), load_nvml())
        return cls(card, interval_s=interval_s, own_bytes=lambda: torch.cuda.memory_reserved(index))

    def start(self) -> None:
        """Begin; a second call changes nothing."""
        if self.device is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and leave NVML; what was sampled stays readable."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(timeout=5 * self.interval_s + 1)
            self._thread = None
        if self.device is not None:
            self.device.close()
            self.device = None

    def since(self, time_s: float) -> list[Sample]:
        """Return the samples taken at or after ``time_s`` of ``time.perf_counter``."""
        with self._lock:
            return [sample for sample in self._samples if sample.time_s >= time_s]

    def forget_before(self, time_s: float) -> None:
        """Drop older samples, so that a long run does not collect them for ever."""
        with self._lock:
            self._samples = [sample for sample in self._samples if sample.time_s >= time_s]

    def others(self) -> str:
        """Describe other processes on the card; empty when none is seen or the driver does not tell."""
        try:
            return "" if self.device is None else describe_others(self.device.processes(), os.getpid())
        except (NvmlError, AttributeError):  # an old driver lacks the function
            return ""

    def _run(self) -> None:
        while not self._is_over.is_set():
            sample = self._look()
            if sample is None:
                return
            with self._lock:
                self._samples.append(sample)
            self._is_over.wait(self.interval_s)

    def _look(self) -> Sample | None:
        """Take a sample; None when the card no longer answers. A card slice (MIG) has memory but no utilisation."""
        try:
            utilisation = self.device.utilisation()
        except NvmlError:
            utilisation = None
        try:
            return Sample(time.perf_counter(), utilisation, self.device.used_bytes(), self.own_bytes())
        except NvmlError:
            return None
