"""3x3 convolutions of few channels whose weight gradient is computed by kernels of our own.

cuDNN takes several times as long for these gradients as reading both maps does. Everything else of such a
convolution is torch's. A gradient is the sum over all pixels of products of two narrow matrices: programs share the
pixels out, each leaves its sums in float32, and a second program adds those up in a fixed order, so that results
repeat exactly. Nothing waits for the device, and all memory comes from torch, as recording CUDA graphs requires.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from utils.kernels.launch import HALF_TYPES
from utils.kernels.layout import ROWS_LIMIT, as_rows, can_launch, ceil_div, multiprocessors, on_device, row_stride

CHANNEL_STEP = 16
INPUTS, OUTPUTS = (32, 48), (32, 96)
"""Fewest and most channels with which the kernels were faster than cuDNN's on an H200; with more they are not."""
SHARED_BYTES = 160 * 1024  # that a program may have; the largest plan takes 147 KB
COLOURS = 3  # channels of pictures, which the first layer reads at stride 2
JOIN_ROWS, JOIN_VALUES, JOIN_WARPS = 128, 32, 8


@dataclass(frozen=True)
class Plan:
    """How the products of one shape are cut: see ``partial_products`` in the programs for the first six."""

    shares_shifts: bool
    pixels: int
    x_columns: int
    y_columns: int
    is_ahead: bool
    stages: int
    warps: int
    resident: int  # programs on a multiprocessor at once

    def blocks(self, inputs: int, outputs: int) -> int:
        """Programs that share a stretch of pixels."""
        x_values, y_values = (4 * inputs, 4 * outputs) if self.shares_shifts else (9 * inputs, outputs)
        return ceil_div(x_values, self.x_columns) * ceil_div(y_values, self.y_columns)


# The fastest of several for each kind of shape on an H200.
FEW_TO_FEW = Plan(True, 64, 128, 128, False, 3, 4, 2)
FEW_TO_MORE = Plan(True, 64, 128, 256, False, 3, 8, 1)
TO_SOME = Plan(False, 64, 128, 64, False, 3, 4, 3)
TO_MANY = Plan(False, 64, 128, 128, False, 3, 8, 2)
FROM_COLOURS = Plan(False, 64, 32, 32, True, 1, 4, 3)


def choose_plan(inputs: int, outputs: int, stride: int) -> Plan:
    """Return the plan for so many channels. A fixed rule: nothing is tried out at run time."""
    if inputs == COLOURS:
        return FROM_COLOURS
    if stride == 1 and inputs <= 32 and outputs <= 64:
        return FEW_TO_FEW if outputs <= 32 else FEW_TO_MORE
    return TO_SOME if outputs <= 64 else TO_MANY


def convolve(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """Return the convolution of ``x`` (B, I, H, W) by ``weight`` (O, I, kernel, kernel), without bias.

    Where the kernels apply, see :func:`suits`, float32 weights of a half-precision map are rounded to its type, as
    autocast does, and their gradient is float32 without having been rounded.
    """
    if padding == 1 and suits(x, weight, stride):
        with on_device(x):
            return _Convolution.apply(x, weight, stride)
    return F.conv2d(x, weight, None, stride, padding)


def suits(x: Tensor, weight: Tensor, stride: int = 1) -> bool:
    """Whether the kernels compute the weight gradient of this convolution with padding 1 and one group."""
    if x.dim() != 4 or x.dtype not in HALF_TYPES or not can_launch(x) or not _has_room(x.device):
        return False
    if weight.dtype not in (x.dtype, torch.float32) or weight.device != x.device:
        return False
    outputs, inputs, *kernel = weight.shape
    is_known = _is_between(inputs, INPUTS) or (inputs == COLOURS and stride == 2)
    if kernel != [3, 3] or inputs != x.shape[1] or not is_known or not _is_between(outputs, OUTPUTS):
        return False
    if stride not in (1, 2) or any(side % stride for side in x.shape[2:]):
        return False
    return 0 < x.numel() < ROWS_LIMIT * inputs and row_stride(x) is not None


@cache
def _has_room(device: torch.device) -> bool:
    """Whether the tiles of the largest plan fit: cards for desktops have less shared memory than those for servers."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= SHARED_BYTES


def _is_between(channels: int, limits: tuple[int, int]) -> bool:
    return channels % CHANNEL_STEP == 0 and limits[0] <= channels <= limits[1]


class _Convolution(torch.autograd.Function):
    """3x3 convolution with padding 1, differentiable once."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        rounded = weight.to(x.dtype)
        ctx.stride, ctx.weight_type = stride, weight.dtype
        ctx.save_for_backward(x, rounded)
        return F.conv2d(x, rounded, None, stride, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx, dweight = None, None
        with on_device(dy):
            if ctx.needs_input_grad[0]:
                sides = [ctx.stride] * 2, [1, 1], [1, 1], False, [0, 0]
                dx = torch.ops.aten.convolution_backward(dy, x, weight, None, *sides, 1, (True, False, False))[0]
            if ctx.needs_input_grad[1]:
                dweight = weight_gradient(x, dy, ctx.stride, ctx.weight_type)
        return dx, dweight, None


def weight_gradient(
    x: Tensor, dy: Tensor, stride: int = 1, dtype: torch.dtype | None = None, plan: Plan | None = None
) -> Tensor:
    """Return the gradient (O, I, 3, 3), channels_last, of the weight of a convolution with padding 1.

    Args:
        x: input (B, I, stride * H, stride * W), a matrix of rows as :func:`suits` asks for.
        dy: gradient (B, O, H, W) of the output.
        stride: 1 or 2.
        dtype: type of the result, by default that of ``x``. Sums are held in float32.
        plan: how to cut the work, by default what :func:`choose_plan` returns.
    """
    from utils.kernels.programs import weight_gradient as programs

    rows, rows_stride = as_rows(dy)
    batch, outputs, height, width = dy.shape
    inputs, pixels = x.shape[1], batch * height * width
    plan = plan or choose_plan(inputs, outputs, stride)
    blocks, tiles = plan.blocks(inputs, outputs), ceil_div(pixels, plan.pixels)
    tiles_each = ceil_div(tiles, max(1, plan.resident * multiprocessors(x.device) // blocks))
    stretches = ceil_div(tiles, tiles_each)
    partials = torch.empty((stretches, outputs, 9, inputs), dtype=torch.float32, device=x.device)
    gradient = torch.empty(
        (outputs, inputs, 3, 3), dtype=dtype or x.dtype, device=x.device, memory_format=torch.channels_last
    )
    programs.partial_products[blocks, stretches](
        partials,
        x,
        row_stride(x),
        rows,
        rows_stride,
        height,
        width,
        pixels,
        tiles_each,
        inputs,
        outputs,
        SHARES_SHIFTS=plan.shares_shifts,
        STRIDE=stride,
        BLOCK_P=plan.pixels,
        BLOCK_X=plan.x_columns,
        BLOCK_Y=plan.y_columns,
        IS_AHEAD=plan.is_ahead,
        STAGES=plan.stages,
        num_warps=plan.warps,
    )
    programs.join_products[(ceil_div(gradient.numel(), JOIN_VALUES),)](
        gradient,
        partials,
        stretches,
        gradient.numel(),
        BLOCK_P=JOIN_ROWS,
        BLOCK_V=JOIN_VALUES,
        num_warps=JOIN_WARPS,
    )
    return gradient
