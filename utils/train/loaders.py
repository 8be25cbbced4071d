"""The two loaders of a training run."""

from __future__ import annotations

import numpy as np
import torch

from utils.data.dataset import LoadImagesAndLabels
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.memory import available_memory_bytes
from utils.data.pool import PoolSettings
from utils.data.scan import require_objects
from utils.data.spec import DataSpec
from utils.kernels.layout import has_triton
from utils.log import LOGGER
from utils.options import Hyp, TrainOptions

LOADERS = 2  # that live side by side and share /dev/shm
VAL_KEPT_BYTES = 1 << 30  # of validation pictures that stay in memory
VAL_FREE_SHARE = 8  # they take at most this part of what is free: an eighth


def make_loaders(
    options: TrainOptions,
    hyp: Hyp,
    spec: DataSpec,
    *,
    imgsz: int,
    batch_size: int,
    stride: int,
    device: torch.device | str = "cpu",
) -> tuple[tuple[EpochLoader, LoadImagesAndLabels], tuple[EpochLoader, LoadImagesAndLabels]]:
    """Return (loader, data set) for training and for validation, whose batches are no larger than those of training.

    ``device`` is where training pictures are put together if ``--augment`` and ``--cache`` say so; its pool is filled
    here. Raises what ``pool_settings`` and ``create_dataloader`` raise.
    """
    for line in idle_caches(options):
        LOGGER.warning(line)
    common = {
        "workers": options.workers,
        "seed": options.seed,
        "nc": spec.nc,
        "single_cls": options.single_cls,
        "cache_dir": options.cache_dir,
        "memory_share": 1 / LOADERS,
    }
    train = create_dataloader(
        spec.train,
        imgsz,
        batch_size,
        stride,
        hyp=hyp,
        augment=True,
        cache=None if options.is_gpu_cache else options.cache,
        rect=options.rect,
        shuffle=not options.rect,
        min_items=options.min_items,
        mosaic_cache=options.mosaic_cache,
        image_weights=options.image_weights,
        quad=options.quad,
        pool=pool_settings(options, torch.device(device)),
        prefix="train: ",
        **common,
    )
    require_objects(train[1].report, "train: ")
    cache = None if options.noval or options.is_gpu_cache else options.cache
    common["told"] = train[1].report
    val = create_dataloader(
        spec.val, imgsz, batch_size, stride, cache=cache, rect=True, pad=0.5, prefix="val: ", **common
    )
    if stays_in_memory(val[1]):
        val[0].keep()
    train[0].stall.limit_s = val[0].stall.limit_s = options.stall_warning
    train[0].fill_pool()
    return train, val


def stays_in_memory(dataset: LoadImagesAndLabels) -> bool:
    """Whether pictures in rectangles take so little memory that a validation set may be kept as the network sees it.

    Making batches of them anew takes longer than the network does, for small sets several times as long.
    """
    rectangles = dataset.batch_shapes[dataset.batch_index]  # (N, 2) height, width
    size = 3 * int(rectangles.astype(np.int64).prod(1).sum())
    return size <= min(VAL_KEPT_BYTES, available_memory_bytes() // VAL_FREE_SHARE)


def idle_caches(options: TrainOptions) -> list[str]:
    """One line for each cache that is asked for and cannot be of use."""
    lines, mosaics = [], options.mosaic_cache
    if options.noval and options.cache == "val":
        lines.append("--cache val has no effect with --noval: validation reads its images once, after the last epoch")
    if options.cache_dir and options.cache != "disk" and not mosaics:
        lines.append(f"--cache-dir {options.cache_dir} has no effect without --cache disk or --mosaic-cache N")
    if mosaics and options.open_mosaic + options.close_mosaic >= options.epochs:
        lines.append(f"--mosaic-cache {mosaics} has no effect: --open-mosaic and --close-mosaic cover all epochs")
    return lines


def check_device(options: TrainOptions, device: torch.device) -> None:
    """Refuse what needs a CUDA device where there is none.

    Raises:
        ValueError: ``--augment gpu`` or ``--cache gpu`` on another device.
    """
    if device.type == "cuda":
        return
    if options.augment == "gpu":
        raise ValueError("--augment gpu needs a CUDA device; leave it out or use --augment cpu")
    if options.is_gpu_cache:
        raise ValueError(f"--cache {options.cache} needs a CUDA device; use --cache ram")


def pool_settings(options: TrainOptions, device: torch.device) -> PoolSettings | None:
    """Where and how the GPU puts training pictures together; None leaves it to the loader processes.

    Raises ValueError where options ask for a CUDA device and there is none.
    """
    check_device(options, device)
    is_wanted = options.augment == "gpu" or options.is_gpu_cache
    if options.augment == "cpu" or device.type != "cuda":
        return None
    if not is_wanted and options.mosaic_cache:
        LOGGER.info("train: prepared mosaics are changed by the loader processes (--augment cpu)")
        return None
    if not has_triton():
        if not is_wanted:
            return None
        LOGGER.warning("train: the package triton is missing, pictures are put together by plain torch, which is slow")
    return PoolSettings(
        device, is_cached=options.is_gpu_cache, budget_bytes=options.gpu_cache_bytes, is_required=is_wanted
    )
