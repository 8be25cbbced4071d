"""Batch norm and activation of a training step in as few passes over memory as it takes.

:func:`bn_act` and :func:`bn_add_act` equal the modules they are given, within rounding. For channels_last maps on a
CUDA device in training mode they run fused: the forward pass reads its input twice and writes its output, nothing is
kept but the input and two numbers per channel, the backward pass reads input and gradient twice. In every other case
the modules are called.

One difference is intended: a channel whose batch statistics are not finite leaves the running statistics alone, so
that one overflow in half precision does not spoil them for good. The number of batches counts on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from utils.kernels.launch import is_fast, launch_options, resident_programs
from utils.kernels.layout import (
    ROWS_LIMIT,
    SUM_TYPES,
    Tiling,
    as_rows,
    can_launch,
    ceil_div,
    is_watched,
    on_device,
    row_stride,
    tiling,
)

# Values of a tile, loaded at once by the threads of a program; and warps of 32 threads per program.
STATISTICS_VALUES, SUMS_VALUES, PAIR_SUMS_VALUES, REDUCTION_WARPS = 4096, 2048, 1024, 4
APPLY_VALUES, GRADIENT_VALUES, PASS_WARPS = 4096, 2048, 4
STATISTICS_UNROLL = 4  # loads that make a tile of the statistics; written out in the program
STATISTICS_REGISTERS, SUMS_REGISTERS, PAIR_SUMS_REGISTERS = 80, 96, 128
"""Registers per thread of a reduction. It has as many programs as run at once, so that none has to wait."""
PARTIAL_STEPS = (16, 64, 128, 256, 512, 1024)  # room for so many partial results; few sizes, to compile few programs
FINISH_WIDTH, FINISH_WARPS = 8, 8


def bn_act(x: Tensor, bn: nn.Module, act: nn.Module, residual: Tensor | None = None) -> Tensor:
    """Return ``act(bn(x))``, plus ``residual`` if given; ``x`` is (B, C, H, W)."""
    if is_fusible(x, bn, act) and (residual is None or _is_like(residual, x)):
        with on_device(x):
            return _NormAct.apply((bn,), type(act) is nn.SiLU, residual, x, bn.weight, bn.bias)
    y = act(bn(x))
    return y if residual is None else residual + y


def bn_add_act(x: Tensor, bn: nn.Module, other: Tensor, other_bn: nn.Module, act: nn.Module) -> Tensor:
    """Return ``act(bn(x) + other_bn(other))`` for two maps of the same shape (B, C, H, W)."""
    if is_fusible_pair(x, bn, other, other_bn, act):
        with on_device(x):
            return _NormAct.apply(
                (bn, other_bn),
                type(act) is nn.SiLU,
                None,
                x,
                bn.weight,
                bn.bias,
                other,
                other_bn.weight,
                other_bn.bias,
            )
    return act(bn(x) + other_bn(other))


def is_fusible(x: Tensor, bn: nn.Module, act: nn.Module) -> bool:
    """Whether the kernels do exactly what ``act(bn(x))`` would; hooks have a right to be called."""
    is_known = type(bn) is nn.BatchNorm2d and type(act) in (nn.SiLU, nn.Identity)
    if not is_known or not bn.training or not can_launch(x):
        return False
    if bn.running_mean is None or bn.running_var is None or bn.momentum is None or bn.weight is None or bn.bias is None:
        return False
    if is_watched(bn) or is_watched(act):
        return False
    if x.dim() != 4 or x.shape[1] != bn.num_features or not x.shape[1] < x.numel() < ROWS_LIMIT * x.shape[1]:
        return False  # for a single row, the module says what is wrong
    tensors = (bn.weight, bn.bias, bn.running_mean, bn.running_var)
    sum_type = SUM_TYPES.get(x.dtype)
    return row_stride(x) is not None and all(t.dtype == sum_type and t.device == x.device for t in tensors)


def is_fusible_pair(x: Tensor, bn: nn.Module, other: Tensor, other_bn: nn.Module, act: nn.Module) -> bool:
    """Whether the kernels do exactly what ``act(bn(x) + other_bn(other))`` would.

    One norm for both has to move its running statistics twice, one after the other, which one launch does not.
    """
    is_each = is_fusible(x, bn, act) and is_fusible(other, other_bn, act)
    return is_each and _is_like(other, x) and bn is not other_bn


def _is_like(other: Tensor, x: Tensor) -> bool:
    same = other.shape == x.shape and other.dtype == x.dtype and other.device == x.device
    return same and row_stride(other) is not None


@dataclass(frozen=True)
class Branch:
    """One input with its norm's parameters and its batch statistics (2, C): means and inverse standard deviations."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    statistics: Tensor

    @property
    def arguments(self) -> tuple[Tensor, int, Tensor, Tensor, Tensor]:
        return self.x, row_stride(self.x), self.statistics, self.weight, self.bias


# Stand for the arguments of an absent second input.
NO_BRANCH = (None, 0, None, None, None)
NO_RUNNING = (None, None, None, 0.0, 0.0)


class _NormAct(torch.autograd.Function):
    """activation(norm(x) [+ norm(other)]) [+ residual], differentiable once."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        norms: Sequence[nn.BatchNorm2d],
        has_silu: bool,
        residual: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        """``inputs`` holds map, weight and bias for each of the norms."""
        ctx.has_silu = has_silu
        y, statistics = forward_pass(inputs[::3], norms, has_silu, residual)
        ctx.save_for_backward(*inputs, *statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients in the order of the arguments of ``forward``."""
        saved = ctx.saved_tensors
        number = len(saved) // 4
        inputs, statistics = saved[: 3 * number], saved[3 * number :]
        needed = ctx.needs_input_grad[3:]
        found: list[Tensor | None] = [None] * len(needed)
        if any(needed):
            with on_device(dy):
                branches = [Branch(*inputs[3 * n : 3 * n + 3], statistics[n]) for n in range(number)]
                found[::3], parameters = backward_pass(dy, branches, ctx.has_silu, needs_maps=any(needed[::3]))
                found[1::3], found[2::3] = parameters[::2].unbind(), parameters[1::2].unbind()
        wanted = (gradient if is_needed else None for gradient, is_needed in zip(found, needed, strict=True))
        return None, None, dy if ctx.needs_input_grad[2] else None, *wanted


def forward_pass(
    maps: Sequence[Tensor],
    norms: Sequence[nn.BatchNorm2d],
    has_silu: bool,
    residual: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return activation(norm(x) [+ norm(other)]) [+ residual], and the statistics (2, C) of each map.

    Nothing may be launched between the two steps: the second relies on the first being the kernel right before it,
    by the rule of :mod:`utils.kernels.programs.streaming`.
    """
    statistics = list(batch_statistics(maps, norms).unbind())
    branches = [
        Branch(x, norm.weight, norm.bias, known) for x, norm, known in zip(maps, norms, statistics, strict=True)
    ]
    return normalise(branches, residual, has_silu, into), statistics


def backward_pass(
    dy: Tensor,
    branches: Sequence[Branch],
    has_silu: bool,
    *,
    into: Sequence[Tensor] | None = None,
    needs_maps: bool = True,
) -> tuple[Sequence[Tensor | None], Tensor]:
    """Return the gradients of the maps, written ``into`` some if given, and of weight and bias of each norm (2n, C).

    As in :func:`forward_pass`, nothing may be launched between the two steps.
    """
    rows, stride = as_rows(dy)
    gradients = parameter_gradients(rows, stride, branches, has_silu)
    if not needs_maps:
        return [None] * len(branches), gradients
    return input_gradients(rows, stride, branches, gradients, has_silu, into), gradients


def batch_statistics(maps: Sequence[Tensor], norms: Sequence[nn.BatchNorm2d]) -> Tensor:
    """Return means and inverse standard deviations (N, 2, C) of one map, or of two of the same shape in one launch.

    Moves the running statistics of the norms.
    """
    from utils.kernels.programs import norm_forward

    x, number = maps[0], len(maps)
    cut = tiling(x, STATISTICS_VALUES)
    resident = resident_programs(x.device, REDUCTION_WARPS, STATISTICS_REGISTERS)
    programs = cut.programs(resident // number)
    partials = norms[0].weight.new_empty((number, 2, programs, cut.channels))
    statistics = norms[0].weight.new_empty((number, 2, cut.channels))
    norm_forward.partial_statistics[cut.columns, programs, number](
        x,
        row_stride(x),
        *((maps[1], row_stride(maps[1])) if number > 1 else (None, 0)),
        partials,
        cut.rows,
        cut.channels,
        cut.tiles,
        BLOCK_R=cut.tile_rows // STATISTICS_UNROLL,
        BLOCK_C=cut.width,
        **launch_options(x, REDUCTION_WARPS, STATISTICS_REGISTERS),
    )
    norm_forward.finish_statistics[(*_finish_grid(cut), number)](
        partials,
        statistics,
        *_running(norms[0]),
        *(_running(norms[1]) if number > 1 else NO_RUNNING),
        cut.rows,
        cut.channels,
        cut.tiles,
        programs,
        TILE_ROWS=cut.tile_rows,
        **_finish_options(x, programs),
    )
    return statistics


def _running(bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor | None, float, float]:
    return bn.running_mean, bn.running_var, bn.num_batches_tracked, float(bn.eps), float(bn.momentum)


def normalise(
    branches: Sequence[Branch], residual: Tensor | None, has_silu: bool, into: Tensor | None = None
) -> Tensor:
    """Return activation(norm(x) [+ norm(other)]) [+ residual] as a channels_last map, written ``into`` one if given."""
    from utils.kernels.programs import norm_forward

    x = branches[0].x
    y = torch.empty_like(x, memory_format=torch.channels_last) if into is None else into
    cut = tiling(x, APPLY_VALUES)
    second = branches[1].arguments if len(branches) > 1 else NO_BRANCH
    norm_forward.apply_norms[(cut.columns * cut.tiles,)](
        y,
        row_stride(y),
        *branches[0].arguments,
        *second,
        residual,
        0 if residual is None else row_stride(residual),
        cut.rows,
        cut.channels,
        HAS_SILU=has_silu,
        FAST=is_fast(x),
        BLOCK_R=cut.tile_rows,
        BLOCK_C=cut.width,
        **launch_options(x, PASS_WARPS),
    )
    return y


def parameter_gradients(dy: Tensor, dy_stride: int, branches: Sequence[Branch], has_silu: bool) -> Tensor:
    """Return the gradients of weight and bias (2, C), or of weight, bias, other weight, other bias (4, C)."""
    from utils.kernels.programs import norm_backward

    first, is_pair = branches[0], len(branches) > 1
    cut = tiling(first.x, PAIR_SUMS_VALUES if is_pair else SUMS_VALUES)
    registers = PAIR_SUMS_REGISTERS if is_pair else SUMS_REGISTERS
    programs = cut.programs(resident_programs(dy.device, REDUCTION_WARPS, registers))
    partials = first.weight.new_empty((3 if is_pair else 2, programs, cut.channels))
    gradients = first.weight.new_empty((4 if is_pair else 2, cut.channels))
    norm_backward.partial_sums[cut.columns, programs](
        dy,
        dy_stride,
        *first.arguments,
        *(branches[1].arguments if is_pair else NO_BRANCH),
        partials,
        cut.rows,
        cut.channels,
        cut.tiles,
        HAS_SILU=has_silu,
        FAST=is_fast(first.x),
        BLOCK_R=cut.tile_rows,
        BLOCK_C=cut.width,
        **launch_options(first.x, REDUCTION_WARPS, registers),
    )
    norm_backward.finish_sums[_finish_grid(cut)](
        partials,
        first.statistics,
        branches[1].statistics if is_pair else None,
        gradients,
        cut.channels,
        programs,
        **_finish_options(first.x, programs),
    )
    return gradients


def input_gradients(
    dy: Tensor,
    dy_stride: int,
    branches: Sequence[Branch],
    parameters: Tensor,
    has_silu: bool,
    into: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """Return the gradient of the map of each branch, given those of the parameters; written ``into`` maps if given."""
    from utils.kernels.programs import norm_backward

    found = into or [torch.empty_like(branch.x, memory_format=torch.channels_last) for branch in branches]
    cut = tiling(branches[0].x, GRADIENT_VALUES)
    second = (None, 0, *NO_BRANCH)
    if len(branches) > 1:
        second = (found[1], row_stride(found[1]), *branches[1].arguments)
    norm_backward.input_gradients[(cut.columns * cut.tiles,)](
        found[0],
        row_stride(found[0]),
        dy,
        dy_stride,
        *branches[0].arguments,
        *second,
        parameters,
        cut.rows,
        cut.channels,
        HAS_SILU=has_silu,
        FAST=is_fast(branches[0].x),
        BLOCK_R=cut.tile_rows,
        BLOCK_C=cut.width,
        **launch_options(branches[0].x, PASS_WARPS),
    )
    return found


def _finish_grid(cut: Tiling) -> tuple[int]:
    return (ceil_div(cut.channels, FINISH_WIDTH),)


def _finish_options(x: Tensor, programs: int) -> dict[str, int | bool]:
    """Sizes of the program that joins partial results: room for all of them, a few channels wide."""
    room = next(step for step in PARTIAL_STEPS if step >= programs)
    return {"BLOCK_P": room, "BLOCK_C": FINISH_WIDTH, **launch_options(x, FINISH_WARPS)}
