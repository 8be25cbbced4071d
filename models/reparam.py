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
from models.parse import Row, kept_outputs, number_row, read_rows
from models.upstream import dotted_path

if TYPE_CHECKING:
    from models.graph import DetectionModel

__all__ = [
    "SingleHeadPlan",
    "flops",
    "fuse_conv_bn",
    "fuse_modules",
    "fuse_repconvn",
    "inference_form",
    "keep_lead_branch",
    "plan_single_head",
    "single_head_skeleton",
    "to_single_head",
]


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


def _folded_branches(block: RepConvN) -> tuple[Tensor, Tensor]:
    """Return weight and bias of both branches of ``block`` as one convolution.

    The branches must still carry their norms. The 1x1 weight goes to the centre of the 3x3 kernel.
    """
    weight, bias = _folded(block.conv1.conv, block.conv1.bn)
    point_weight, point_bias = _folded(block.conv2.conv, block.conv2.bn)
    return weight + F.pad(point_weight, (1, 1, 1, 1)), bias + point_bias


def _with_values(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """Give a convolution another weight and a bias, both without gradients, and return it."""
    dtype = conv.weight.dtype
    conv.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    conv.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return conv


@torch.no_grad()
def fuse_conv_bn(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """Return one biased convolution that equals ``norm(conv(x))`` in eval mode; the arguments stay as they are."""
    return _with_values(copy.deepcopy(conv), *_folded(conv, norm))


@torch.no_grad()
def fuse_repconvn(block: RepConvN) -> nn.Conv2d:
    """Return one biased 3x3 convolution that equals the sum of both branches of ``block`` before its activation."""
    return _with_values(copy.deepcopy(block.conv1.conv), *_folded_branches(block))


@torch.no_grad()
def fuse_modules(module: nn.Module) -> None:
    """Fold all norms below ``module`` in place. Already folded blocks are skipped."""
    # A RepConvN is folded from the norms of its inner blocks, so it has to come before those.
    for block in list(module.modules()):
        if isinstance(block, RepConvN) and not block.is_fused:
            block.conv = _with_values(block.conv1.conv, *_folded_branches(block))
            del block.conv1, block.conv2
    for block in module.modules():
        if isinstance(block, Conv) and block.bn is not None:
            _with_values(block.conv, *_folded(block.conv, block.bn))
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


def keep_lead_branch(model: DetectionModel) -> DetectionModel:
    """Reduce ``model`` itself to what its lead branch needs, with bit-equal results, and return it."""
    if len(model.head.branch_names) == 1:
        return model
    plan = plan_single_head(model)
    rows = read_rows(plan.yaml)
    layers = [*(model.model[index] for index in plan.rows[:-1]), _lead_head(model.head, plan.head_names)]
    for layer, row in zip(layers, rows, strict=True):
        number_row(layer, row)
    model.model = nn.Sequential(*layers).train(model.training)
    model.yaml, model.save = plan.yaml, kept_outputs(rows)
    vars(model).pop("_checkpoint_plan", None)  # of rows that are no longer there
    return model


def _lead_head(head: nn.Module, names: Mapping[str, str]) -> DDetect:
    """Return a head with one branch, made of the last one of ``head``; ``names`` are its new and its old ones."""
    boxes, _, _ = head.branches[-1]
    with torch.device("meta"):
        lead = DDetect(head.nc, [level[0].conv.in_channels for level in boxes], head.inplace)
    for name, source in names.items():
        setattr(lead, name, getattr(head, source))
    lead.stride, lead.type = head.stride, dotted_path(DDetect)
    lead.np = sum(parameter.numel() for parameter in lead.parameters())
    return lead


def to_single_head(model: DetectionModel) -> DetectionModel:
    """Return a copy of ``model`` that computes the lead branch only, with bit-equal results.

    Weights, precision, device, mode and everything else that ``model`` carries stay; ``model`` is left alone.
    """
    return keep_lead_branch(copy.deepcopy(model))


def inference_form(model: DetectionModel, *, in_place: bool = False) -> DetectionModel:
    """Return ``model``, or by default a copy of it, as deployed: lead branch only, folded, in eval mode."""
    return (keep_lead_branch if in_place else to_single_head)(model).eval().fuse()
