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

    @property
    def updates(self) -> int:
        """Number of updates so far. Where some may have been called off on a device, reading it waits for that."""
        if self._called_off is not None:
            self._offered -= int(self._called_off)
            self._called_off = None
        return self._offered

    @updates.setter
    def updates(self, value: int) -> None:
        self._offered = value
        self._called_off: Tensor | None = None  # how many of the offered ones, counted on the device

    def decay(self, updates: int) -> float:
        """Return the decay of update number ``updates``."""
        return ema_decay(updates, self.max_decay, self.tau)

    @torch.no_grad()
    def update(self, model: nn.Module, is_wanted: Tensor | None = None) -> None:
        """Move the average one step towards ``model``, in a few fused kernels.

        ``is_wanted``, a 0-d flag on the device, calls the update off where it is False, without being read. The
        weights of ``model`` have to be finite in any case.
        """
        averaged, current = _floating_tensors(self.ema), _floating_tensors(model)
        current = [new.to(old.dtype) for old, new in zip(averaged, current, strict=True)]
        # v·d + (1 − d)·w, written as two fused passes over all tensors
        if is_wanted is None:
            self.updates += 1
            share = 1 - self.decay(self.updates)
            torch._foreach_mul_(averaged, 1 - share)
            torch._foreach_add_(averaged, current, alpha=share)
            return
        share = self._share_on_device(is_wanted)
        torch._foreach_mul_(averaged, 1 - share)
        torch._foreach_add_(averaged, torch._foreach_mul(current, share))

    def _share_on_device(self, is_wanted: Tensor) -> Tensor:
        """Count an offered update; return the share (0-d float32) of the new values in it, 0 where it is called off."""
        if self._called_off is None:
            self._called_off = torch.zeros((), dtype=torch.float64, device=is_wanted.device)
        self._offered += 1
        self._called_off += ~is_wanted
        made = self._offered - self._called_off
        share = 1 - self.max_decay * (1 - torch.exp(-made / self.tau))
        return (share * is_wanted).float()

    def update_attr(self, model: nn.Module, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> None:
        """Copy plain attributes (``names``, ``hyp``, …) from ``model``; private ones and ``exclude`` are skipped."""
        for key, value in model.__dict__.items():
            if (include and key not in include) or key.startswith("_") or key in exclude:
                continue
            setattr(self.ema, key, value)
