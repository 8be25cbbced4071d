"""Arithmetic of a forward pass, counted the way the published figures were.

FLOPs = 2 * (convolution multiply-adds + 4 per norm output + 1 per upsampled value). Bias, activation, pooling,
concatenation, softmax and the resizing inside CBFuse count as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from models.heads import head_branches

NORM_OPERATIONS = 4
SMALLEST_SIDE = 32
DEFAULT_SIZE = 640


@dataclass
class OperationCount:
    """Multiply-adds seen so far."""

    macs: int = 0

    @property
    def flops(self) -> int:
        return 2 * self.macs


@contextmanager
def count_operations(module: nn.Module) -> Iterator[OperationCount]:
    """Count the operations of every forward pass through ``module`` inside the ``with`` block."""
    count = OperationCount()

    def observe(layer: nn.Module, _inputs: object, output: Tensor) -> None:
        count.macs += output.numel() * operations_per_output(layer)

    handles = [layer.register_forward_hook(observe) for layer in module.modules() if operations_per_output(layer)]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def operations_per_output(layer: nn.Module) -> int:
    """Multiply-adds that a layer is charged per value it puts out; 0 for layers that count as free."""
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels // layer.groups * layer.kernel_size[0] * layer.kernel_size[1]
    if isinstance(layer, nn.BatchNorm2d):
        return NORM_OPERATIONS
    return int(isinstance(layer, nn.Upsample))


def flops(model: nn.Module, imgsz: int | Sequence[int] = DEFAULT_SIZE) -> float:
    """Return the FLOPs of one image of ``imgsz`` (side, or height and width), all branches decoded.

    Only shapes are computed, for the smallest image, then scaled by the area.
    """
    height, width = (imgsz, imgsz) if isinstance(imgsz, int) else imgsz
    side = max(int(model.stride.max()), SMALLEST_SIDE)
    image = torch.empty(1, model.yaml["ch"], side, side, device="meta")
    with count_operations(model) as count:
        branches = head_branches(shape_pass(model, image))
    cells = sum(level.shape[2] * level.shape[3] for maps in branches for level in maps)
    count.macs += cells * 4 * model.head.reg_max  # the decoding convolution, which runs in eval mode only
    return count.flops * (height / side) * (width / side)


def shape_pass(model: nn.Module, image: Tensor) -> object:
    """Return the training output of ``model`` for a meta ``image``: shapes without arithmetic.

    Neither weights nor statistics are read or changed. Norms hand their input on: they do not change a shape, and on
    the meta device they would cost more than everything else.
    """
    shapes = {
        key: torch.empty(value.shape, dtype=torch.float32, device="meta")
        for key, value in model.state_dict(keep_vars=True).items()
    }
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    was_training = model.head.training
    try:
        model.head.training = True  # a head that skips branches in eval mode gives all of them
        for norm in norms:
            norm.forward = _unchanged
        with torch.no_grad():
            return functional_call(model, shapes, (image,))
    finally:
        model.head.training = was_training
        for norm in norms:
            del norm.forward


def _unchanged(x: Tensor) -> Tensor:
    return x
