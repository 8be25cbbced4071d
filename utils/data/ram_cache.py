"""Decoded pictures kept in main memory, all in one flat buffer that loader processes share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from utils.data.images import fitted_size
from utils.data.memory import SharedBytes, available_memory_bytes, size_text
from utils.data.tables import offsets_of
from utils.log import LOGGER, progress

MEMORY_RESERVE = 1.1  # the buffer times this must fit into free memory


class RamCache:
    """Pictures scaled to one long side; entry i is a view (h_i, w_i, 3) or None where the file could not be read.

    Use `RamCache.fill`; a cache that would not fit into memory is refused with a message. Loader processes see the one
    buffer, whether they are forked or started anew.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self.sizes = np.array(sizes, np.int64).reshape(-1, 2)  # width, height as kept
        self.offsets = offsets_of((self.sizes[:, 0] * self.sizes[:, 1] * 3).tolist())
        self.buffer = SharedBytes(int(self.offsets[-1]))
        self.is_filled = np.zeros(len(self.sizes), bool)

    def get(self, index: int) -> np.ndarray | None:
        """Read-only picture (h, w, 3) of an index, or None."""
        if not self.is_filled[index]:
            return None
        width, height = self.sizes[index]
        view = self.buffer.array[self.offsets[index] : self.offsets[index + 1]].reshape(height, width, 3)
        view.flags.writeable = False
        return view

    def put(self, index: int, image: np.ndarray) -> None:
        """Keep a picture; one whose size differs from the expected one is not kept."""
        width, height = self.sizes[index]
        if image.shape == (height, width, 3):
            self.buffer.array[self.offsets[index] : self.offsets[index + 1]] = image.reshape(-1)
            self.is_filled[index] = True

    @classmethod
    def fill(
        cls, shapes: np.ndarray, size: int, load: Callable[[int], np.ndarray | None], prefix: str = ""
    ) -> RamCache | None:
        """Load all pictures, shapes (N, 2) are width and height of the files; None where memory does not suffice."""
        sizes = [fitted_size(int(width), int(height), size) for width, height in shapes]
        needed, free = sum(width * height * 3 for width, height in sizes), available_memory_bytes()
        if needed * MEMORY_RESERVE >= free:
            LOGGER.warning(
                f"{prefix}--cache ram left out: {len(sizes)} pictures need {size_text(needed)} and 10 % reserve, "
                f"{size_text(free)} are free; pictures are read from their files. --cache disk needs no memory"
            )
            return None
        try:
            cache = cls(sizes)
        except OSError as error:
            LOGGER.warning(f"{prefix}--cache ram left out: {error}; pictures are read from their files")
            return None

        def keep(index: int) -> None:
            image = load(index)
            if image is not None:
                cache.put(index, image)

        threads = max(1, min(8, os.cpu_count() or 1))
        with (
            ThreadPoolExecutor(threads) as pool,
            progress(total=len(sizes), desc=f"{prefix}caching pictures in memory", unit="img") as bar,
        ):
            for _ in pool.map(keep, range(len(sizes))):
                bar.update()
        LOGGER.info(f"{prefix}{int(cache.is_filled.sum())} pictures in memory, {size_text(needed)}")
        return cache
