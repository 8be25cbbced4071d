"""From the training form of a model to the one that is deployed.

Two independent and exact steps: keep only what the lead branch needs, and fold every batch norm (and the two branches
of every RepConvN) into plain convolutions. Nothing is pruned and no weight is approximated.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.blocks import Conv, RepConvN
from models.flops import flops
from models.heads import DDetect
from models.parse import Row, read_rows

if TYPE_CHECKING:
    from models.graph import DetectionModel

__all__ = [
    "SingleHeadPlan",
    "flops",
    "fuse_conv_bn",
    "fuse_modules",
    "fuse_repconvn",
    "inference_form",
    "plan_single_head",
    "single_head_skeleton",
    "to_single_head",
]

CARRIED_ATTRIBUTES = ("names", "nc", "hyp", "class_weights", "yaml_file")


def _folding_dtype(weight: Tensor) -> torch.dtype:
    """Fold in double precision where the device has it, so that half-precision models are rounded only once."""
    return torch.float32 if weight.device.type == "mps" else torch.float64


def _folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of ``norm(conv(x))`` as one convolution.

    With t = gamma / sqrt(var + eps): W' = t * W and b' = beta + t * (b - mean), per output channel.
    """
    dtype = _folding_dtype(conv.weight)
    scale = norm.weight.to(dtype) / (norm.running_var.to(dtype) + norm.eps).sqrt()
    bias = norm.running_mean.new_zeros(()) if conv.bias is None else conv.bias
    shifted = bias.to(dtype) - norm.running_mean.to(dtype)
    return conv.weight.to(dtype) * scale.view(-1, 1, 1, 1), norm.bias.to(dtype) + scale * shifted


def _biased_copy(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """Return a convolution of the same geometry with the given weight and bias, without gradients."""
    fused = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        device="meta",
    )
    fused.weight = nn.Parameter(weight.to(conv.weight.dtype), requires_grad=False)
    fused.bias = nn.Parameter(bias.to(conv.weight.dtype), requires_grad=False)
    return fused.train(conv.training)


@torch.no_grad()
def fuse_conv_bn(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """Return one biased convolution that equals ``norm(conv(x))`` in eval mode; the arguments stay as they are."""
    return _biased_copy(conv, *_folded(conv, norm))


@torch.no_grad()
def fuse_repconvn(block: RepConvN) -> nn.Conv2d:
    """Return one biased 3x3 convolution that equals the sum of both branches of ``block`` before its activation.

    The branches must still carry their norms. The 1x1 weight goes to the centre of the 3x3 kernel.
    """
    weight, bias = _folded(block.conv1.conv, block.conv1.bn)
    point_weight, point_bias = _folded(block.conv2.conv, block.conv2.bn)
    return _biased_copy(block.conv1.conv, weight + F.pad(point_weight, (1, 1, 1, 1)), bias + point_bias)


def fuse_modules(module: nn.Module) -> None:
    """Fold all norms below ``module`` in place. Already folded blocks are skipped."""
    # A RepConvN is folded from the norms of its inner blocks, so it has to come before those.
    for block in list(module.modules()):
        if isinstance(block, RepConvN) and not block.is_fused:
            block.conv = fuse_repconvn(block)
            del block.conv1, block.conv2
    for block in module.modules():
        if isinstance(block, Conv) and block.bn is not None:
            block.conv = fuse_conv_bn(block.conv, block.bn)
            block.bn = None


def is_fused(module: nn.Module) -> bool:
    """Whether the norms of ``module`` have been folded."""
    return any(isinstance(block, Conv) and block.bn is None for block in module.modules())


@dataclass(frozen=True)
class SingleHeadPlan:
    """How a model shrinks to its lead branch: the new YAML, and for each new row the old one it stems from."""

    yaml: dict[str, object]
    rows: tuple[int, ...]
    head_names: Mapping[str, str]

    def source_key(self, key: str) -> str:
        """Return the state-dict key of the multi-branch model that holds the value of the single-branch ``key``."""
        prefix, row, *rest = key.split(".")
        new_row = int(row)
        if new_row == len(self.rows) - 1:
            rest[0] = self.head_names[rest[0]]
        return ".".join((prefix, str(self.rows[new_row]), *rest))


def plan_single_head(model: DetectionModel) -> SingleHeadPlan:
    """Work out which rows the lead branch needs and how they are numbered without the others.

    Needed are the rows reachable backwards from the last ``nl`` inputs of the head. A leading Silence that only its
    successor reads goes as well, since the image is the input of the first row anyway.
    """
    rows = read_rows(model.yaml)
    head = rows[-1]
    lead_sources = head.sources[-model.head.nl :]
    rows[-1] = Row(head.index, lead_sources, head.repeats, DDetect.__name__, head.args, True)
    needed = _reachable(rows)
    if rows[0].name == "Silence" and all(0 not in rows[index].absolute_sources for index in needed if index > 1):
        needed.discard(0)
    kept = sorted(needed)
    position = {old: new for new, old in enumerate(kept)}
    renumbered = [_renumbered(rows[old], position) for old in kept]
    backbone = sum(old < len(model.yaml["backbone"]) for old in kept)
    yaml = copy.deepcopy(model.yaml)
    yaml["backbone"], yaml["head"] = renumbered[:backbone], renumbered[backbone:]
    (box, cls), decoder = model.head.branch_names[-1], model.head.decoder_names[-1]
    return SingleHeadPlan(yaml, tuple(kept), {"cv2": box, "cv3": cls, "dfl": decoder})


def _reachable(rows: list[Row]) -> set[int]:
    """Return the rows that the last one depends on, itself included."""
    needed, waiting = set(), [rows[-1].index]
    while waiting:
        index = waiting.pop()
        if index >= 0 and index not in needed:
            needed.add(index)
            waiting.extend(rows[index].absolute_sources)
    return needed


def _renumbered(row: Row, position: Mapping[int, int]) -> list[object]:
    """Write a row for the smaller network; "the previous row" stays that, since it is always kept."""
    pairs = zip(row.sources, row.absolute_sources, strict=True)
    sources = [source if source == -1 else position.get(absolute, -1) for source, absolute in pairs]
    return [sources if row.is_list else sources[0], row.repeats, row.name, copy.deepcopy(list(row.args))]


def single_head_skeleton(model: DetectionModel) -> DetectionModel:
    """Build the single-branch network of ``model`` on the meta device: shapes without values."""
    plan = plan_single_head(model)
    with torch.device("meta"):
        single = type(model)(plan.yaml)
        if single.head.set_hidden_widths(model.head.hidden_widths()[-1:]):
            single.finish_blocks()
    return single


@torch.no_grad()
def to_single_head(model: DetectionModel) -> DetectionModel:
    """Return a copy of ``model`` that computes the lead branch only, with bit-equal results.

    Weights, precision, device, mode, ``names`` and training attributes carry over; ``model`` is left alone.
    """
    if len(model.head.branch_names) == 1:
        return copy.deepcopy(model)
    plan = plan_single_head(model)
    single = single_head_skeleton(model)
    if is_fused(model):
        fuse_modules(single)
    source = model.state_dict(keep_vars=True)
    chosen = {key: source[plan.source_key(key)] for key in single.state_dict()}
    single.load_state_dict({key: value.detach().clone() for key, value in chosen.items()}, strict=True, assign=True)
    for key, parameter in single.named_parameters():
        parameter.requires_grad_(chosen[key].requires_grad)
    single.head.stride = model.head.stride.clone()
    for name in CARRIED_ATTRIBUTES:
        if name in model.__dict__:
            setattr(single, name, copy.deepcopy(model.__dict__[name]))
    return single.train(model.training)


def inference_form(model: DetectionModel) -> DetectionModel:
    """Return a copy of ``model`` for deployment: lead branch only, folded, in eval mode."""
    return to_single_head(model).eval().fuse()
