"""DevicePrefetcher: the next batch travels to the GPU while the current one is computed; counts the time waited."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch

from utils.data.batching import Batch
from utils.data.plan_batches import PlanBatch


class DevicePrefetcher:
    """Yield the batches of a loader with images (uint8) and targets on a device.

    On CUDA one batch is copied ahead on a stream of its own; copies overlap with computing where the loader's memory
    is pinned. Elsewhere batches pass through. Where the loader gives plans, its composer makes the pictures, on that
    stream. After or during a pass `wait_s` tells how many seconds of it were spent waiting for the loader.

        for images, targets, paths, shapes in DevicePrefetcher(loader, device):
            step(images, targets)
    """

    def __init__(self, loader: Iterable[Batch | PlanBatch], device: torch.device) -> None:
        self.loader, self.device = loader, torch.device(device)
        self.wait_s = 0.0
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        self.wait_s = 0.0
        batches = iter(self.loader)
        if self._stream is None:
            while (batch := self._take(batches)) is not None:
                yield self.place(batch)
            return
        upcoming = self._start_copy(batches)
        while upcoming is not None:
            batch, is_copied = upcoming
            upcoming = self._start_copy(batches)
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(is_copied)
            for tensor in batch[:2]:
                tensor.record_stream(computing)  # so that its memory is not reused while computing still reads it
            yield batch

    def place(self, batch: Batch | PlanBatch) -> Batch:
        """A batch of the loader with images and targets on the device, without waiting for it."""
        if isinstance(batch, PlanBatch):
            return self.loader.composer(batch)  # type: ignore[attr-defined]
        images, targets, paths, shapes = batch
        to = {"device": self.device, "non_blocking": True}
        return images.to(**to), targets.to(**to), paths, shapes

    def _take(self, batches: Iterator[Batch | PlanBatch]) -> Batch | PlanBatch | None:
        started = time.perf_counter()
        batch = next(batches, None)
        self.wait_s += time.perf_counter() - started
        return batch

    def _start_copy(self, batches: Iterator[Batch | PlanBatch]) -> tuple[Batch, torch.cuda.Event] | None:
        """Take the next batch and start its way to the device; the event marks its arrival."""
        batch = self._take(batches)
        if batch is None or self._stream is None:
            return None
        with torch.cuda.stream(self._stream):
            return self.place(batch), self._stream.record_event()


def count_images(batch: Batch | PlanBatch) -> int:
    """Number of pictures in a batch of a loader."""
    return len(batch.paths if isinstance(batch, PlanBatch) else batch[2])
