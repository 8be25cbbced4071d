"""What the first bytes of a picture say: kind, size, bit depth and EXIF orientation.

Content decides, never the file name. Sizes are read for JPEG and PNG only (the other kinds are rare enough to be
decoded); orientations for JPEG, PNG and WebP, because it depends on OpenCV's version which of them it turns.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

JPEG_END = b"\xff\xd9"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEAD_BYTES, TAIL_BYTES = 1 << 16, 1 << 12  # parts of a JPEG that tell its size and whether it is complete
ORIENTATION_TAG, TIFF_DEPTH_TAG, TIFF_FORMAT_TAG = 0x0112, 0x0102, 0x0153
UNSIGNED_SAMPLES, FLOAT_SAMPLES = 1, 3  # values of the last of these
# Start-of-frame markers: all of C0..CF but DHT (C4), JPG (C8) and DAC (CC).
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_CONVERT = "convert it to JPEG or PNG"
# What lies under names of pictures without being one that is read everywhere: position, first bytes, what it is.
_FOREIGN: tuple[tuple[int, tuple[bytes, ...], str], ...] = (
    (4, (b"ftypheic", b"ftypheix", b"ftyphevc", b"ftypmif1", b"ftypmsf1"), f"a HEIC picture of a phone: {_CONVERT}"),
    (4, (b"ftypavif", b"ftypavis"), f"an AVIF picture, which this OpenCV cannot read: {_CONVERT}"),
    (4, (b"ftyp",), "a video"),
    (
        0,
        (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
        f"a JPEG 2000 picture, damaged or of an unknown kind: {_CONVERT}",
    ),
    (0, (b"\0\0\0\x0cJXL ", b"\xff\x0a"), f"a JPEG XL picture: {_CONVERT}"),
    (0, (b"GIF8",), f"a GIF picture, damaged or not read by this OpenCV: {_CONVERT}"),
    (0, (b"%PDF",), f"a PDF document: {_CONVERT}"),
    (0, (b"8BPS",), f"a Photoshop document: {_CONVERT}"),
    (0, (b"version https://git-lfs",), "a pointer of Git LFS: 'git lfs pull' fetches the picture itself"),
    (0, (b"<html", b"<HTML", b"<!DOCTYPE", b"<!doctype"), "a web page, perhaps of a download that failed"),
    (0, (b"<?xml", b"<svg"), f"XML or an SVG drawing: {_CONVERT}"),
    (0, (b"PK\3\4", b"\x1f\x8b"), "an archive: unpack it"),
    (0, (b"\x93NUMPY",), "a NumPy array"),
)


@dataclass(frozen=True)
class ImageHeader:
    """Facts about an encoded picture; width and height are those of the turned picture, 0 where not read."""

    kind: str
    width: int = 0
    height: int = 0
    orientation: int = 1
    bit_depth: int = 8
    sample_format: int = UNSIGNED_SAMPLES  # of a TIFF


def image_kind(data: bytes | memoryview) -> str:
    """Name the format of encoded bytes: jpeg, png, webp, tiff, bmp, pfm, or '' where none is recognised."""
    head = bytes(data[:12])
    if head.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if head.startswith(PNG_SIGNATURE):
        return "png"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "tiff"
    if head.startswith(b"BM"):
        return "bmp"
    if head[:2] in (b"PF", b"Pf") and head[2:3].isspace():
        return "pfm"
    return ""


def foreign_kind(data: bytes | memoryview) -> str:
    """What bytes are that cannot be read as a picture, in words; '' where they are not known either."""
    head = bytes(data[:32])
    return next((what for at, marks, what in _FOREIGN if head[at:].startswith(marks)), "")


def read_header(data: bytes | memoryview) -> ImageHeader:
    """Read the header of encoded bytes; malformed parts fall back to size 0 or orientation 1, nothing is raised."""
    kind, sample_format = image_kind(data), UNSIGNED_SAMPLES
    try:
        if kind == "jpeg":
            width, height, orientation, depth = _jpeg_facts(data)
        elif kind == "png":
            width, height, orientation, depth = _png_facts(data)
        else:
            width, height = 0, 0
            orientation = _webp_orientation(data) if kind == "webp" else 1  # TIFF is turned by its decoder
            tags = _first_directory(data) if kind == "tiff" else {}
            depth = tags.get(TIFF_DEPTH_TAG, 8)
            sample_format = tags.get(TIFF_FORMAT_TAG, UNSIGNED_SAMPLES)
    except (struct.error, IndexError):
        return ImageHeader(kind)
    if orientation >= 5:
        width, height = height, width
    return ImageHeader(kind, width, height, orientation, depth, sample_format)


def _jpeg_facts(data: bytes | memoryview) -> tuple[int, int, int, int]:
    """Width, height, orientation and bit depth from the segments in front of the picture data."""
    at, orientation = 2, 1
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        length = struct.unpack_from(">H", data, at + 2)[0]
        if marker in _FRAME_MARKERS:
            depth, height, width = struct.unpack_from(">BHH", data, at + 4)
            return width, height, orientation, depth
        if marker == 0xE1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            orientation = tiff_orientation(data[at + 10 : at + 2 + length])
        if marker == 0xDA or length < 2:
            break
        at += 2 + length
    return 0, 0, orientation, 8


def _png_facts(data: bytes | memoryview) -> tuple[int, int, int, int]:
    """Width, height, orientation (eXIf chunk) and bit depth of a PNG."""
    width, height, depth = struct.unpack_from(">IIB", data, 16)
    orientation, at = 1, 8
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"eXIf":
            orientation = tiff_orientation(data[at + 8 : at + 8 + length])
            break
        at += 12 + length
    return width, height, orientation, depth


def _webp_orientation(data: bytes | memoryview) -> int:
    """Orientation from the EXIF chunk of a WebP file."""
    at = 12
    while at + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, at)
        if name == b"EXIF":
            body = data[at + 8 : at + 8 + length]
            return tiff_orientation(body[6:] if bytes(body[:6]) == b"Exif\0\0" else body)
        at += 8 + length + (length & 1)
    return 1


def _first_directory(data: bytes | memoryview) -> dict[int, int]:
    """Short values of the first TIFF directory, tag -> value (the first one where there are several)."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None or len(data) < 8:
        return {}
    start = struct.unpack_from(order + "I", data, 4)[0]
    count = struct.unpack_from(order + "H", data, start)[0]
    values = {}
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind, number = struct.unpack_from(order + "HHI", data, entry)
        if kind != 3 or not number:
            continue
        at = entry + 8 if number <= 2 else struct.unpack_from(order + "I", data, entry + 8)[0]
        values[tag] = struct.unpack_from(order + "H", data, at)[0]
    return values


def tiff_orientation(data: bytes | memoryview) -> int:
    """Orientation 1 to 8 from a TIFF structure (EXIF blocks are such); 1 where it is absent or malformed."""
    try:
        value = _first_directory(data).get(ORIENTATION_TAG, 1)
    except struct.error:
        return 1
    return value if 1 <= value <= 8 else 1


def jpeg_has_end(data: bytes | memoryview) -> bool:
    """Whether the end marker is the last thing in the file, zero padding aside."""
    return bytes(data[-TAIL_BYTES:]).rstrip(b"\0").endswith(JPEG_END)


def peek_jpeg(path: str | Path) -> ImageHeader | None:
    """Header of a sound 8-bit JPEG from its first and last bytes, or None for whatever needs a closer look.

    None as well for other kinds and for headers longer than HEAD_BYTES. Raises OSError where the file cannot be opened.
    """
    with open(path, "rb", buffering=0) as file:
        head = file.read(HEAD_BYTES)
        if image_kind(head) != "jpeg":
            return None
        header = read_header(head)
        if not (header.width and header.height) or header.bit_depth != 8:
            return None
        tail = head
        if len(head) == HEAD_BYTES:
            file.seek(-min(TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            tail = file.read(TAIL_BYTES)
    return header if jpeg_has_end(tail) else None


def png_damage(data: bytes | memoryview) -> str | None:
    """Say what is wrong with the chunks of a PNG (cut off, checksum), or None when they are all sound."""
    at = len(PNG_SIGNATURE)
    while at + 12 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            break
        if zlib.crc32(data[at + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            return f"checksum of PNG chunk {name.decode('ascii', 'replace')} is wrong"
        if name == b"IEND":
            return None
        at = end + 4
    return "PNG file is cut off (no end chunk)"
