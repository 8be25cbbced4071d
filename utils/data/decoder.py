"""Encoded bytes to pixels through OpenCV, with what its decoders have to say about a picture as a result.

libjpeg and libpng write their remarks to file descriptor 2, without a file name. While a picture is decoded this is a
file in memory; of what it holds afterwards, lines of decoders are remarks about the picture, and all else, which other
threads wrote meanwhile, is passed on. Where several threads decode at the same time and one of the pictures is damaged,
those that were under way are decoded a second time, one by one, so that the right one is blamed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import cv2
import numpy as np

STDERR = 2
# Lines as libjpeg, libpng and OpenCV's readers write them.
_REMARK = re.compile(
    rb"(?:(Corrupt JPEG data: [^\r\n]*|Premature end of JPEG file|Warning: unknown JFIF revision [^\r\n]*"
    rb"|Invalid SOS parameters for sequential JPEG|Inconsistent progression sequence [^\r\n]*"
    rb"|Unknown Adobe color transform code [^\r\n]*|libpng (?:warning|error): [^\r\n]*"
    rb"|\[ ?(?:WARN|ERROR) ?:[^\r\n]*(?:grfmt_|loadsave)[^\r\n]*)\s?\n+)"
)
# Picture data is missing or cannot be understood; libjpeg then makes up the rest (mostly grey).
_DAMAGE = re.compile(r"premature end|bad Huffman code|bad arithmetic code|found marker 0x", re.IGNORECASE)


class Decoded(NamedTuple):
    """A picture (None: it cannot be decoded) and what is wrong with its JPEG data, '' where nothing is."""

    image: np.ndarray | None
    damage: str


def decode(data: np.ndarray, flags: int) -> Decoded:
    """Decode encoded bytes (uint8 array) with OpenCV's flags; errors of OpenCV give None."""
    with _LISTENER.listen() as heard:
        image = _imdecode(data, flags)
    if heard.damage and heard.is_shared:
        with _LISTENER.listen(alone=True) as heard:
            image = _imdecode(data, flags)
    return Decoded(image, heard.damage)


def _imdecode(data: np.ndarray, flags: int) -> np.ndarray | None:
    try:
        return cv2.imdecode(data, flags)
    except cv2.error:
        return None


@dataclass(eq=False)
class _Heard:
    """What was said while one picture was decoded; is_shared: others were being decoded at the same time."""

    is_shared: bool = False
    remarks: list[str] = field(default_factory=list)

    @property
    def damage(self) -> str:
        return next((remark for remark in self.remarks if _DAMAGE.search(remark)), "")


class _Listener:
    """Turns descriptor 2 aside while at least one picture is decoded."""

    def __init__(self) -> None:
        self._aside = self._stderr = -1  # descriptors: file in memory, the real stderr
        self._is_possible = False
        self._renew()

    def _renew(self) -> None:
        self.changed = threading.Condition()
        self._active: list[_Heard] = []
        self._read_at, self._waiting_alone, self._is_alone = 0, 0, False

    @contextlib.contextmanager
    def listen(self, *, alone: bool = False) -> Iterator[_Heard]:
        """Collect what decoders say inside; alone waits until no other picture is being decoded."""
        heard = _Heard()
        with self.changed:
            self._wait_for_turn(alone)
            if not self._active:
                self._turn_aside()
            for other in (*self._active, heard) if self._active else ():
                other.is_shared = True
            self._active.append(heard)
        try:
            yield heard
        finally:
            with self.changed:
                if self._is_possible:
                    self._collect()
                self._active.remove(heard)
                if not self._active:
                    self._restore()
                self._is_alone = False
                self.changed.notify_all()

    def _wait_for_turn(self, alone: bool) -> None:
        if not alone:
            while self._is_alone or self._waiting_alone:
                self.changed.wait()
            return
        self._waiting_alone += 1
        while self._active:
            self.changed.wait()
        self._waiting_alone -= 1
        self._is_alone = True

    def _turn_aside(self) -> None:
        """Let descriptor 2 be the file in memory, which is made at first; nothing where there is no stderr."""
        self._is_possible = False
        if sys.platform == "win32" or sys.__stderr__ is None:
            return
        with contextlib.suppress(OSError):  # stderr is closed, or there are no descriptors left
            if self._aside < 0:
                self._aside = _memory_file()
            self._stderr = os.dup(STDERR)
            os.dup2(self._aside, STDERR)
            self._is_possible = True

    def _collect(self) -> None:
        """Hand new remarks to all that are decoding, and the rest to the real stderr."""
        end = os.lseek(self._aside, 0, os.SEEK_CUR)
        if end <= self._read_at:
            return
        text = os.pread(self._aside, end - self._read_at, self._read_at)
        self._read_at = end
        remarks = [match.group(1).decode("utf-8", "replace").strip() for match in _REMARK.finditer(text)]
        for heard in self._active:
            heard.remarks += remarks
        rest = _REMARK.sub(b"", text)
        if rest:
            with contextlib.suppress(OSError):
                os.write(self._stderr, rest)

    def _restore(self) -> None:
        if not self._is_possible:
            return
        os.dup2(self._stderr, STDERR)
        os.close(self._stderr)
        if self._read_at:
            os.ftruncate(self._aside, 0)
            os.lseek(self._aside, 0, os.SEEK_SET)
            self._read_at = 0

    def start_in_child(self) -> None:
        """Give a forked process its own stderr and file: the position in the parent's file is shared."""
        if self._active and self._is_possible:
            os.dup2(self._stderr, STDERR)
            os.close(self._stderr)
        if self._aside >= 0:
            os.close(self._aside)
        self._aside = -1
        self._renew()


def _memory_file() -> int:
    """Descriptor of an empty file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("decoder-remarks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_LISTENER = _Listener()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _LISTENER.changed.acquire(),
        after_in_parent=lambda: _LISTENER.changed.release(),
        after_in_child=_LISTENER.start_in_child,
    )
