"""Requests for batches of plans: the order of `BatchStream`, and which picture lies in which slot at that time.

In a ring the picture at position g of the endless order of all epochs lies in slot g modulo the number of slots. A pass
that begins with epoch e starts from a ring that holds the end of epoch e - 1, so that it does not matter whether that
epoch was run just before or the training was resumed in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from utils.data.plan_batches import Request
from utils.data.pool import PoolLayout
from utils.data.sampling import BatchStream, epoch_order

LAST_EPOCH = 1 << 31  # its order is used before epoch 0
FILL_PICTURES = 4  # decoded by a loader process at a time when a pool is filled


class PlanStream(BatchStream):
    """Requests, one per batch, for a pool of a given layout. `sent` holds those that were handed out, oldest first."""

    def __init__(self, length: int, batch_size: int, layout: PoolLayout, **options: object) -> None:
        super().__init__(length, batch_size, **options)  # type: ignore[arg-type]
        self.layout = layout
        self.sent: deque[Request] = deque()
        self._is_filling = False
        self._pictures, self._position = np.zeros(0, np.int64), 0  # of a ring: index per slot, positions handed out

    def __iter__(self) -> Iterator[Request]:  # type: ignore[override]
        self.sent.clear()
        is_filling, self._is_filling = self._is_filling, False
        if is_filling:
            yield from self.fill_requests()
            return
        if not self.layout.is_whole:
            self._pictures, self._position = self.first_ring(), self.current.epoch * self._usable()
        for keys in super().__iter__():
            request = self._request(tuple(keys))
            self.sent.append(request)
            yield request

    def fill_next(self) -> None:
        """Let the next pass give `fill_requests` instead of batches."""
        self._is_filling = True

    def fill_requests(self) -> list[Request]:
        """Requests that decode what the pool has to hold before the first batch of the current epoch."""
        pictures = np.arange(self.length) if self.layout.is_whole else self.first_ring()
        return [
            Request(
                first_slot=start,
                decoded=tuple(pictures[start : start + FILL_PICTURES].tolist()),
                stride=self.layout.stride,
            )
            for start in range(0, len(pictures), FILL_PICTURES)
        ]

    def first_ring(self) -> np.ndarray:
        """Index of the picture in each slot (P,) of a ring before the current epoch: the end of the one before.

        Before epoch 0 it is the end of the order that comes last of all, which no training reaches. Where weights draw
        the pictures, these draw the ring's as well: those of the epoch before are not known after a resumption.
        """
        epoch, usable, weights = self.current.epoch, self._usable(), self.current.weights
        number = epoch - 1 if epoch else LAST_EPOCH
        order = epoch_order(self.length, number, seed=self.seed, shuffle=self.shuffle, weights=weights)
        before = order[:usable]
        ages = np.arange(1, self.layout.slots + 1)  # 1: the last position of the epoch before
        pictures = np.zeros(self.layout.slots, np.int64)
        pictures[(epoch * usable - ages) % self.layout.slots] = before[-ages % usable]
        return pictures

    def _usable(self) -> int:
        """Pictures that one epoch shows."""
        usable = self.length // self.group * self.group
        return usable // self.batch_size * self.batch_size if self.drop_last else usable

    def _request(self, keys: tuple) -> Request:
        if self.layout.is_whole:
            return Request(keys)
        first, indices = self._position % self.layout.slots, np.array([key.index for key in keys])
        self._pictures[(first + np.arange(len(keys))) % self.layout.slots] = indices
        self._position += len(keys)
        return Request(keys, self._pictures.astype(np.int32), first, tuple(indices.tolist()), self.layout.stride)
