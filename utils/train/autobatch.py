"""``--batch -1``: find the batch size from real training steps. Also what to say when one turns out too large."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from utils.log import LOGGER
from utils.runtime import autocast, is_out_of_memory
from utils.train.schedule import NOMINAL_BATCH

CPU_BATCH = 16
TRIED = (2, 4, 8, 16)
MEMORY_SHARE = 0.8  # of the free memory; the rest is for crowded batches and validation


def find_batch_size(
    model: nn.Module,
    loss_fn: Callable[..., tuple[Tensor, Tensor]],
    imgsz: int,
    device: torch.device,
    dtype: torch.dtype | None,
    nominal: int = NOMINAL_BATCH,
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
    batch = min(fitting_batch(free, intercept, slope), 2 * nominal)
    LOGGER.info(
        f"--batch -1: {batch} ({slope / 2**20:.0f} MiB per image, {free / 2**30:.1f} GiB free, "
        f"about {(intercept + slope * batch) / 2**30:.1f} GiB will be used)"
    )
    return batch


def fitting_batch(room: float, fixed: float, per_image: float) -> int:
    """Return the batch that fills 80 % of ``room`` bytes, of which a step takes ``fixed`` and ``per_image``."""
    return max(1, int((room * MEMORY_SHARE - fixed) / max(per_image, 1)))


@contextlib.contextmanager
def memory_advised(device: torch.device, batch_size: int, imgsz: int, *, group: int = 1) -> Iterator[None]:
    """Train in the block; raise MemoryError with advice where it runs out of memory.

    What lies in a GPU's memory before (model, averaged weights, a pool of pictures) is told from what a batch takes.
    """
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(memory_advice(device, batch_size, imgsz, held, group=group)) from error


def memory_advice(device: torch.device, batch_size: int, imgsz: int, held: int = 0, *, group: int = 1) -> str:
    """Return what to say when the device's memory is full: figures, and what to change.

    Args:
        held: bytes that were in use before the first step; 0 = not known, nothing is said about what would fit.
        group: a batch has to be a multiple of it.
    """
    half = max(batch_size // 2 // group, 1) * group
    if device.type != "cuda":
        return (
            f"main memory is full: batch {batch_size} at {imgsz} px. Try --batch {half} (gradients are summed over "
            f"{NOMINAL_BATCH} images anyway), --grad-checkpoint, a smaller --img, fewer --workers, or leave --cache out"
        )
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    fitting, estimate = batch_size, ""
    if 0 < held < peak:
        # About: gradients and the optimizer's state are counted in, and the step that failed had not got all it needs.
        per_image = (peak - held) / batch_size
        room = free + torch.cuda.memory_reserved(device)
        fitting = max(fitting_batch(room, held, per_image) // group, 1) * group
    if fitting < batch_size:
        estimate = (
            f". Estimated from {held / 1e9:.1f} GB before the first step and about {per_image / 1e9:.2f} GB for each "
            f"image, --batch {fitting} is the largest that might fit"
        )
    return (
        f"the GPU's memory is full: batch {batch_size} at {imgsz} px, {peak / 1e9:.1f} GB used by this run at most, "
        f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free. Try --batch {min(half, fitting)} (gradients are summed over "
        f"{NOMINAL_BATCH} images anyway), --grad-checkpoint, a smaller --img, or --batch -1{estimate}"
    )


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
