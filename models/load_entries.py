"""Entries of a zip archive as torch writes it: hundreds of small ones, stored as they are.

``zipfile`` takes longer to open one of them than to read it. Here an entry is read by its header, and whatever is not
exactly as expected is left to ``zipfile``, which finds the words for what is wrong.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from itertools import pairwise
from typing import BinaryIO

HEADER = struct.Struct("<4s2xHH16xHH")
"""Of a local header: signature, flags, compression, then the lengths of the name and of further fields."""
SIGNATURE = b"PK\x03\x04"
NAME_IS_UTF8 = 0x800
USUAL_FLAGS = NAME_IS_UTF8 | 0x8
"""A name in UTF-8, and sizes that stand behind the data too; any other flag means encryption or the like."""


class Entries:
    """Reads entries of an open archive.

    Args:
        stream: the file below ``archive``, which nobody else moves meanwhile.
    """

    def __init__(self, archive: zipfile.ZipFile, stream: BinaryIO) -> None:
        self.archive, self.stream = archive, stream
        starts = sorted({entry.header_offset for entry in archive.infolist()} | {archive.start_dir})
        self.ends = dict(pairwise(starts))

    def read(self, entry: zipfile.ZipInfo) -> bytearray:
        """Return the content of an entry, whose checksum fits; raises what ``ZipFile.read`` raises."""
        content = self._stored(entry)
        return bytearray(self.archive.read(entry)) if content is None else content

    def _stored(self, entry: zipfile.ZipInfo) -> bytearray | None:
        """Return the content of an entry that is in perfect order, None for any other."""
        self.stream.seek(entry.header_offset)
        head = self.stream.read(HEADER.size)
        if len(head) < HEADER.size:
            return None
        signature, flags, compression, name_length, further = HEADER.unpack(head)
        name = self.stream.read(name_length).decode("utf-8" if flags & NAME_IS_UTF8 else "cp437", "replace")
        start = self.stream.seek(further, 1)
        is_plain = compression == entry.compress_type == zipfile.ZIP_STORED
        is_usual = signature == SIGNATURE and not (flags | entry.flag_bits) & ~USUAL_FLAGS
        is_whole = start + entry.file_size <= self.ends.get(entry.header_offset, 0)
        is_named = name == entry.orig_filename and entry.compress_size == entry.file_size
        if not (is_plain and is_usual and is_whole and is_named):
            return None
        content = bytearray(entry.file_size)
        is_read = self.stream.readinto(content) == len(content)
        return content if is_read and zlib.crc32(content) == entry.CRC else None
