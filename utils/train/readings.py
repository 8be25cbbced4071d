"""Figures of some steps of training: their column names, their sums on the device, their means on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOSS_NAMES = ("box_loss", "cls_loss", "dfl_loss")
# Readers of results.csv use positions: upstream's columns first, ours after them.
RESULT_COLUMNS = (
    "epoch",
    *(f"train/{name}" for name in LOSS_NAMES),
    "metrics/precision",
    "metrics/recall",
    "metrics/mAP_0.5",
    "metrics/mAP_0.5:0.95",
    *(f"val/{name}" for name in LOSS_NAMES),
    "x/lr0",
    "x/lr1",
    "x/lr2",
)
GRADIENT_COLUMNS = ("train/grad_norm", "train/grad_norm_max", "train/clipped", "train/skipped")
# Figures of the machine rather than of the training: they differ between two equal runs.
MACHINE_COLUMNS = (
    "train/img_per_s",
    "gpu_gb",
    "train/data_wait",
    "train/mfu",
    "gpu/utilisation",
    "gpu/utilisation_min",
    "gpu/utilisation_max",
    "gpu/allocated_gb",
    "gpu/device_gb",
    "gpu/swing_gb",
)
RATIO_COLUMNS = ("train/grad_norm_per_image", "train/box_cls_ratio")
EXTRA_COLUMNS = (*GRADIENT_COLUMNS, *MACHINE_COLUMNS[:2], *RATIO_COLUMNS, *MACHINE_COLUMNS[2:])
# AP by object size as COCO defines it: known once per epoch, NaN where the data set has no such object.
SIZE_COLUMNS = tuple(f"coco/{name}" for name in ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR"))
MONITOR_COLUMNS = ("step", "epoch", *RESULT_COLUMNS[1:4], *RESULT_COLUMNS[-3:], *EXTRA_COLUMNS)


@dataclass
class Reading:
    """Sums over some batches and optimizer steps, on the host. Losses and norms that are not finite are left out."""

    losses: list[float] = field(default_factory=lambda: [0.0] * 3)
    batches: float = 0.0  # with finite losses
    norm: float = 0.0
    steps: float = 0.0  # with finite gradients
    clipped: float = 0.0
    skipped: float = 0.0
    norm_max: float = 0.0
    in_a_row: float = 0.0  # longest chain of skipped steps
    images: int = 0
    stepped_images: int = 0  # whose gradients went into the optimizer steps, skipped ones included
    wait_s: float = 0.0
    elapsed_s: float = 0.0

    def add(self, other: Reading) -> None:
        """Join another stretch to this one."""
        self.losses = [a + b for a, b in zip(self.losses, other.losses, strict=True)]
        for name in (
            "batches",
            "norm",
            "steps",
            "clipped",
            "skipped",
            "images",
            "stepped_images",
            "wait_s",
            "elapsed_s",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.norm_max = max(self.norm_max, other.norm_max)
        self.in_a_row = max(self.in_a_row, other.in_a_row)

    def columns(self) -> dict[str, float]:
        """Return means and shares under their column names; NaN where there is nothing to divide by."""
        means = [ratio(total, self.batches) for total in self.losses]
        all_steps = self.steps + self.skipped
        norm = ratio(self.norm, self.steps)
        return {
            **dict(zip(RESULT_COLUMNS[1:4], means, strict=True)),
            "train/grad_norm": norm,
            "train/grad_norm_max": self.norm_max if self.steps else math.nan,
            "train/clipped": ratio(self.clipped, self.steps),
            "train/skipped": self.skipped,
            "train/skipped_share": ratio(self.skipped, all_steps),
            "train/grad_norm_per_image": ratio(norm * all_steps, self.stepped_images),
            "train/box_cls_ratio": ratio(means[0], means[1]),
            "train/img_per_s": ratio(self.images, self.elapsed_s),
            "train/data_wait": ratio(self.wait_s, self.elapsed_s),
        }


def ratio(value: float, divisor: float) -> float:
    """Divide; NaN where the divisor is not positive."""
    return value / divisor if divisor > 0 else math.nan


class DeviceSums:
    """The part of a :class:`Reading` that is computed on the device, without waiting for it."""

    def __init__(self, device: torch.device, clip_limit: float) -> None:
        self.clip_limit = clip_limit
        self.losses = torch.zeros(4, device=device)  # three sums, number of batches
        self.steps = torch.zeros(4, device=device)  # sum of norms, finite, clipped, skipped
        self.peaks = torch.zeros(2, device=device)  # highest norm, longest chain of skipped steps
        self.chain = torch.zeros((), device=device)  # the chain that is running, across readings

    @torch.no_grad()
    def add_losses(self, items: Tensor) -> None:
        """Add the three loss items (3,) of a batch."""
        values = torch.cat([items.detach().float(), items.new_ones(1, dtype=torch.float32)])
        self.losses += torch.where(torch.isfinite(values).all(), values, torch.zeros_like(values))

    @torch.no_grad()
    def add_norm(self, norm: Tensor) -> None:
        """Add the gradient norm of an optimizer step, 0-d, before clipping."""
        norm = norm.detach().to(self.chain)
        is_finite = torch.isfinite(norm)
        value = torch.where(is_finite, norm, torch.zeros_like(norm))
        self.steps += torch.stack([value, is_finite.float(), (value > self.clip_limit).float(), (~is_finite).float()])
        self.chain = (self.chain + 1) * (~is_finite)
        self.peaks = torch.maximum(self.peaks, torch.stack([value, self.chain]))

    def reset(self) -> None:
        """Forget what has been summed up, without waiting."""
        for tensor in (self.losses, self.steps, self.peaks):
            tensor.zero_()

    def read(self) -> Reading:
        """Return what has been summed up and start anew; waits for the device, once."""
        values = torch.cat([self.losses, self.steps, self.peaks]).tolist()
        self.reset()
        return Reading(values[:3], *values[3:])
