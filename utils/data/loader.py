"""create_dataloader: batches in an order that follows from (seed, epoch), made by workers that live for a whole run.

The epoch and the mosaic switch travel to the workers inside the keys of each batch, so that living workers need no
other channel, and so that a worker can start on the next epoch while the last batches of this one are still in use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from utils.data.batching import QUAD, Batch, BatchMaker, Failure, Parcel, collate
from utils.data.dataset import LoadImagesAndLabels
from utils.data.sampling import BatchStream, EpochPlan, checked_weights, class_weights, image_weights
from utils.data.shared_memory import PREFETCH, fit_shared_memory
from utils.data.workers import WorkerWatch, init_worker, raise_failure, worker_count
from utils.log import LOGGER

__all__ = ["EpochLoader", "collate", "create_dataloader"]


class EpochLoader:
    """Batches (images (B, 3, H, W) uint8, targets (T, 6), paths, shapes), one epoch per pass.

    `set_epoch` decides what the next pass gives, `announce` what the one after it will: workers then start on that
    without waiting for it. A pass that was not announced gives the same batches, only later. pin_memory: page-locked
    memory, from which copies to the GPU overlap with computing; left out: where there is a GPU.
    """

    def __init__(
        self,
        dataset: LoadImagesAndLabels,
        stream: BatchStream,
        *,
        workers: int = 0,
        prefetch: int = PREFETCH,
        quad: bool = False,
        weights: np.ndarray | None = None,
        pin_memory: bool | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        self.dataset, self.num_workers, self.batch_size = dataset, workers, stream.batch_size
        self._stream, self._weights = stream, weights
        self._loader = DataLoader(
            BatchMaker(dataset, quad=quad, seed=stream.seed),
            batch_size=None,  # the stream makes batches already
            sampler=stream,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=use_pinned_memory() if pin_memory is None else pin_memory,
            collate_fn=_as_it_is,
            worker_init_fn=init_worker,
            multiprocessing_context=multiprocessing_context if workers else None,
        )
        self._watch = WorkerWatch()
        self._parcels: Iterator[Parcel | Failure] | None = None
        self._is_between_epochs = False  # all batches of the last pass were taken
        self.set_epoch(0)

    def __len__(self) -> int:
        return len(self._stream)

    def set_epoch(
        self, epoch: int, mosaic: bool = True, image_weights: Sequence[float] | np.ndarray | None = None
    ) -> None:
        """Choose epoch, mosaics (with mixup and copy-paste) and picture weights (N,) from the next pass on.

        Raises ValueError for weights that do not fit.
        """
        self._stream.current = self._plan(epoch, mosaic, image_weights)
        self._stream.announced = None

    def announce(
        self, epoch: int, mosaic: bool = True, image_weights: Sequence[float] | np.ndarray | None = None
    ) -> None:
        """Say what `set_epoch` will choose for the pass after the next; to be called between the two.

        When it turns out otherwise, what was prepared is thrown away.
        """
        self._stream.announced = self._plan(epoch, mosaic, image_weights)

    def __iter__(self) -> Iterator[Batch]:
        begun = self._stream.begun
        if self._is_between_epochs and begun and self._stream.current.is_same(begun[0]):
            begun.popleft()
        else:
            self._restart()
        self._is_between_epochs = False
        for number in range(len(self)):
            batch = self._take()
            self._is_between_epochs = number == len(self) - 1
            yield batch

    def close(self) -> None:
        """End the worker processes; the loader cannot be used afterwards."""
        self._parcels = None
        self._watch.processes = ()
        del self._loader

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that have been started."""
        return [process.pid for process in self._watch.processes if process.pid]

    def _plan(self, epoch: int, mosaic: bool, weights: Sequence[float] | np.ndarray | None) -> EpochPlan:
        chosen = self._weights if weights is None else checked_weights(weights, len(self.dataset))
        return EpochPlan(int(epoch), bool(mosaic), chosen)

    def _restart(self) -> None:
        """Begin with the first batch of the current plan; batches under way are dropped."""
        if self._parcels is None or not self.num_workers:
            with self._watch.starting():
                self._parcels = iter(self._loader)
        else:
            with self._watch.waiting():
                self._parcels = iter(self._loader)

    def _take(self) -> Batch:
        with self._watch.waiting():
            parcel = next(self._parcels)
        if isinstance(parcel, Failure):
            raise_failure(parcel, self.worker_pids())
        return parcel.batch()


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
    cache_dir: str | Path = "",
    mosaic_cache: int = 0,
    image_weights: bool = False,
    quad: bool = False,
    memory_share: float = 1.0,
    multiprocessing_context: str | None = None,
) -> tuple[EpochLoader, LoadImagesAndLabels]:
    """Scan a data set and build its loader; batches are (images (B, 3, H, W) uint8, targets (T, 6), paths, shapes).

    nc (or the number of names) is checked against the labels; cache 'val' keeps pictures in memory when not augmenting.
    image_weights draws pictures with replacement, by class frequency until `set_epoch` gets weights. quad gives
    batches of a quarter of the pictures at twice the side. memory_share is the part of shared memory to plan with, one
    half where two loaders live. multiprocessing_context ('fork', 'spawn', 'forkserver') replaces the system's way to
    start processes. Raises what `scan_dataset` raises, and ValueError for options that exclude each other.
    """
    nc = len(names) if nc is None and names is not None else nc
    rect, shuffle = _compatible(rect, shuffle, image_weights, prefix)
    _check_quad(quad, batch_size, prefix)
    cv2.setNumThreads(0)
    dataset = LoadImagesAndLabels(
        path, imgsz, batch_size, augment, hyp, rect, single_cls=single_cls, stride=stride, pad=pad,
        min_items=min_items, prefix=prefix, seed=seed, nc=nc, **_cache_options(cache, cache_dir, mosaic_cache, augment),
    )  # fmt: skip
    _check_content(dataset, quad, prefix)
    group = QUAD if quad else 1
    batch_size = min(batch_size, len(dataset) // group * group)
    workers, batch_bytes = worker_count(workers, batch_size), batch_size * 3 * imgsz * imgsz
    workers, prefetch = fit_shared_memory(workers, batch_bytes, share=memory_share, prefix=prefix)
    loader = EpochLoader(
        dataset,
        BatchStream(len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, group=group),
        workers=workers,
        prefetch=prefetch,
        quad=quad,
        weights=_first_weights(dataset, nc) if image_weights else None,
        multiprocessing_context=multiprocessing_context,
    )
    return loader, dataset


def _cache_options(
    cache: bool | str | None, cache_dir: str | Path, mosaic_cache: int, augment: bool
) -> dict[str, object]:
    """Keywords for the data set, without those that ask for nothing."""
    if cache == "val":
        cache = None if augment else "ram"
    options = {"cache": cache, "cache_dir": cache_dir, "mosaic_cache": mosaic_cache}
    return {name: value for name, value in options.items() if value}


def use_pinned_memory() -> bool:
    """Whether batches go to page-locked memory: where there is a GPU, unless PIN_MEMORY=false forbids it."""
    return torch.cuda.is_available() and os.environ.get("PIN_MEMORY", "true").lower() not in ("false", "0")


def _compatible(rect: bool, shuffle: bool, weighted: bool, prefix: str) -> tuple[bool, bool]:
    """Settle rect and shuffle where the options ask for orders that exclude each other."""
    if weighted and rect:
        LOGGER.warning(f"{prefix}--image-weights draws pictures of all shapes together, --rect is off")
        rect = False
    if rect and shuffle:
        LOGGER.warning(f"{prefix}--rect keeps pictures of one shape together, shuffling is off")
        shuffle = False
    return rect, shuffle


def _check_quad(quad: bool, batch_size: int, prefix: str) -> None:
    if quad and batch_size % QUAD:
        raise ValueError(
            f"{prefix}--quad joins {QUAD} pictures to one, --batch-size {batch_size} is no multiple of {QUAD}: "
            f"use --batch-size {max(QUAD, batch_size // QUAD * QUAD)}"
        )


def _check_content(dataset: LoadImagesAndLabels, quad: bool, prefix: str) -> None:
    if quad and len(dataset) < QUAD:
        raise ValueError(f"{prefix}--quad needs at least {QUAD} pictures, there are {len(dataset)}: leave --quad out")
    if dataset.augment and not len(dataset.labels.values):
        raise ValueError(
            f"{prefix}there is nothing to learn: none of the {len(dataset)} pictures has a label; "
            f"the first label file was expected at {dataset.label_files[0]}"
        )


def _first_weights(dataset: LoadImagesAndLabels, nc: int | None) -> np.ndarray:
    """Picture weights (N,) before anything is known about accuracy: by rarity of the classes alone."""
    labels = dataset.labels
    nc = nc or int(labels.values[:, 0].max(initial=0)) + 1
    return checked_weights(image_weights(labels, nc, class_weights(labels, nc) / nc), len(dataset))


def _as_it_is(parcel: Parcel | Failure) -> Parcel | Failure:
    return parcel
