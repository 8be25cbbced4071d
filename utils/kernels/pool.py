"""Means of 2x2 neighbours at stride 1, forward and backward, for channels_last maps.

The backward pass is the same operation on the gradient with a border of zeros, so one program serves both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from utils.kernels.layout import SUM_TYPES, as_rows, block_width, can_launch, ceil_div, on_device, row_stride

POOL_VALUES, POOL_WARPS = 1024, 4
OUT_ROWS = 8  # rows that one program computes; it reads one more
IMAGE_LIMIT = 2**31 - 1  # offsets within an image are counted in 32 bits


def average_neighbours(x: Tensor) -> Tensor:
    """Return the means of 2x2 neighbours at stride 1: (B, C, H, W) -> (B, C, H - 1, W - 1)."""
    if _is_fusible(x):
        with on_device(x):
            return _Average.apply(x)
    return F.avg_pool2d(x, kernel_size=2, stride=1)


def _is_fusible(x: Tensor) -> bool:
    if x.dim() != 4 or x.dtype not in SUM_TYPES or not can_launch(x):
        return False
    if min(x.shape[2:]) < 2 or not x.numel():
        return False
    stride = row_stride(x)
    return stride is not None and x.shape[1] > 1 and x.shape[2] * x.shape[3] * stride < IMAGE_LIMIT


class _Average(torch.autograd.Function):
    """Means of 2x2 neighbours, differentiable once."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return _averages(x, border=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> Tensor:
        with on_device(dy):
            return _averages(as_rows(dy)[0], border=1)


def _averages(x: Tensor, border: int) -> Tensor:
    """Return means of 2x2 neighbours of ``x`` with ``border`` rows and columns of zeros around it."""
    from utils.kernels.programs import pool

    batch, channels, height, width = x.shape
    shape = (batch, channels, height - 1 + 2 * border, width - 1 + 2 * border)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    stride = row_stride(x)
    block_c = block_width(channels)
    block_w = POOL_VALUES // block_c
    programs = batch * ceil_div(shape[2], OUT_ROWS) * ceil_div(shape[3], block_w) * ceil_div(channels, block_c)
    pool.average_2x2[(programs,)](
        y,
        x,
        height * width * stride,
        width * stride,
        stride,
        height,
        width,
        shape[2],
        shape[3],
        channels,
        border,
        OUT_ROWS=OUT_ROWS,
        IS_DOUBLE=x.dtype == torch.float64,
        BLOCK_W=block_w,
        BLOCK_C=block_c,
        num_warps=POOL_WARPS,
    )
    return y
