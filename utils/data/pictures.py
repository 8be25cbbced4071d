"""A picture of a sample: all of it, the part that is seen, or none of its pixels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.data.listing import printable
from utils.data.mosaic_view import align_tile, shrink_tile
from utils.data.scan import MAX_NAMED
from utils.log import LOGGER


class Picture(NamedTuple):
    """A loaded picture (BGR, long side img_size), its size on disk (height, width), and the index whose labels fit."""

    image: np.ndarray
    original: tuple[int, int]
    index: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as loaded."""
        return self.image.shape[1], self.image.shape[0]


class Unread(NamedTuple):
    """A picture whose pixels nobody will see: its (width, height) as it would be loaded, and its index."""

    size: tuple[int, int]
    index: int
    image: None = None


class Part(NamedTuple):
    """The seen part of a picture (its upper rows, perhaps shrunk), its (width, height) as loaded, and its index."""

    image: np.ndarray
    size: tuple[int, int]
    index: int


def shrunk_part(part: Picture | Part, position: int, shrink: int) -> Part:
    """Shrunk picture of a mosaic's position; a Part is shrunk already, a whole Picture is not."""
    image = part.image if isinstance(part, Part) else shrink_tile(part.image, shrink)
    return Part(align_tile(image, position, part.size, shrink), part.size, part.index)


def tell_unreadable(path: str, error: Exception, count: int, total: int, prefix: str = "") -> None:
    """Name a picture that cannot be read any more, the count-th of total; of very many only the 100th, the 1000th …"""
    if count > MAX_NAMED and count not in (100, 1000, 10_000, 100_000):
        return
    text = str(error.strerror) if isinstance(error, OSError) and error.strerror else str(error)
    more = f" ({count} of {total} so far; few are named from here on)" if count >= MAX_NAMED else ""
    reason = text.removeprefix(f"{path}: ")
    LOGGER.warning(printable(f"{prefix}{path} cannot be read, replaced from now on: {reason}{more}"))
