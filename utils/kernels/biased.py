"""Convolutions with a bias, whose gradient is a sum over all positions: torch's kernel for it is slow on channels_last.

The sum is taken in two stages in a fixed order, in float32, or in float64 for maps of that type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from utils.kernels.layout import SUM_TYPES, as_rows, can_launch, multiprocessors, on_device, tiling

TOTAL_VALUES, TOTAL_UNROLL, TOTAL_WARPS = 1024, 4, 4
RESIDENT = 7  # programs on a multiprocessor at once


def convolve_pointwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the 1x1 convolution of (B, I, H, W) with a weight (C, I, 1, 1) and a bias (C,), in the type of ``x``."""
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    if not (can_launch(x) and bias.requires_grad and x.numel()):
        return F.conv2d(x, weight, bias)
    with on_device(x):
        return _Pointwise.apply(x, weight, bias)


def channel_totals(x: Tensor) -> Tensor:
    """Return the sums (C,) over all positions of (B, C, H, W), in float32 or float64."""
    from utils.kernels.programs import moves

    rows, stride = as_rows(x)
    cut = tiling(x, TOTAL_UNROLL * TOTAL_VALUES)
    programs = cut.programs(RESIDENT * multiprocessors(x.device))
    partials = torch.empty((programs, cut.channels), dtype=SUM_TYPES[x.dtype], device=x.device)
    moves.partial_totals[cut.columns, programs](
        rows, stride, partials, cut.rows, cut.channels, cut.tiles,
        BLOCK_R=cut.tile_rows // TOTAL_UNROLL, BLOCK_C=cut.width, num_warps=TOTAL_WARPS,
    )  # fmt: skip
    return partials.sum(0)


class _Pointwise(torch.autograd.Function):
    """1x1 convolution with a bias, differentiable once."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx, dw = None, None
        if needs[0] or needs[1]:
            dx, dw, _ = torch.ops.aten.convolution_backward(
                dy, x, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (needs[0], needs[1], False)
            )
        if not needs[2]:
            return dx, dw, None
        with on_device(dy):
            return dx, dw, channel_totals(dy).to(dy.dtype)
