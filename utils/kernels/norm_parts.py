"""Batch norm and activation of a map whose channels go different ways, in a training step.

A convolution may compute the inputs of several paths at once. Cutting its normalised output into slices would cost
each path a copy, since convolutions want maps without gaps, and the gradients would have to be put together again.
Here every part is written to a map of its own, and the gradients of all parts into one. See :mod:`utils.kernels.norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from utils.kernels.layout import on_device
from utils.kernels.norm import Branch, backward_pass, forward_pass, is_fusible, is_fusible_pair


def bn_act_parts(x: Tensor, norms: Sequence[nn.BatchNorm2d], act: nn.Module, widths: Sequence[int]) -> list[Tensor]:
    """Normalise and activate ``x`` (B, C, H, W), and return it as parts of ``widths`` channels.

    ``norms`` is one norm over all channels, or one for each part.
    """
    owners = list(norms) if len(norms) > 1 else [norms[0]] * len(widths)
    whole = x.shape[1] if len(norms) == 1 else None
    if all(is_fusible(x if whole else part, norm, act) for part, norm in zip(x.split(widths, 1), owners, strict=True)):
        parameters = [parameter for norm in norms for parameter in (norm.weight, norm.bias)]
        with on_device(x):
            return list(_NormActParts.apply(tuple(norms), tuple(widths), type(act) is nn.SiLU, x, *parameters))
    if whole:
        return list(act(norms[0](x)).split(widths, 1))
    return [act(norm(part)) for norm, part in zip(norms, x.split(widths, 1), strict=True)]


def bn_add_act_joint(x: Tensor, bn: nn.BatchNorm2d, other_bn: nn.BatchNorm2d, act: nn.Module) -> Tensor:
    """Return ``act(bn(a) + other_bn(b))`` for the halves a and b of the channels of ``x`` (B, 2 * C, H, W)."""
    first, second = x.chunk(2, 1)
    if is_fusible_pair(first, bn, second, other_bn, act):
        with on_device(x):
            return _NormAddActJoint.apply(
                (bn, other_bn), type(act) is nn.SiLU, x, bn.weight, bn.bias, other_bn.weight, other_bn.bias
            )
    return act(bn(first) + other_bn(second))


class _NormAddActJoint(torch.autograd.Function):
    """activation(norm(a) + norm(b)) for both halves of one map, differentiable once."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, norms: Sequence[nn.BatchNorm2d], has_silu: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        """``parameters`` holds weight and bias of each of the norms."""
        ctx.has_silu = has_silu
        y, statistics = forward_pass(x.chunk(2, 1), norms, has_silu)
        ctx.save_for_backward(x, *parameters, *statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients in the order of the arguments of ``forward``."""
        x, *saved = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.channels_last)
        first, second = x.chunk(2, 1)
        branches = [Branch(first, *saved[:2], saved[4]), Branch(second, *saved[2:4], saved[5])]
        with on_device(x):
            _, found = backward_pass(dy, branches, ctx.has_silu, into=dx.chunk(2, 1))
        wanted = zip((dx, *found.unbind()), ctx.needs_input_grad[2:], strict=True)
        return None, None, *(gradient if is_needed else None for gradient, is_needed in wanted)


def bn_act_beside(maps: Sequence[Tensor], norms: Sequence[nn.BatchNorm2d], act: nn.Module) -> Tensor:
    """Return ``torch.cat([act(norm(x)) for x, norm in zip(maps, norms)], 1)``."""
    first = maps[0]
    if all(
        is_fusible(x, norm, act) and x.dtype == first.dtype and x[:, 0].shape == first[:, 0].shape
        for x, norm in zip(maps, norms, strict=True)
    ):
        inputs = [each for x, norm in zip(maps, norms, strict=True) for each in (x, norm.weight, norm.bias)]
        with on_device(first):
            return _NormActBeside.apply(tuple(norms), type(act) is nn.SiLU, *inputs)
    return torch.cat([act(norm(x)) for x, norm in zip(maps, norms, strict=True)], 1)


class _NormActBeside(torch.autograd.Function):
    """activation(norm(x)) of several maps in one, differentiable once."""

    @staticmethod
    def forward(ctx: FunctionCtx, norms: Sequence[nn.BatchNorm2d], has_silu: bool, *inputs: Tensor) -> Tensor:
        """``inputs`` holds map, weight and bias for each of the norms."""
        maps = inputs[::3]
        ctx.widths, ctx.has_silu = [x.shape[1] for x in maps], has_silu
        batch, _, height, width = maps[0].shape
        shape = (batch, sum(ctx.widths), height, width)
        y = torch.empty(shape, dtype=maps[0].dtype, device=maps[0].device, memory_format=torch.channels_last)
        statistics = []
        for x, norm, part in zip(maps, norms, y.split(ctx.widths, 1), strict=True):
            statistics += forward_pass([x], [norm], has_silu, into=part)[1]
        ctx.save_for_backward(*inputs, *statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients in the order of the arguments of ``forward``."""
        number = len(ctx.widths)
        inputs, statistics = ctx.saved_tensors[: 3 * number], ctx.saved_tensors[3 * number :]
        found: list[Tensor] = []
        with on_device(dy):
            for index, part in enumerate(dy.split(ctx.widths, 1)):
                branch = Branch(*inputs[3 * index : 3 * index + 3], statistics[index])
                maps, of_parameters = backward_pass(part, [branch], ctx.has_silu)
                found += [*maps, *of_parameters.unbind()]
        wanted = zip(found, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(gradient if is_needed else None for gradient, is_needed in wanted)


@dataclass(frozen=True)
class _PartOfNorm:
    """What statistics have to know of a norm, for some of its channels."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor | None
    eps: float
    momentum: float


def _parts_of(norms: Sequence[nn.BatchNorm2d], widths: Sequence[int]) -> list[_PartOfNorm]:
    """Cut one norm into parts, or take each of several as one; only the first part of a norm counts its batches."""
    parts, start = [], 0
    for index, width in enumerate(widths):
        norm = norms[0] if len(norms) == 1 else norms[index]
        first = start if len(norms) == 1 else 0
        here = slice(first, first + width)
        parts.append(
            _PartOfNorm(
                norm.weight.detach()[here],
                norm.bias.detach()[here],
                norm.running_mean[here],
                norm.running_var[here],
                norm.num_batches_tracked if first == 0 else None,
                norm.eps,
                norm.momentum,
            )
        )
        start += width
    return parts


class _NormActParts(torch.autograd.Function):
    """activation(norm(x)) in parts, differentiable once."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        norms: Sequence[nn.BatchNorm2d],
        widths: Sequence[int],
        has_silu: bool,
        x: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """``parameters`` holds weight and bias of each of the norms."""
        outputs, statistics = [], []
        for part, norm in zip(x.split(widths, 1), _parts_of(norms, widths), strict=True):
            y, found = forward_pass([part], [norm], has_silu)
            outputs.append(y)
            statistics += found
        ctx.widths, ctx.has_silu, ctx.is_one_norm = widths, has_silu, len(norms) == 1
        ctx.save_for_backward(x, *parameters, *statistics)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients in the order of the arguments of ``forward``."""
        number = len(ctx.widths)
        x, *saved = ctx.saved_tensors
        parameters, statistics = saved[:-number], saved[-number:]
        weights, biases = parameters[::2], parameters[1::2]
        if ctx.is_one_norm:
            weights, biases = weights[0].split(ctx.widths), biases[0].split(ctx.widths)
        dx = torch.empty_like(x, memory_format=torch.channels_last)
        found = []
        with on_device(x):
            for part, weight, bias, known, dy, target in zip(
                x.split(ctx.widths, 1), weights, biases, statistics, gradients, dx.split(ctx.widths, 1), strict=True
            ):
                branch = Branch(part, weight, bias, known)
                found.append(backward_pass(dy, [branch], ctx.has_silu, into=[target])[1])
        if ctx.is_one_norm:
            found = [torch.cat(found, 1)]
        of_all = [gradient for each in found for gradient in each.unbind()]
        needed = ctx.needs_input_grad[3:]
        wanted = (gradient if is_needed else None for gradient, is_needed in zip((dx, *of_all), needed, strict=True))
        return None, None, None, *wanted
