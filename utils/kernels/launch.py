"""With which options streaming programs are launched on a device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from utils.kernels.layout import is_interpreted, multiprocessors

HALF_TYPES = (torch.float16, torch.bfloat16)
REGISTERS = 65536  # of a multiprocessor, all of which its programs share
WARP = 32  # threads
OVERLAPPING_CAPABILITY = (9, 0)


def is_fast(x: Tensor) -> bool:
    """Whether approximate instructions are exact enough for the map ``x``, and exist where it lies."""
    return x.dtype in HALF_TYPES and _is_nvidia(x.device)


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends: see :mod:`utils.kernels.programs.streaming`."""
    if not _is_nvidia(device) or torch.cuda.get_device_capability(device) < OVERLAPPING_CAPABILITY:
        return False
    from utils.kernels.programs import streaming

    return streaming.CAN_OVERLAP


def launch_options(x: Tensor, warps: int, registers: int | None = None) -> dict[str, int | bool]:
    """Return the options of a launch that reads the map ``x``, for programs that wait for their inputs.

    ``registers`` per thread at most are asked for only where ``x`` is in half precision: wider values that are loaded
    ahead need more, and would be spilled to memory.
    """
    options: dict[str, int | bool] = {"num_warps": warps, "PDL": can_overlap(x.device)}
    if options["PDL"]:
        options["launch_pdl"] = True
    if registers and is_fast(x):
        options["maxnreg"] = registers
    return options


def resident_programs(device: torch.device, warps: int, registers: int) -> int:
    """Return how many programs of so many ``registers`` per thread run on ``device`` at once."""
    return REGISTERS // (WARP * warps * registers) * multiprocessors(device)


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and not is_interpreted()
