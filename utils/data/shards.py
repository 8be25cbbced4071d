"""Files of decoded pictures: raw pixels one after the other, and beside them a row of figures for each picture.

Both files only grow, pixels first, so that a process that is killed loses nothing but the picture it was writing. Every
row carries a checksum of itself and of its pixels: what a power failure or a bad disk has spoilt is noticed.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

PIXELS, ROWS, DAMAGED = ".pixels", ".rows", ".damaged"
SHARD_BYTES = 1 << 30  # a new shard begins when one holds as much
# Of the row itself: checksum and length of what follows. Then stamp (2), offset, width, height, checksum of the pixels.
_HEAD, _FIGURES = struct.Struct("<II"), struct.Struct("<qqqIII")


class Stamp(NamedTuple):
    """Size in bytes and times of a picture file; -1 where there is none.

    Two times are added up: that of the content, and that of the entry, which also changes when another file of the same
    size and time takes the name.
    """

    size: int
    time_ns: int

    @classmethod
    def of(cls, path: str) -> Stamp:
        """Read the stamp from the file system."""
        try:
            status = os.stat(path)
        except OSError:
            return cls(-1, -1)
        return cls(status.st_size, status.st_mtime_ns + status.st_ctime_ns)


class Row(NamedTuple):
    """One stored picture: path and stamp of its file, where its pixels begin, size (width, height), their checksum."""

    name: str
    stamp: Stamp
    offset: int
    size: tuple[int, int]
    checksum: int

    @property
    def end(self) -> int:
        """Offset behind the last pixel."""
        return self.offset + self.size[0] * self.size[1] * 3

    def pack(self) -> bytes:
        """The row as it is stored."""
        figures = _FIGURES.pack(*self.stamp, self.offset, *self.size, self.checksum)
        body = figures + os.fsencode(self.name)
        return _HEAD.pack(zlib.crc32(body), len(body)) + body


class Shard:
    """A pair of files; `rows` are those whose pixels are there and not known to be damaged."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.rows: list[Row] = []
        self.rows_end = 0  # bytes of the file of rows that are sound
        self.pixels_end = 0

    @classmethod
    def new(cls, folder: Path) -> Shard:
        """A shard that does not exist yet; names begin with the time."""
        return cls(folder, f"{time.time_ns():020d}-{os.getpid()}")

    @classmethod
    def read(cls, folder: Path, name: str) -> Shard:
        """Read the rows of a shard up to the first one that is damaged. Raises OSError."""
        shard = cls(folder, name)
        data, available = shard.path(ROWS).read_bytes(), shard.path(PIXELS).stat().st_size
        damaged = shard._damaged_offsets()
        for row, end in _unpacked(data):
            if row.end > available:
                break
            shard.rows_end, shard.pixels_end = end, row.end
            if row.offset not in damaged:
                shard.rows.append(row)
        return shard

    def path(self, suffix: str) -> Path:
        """One of the files."""
        return self.folder / (self.name + suffix)

    def map(self) -> mmap.mmap | None:
        """All pixels, read-only; None where the file is gone."""
        try:
            with open(self.path(PIXELS), "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None

    def delete(self) -> None:
        """Remove the files, the rows first: without them pixels mean nothing."""
        for suffix in (ROWS, PIXELS, DAMAGED):
            self.path(suffix).unlink(missing_ok=True)

    def note_damage(self, offset: int) -> None:
        """Remember that the pixels at an offset are damaged; several processes may do so at once. Raises OSError."""
        descriptor = os.open(self.path(DAMAGED), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, struct.pack("<q", offset))
        finally:
            os.close(descriptor)

    def _damaged_offsets(self) -> set[int]:
        try:
            data = self.path(DAMAGED).read_bytes()
        except OSError:
            return set()
        return {offset for (offset,) in struct.iter_unpack("<q", data[: len(data) // 8 * 8])}

    @property
    def has_tail(self) -> bool:
        """Whether there are bytes behind the last sound row: of a picture that was being written, or damaged ones."""
        return (self.rows_end, self.pixels_end) != (self._size(ROWS), self._size(PIXELS))

    def cut_tail(self) -> None:
        """Remove these bytes; to be done while no other process has the files mapped. Raises OSError."""
        for suffix, end in ((ROWS, self.rows_end), (PIXELS, self.pixels_end)):
            os.truncate(self.path(suffix), end)

    def _size(self, suffix: str) -> int:
        try:
            return self.path(suffix).stat().st_size
        except OSError:
            return 0


class ShardWriter:
    """Appends pictures to a shard without tail; what `add` has returned for is there whatever happens to the process.

    Raises OSError.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._rows, self._pixels = (open(shard.path(s), "ab", buffering=0) for s in (ROWS, PIXELS))  # noqa: SIM115

    @property
    def is_full(self) -> bool:
        """Whether the next picture belongs into another shard."""
        return self.shard.pixels_end >= SHARD_BYTES

    def add(self, name: str, stamp: Stamp, image: np.ndarray) -> Row:
        """Append a picture (h, w, 3) uint8. Raises OSError, such as for a full disk."""
        pixels = np.ascontiguousarray(image).reshape(-1)
        height, width = image.shape[:2]
        row = Row(name, stamp, self.shard.pixels_end, (width, height), zlib.crc32(pixels))
        _write_all(self._pixels.fileno(), pixels.data)
        packed = row.pack()
        _write_all(self._rows.fileno(), memoryview(packed))
        self.shard.pixels_end, self.shard.rows_end = row.end, self.shard.rows_end + len(packed)
        return row

    def close(self) -> None:
        """Bring everything to the disk."""
        for file in (self._pixels, self._rows):
            if not file.closed:
                os.fsync(file.fileno())
                file.close()


def shard_names(folder: Path) -> list[str]:
    """Names of the shards in a folder, oldest first."""
    return sorted(path.name.removesuffix(ROWS) for path in folder.glob(f"*{ROWS}"))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _unpacked(data: bytes) -> Iterator[tuple[Row, int]]:
    """Rows with the offset behind each, as far as they are sound."""
    at = 0
    while at + _HEAD.size <= len(data):
        checksum, length = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) != length or length < _FIGURES.size or zlib.crc32(body) != checksum:
            return
        at += _HEAD.size + length
        size, time_ns, offset, width, height, pixels = _FIGURES.unpack_from(body)
        name = os.fsdecode(body[_FIGURES.size :])
        yield Row(name, Stamp(size, time_ns), offset, (width, height), pixels), at
