"""The device that is asked for, and what its driver can begin on while torch is loaded. Works without torch."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
from pathlib import Path

AUTOMATIC_DEVICES = ("", "-1", "auto", "cuda")
LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
MOST_DIGITS = 3  # of a device's number; torch refuses larger ones
TORCH_LIBRARIES = ("libtorch_cuda.so", "torch_cuda.dll")  # one of which a torch for CUDA has


def short_device(device: object) -> str:
    """Return a value of ``--device`` in its short form: ``''``, ``cpu``, ``0`` …"""
    return str(device).strip().lower().removeprefix("cuda:")


def is_automatic(device: object) -> bool:
    """Whether a value of ``--device`` leaves the choice to this program."""
    return short_device(device) in AUTOMATIC_DEVICES


def asked_index(device: object) -> int | None:
    """Return the number of the CUDA device that ``--device`` asks for; None where it asks for anything else."""
    index = "0" if is_automatic(device) else short_device(device)
    return int(index) if index.isdecimal() and len(index) <= MOST_DIGITS else None


def begin_context(device: object = "") -> threading.Thread | None:
    """Let the driver make the context of the GPU that ``--device`` chooses, in a thread beside whatever comes next.

    Torch then finds it made: it uses the one primary context of a device that all of a process share. Returns None
    where no GPU is chosen or torch has no use for one. What goes wrong is left for torch to report, and the end of the
    process does not wait for a driver that hangs.
    """
    index = asked_index(device)
    if index is None or not _is_torch_for_cuda():
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does: kernels are loaded when first used
    thread = threading.Thread(target=_make_context, args=(index,), name="driver", daemon=True)
    thread.start()
    return thread


def _is_torch_for_cuda() -> bool:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    folder = Path(found.origin).parent / "lib"
    return any((folder / name).is_file() for name in TORCH_LIBRARIES)


def _make_context(index: int) -> None:
    """Retain the primary context of device ``index`` until the process ends (CUDA driver API)."""
    with contextlib.suppress(OSError, AttributeError):  # no driver, or a library of that name that is none
        driver = ctypes.CDLL(LIBRARY)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
