"""Decoded pictures in device memory: how much of a set fits, where each picture lies, and how it gets there.

A pool is whole (every picture of the set, one directly after the other, stored once) or a ring of equal slots, in which
each newly decoded picture takes the place of the oldest one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from utils.data.images import FILL, fitted_size
from utils.data.tables import offsets_of
from utils.log import LOGGER

GIB = 1 << 30
CACHE_SHARE = 0.5  # of the free device memory that --cache gpu takes; the rest is for training
RING_SHARE = 0.1  # the same without --cache gpu
RING_SLOTS = 8192  # more partners to draw from change nothing that could be noticed
MIN_BATCHES = 2  # batches that a ring holds at least, so that a mosaic has others to draw from


@dataclass(frozen=True)
class PoolSettings:
    """Where and how pictures are put together on a device.

    budget_bytes: memory for the pool; 0 takes a share of what is free, a large one with is_cached (--cache gpu).
    is_required: without a pool there is no training. use_triton: None takes the Triton kernel where there is one. A CPU
    device works, slowly, for tests.
    """

    device: torch.device
    is_cached: bool = False
    budget_bytes: int = 0
    is_required: bool = False
    use_triton: bool | None = None

    def budget(self) -> int:
        """Bytes that the pool may take."""
        if self.budget_bytes or self.device.type != "cuda":
            return self.budget_bytes or GIB
        return int(free_bytes(self.device) * (CACHE_SHARE if self.is_cached else RING_SHARE))


@dataclass(frozen=True)
class PoolLayout:
    """Offsets (P + 1,) in bytes of P slots; is_whole: slot i holds picture i for good, else the slots are a ring."""

    offsets: np.ndarray
    is_whole: bool

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.offsets) - 1

    @property
    def total_bytes(self) -> int:
        """Memory of all slots."""
        return int(self.offsets[-1])

    @property
    def stride(self) -> int:
        """Bytes from one slot of a ring to the next; 0 where slots have different lengths."""
        return 0 if self.is_whole else int(self.offsets[1])


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that can still be used, including what torch holds in reserve."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def plan_pool(
    shapes: np.ndarray, img_size: int, batch_size: int, settings: PoolSettings, prefix: str = ""
) -> PoolLayout | None:
    """Lay out a pool for pictures of shapes (N, 2) width, height: whole where the budget allows it, else a ring.

    A budget that holds less than a few batches gives None, with a message, or ValueError where the pool is required.
    """
    budget = settings.budget()
    lengths = [3 * width * height for width, height in (fitted_size(*row, img_size) for row in shapes.tolist())]
    needed, slot_bytes = sum(lengths), 3 * img_size * img_size
    if needed <= budget:
        LOGGER.info(
            f"{prefix}pictures are put together on the GPU, from all {len(lengths)} of the set in its memory "
            f"({needed / GIB:.2f} GB)"
        )
        return PoolLayout(offsets_of(lengths), True)
    slots = min(budget // slot_bytes, len(lengths), len(lengths) if settings.is_cached else RING_SLOTS)
    least = min(MIN_BATCHES * batch_size, len(lengths))
    if slots < least:
        reason = (
            f"{prefix}pictures can be put together on the GPU from a pool of at least {least} of {img_size} pixels "
            f"({least * slot_bytes / GIB:.2f} GB), but it may take {budget / GIB:.2f} GB of the GPU's memory"
        )
        if settings.is_required:
            raise ValueError(f"{reason}. Use --augment cpu, a smaller --batch or --img, or --cache gpu:GB with more GB")
        LOGGER.info(f"{reason}; they are put together by the loader processes (--augment cpu)")
        return None
    more = f"all would take {needed / GIB:.1f} GB" + ("" if settings.is_cached else ", --cache gpu keeps more")
    LOGGER.info(
        f"{prefix}pictures are put together on the GPU, from the last {slots} decoded ones in its memory "
        f"({slots * slot_bytes / GIB:.2f} GB; {more})"
    )
    return PoolLayout(np.arange(slots + 1, dtype=np.int64) * slot_bytes, False)


class PicturePool:
    """One flat uint8 tensor of pictures (h, w, 3) BGR on a device; slot i begins at byte offsets[i]."""

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        try:
            self.data = torch.full((layout.total_bytes,), FILL[0], dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"the pool of pictures needs {layout.total_bytes / GIB:.2f} GB of GPU memory, "
                f"{free_bytes(device) / GIB:.2f} GB are free. Use a smaller --batch, --cache gpu:GB with fewer GB, or "
                "--augment cpu"
            ) from error
        self.offsets = torch.from_numpy(layout.offsets).to(device)

    def put(self, first_slot: int, pixels: Tensor) -> None:
        """Store flat pixels from a slot on; what reaches beyond the last slot goes on at the first."""
        start = int(self.layout.offsets[first_slot])
        head = min(len(pixels), self.layout.total_bytes - start)
        self.data[start : start + head].copy_(pixels[:head], non_blocking=True)
        if head < len(pixels):
            self.data[: len(pixels) - head].copy_(pixels[head:], non_blocking=True)
