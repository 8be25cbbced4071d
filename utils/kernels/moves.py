"""Concatenation, enlargement and largest neighbours of channels_last maps, forward and backward.

torch has all of these, but its kernels for channels_last maps in half precision reach a fraction of the bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from utils.kernels.layout import (
    ROWS_LIMIT,
    SUM_TYPES,
    as_rows,
    block_width,
    can_launch,
    ceil_div,
    on_device,
    row_stride,
    tiling,
)

COPY_VALUES, COPY_WARPS = 4096, 4
LINE_VALUES, LINE_WARPS = 1024, 4
LARGEST_SCALE = 4  # each value is written scale * scale times by one program


def concatenate(maps: Sequence[Tensor]) -> Tensor:
    """Return the maps (B, C_i, H, W) beside each other, (B, sum C_i, H, W)."""
    first = maps[0]
    is_fusible = all(
        _is_fusible(each) and each.dtype == first.dtype and each.device == first.device
        and each.shape[:1] + each.shape[2:] == first.shape[:1] + first.shape[2:]
        for each in maps
    )  # fmt: skip
    if is_fusible:
        with on_device(first):
            return _Concatenate.apply(*maps)
    return torch.cat(tuple(maps), 1)


def enlarge_nearest(x: Tensor, scale: int) -> Tensor:
    """Return every value of (B, C, H, W) ``scale`` x ``scale`` times: (B, C, scale * H, scale * W)."""
    if _is_fusible(x) and 1 < scale <= LARGEST_SCALE:
        with on_device(x):
            return _Enlarge.apply(x, scale)
    return F.interpolate(x, scale_factor=scale, mode="nearest")


def largest_neighbours(x: Tensor, kernel: int) -> Tensor:
    """Return the largest of ``kernel`` x ``kernel`` neighbours (odd, at most 15) of each value: (B, C, H, W)."""
    if _is_fusible(x) and kernel % 2 and kernel * kernel < 255:
        with on_device(x):
            return _Largest.apply(x, kernel)
    return F.max_pool2d(x, kernel, 1, kernel // 2)


def fork(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` twice, for two readers: their gradients are added here, also where one is a part of a wider map."""
    if x.requires_grad and _is_fusible(x):
        return _Fork.apply(x)
    return x, x


def add_maps(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a + b`` for maps of one shape, at full speed also where they are parts of wider ones."""
    is_plain = all(each.is_contiguous(memory_format=torch.channels_last) for each in (a, b))
    if is_plain or a.dtype != b.dtype or not (_is_fusible(a) and _is_fusible(b)):
        return a + b
    from utils.kernels.programs import moves

    with on_device(a):
        y, cut = _empty(a, a.shape), tiling(a, COPY_VALUES)
        moves.add_rows[(cut.columns * cut.tiles,)](
            y, a, row_stride(a), b, row_stride(b), cut.rows, cut.channels,
            IS_DOUBLE=a.dtype == torch.float64, BLOCK_R=cut.tile_rows, BLOCK_C=cut.width, num_warps=COPY_WARPS,
        )  # fmt: skip
    return y


class _Fork(torch.autograd.Function):
    """Two readers of one map, differentiable once."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, a: Tensor, b: Tensor) -> Tensor:
        return add_maps(a, b)


def _is_fusible(x: Tensor) -> bool:
    is_map = x.dim() == 4 and x.dtype in SUM_TYPES and x.numel() > 0 and x.shape[1] > 1
    return is_map and x.numel() < ROWS_LIMIT * x.shape[1] and can_launch(x) and row_stride(x) is not None


class _Concatenate(torch.autograd.Function):
    """Maps beside each other, differentiable once."""

    @staticmethod
    def forward(ctx: FunctionCtx, *maps: Tensor) -> Tensor:
        from utils.kernels.programs import moves

        ctx.widths = [each.shape[1] for each in maps]
        batch, _, height, width = maps[0].shape
        y = _empty(maps[0], (batch, sum(ctx.widths), height, width))
        for part, x in zip(y.split(ctx.widths, 1), maps, strict=True):
            cut = tiling(x, COPY_VALUES)
            moves.copy_rows[(cut.columns * cut.tiles,)](
                part, row_stride(part), x, row_stride(x), cut.rows, cut.channels,
                BLOCK_R=cut.tile_rows, BLOCK_C=cut.width, num_warps=COPY_WARPS,
            )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, ...]:
        return dy.split(ctx.widths, 1)


class _Enlarge(torch.autograd.Function):
    """Nearest neighbours at a whole scale, differentiable once."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, scale: int) -> Tensor:
        from utils.kernels.programs import moves

        ctx.scale = scale
        batch, channels, height, width = x.shape
        y = _empty(x, (batch, channels, height * scale, width * scale))
        programs, blocks = _lines(x.shape)
        moves.enlarge[programs](y, x, row_stride(x), height, width, channels, SCALE=scale, **blocks)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, None]:
        from utils.kernels.programs import moves

        with on_device(dy):
            rows, stride = as_rows(dy)
            batch, channels, height, width = dy.shape
            shape = (batch, channels, height // ctx.scale, width // ctx.scale)
            dx = _empty(dy, shape)
            programs, blocks = _lines(shape)
            moves.reduce[programs](
                dx, rows, stride, *shape[2:], channels,
                IS_DOUBLE=dy.dtype == torch.float64, SCALE=ctx.scale, **blocks,
            )  # fmt: skip
        return dx, None


class _Largest(torch.autograd.Function):
    """Largest neighbours, differentiable once."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, kernel: int) -> Tensor:
        from utils.kernels.programs import moves

        y, winner = _empty(x, x.shape), _empty(x, x.shape, torch.uint8)
        programs, blocks = _lines(x.shape)
        _, channels, height, width = x.shape
        moves.largest[programs](
            y, winner, x, row_stride(x), height, width, channels,
            IS_DOUBLE=x.dtype == torch.float64, KERNEL=kernel, **blocks,
        )  # fmt: skip
        ctx.kernel = kernel
        ctx.save_for_backward(winner)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, None]:
        from utils.kernels.programs import moves

        (winner,) = ctx.saved_tensors
        with on_device(dy):
            rows, stride = as_rows(dy)
            dx = _empty(dy, dy.shape)
            programs, blocks = _lines(dy.shape)
            _, channels, height, width = dy.shape
            moves.largest_backward[programs](
                dx, rows, stride, winner, height, width, channels,
                IS_DOUBLE=dy.dtype == torch.float64, KERNEL=ctx.kernel, **blocks,
            )  # fmt: skip
        return dx, None


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)


def _lines(shape: Sequence[int]) -> tuple[tuple[int], dict[str, int]]:
    """Number of programs, and their sizes, for maps of ``shape`` cut into pieces of lines."""
    batch, channels, height, width = shape
    block_c = block_width(channels)
    block_w = LINE_VALUES // block_c
    programs = batch * height * ceil_div(width, block_w) * ceil_div(channels, block_c)
    return (programs,), {"BLOCK_W": block_w, "BLOCK_C": block_c, "num_warps": LINE_WARPS}
