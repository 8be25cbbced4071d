"""create_dataloader: batches in an order that follows from (seed, epoch), made by workers that live for a whole run.

The epoch and the mosaic switch travel to the workers inside the items that the sampler hands out, so that living
workers need no other channel.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from utils.data.dataset import LoadImagesAndLabels, Sample, SampleKey, Shapes
from utils.log import LOGGER

Batch = tuple[Tensor, Tensor, tuple[str, ...], tuple[Shapes | None, ...]]
ORDER_STREAM = 1 << 40  # keeps the draws of the order apart from those of the samples
SHARED_MEMORY = Path("/dev/shm")
PREFETCH = 2  # batches a worker may be ahead
BATCH_SLACK = 1.3  # shared memory a batch needs beyond its pixels: other shapes of rectangular batches, labels


class EpochSampler(Sampler[SampleKey]):
    """Hands out SampleKeys in the order of the current epoch; the order depends on (seed, epoch) only."""

    def __init__(self, length: int, *, shuffle: bool, seed: int = 0) -> None:
        self.length, self.shuffle, self.seed = length, shuffle, seed % 2**63
        self.epoch, self.is_mosaic = 0, True

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[SampleKey]:
        order = np.arange(self.length)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch, ORDER_STREAM]).shuffle(order)
        for index in order.tolist():
            yield SampleKey(self.epoch, index, self.is_mosaic)


class EpochLoader(DataLoader):
    """A DataLoader whose `set_epoch` decides order and augmentation of the next pass."""

    def set_epoch(self, epoch: int, mosaic: bool = True) -> None:
        """Choose the epoch, and whether mosaics (with mixup and copy-paste) are allowed, from the next pass on."""
        self.sampler.epoch, self.sampler.is_mosaic = int(epoch), bool(mosaic)


def create_dataloader(
    path: str | Path | Sequence[str | Path],
    imgsz: int,
    batch_size: int,
    stride: int = 32,
    *,
    single_cls: bool = False,
    hyp: object = None,
    augment: bool = False,
    cache: bool | str | None = None,
    pad: float = 0.0,
    rect: bool = False,
    workers: int = 8,
    shuffle: bool = False,
    seed: int = 0,
    min_items: int = 0,
    nc: int | None = None,
    names: dict[int, str] | None = None,
    prefix: str = "",
    drop_last: bool = False,
) -> tuple[EpochLoader, LoadImagesAndLabels]:
    """Scan a data set and build its loader; batches are (images (B, 3, H, W) uint8, targets (T, 6), paths, shapes).

    nc (or the number of names) is checked against the labels. Raises what `scan_dataset` raises.
    """
    if nc is None and names is not None:
        nc = len(names)
    if rect and shuffle:
        LOGGER.warning(f"{prefix}--rect keeps pictures of one shape together, shuffling is off")
        shuffle = False
    cv2.setNumThreads(0)
    dataset = LoadImagesAndLabels(
        path, imgsz, batch_size, augment, hyp, rect, single_cls=single_cls, stride=stride, pad=pad,
        min_items=min_items, prefix=prefix, cache=cache, seed=seed, nc=nc,
    )  # fmt: skip
    if augment and not len(dataset.labels.values):
        raise ValueError(
            f"{prefix}there is nothing to learn: none of the {len(dataset)} pictures has a label; "
            f"the first label file was expected at {dataset.label_files[0]}"
        )
    batch_size = min(batch_size, len(dataset))
    workers = worker_count(workers, batch_size)
    workers, prefetch = fit_shared_memory(workers, batch_size * 3 * imgsz * imgsz, prefix=prefix)
    loader = EpochLoader(
        dataset,
        batch_size=batch_size,
        sampler=EpochSampler(len(dataset), shuffle=shuffle, seed=seed),
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available() and os.environ.get("PIN_MEMORY", "true").lower() != "false",
        collate_fn=collate,
        worker_init_fn=_init_worker,
        drop_last=drop_last,
    )
    return loader, dataset


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples; column 0 of the joined targets tells the picture's position in the batch."""
    images, targets, paths, shapes = zip(*samples, strict=True)
    for position, rows in enumerate(targets):
        rows[:, 0] = position
    return torch.stack(images), torch.cat(targets), paths, shapes


def worker_count(wanted: int, batch_size: int) -> int:
    """Loader processes to start: no more than usable CPUs and pictures in a batch, none for single pictures.

    A negative number asks for as many as there are CPUs.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = min(cpus, batch_size if batch_size > 1 else 0)
    return limit if wanted < 0 else min(wanted, limit)


def fit_shared_memory(
    workers: int, batch_bytes: int, *, prefix: str = "", free_bytes: int | None = None
) -> tuple[int, int]:
    """Workers and prefetched batches per worker that shared memory has room for; says so where it had to reduce.

    free_bytes replaces the measured free space of /dev/shm.
    """
    if not workers:
        return 0, 0
    if free_bytes is None:
        if not SHARED_MEMORY.is_dir():
            return workers, PREFETCH
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    slots = int(free_bytes / (batch_bytes * BATCH_SLACK)) - 1  # one batch is in the hands of the trainer
    kept_workers = max(0, min(workers, slots))
    prefetch = min(PREFETCH, slots // kept_workers) if kept_workers else 0
    if (kept_workers, prefetch) != (workers, PREFETCH):
        need = (workers * PREFETCH + 1) * batch_bytes * BATCH_SLACK
        LOGGER.warning(
            f"{prefix}shared memory (/dev/shm) has {free_bytes / 2**20:.0f} MB free, {workers} workers would use up to "
            f"{need / 2**20:.0f} MB: going on with {kept_workers} workers, {prefetch} batches ahead each. "
            f"A container gets more with --shm-size={max(1, round(need / 2**30 + 0.5))}g"
        )
    return kept_workers, prefetch


def _init_worker(worker_id: int) -> None:
    """One thread per worker: parallel work is spread over processes."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
