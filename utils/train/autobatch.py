"""``--batch -1``: find the batch size from real training steps instead of a guess."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from utils.log import LOGGER
from utils.runtime import autocast

CPU_BATCH = 16
TRIED = (2, 4, 8, 16)
MEMORY_SHARE = 0.8  # of the free memory; the rest is for crowded batches and validation


def find_batch_size(
    model: nn.Module,
    loss_fn: Callable[..., tuple[Tensor, Tensor]],
    imgsz: int,
    device: torch.device,
    dtype: torch.dtype | None,
    nominal: int = 64,
) -> int:
    """Measure forward + loss + backward at a few sizes, fit a line, return the size that fills 80 % of free memory.

    The result is at most twice ``nominal``: larger batches change how a run trains. On other devices than CUDA: 16.
    """
    if device.type != "cuda":
        LOGGER.info(f"--batch -1: no CUDA device to measure, batch {CPU_BATCH} is used")
        return CPU_BATCH
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    sizes, peaks = [], []
    for size in TRIED:
        try:
            peaks.append(_peak_bytes(model, loss_fn, size, imgsz, device, dtype))
        except torch.cuda.OutOfMemoryError:
            break
        sizes.append(size)
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    if len(sizes) < 2:
        raise ValueError(
            f"--batch -1: not even {TRIED[1]} images of {imgsz} px fit this GPU; use a smaller --img or --cfg"
        )
    slope = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0])
    intercept = peaks[-1] - slope * sizes[-1]
    batch = max(1, min(int((free * MEMORY_SHARE - intercept) / max(slope, 1)), 2 * nominal))
    LOGGER.info(
        f"--batch -1: {batch} ({slope / 2**20:.0f} MiB per image, {free / 2**30:.1f} GiB free, "
        f"about {(intercept + slope * batch) / 2**30:.1f} GiB will be used)"
    )
    return batch


def _peak_bytes(
    model: nn.Module,
    loss_fn: Callable[..., tuple[Tensor, Tensor]],
    size: int,
    imgsz: int,
    device: torch.device,
    dtype: torch.dtype | None,
) -> int:
    """Run one training step on noise with ten boxes per image and return its peak memory."""
    torch.cuda.reset_peak_memory_stats(device)
    images = torch.rand(size, 3, imgsz, imgsz, device=device).contiguous(memory_format=torch.channels_last)
    index = torch.arange(size, device=device, dtype=torch.float32).repeat_interleave(10)[:, None]
    centre = torch.rand(size * 10, 2, device=device) * 0.6 + 0.2
    targets = torch.cat((index, torch.zeros_like(index), centre, torch.full_like(centre, 0.2)), 1)
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    try:
        with autocast(device, dtype):
            predictions = model(images)
        loss_fn(predictions, targets)[0].backward()
    finally:
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(statistics[name])
        model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(device)
