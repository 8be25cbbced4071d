"""Less than a whole JPEG: its upper rows only, or all of it at a half or a quarter of its size.

Of a mosaic's lower pictures often only the upper rows are seen, and of a mosaic that is warped to half its size or less
every second pixel would be skipped. Both save most of a decoder's work. Only the common kind of file is read this way:
baseline, 8 bits, three components in one scan, stored upright, no restart markers. For anything else, and whenever the
outcome is not as expected, the answer is None, and the caller decodes the whole picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from utils.data.decoder import decode
from utils.data.headers import JPEG_END, tiff_orientation

BLOCK_ROWS = 16  # rows of a block with halved colour resolution
SPARE_ROWS = 2  # the last decoded rows lack the neighbours that colour interpolation looks at
SHRINKS = {  # how many times smaller -> OpenCV's flag
    1: cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION,
    2: cv2.IMREAD_REDUCED_COLOR_2 | cv2.IMREAD_IGNORE_ORIENTATION,
    4: cv2.IMREAD_REDUCED_COLOR_4 | cv2.IMREAD_IGNORE_ORIENTATION,
}
_FRAME, _SCAN, _EXIF = 0xC0, 0xDA, 0xE1
_REFUSED = (frozenset(range(0xC1, 0xD0)) - {0xC4}) | {0xDD, 0xFF}  # other kinds of frame, restarts, fill bytes


class JpegLayout(NamedTuple):
    """Size in pixels, and the offsets of the height's two bytes and of the end marker."""

    width: int
    height: int
    height_at: int
    end: int


def jpeg_layout(data: bytes) -> JpegLayout | None:
    """Find out whether encoded bytes are of the common kind (see above), and where its parts are; else None."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    at, frame = 2, 0
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _REFUSED or length < 2:
            return None
        if marker == _EXIF and data[at + 4 : at + 10] == b"Exif\0\0":
            if tiff_orientation(data[at + 10 : at + 2 + length]) != 1:
                return None
        elif marker == _FRAME:
            if frame or data[at + 4] != 8 or data[at + 9] != 3:
                return None
            frame = at
        elif marker == _SCAN:
            end = data.find(JPEG_END, at)
            if not frame or data[at + 4] != 3 or end < 0:
                return None
            height, width = (int.from_bytes(data[frame + i : frame + i + 2], "big") for i in (5, 7))
            return JpegLayout(width, height, frame + 5, end)
        at += 2 + length
    return None


def decoded_rows(rows: int, height: int) -> int:
    """How many rows to decode so that the first `rows` of a picture are right: whole blocks, at most all."""
    return min(-(-(rows + SPARE_ROWS) // BLOCK_ROWS) * BLOCK_ROWS, height)


def read_jpeg_part(
    path: str | Path, size: tuple[int, int], rows: int | None = None, shrink: int = 1
) -> np.ndarray | None:
    """Read the first rows (all where None) of a JPEG of a known (width, height), `shrink` times smaller (1, 2 or 4).

    Gives (h, w, 3) uint8 BGR, h at least rows / shrink and w = width / shrink, rounded up, or None where the file is
    not of the common kind, of another size, or damaged. Raises OSError where it cannot be opened.
    """
    data = Path(path).read_bytes()
    layout = jpeg_layout(data)
    if layout is None or (layout.width, layout.height) != size:
        return None
    width, height = size
    taken = height if rows is None else decoded_rows(rows, height)
    buffer = np.frombuffer(data, np.uint8)
    if taken < height:
        # The decoder stops after the rows that the header announces. Without an end marker it does not complain about
        # what it left over; it would do so if it had to wait for data, and then gives nothing.
        buffer = buffer[: layout.end].copy()
        buffer[layout.height_at : layout.height_at + 2] = divmod(taken, 256)
    image, damage = decode(buffer, SHRINKS[shrink])
    expected = (-(-taken // shrink), -(-width // shrink), 3)
    return image if image is not None and image.shape == expected and not damage else None
