"""Lists of texts and of array pieces kept in a few flat arrays.

A Python list of 100,000 small objects is copied page by page into every loader process, because reading an object
changes its reference count; flat arrays stay shared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np


def offsets_of(lengths: Iterable[int]) -> np.ndarray:
    """Start offsets (n + 1,) int64 of n pieces that lie one after the other."""
    return np.concatenate(([0], np.cumsum(np.fromiter(lengths, np.int64)))).astype(np.int64)


class TextTable(Sequence[str]):
    """Read-only sequence of file names; names that are not valid text survive (surrogate escapes)."""

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [os.fsencode(text) for text in texts]
        self.offsets = offsets_of(len(text) for text in encoded)
        self.blob = np.frombuffer(b"".join(encoded), np.uint8)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = _checked(index, len(self))
        return os.fsdecode(self.blob[self.offsets[index] : self.offsets[index + 1]].tobytes())

    def is_equal(self, other: TextTable) -> bool:
        """Whether another table holds the same names in the same order."""
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.blob, other.blob)


class RowTable(Sequence[np.ndarray]):
    """Sequence of arrays (n_i, columns) that are views of one flat array (sum n_i, columns)."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        self.values, self.offsets = values, offsets

    @classmethod
    def from_pieces(cls, pieces: Sequence[np.ndarray], columns: int) -> RowTable:
        """Join arrays (n_i, columns) into one table of float32."""
        empty = np.zeros((0, columns), np.float32)
        values = np.concatenate([empty, *pieces]).astype(np.float32, copy=False)
        return cls(values, offsets_of(len(piece) for piece in pieces))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = _checked(index, len(self))
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> np.ndarray:
        """Rows of each piece (n,)."""
        return np.diff(self.offsets)

    def select(self, index: np.ndarray) -> RowTable:
        """A new table of the pieces named by an index array, in its order."""
        return RowTable.from_pieces([self[int(i)] for i in index], self.values.shape[1])


def _checked(index: int, length: int) -> int:
    index = int(index)
    if index < 0:
        index += length
    if not 0 <= index < length:
        raise IndexError(f"index {index} is outside 0..{length - 1}")
    return index
