"""Exponential moving average of a model's weights and batch-norm statistics."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor, nn


def ema_decay(updates: int, decay: float = 0.9999, tau: float = 2000.0) -> float:
    """Return the share kept at update number ``updates`` (from 1): ``decay · (1 − exp(−updates / tau))``."""
    return decay * (1 - math.exp(-updates / tau))


def _floating_tensors(model: nn.Module) -> list[Tensor]:
    """Return the floating entries of the state dict, without the cost of building it."""
    entries = (*model.parameters(), *model.buffers())
    return [entry.detach() for entry in entries if entry.dtype.is_floating_point]


class ModelEMA:
    """Keep ``ema``, a float32 evaluation copy of ``model`` that follows it slowly.

    Every floating entry of the state dict is averaged, running statistics included; counters stay as copied.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, tau: float = 2000.0, updates: int = 0) -> None:
        self.ema = deepcopy(model).eval()
        self.ema.requires_grad_(False)
        self.updates = updates
        self.max_decay = decay
        self.tau = tau

    def decay(self, updates: int) -> float:
        """Return the decay of update number ``updates``."""
        return ema_decay(updates, self.max_decay, self.tau)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average one step towards ``model``, in a few fused kernels."""
        self.updates += 1
        share = 1 - self.decay(self.updates)
        averaged, current = _floating_tensors(self.ema), _floating_tensors(model)
        current = [new.to(old.dtype) for old, new in zip(averaged, current, strict=True)]
        # v·d + (1 − d)·w, written as two fused passes over all tensors
        torch._foreach_mul_(averaged, 1 - share)
        torch._foreach_add_(averaged, current, alpha=share)

    def update_attr(self, model: nn.Module, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> None:
        """Copy plain attributes (``names``, ``hyp``, …) from ``model``; private ones and ``exclude`` are skipped."""
        for key, value in model.__dict__.items():
            if (include and key not in include) or key.startswith("_") or key in exclude:
                continue
            setattr(self.ema, key, value)
