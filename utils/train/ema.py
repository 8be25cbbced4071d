"""Exponential moving average of a model's weights and batch-norm statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # values between the beginnings of joined tensors: 256 bytes of float32, as the allocator aligns them


def ema_decay(updates: int, decay: float = 0.9999, tau: float = 2000.0) -> float:
    """Return the share kept at update number ``updates`` (from 1): ``decay · (1 − exp(−updates / tau))``."""
    return decay * (1 - math.exp(-updates / tau))


def _floating_tensors(model: nn.Module) -> list[Tensor]:
    """Return the floating entries of the state dict, without the cost of building it."""
    entries = (*model.parameters(), *model.buffers())
    return [entry.detach() for entry in entries if entry.dtype.is_floating_point]


def joined_like(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return one tensor of float32 zeros (N,) and parts of it with the shapes and strides of ``tensors``.

    The gaps between parts, which align them, are zeros as well. Raises IndexError where there are no tensors.
    """
    sizes = [math.ceil(tensor.numel() / ALIGNMENT) * ALIGNMENT for tensor in tensors]
    flat = torch.zeros(sum(sizes), device=tensors[0].device)
    parts, begin = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        strides = torch.empty_like(tensor, device="meta").stride()  # without gaps, where the tensor has some
        parts.append(flat.as_strided(tensor.shape, strides, begin))
        begin += size
    return flat, parts


class JoinedAverage:
    """The average's weights as parts of one tensor, with a place of the same form for those of the model.

    Thus an update is one copy from many tensors and a few operations on one, and nothing has to be searched for.
    ``statistics`` and ``averaged`` hold the running statistics of both, of which they are parts, see ``join``.
    """

    @torch.no_grad()
    def __init__(self, ema: nn.Module, model: nn.Module, averaged: Tensor, statistics: Tensor) -> None:
        self.model = model
        own = list(ema.parameters())
        flat, parts = joined_like(own)
        for weight, part in zip(own, parts, strict=True):
            weight.data = part.copy_(weight)
        fresh, places = joined_like(own)
        self.sources = [*model.parameters(), statistics]  # not detached: they follow a new `data`
        self.averaged, self.fresh = [flat, averaged], [fresh, torch.empty_like(statistics)]
        self.places = [*places, self.fresh[1]]
        self.witnesses = [entry for each in (ema, model) for entry in _outermost(each)]

    def is_in_place(self, model: nn.Module) -> bool:
        """Whether ``model`` is the one, and no module's tensors have been exchanged, as moving them to a device does.

        Only the first and the last are looked at: whatever exchanges tensors does so with all of them.
        """
        return model is self.model and all(
            kept[name] is tensor and tensor.data_ptr() == address for kept, name, tensor, address in self.witnesses
        )

    def gather(self) -> list[Tensor]:
        """Copy what the model has now; return it in the form of ``averaged``, to be overwritten at will."""
        torch._foreach_copy_(self.places, self.sources)
        return self.fresh


def _outermost(model: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor, int]]:
    """First and last parameter and buffer: the dictionary that holds it, its name there, itself, its address."""
    entries = []
    for kind in ("_parameters", "_buffers"):
        found = [
            (kept, name, tensor, tensor.data_ptr())
            for module in model.modules()
            for kept in [getattr(module, kind)]
            for name, tensor in kept.items()
            if tensor is not None
        ]
        entries += [found[0], found[-1]] if found else []
    return entries


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
        self._joined: JoinedAverage | None = None

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

    def join(self, model: nn.Module, averaged: Tensor, statistics: Tensor) -> bool:
        """Have updates from ``model`` cost little time of the processor; return whether that is possible.

        The weights of the average are moved, once. All floating buffers of it have to be parts of ``averaged``, those
        of ``model`` parts of ``statistics``, in the same order. Should tensors be exchanged later, updates do without.
        """
        entries = [*_floating_tensors(self.ema), *_floating_tensors(model)]
        weights = [*self.ema.parameters(), *model.parameters()]
        # Without statistics there is nothing of theirs on the device to be worked on beside the weights.
        if not weights or not statistics.numel() or any(entry.dtype != torch.float32 for entry in (*entries, *weights)):
            return False
        self._joined = JoinedAverage(self.ema, model, averaged, statistics)
        return True

    @torch.no_grad()
    def update(self, model: nn.Module, is_wanted: Tensor | None = None) -> None:
        """Move the average one step towards ``model``, in a few fused kernels.

        ``is_wanted``, a 0-d flag on the device, calls the update off where it is False, without being read. The
        weights of ``model`` have to be finite in any case.
        """
        joined = self._joined if self._joined is not None and self._joined.is_in_place(model) else None
        if joined is not None:
            averaged, current = joined.averaged, joined.gather()
        else:
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
        if joined is not None:
            torch._foreach_mul_(current, share)
        else:
            current = torch._foreach_mul(current, share)
        torch._foreach_add_(averaged, current)

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
