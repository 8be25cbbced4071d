"""A picture of a sample: all of it, the part that is seen, or none of its pixels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from utils.data.mosaic_view import align_tile, shrink_tile


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
