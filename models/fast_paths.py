"""What blocks and heads do differently where the kernels of :mod:`utils.kernels` are switched on for training.

All of it equals plain modules within rounding, and these are taken wherever the kernels do not apply: in eval mode, off
CUDA, while something traces the model, or where a module carries hooks, which have a right to be called. Blocks are
modules with the attributes ``conv``, ``bn``, ``act`` and ``uses_kernels``, such as :class:`models.blocks.Conv`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.kernels.biased import convolve_pointwise
from utils.kernels.layout import can_launch, is_watched
from utils.kernels.moves import concatenate, fork
from utils.kernels.norm_parts import bn_act_beside, bn_act_parts, bn_add_act_joint
from utils.kernels.weight_gradient import convolve


def trains_fast(block: nn.Module) -> bool:
    """Whether ``block`` is training with kernels."""
    return block.uses_kernels and block.training


def beside(maps: Sequence[Tensor], block: nn.Module) -> Tensor:
    """Return maps (B, C_i, H, W) beside each other (B, sum C_i, H, W), within the forward pass of ``block``."""
    return concatenate(maps) if trains_fast(block) else torch.cat(tuple(maps), 1)


def two_readers(x: Tensor, block: nn.Module) -> tuple[Tensor, Tensor]:
    """Return ``x`` twice, for two readers within ``block``: one kernel adds their gradients."""
    return fork(x) if trains_fast(block) else (x, x)


def convolution(block: nn.Module, x: Tensor) -> Tensor:
    """Return ``block.conv(x)``, with the weight gradient of an own kernel where that is faster."""
    conv = block.conv
    if trains_fast(block) and _is_simple(conv) and not is_watched(conv):
        return convolve(x, conv.weight, conv.stride[0], conv.padding[0])
    return conv(x)


def joint_parts(x: Tensor, blocks: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Return ``[block(x) for block in blocks]`` from one convolution, which reads ``x`` once."""
    if not _joins(x, blocks):
        return [block(x) for block in blocks]
    norms = [block.bn for block in blocks]
    return bn_act_parts(_joint_convolution(x, blocks), norms, blocks[0].act, [norm.num_features for norm in norms])


def joint_sum(x: Tensor, blocks: Sequence[nn.Module], act: nn.Module) -> Tensor | None:
    """Return ``act`` of the sum of two blocks without activation from one convolution; None where that is not so."""
    first, second = blocks
    if any(type(block.act) is not nn.Identity for block in blocks) or not _joins(x, blocks):
        return None
    if first.bn.num_features != second.bn.num_features:
        return None
    return bn_add_act_joint(_joint_convolution(x, blocks), first.bn, second.bn, act)


def _joins(x: Tensor, blocks: Sequence[nn.Module]) -> bool:
    """Whether the convolutions of ``blocks``, which all read ``x``, can be one."""
    if not all(trains_fast(block) and block.bn is not None for block in blocks) or not can_launch(x):
        return False
    if any(type(block.act) is not type(blocks[0].act) or is_watched(block) for block in blocks):
        return False
    return all(_is_simple(block.conv) and block.conv.stride == blocks[0].conv.stride for block in blocks)


def _is_simple(conv: nn.Conv2d) -> bool:
    """Whether a convolution has nothing but a square kernel of odd size, the border of zeros for it, and a stride."""
    size, stride = conv.kernel_size[0], conv.stride[0]
    return (
        conv.kernel_size == (size, size)
        and size % 2 == 1
        and conv.padding == (size // 2, size // 2)
        and conv.padding_mode == "zeros"
        and conv.stride == (stride, stride)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is None
    )


def _joint_convolution(x: Tensor, blocks: Sequence[nn.Module]) -> Tensor:
    """Convolve ``x`` with the kernels of all ``blocks`` in a row; a smaller kernel gets a border of zeros."""
    convolutions = [block.conv for block in blocks]
    largest = max(each.kernel_size[0] for each in convolutions)
    borders = [(largest - each.kernel_size[0]) // 2 for each in convolutions]
    weights = [
        F.pad(each.weight, (border,) * 4) if border else each.weight
        for each, border in zip(convolutions, borders, strict=True)
    ]
    return convolve(x, torch.cat(weights), convolutions[0].stride[0], largest // 2)


def level_map(x: Tensor, box: nn.Sequential, cls: nn.Sequential) -> Tensor:
    """Return the raw map (B, 4 * reg_max + nc, H, W) of a level of a head from its box and its class branch.

    Each branch is two blocks and a 1x1 convolution with a bias.
    """
    blocks = (*box[:2], *cls[:2])
    if (
        not can_launch(x)
        or not all(trains_fast(block) and block.bn is not None for block in blocks)
        or type(box[1].act) is not type(cls[1].act)
        or is_watched(box)
        or is_watched(cls)
    ):
        return torch.cat((box(x), cls(x)), 1)
    first, second = joint_parts(x, (box[0], cls[0]))
    return _joint_end((first, second), (box[1], cls[1]), (box[2], cls[2]))


def _joint_end(maps: Sequence[Tensor], blocks: Sequence[nn.Module], ends: Sequence[nn.Conv2d]) -> Tensor:
    """Return ``end(block(x))`` for each of ``maps`` beside each other, from one 1x1 convolution.

    Its weight has those of ``ends``, and those of their groups, along the diagonal and zeros elsewhere: what it
    multiplies in vain costs less than copying the results and cutting their gradient.
    """
    hidden = bn_act_beside(
        [convolution(block, x) for block, x in zip(blocks, maps, strict=True)],
        [block.bn for block in blocks],
        blocks[0].act,
    )
    groups = [group.flatten(1) for end in ends for group in end.weight.to(hidden.dtype).chunk(end.groups)]
    weight = torch.block_diag(*groups)[..., None, None]
    return convolve_pointwise(hidden, weight, torch.cat([end.bias for end in ends]))
