"""Device, seeds, threads and number types: how a process is set up before anything is computed."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import random
import threading
from collections.abc import Callable

import cv2
import numpy as np
import torch
from torch import nn

from utils.driver import asked_index, is_automatic, short_device
from utils.log import LOGGER, first_line

device_lock = threading.RLock()
"""Held while waiting for a whole device, and while a CUDA graph is recorded, which such waiting would spoil."""


class GraphPool:
    """Memory that recorded CUDA graphs share, which therefore must never run at the same time."""

    def __init__(self) -> None:
        self._handle: tuple[int, int] | None = None

    def handle(self) -> tuple[int, int]:
        """What `torch.cuda.graph` takes as its pool; made when it is first asked for."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def give_up(self, recordings: dict, work: str, error: RuntimeError) -> None:
        """Forget the graphs of some work, of which recording one has failed, with the pool that it may have spoilt.

        The memory is free once no graph of other work is left.
        """
        recordings.clear()
        self._handle = None
        LOGGER.warning(
            f"CUDA graphs are off, {work} goes on without them: {first_line(error)}. "
            "--no-cuda-graphs avoids the attempt"
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether torch found no memory, on the GPU or (which has no type of its own) in main memory."""
    words = ("DefaultCPUAllocator", "allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def refuse_distributed() -> None:
    """Raise ValueError where ``torchrun`` or the like has started several of these processes, one for each GPU."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count.isdecimal() and int(count) > 1:
        raise ValueError(
            f"WORLD_SIZE={count}: started {count} times by torchrun or torch.distributed, but one device only is used "
            "here (no distributed training); start it once, python train_dual.py … --device 0"
        )


def select_device(device: str | int | torch.device = "", batch_size: int = 0) -> torch.device:
    """Return the one device to use and log it.

    ``''``, ``-1``, ``auto`` and ``cuda`` take the first CUDA device if there is one, else the CPU.
    ``cpu``, ``mps`` and ``0`` … name a device that has to be there. ``batch_size`` is accepted for compatibility.

    Raises:
        ValueError: several devices, an unknown word, or a device this machine does not have.
    """
    name = short_device(device)
    if "," in name:
        raise ValueError(f"--device {device}: one device only (no distributed training here), for example --device 0")
    if is_automatic(device):
        if not torch.cuda.is_available():
            return _announce(torch.device("cpu"), "no CUDA device found, this will be slow")
        more = torch.cuda.device_count() - 1
        return _announce(torch.device("cuda:0"), f"the first of {more + 1}, --device N takes another" if more else "")
    if name == "cpu":
        return _announce(torch.device("cpu"))
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise ValueError("--device mps: this machine has no Metal device; use --device cpu")
        return _announce(torch.device("mps"))
    if not name.isdigit():
        raise ValueError(f"--device {device}: expected '' (automatic), cpu, mps or the number of a CUDA device")
    if not torch.cuda.is_available() or int(name) >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ValueError(
            f"--device {device}: this machine offers {found} CUDA device(s) to torch {torch.__version__} "
            f"(CUDA build {torch.version.cuda}). Use --device cpu, or install a torch build that fits the driver"
        )
    if int(name):
        torch.cuda.set_device(int(name))  # CUDA graphs are recorded on the current device
    return _announce(torch.device(f"cuda:{name}"))


def foreseen_device(device: str | int | torch.device = "") -> torch.device:
    """Return what :func:`select_device` is going to choose, without a word; the CPU where that refuses."""
    index = asked_index(device)
    is_there = index is not None and torch.cuda.is_available() and index < torch.cuda.device_count()
    return torch.device(f"cuda:{index}" if is_there else "cpu")


def _announce(device: torch.device, remark: str = "") -> torch.device:
    described = str(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described += f" ({properties.name}, {properties.total_memory / 2**20:.0f} MiB)"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    LOGGER.info(f"{versions}, device {described}{', ' + remark if remark else ''}")
    return device


def init_seeds(seed: int = 0, deterministic: bool = False, *, autotune: bool = True) -> None:
    """Seed Python, NumPy and torch; with ``deterministic`` also forbid kernels whose result may vary (slower).

    With ``autotune`` cuDNN tries its algorithms on every new shape and keeps the fastest.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = autotune and not deterministic
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def limit_threads() -> None:
    """Switch OpenCV's own thread pool off: parallel work here is done by processes and threads of ours."""
    cv2.setNumThreads(0)
    cv2.ocl.setUseOpenCL(False)


def worker_limit_threads(worker_id: int = 0) -> None:
    """Initialise a loader worker: one thread each, or eight workers fight over the cores."""
    limit_threads()
    torch.set_num_threads(1)


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """Return a mixed-precision context for ``dtype``, or one that does nothing when it is None."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def memory_gb(device: torch.device) -> float:
    """Return the memory torch has reserved on ``device`` in 1e9 bytes; 0 on other devices than CUDA."""
    return torch.cuda.memory_reserved(device) / 1e9 if device.type == "cuda" else 0.0


def picture_layout(device: torch.device) -> torch.memory_format:
    """Return the layout of pictures and weights for which a device has its fastest convolutions."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, on CUDA in its :func:`picture_layout`; return it."""
    if device.type == "cuda":
        return model.to(device, memory_format=picture_layout(device))
    return model.to(device)


_awake: set[torch.device] = set()


def wake(device: torch.device, rehearse: Callable[[torch.device], object] | None = None) -> None:
    """Begin to load what the first computation on a GPU needs, in a thread beside whatever comes next.

    ``rehearse`` is called with the device there: it runs on something small what will be needed besides convolutions.
    """
    if device.type == "cuda" and device not in _awake:
        _awake.add(device)  # once is enough, whoever asks
        threading.Thread(target=_first_computation, args=(device, rehearse), name="wake").start()


def _first_computation(device: torch.device, rehearse: Callable[[torch.device], object] | None) -> None:
    with contextlib.suppress(RuntimeError), torch.no_grad():  # whoever needs the device will meet the error as well
        image = torch.zeros(1, 8, 32, 32, device=device).contiguous(memory_format=picture_layout(device))
        torch.nn.functional.conv2d(image, torch.zeros(8, 8, 3, 3, device=device))
        if rehearse is not None:
            rehearse(device)


def synchronise(device: torch.device) -> None:
    """Wait for queued work of a CUDA device, so that a clock read afterwards means something."""
    if device.type == "cuda":
        with device_lock:
            torch.cuda.synchronize(device)


def check_img_size(imgsz: int | list[int], stride: int = 32, floor: int = 0, *, quiet: bool = False) -> int | list[int]:
    """Round each side up to a multiple of ``stride``, at least ``floor``, and say so when that changes something."""
    if isinstance(imgsz, (list, tuple)):
        used = {side: check_img_size(side, stride, floor, quiet=quiet) for side in set(imgsz)}
        return [used[side] for side in imgsz]  # type: ignore[misc]
    rounded = math.ceil(imgsz / stride) * stride
    reason = f"is no multiple of the stride {stride}"
    if rounded < floor:
        rounded, reason = floor, f"is smaller than {floor}, the smallest side for the stride {stride}"
    if rounded != imgsz and not quiet:
        LOGGER.info(f"--img {imgsz} {reason}: {rounded} is used")
    return rounded
