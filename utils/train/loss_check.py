"""Whether the fused kernels of the loss compile on a device and agree with the plain way."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from utils.train.loss import DetectionLoss

SMALLEST = 1e-6  # an item may be switched off
CELLS = 4  # along a side of the coarsest level
OBJECTS = (
    (0, 0, 0.5, 0.5, 0.6, 0.7),
    (0, 0, 0.4, 0.5, 0.5, 0.5),
    (1, 0, 0.7, 0.3, 0.3, 0.4),
    (1, 0, 0.2, 0.8, 0.2, 0.1),
)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest difference of items, as a share of their value, and of gradients, as a share of the largest."""


def kernel_obstacle(loss: DetectionLoss, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Return an empty text if fused kernels compute ``loss`` for maps of ``dtype``, else a sentence that says why not.

    Compiles the programs that training will use, which takes seconds. ``loss`` and random states are left alone.
    """
    if loss.fl_gamma > 0:
        return "The fused loss knows no focal factor (fl_gamma)."
    try:
        plain, fused = (_results(loss, device, dtype, use_kernels) for use_kernels in (False, True))
        shares = [
            ((one.float() - other.float()).abs().max() / one.float().abs().max().clamp(min=SMALLEST)).item()
            for one, other in zip(plain, fused, strict=True)
        ]
    except Exception as error:  # whatever a missing compiler, an old driver or an unknown GPU makes Triton raise
        reason = next(iter(str(error).strip().splitlines()), "no message")
        return f"The fused loss does not run on {device}: {type(error).__name__}: {reason}."
    worst = max(share if share == share else float("inf") for share in shares)
    return (
        "" if worst <= TOLERANCES[dtype] else f"The fused loss differs by {worst:.1e} from the plain one on {device}."
    )


def _results(loss: DetectionLoss, device: torch.device, dtype: torch.dtype, use_kernels: bool) -> list[Tensor]:
    """Each item, and the gradient of each map of one head."""
    generator = torch.Generator().manual_seed(0)
    side, channels = CELLS * max(loss.strides), 4 * loss.reg_max + loss.num_classes
    maps = []
    for stride in loss.strides:
        level = torch.randn((2, channels, int(side // stride), int(side // stride)), generator=generator)
        level = level.to(device, dtype).contiguous(memory_format=torch.channels_last)
        maps.append(level.requires_grad_())
    tried = copy.copy(loss)
    tried.use_kernels = use_kernels
    with torch.enable_grad():
        total, items = tried(maps, torch.tensor(OBJECTS))
        return [*items, *torch.autograd.grad(total, maps)]
