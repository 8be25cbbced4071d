"""create_dataloader: batches in an order that follows from (seed, epoch), made by workers that live for a whole run.

The epoch and the mosaic switch travel to the workers inside the keys of each batch, so that living workers need no
other channel, and so that a worker can start on the next epoch while the last batches of this one are still in use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from utils.data.batching import QUAD, Batch, BatchMaker, Failure, Parcel, collate
from utils.data.dataset import LoadImagesAndLabels
from utils.data.gpu_augment import Composer
from utils.data.plan_batches import PlanBatch, PlanMaker
from utils.data.plan_stream import FILL_PICTURES, PlanStream
from utils.data.plans import PlannedImagesAndLabels
from utils.data.pool import PoolLayout, PoolSettings, plan_pool
from utils.data.sampling import (
    BatchStream,
    EpochPlan,
    Pieces,
    checked_weights,
    class_weights,
    image_weights,
    piece_size,
)
from utils.data.scan import ScanResult
from utils.data.shared_memory import PREFETCH, fit_shared_memory
from utils.data.stall import Readings, StallWatch, stall_text
from utils.data.workers import WorkerWatch, init_worker, raise_failure, worker_count
from utils.log import LOGGER, progress
from utils.runtime import synchronise

__all__ = ["EpochLoader", "collate", "create_dataloader"]
PLAN_BYTES = 2048  # of a sample without its copies: its tiles, views and usual number of targets


class EpochLoader:
    """Batches (images (B, 3, H, W) uint8, targets (T, 6), paths, shapes), one epoch per pass.

    `set_epoch` decides what the next pass gives, `announce` what the one after it will: workers then start on that
    without waiting for it. A pass that was not announced gives the same batches, only later. pin_memory: page-locked
    memory, from which copies to the GPU overlap with computing; left out: where there is a GPU. A wait that is longer
    than `stall.limit_s` is warned of.

    With a composer, which takes a PlannedImagesAndLabels and a PlanStream, it gives PlanBatches instead, from which the
    composer makes the same batches on its device; `DevicePrefetcher` does that.
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
        composer: Composer | None = None,
        piece: int | None = None,
    ) -> None:
        self.dataset, self.num_workers, self.batch_size = dataset, workers, stream.batch_size
        self._pieces = Pieces(stream, piece) if workers and piece and piece < stream.batch_size else None
        self.composer, self._is_pool_filled = composer, False
        self._stream, self._weights = stream, weights
        self._maker = (BatchMaker if composer is None else PlanMaker)(dataset, quad=quad, seed=stream.seed)
        self._pins = use_pinned_memory() if pin_memory is None else pin_memory
        self._loader = DataLoader(
            self._maker,
            batch_size=None,  # the stream makes batches already
            sampler=self._pieces or stream,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=self._pins,  # pieces too: a thread takes them from the workers while other work goes on
            collate_fn=_as_it_is,
            worker_init_fn=init_worker,
            multiprocessing_context=multiprocessing_context if workers else None,
        )
        self.stall = StallWatch(self.doing, getattr(dataset, "prefix", ""))
        self._watch = WorkerWatch(self.stall, getattr(dataset, "cut_files", None))
        self._parcels: Iterator[Parcel | Failure] | None = None
        self._restarts, self._keeps = 0, False
        self._kept: list[Batch] | None = None
        self._is_between_epochs = False  # no batch of the next pass was taken
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

    def keep(self) -> None:
        """Hold the batches of the next whole pass in memory; later passes give these, without workers, and no others.

        For validation, which sees the same pictures again and again. Nobody may change what a batch holds.
        """
        self._keeps = True

    def fill_pool(self) -> None:
        """Let the workers decode what the composer's pool has to hold before the first batch; done when it is needed.

        That is the whole set, once, or the pictures that a ring begins with.
        """
        composer, stream = self.composer, self._stream
        if composer is None or not isinstance(stream, PlanStream):
            return
        stream.fill_next()
        self._restart()
        synchronise(composer.device)  # batches that are still being made read from the pool
        count, is_whole = len(stream.fill_requests()), composer.pool.layout.is_whole
        total = min(count * FILL_PICTURES, len(self.dataset))
        with progress(total=total, desc="pictures to the GPU", unit="img", disable=not is_whole) as bar:
            for _ in range(count):
                parcel = self._take()
                composer.pool.put(parcel.first_slot, parcel.pixels)
                bar.update(min(FILL_PICTURES, total - bar.n))
        synchronise(composer.device)
        self._is_pool_filled = is_whole

    def begin(self) -> None:
        """Let the workers start on the next pass while this process prepares something else.

        A pass that is under way is given up: who goes on with it gets a RuntimeError.
        """
        if self._kept is not None:
            return
        if not self._is_pool_filled:
            self.fill_pool()
        self._restart()
        self._stream.begun.appendleft(self._stream.current)
        self._is_between_epochs = True

    def __iter__(self) -> Iterator[Batch | PlanBatch]:
        if self._kept is not None:
            yield from self._kept
            return
        if not self._keeps:
            yield from self._pass()
            return
        kept = []
        for batch in self._pass():
            kept.append(_in_own_memory(batch))
            yield kept[-1]
        self._kept = kept
        self._end_workers()

    def _pass(self) -> Iterator[Batch | PlanBatch]:
        begun = self._stream.begun
        if not (self._is_between_epochs and begun and self._stream.current.is_same(begun[0])):
            self.begin()
        begun.popleft()
        self._is_between_epochs, restarts = False, self._restarts
        for number in range(len(self)):
            if restarts != self._restarts:
                raise RuntimeError("this pass of the loader was given up: another one has begun since")
            batch = self._take()
            self._is_between_epochs = number == len(self) - 1
            yield batch

    def close(self) -> None:
        """End the worker processes, by force where they do not; the loader cannot be used afterwards."""
        self._end_workers()
        self.composer = self._kept = self._loader = None

    def _end_workers(self) -> None:
        with self._watch.ending():
            end_workers = getattr(self._parcels, "_shutdown_workers", None)
            if end_workers is not None:  # dropping it is not enough where an interruption's traceback holds it
                end_workers()
            self._parcels = None

    def __del__(self) -> None:
        if getattr(self, "_watch", None) is not None:  # else it was never complete
            self.close()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that have been started."""
        return [process.pid for process in self._watch.processes if process.pid]

    def doing(self) -> str:
        """What the loader processes (or this one) are doing, and what to try when no batch comes."""
        pids, dataset = self.worker_pids() if self.num_workers else [], self.dataset
        last = getattr(dataset, "readings", Readings()).last
        slots = list(enumerate(pids)) if self.num_workers else [(-1, os.getpid())]
        return stall_text(
            [(pid, dataset.im_files[last(slot)] if last(slot) >= 0 else "") for slot, pid in slots],
            dataset.report.notes.network if hasattr(dataset, "report") else "",
        )

    def _plan(self, epoch: int, mosaic: bool, weights: Sequence[float] | np.ndarray | None) -> EpochPlan:
        chosen = self._weights if weights is None else checked_weights(weights, len(self.dataset))
        return EpochPlan(int(epoch), bool(mosaic), chosen)

    def _restart(self) -> None:
        """Begin with the first batch of the current plan; batches under way are dropped."""
        self._restarts += 1
        if self._parcels is None or not self.num_workers:
            with self._watch.starting():
                self._parcels = iter(self._loader)
        else:
            with self._watch.waiting():
                self._parcels = iter(self._loader)

    def _take(self) -> Batch | PlanBatch:
        parcel = self._next() if self._pieces is None else self._next_of_pieces()
        if isinstance(parcel, PlanBatch) and self._stream.sent:
            parcel = self._renewed(parcel)
        if isinstance(parcel, Failure):
            raise_failure(parcel, self.worker_pids())
        return parcel.batch()

    def _next(self) -> Parcel | PlanBatch | Failure:
        with self._watch.waiting():
            return next(self._parcels)

    def _next_of_pieces(self) -> Parcel | Failure:
        """A whole batch, made by several workers, or what went wrong with one of its pieces."""
        pieces = [self._next() for _ in range(self._pieces.counts.popleft())]
        failure = next((piece for piece in pieces if isinstance(piece, Failure)), None)
        return failure or Parcel.joined(pieces, pin_memory=self._pins)

    def _renewed(self, plans: PlanBatch) -> PlanBatch | Failure:
        """The plans, made anew where another process found a picture unreadable that they may count on."""
        request = self._stream.sent.popleft()
        if request.pictures is None or plans.known_broken == self.dataset.known_broken():
            return plans
        fresh = self._maker[replace(request, decoded=())]
        return fresh if isinstance(fresh, Failure) else replace(fresh, pixels=plans.pixels)


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
    pool: PoolSettings | None = None,
    told: ScanResult | None = None,
) -> tuple[EpochLoader, LoadImagesAndLabels]:
    """Scan a data set and build its loader; batches are (images (B, 3, H, W) uint8, targets (T, 6), paths, shapes).

    nc (or the number of names) is checked against the labels; cache 'val' keeps pictures in memory when not augmenting.
    image_weights draws pictures with replacement, at first by class frequency. quad gives batches of a quarter of the
    pictures at twice the side. memory_share: part of shared memory to plan with. multiprocessing_context ('fork', …)
    replaces the system's way to start processes. With pool a composer makes pictures from plans. told: see
    `scan_dataset`. Raises what that does, ValueError for options that exclude each other.
    """
    nc = len(names) if nc is None and names is not None else nc
    rect, shuffle = _compatible(rect, shuffle, image_weights, prefix)
    _check_quad(quad, batch_size, prefix)
    cv2.setNumThreads(0)
    dataset = (LoadImagesAndLabels if pool is None else PlannedImagesAndLabels)(
        path, imgsz, batch_size, augment, hyp, rect, single_cls=single_cls, stride=stride, pad=pad, told=told,
        min_items=min_items, prefix=prefix, seed=seed, nc=nc, **_cache_options(cache, cache_dir, mosaic_cache, augment),
    )  # fmt: skip
    group = _check_content(dataset, quad, prefix)
    batch_size = min(batch_size, len(dataset) // group * group)
    layout = None if pool is None else plan_pool(dataset.shapes, imgsz, batch_size, pool, prefix)
    batch_bytes, workers = _batch_bytes(dataset, batch_size, layout), worker_count(workers, batch_size)
    workers, prefetch = fit_shared_memory(workers, batch_bytes, share=memory_share, prefix=prefix)
    return EpochLoader(
        dataset,
        _stream(len(dataset), batch_size, layout, shuffle=shuffle, seed=seed, drop_last=drop_last, group=group),
        composer=None if layout is None else Composer(layout, pool.device, use_triton=pool.use_triton),
        weights=_first_weights(dataset, nc) if image_weights else None,
        workers=workers, prefetch=prefetch, quad=quad, multiprocessing_context=multiprocessing_context,
        piece=None if augment or quad or pool else piece_size(len(dataset), batch_size, workers, prefetch),
    ), dataset  # fmt: skip


def _stream(length: int, batch_size: int, layout: PoolLayout | None, **order: bool | int) -> BatchStream:
    if layout is None:
        return BatchStream(length, batch_size, **order)  # type: ignore[arg-type]
    return PlanStream(length, batch_size, layout, **order)


def _batch_bytes(dataset: LoadImagesAndLabels, batch_size: int, layout: PoolLayout | None) -> int:
    """Shared memory that a batch takes: its pictures, or what their plans and newly decoded pictures need."""
    picture = 3 * dataset.img_size**2
    if layout is None:
        return batch_size * picture
    mask = dataset.img_size**2 if dataset.settings.copy_paste else 0  # two planes of four times the size, in bits
    plans = batch_size * (PLAN_BYTES + mask)
    return max(plans, FILL_PICTURES * picture) if layout.is_whole else plans + batch_size * picture


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


def _check_content(dataset: LoadImagesAndLabels, quad: bool, prefix: str) -> int:
    """How many pictures belong together; raises ValueError where there are too few of them, or nothing to learn."""
    if quad and len(dataset) < QUAD:
        raise ValueError(f"{prefix}--quad needs at least {QUAD} pictures, there are {len(dataset)}: leave --quad out")
    if dataset.augment and not len(dataset.labels.values):
        counts = dataset.report.counts
        if counts.left_out or counts.rows_refused:
            raise ValueError(
                f"{prefix}there is nothing to learn: {counts.left_out} pictures were left out and "
                f"{counts.rows_refused} rows refused for the reasons above, and none of the {len(dataset)} other "
                "pictures has a label"
            )
        raise ValueError(
            f"{prefix}there is nothing to learn: none of the {len(dataset)} pictures has a label; "
            f"the first label file was expected at {dataset.label_files[0]}"
        )
    return QUAD if quad else 1


def _first_weights(dataset: LoadImagesAndLabels, nc: int | None) -> np.ndarray:
    """Picture weights (N,) before anything is known about accuracy: by rarity of the classes alone."""
    labels = dataset.labels
    nc = nc or int(labels.values[:, 0].max(initial=0)) + 1
    return checked_weights(image_weights(labels, nc, class_weights(labels, nc) / nc), len(dataset))


def _in_own_memory(batch: Batch) -> Batch:
    """The batch with its tensors out of shared memory, which has to last for the next ones."""
    images, targets, paths, shapes = batch
    return *(value.clone() if value.is_shared() else value for value in (images, targets)), paths, shapes


def _as_it_is(parcel: Parcel | Failure) -> Parcel | Failure:
    return parcel
