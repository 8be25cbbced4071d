"""Correct the frame size written in an MP4 file with MPEG-4 Part 2 video (codec mp4v).

OpenCV's writer drops the last column or row of pictures with an odd side. The codec itself has no such limit: it
stores blocks of 16 x 16 pixels and a header that says how much of them to show. So a video of odd size is written with
one more column or row, and the three places that hold the size are set to the wanted one afterwards.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import BinaryIO

_LAYER_START = b"\x00\x00\x01"  # start code of a video object layer, followed by one of 0x20 … 0x2f
_HEADER_BYTES = 48  # longer than any layer header up to its size fields


def set_frame_size(path: str | Path, width: int, height: int) -> bool:
    """Set the shown size in all headers of ``path``; return False, with the file untouched, if it is not as expected.

    Only the last macroblock column and row may shrink, so the new size has to fit the stored blocks.
    """
    with open(path, "r+b") as handle:
        place = _find_box(handle, b"moov")
        if place is None:
            return False
        start, size = place
        handle.seek(start)
        data = bytearray(handle.read(size))
        if not all(edit(data, width, height) for edit in (_set_track, _set_entry, _set_layer)):
            return False
        handle.seek(start)
        handle.write(data)
    return True


def has_index(path: str | Path) -> bool:
    """Return whether an MP4 file is whole: its index is written last, and nothing plays it without."""
    with open(path, "rb") as handle:
        place = _find_box(handle, b"moov")
        return place is not None and sum(place) <= handle.seek(0, io.SEEK_END)


def _find_box(handle: BinaryIO, name: bytes) -> tuple[int, int] | None:
    """Return offset and length of a top-level box, header included."""
    offset = 0
    while True:
        handle.seek(offset)
        header = handle.read(16)
        if len(header) < 8:
            return None
        size = struct.unpack(">I", header[:4])[0]
        if size == 1 and len(header) == 16:  # the true length follows as 64 bits
            size = struct.unpack(">Q", header[8:])[0]
        if size < 8:
            return None
        if header[4:8] == name:
            return offset, size
        offset += size


def _set_track(data: bytearray, width: int, height: int) -> bool:
    """Set the size in the track header: its last two fields, 16.16 fixed point."""
    position = data.find(b"tkhd")
    if position < 4:
        return False
    end = position - 4 + struct.unpack_from(">I", data, position - 4)[0]
    if end > len(data):
        return False
    struct.pack_into(">II", data, end - 8, width << 16, height << 16)
    return True


def _set_entry(data: bytearray, width: int, height: int) -> bool:
    """Set the size in the sample description: 28 bytes behind the entry's name, 16 bits each."""
    position = data.find(b"mp4v", data.find(b"stsd"))
    if position < 0 or position + 32 > len(data):
        return False
    struct.pack_into(">HH", data, position + 28, width, height)
    return True


def _set_layer(data: bytearray, width: int, height: int) -> bool:
    """Set the size in the video object layer header (ISO 14496-2, section 6.2.3), where decoders take it from."""
    position = data.find(_LAYER_START)
    while position >= 0 and not 0x20 <= data[position + 3] <= 0x2F:
        position = data.find(_LAYER_START, position + 1)
    if position < 0:
        return False
    start = position + 4
    count = min(_HEADER_BYTES, len(data) - start)
    bits = _Bits(bytes(data[start : start + count]))
    if not _skip_to_width(bits):
        return False
    bits.set(13, width)
    bits.skip(1)  # marker
    bits.set(13, height)
    data[start : start + count] = bits.value.to_bytes(count, "big")
    return True


def _skip_to_width(bits: _Bits) -> bool:
    """Move to the width field; False for layers that are not rectangular."""
    bits.skip(9)  # random access, object type
    if bits.take(1):  # version and priority follow
        bits.skip(7)
    if bits.take(4) == 15:  # aspect ratio of the pixels given as two numbers
        bits.skip(16)
    if bits.take(1):  # control parameters
        bits.skip(3)
        if bits.take(1):
            bits.skip(79)  # buffer sizes and rates with their markers
    if bits.take(2) != 0:  # shape
        return False
    bits.skip(1)
    resolution = bits.take(16)  # of the time stamps
    bits.skip(1)
    if bits.take(1):  # fixed rate: one time step in just as many bits as it needs
        bits.skip(max((resolution - 1).bit_length(), 1))
    bits.skip(1)
    return True


class _Bits:
    """Read and overwrite fields of a bit string from its front."""

    def __init__(self, data: bytes) -> None:
        self.value, self.left = int.from_bytes(data, "big"), len(data) * 8

    def skip(self, count: int) -> None:
        self.left -= count

    def take(self, count: int) -> int:
        self.left -= count
        return self.value >> self.left & (1 << count) - 1

    def set(self, count: int, number: int) -> None:
        self.left -= count
        self.value &= ~(((1 << count) - 1) << self.left)
        self.value |= number << self.left
