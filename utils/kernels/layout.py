"""How a channels_last map is cut into tiles: maps read as matrices of positions by channels, and sizes of tiles.

A map (B, C, H, W) in channels_last is a matrix of R = B * H * W rows and C columns. All sizes are fixed rules of the
shape: nothing is tried out at run time, and few different programs have to be compiled.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

WIDEST_BLOCK = 128
"""Channels of a tile at most: 256 bytes in half precision, two lines of the cache."""
NARROWEST_BLOCK = 16
MOST_PROGRAMS = 1024  # sharing one reduction; their results are joined by a program that holds them all
INTERPRETED_MULTIPROCESSORS = 1  # few, so that programs have several tiles to visit even in small maps
SUM_TYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""Types of maps that are fused, and in which type their statistics, weights and sums are held."""
ROWS_LIMIT = 2**31 - 2**16  # rows are counted in 32 bits; offsets within the memory of a map in 64


@cache
def has_triton() -> bool:
    """Whether the package can be found; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton's interpreter is asked for, which computes on the CPU what a GPU would; for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def can_launch(x: Tensor) -> bool:
    """Whether kernels can run where ``x`` lies, and nothing records or traces the operations."""
    is_reachable = x.is_cuda or (x.device.type == "cpu" and is_interpreted())
    return is_reachable and has_triton() and not torch.jit.is_tracing() and not torch.compiler.is_compiling()


def is_watched(module: nn.Module) -> bool:
    """Whether hooks wait for calls of ``module`` or of a module inside it: they have a right to be called."""
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
        for each in module.modules()
    )


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Context in which launches go to the device of ``x``."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def row_stride(x: Tensor) -> int | None:
    """Return the distance between rows of the matrix (R, C) that the map ``x`` (B, C, H, W) is, in elements.

    That is C for a channels_last map and more for a slice of its channels. None where the memory is no such matrix.
    """
    batch, channels, height, width = x.shape
    if channels > 1 and x.stride(1) != 1:
        return None
    stride, rows = 0, 1
    for size, step in ((width, x.stride(3)), (height, x.stride(2)), (batch, x.stride(0))):
        if size == 1:
            continue  # the stride of a dimension of one says nothing
        if rows == 1:
            stride = step
        elif step != stride * rows:
            return None
        rows *= size
    stride = stride if rows > 1 else channels
    return stride if stride >= channels else None


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return ``x``, copied to channels_last if it is no matrix of rows, and its row stride."""
    stride = row_stride(x)
    if stride is None:
        return x.contiguous(memory_format=torch.channels_last), x.shape[1]
    return x, stride


def block_width(channels: int) -> int:
    """Columns of a tile: a power of two that divides the channels where one of at least 32 does."""
    for width in (WIDEST_BLOCK, 64, 32):
        if channels % width == 0:
            return width
    return min(max(1 << (channels - 1).bit_length(), NARROWEST_BLOCK), WIDEST_BLOCK)


def ceil_div(number: int, divisor: int) -> int:
    """Return ``number / divisor`` rounded up."""
    return -(-number // divisor)


@dataclass(frozen=True)
class Tiling:
    """A matrix of ``rows`` by ``channels`` cut into tiles of ``tile_rows`` by ``width``."""

    rows: int
    channels: int
    tile_rows: int
    width: int

    @property
    def columns(self) -> int:
        """Tiles side by side."""
        return ceil_div(self.channels, self.width)

    @property
    def tiles(self) -> int:
        """Tiles on top of each other."""
        return ceil_div(self.rows, self.tile_rows)

    def programs(self, total: int) -> int:
        """Programs that share the tiles of one column of tiles if there are ``total`` in all."""
        return min(self.tiles, MOST_PROGRAMS, max(1, total // self.columns))


def tiling(x: Tensor, values: int) -> Tiling:
    """Cut the map ``x`` into tiles of ``values`` values each."""
    width = block_width(x.shape[1])
    return Tiling(x.numel() // x.shape[1], x.shape[1], values // width, width)


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors, among which the programs of a reduction are shared out."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
