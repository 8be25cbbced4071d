"""Main memory: how much of it can still be used, how it is handed back, and flat buffers that processes share."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import reduction
from pathlib import Path

import numpy as np

MIB, GIB = 1 << 20, 1 << 30
UNKNOWN = 1 << 62  # bytes; stands for "no limit known"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of these settings in the C library's mallopt()
KEPT_BYTES, MAPPED_FROM_BYTES = 256 << 20, 32 << 20  # the second one is the largest that mallopt() accepts
# Per cgroup version: files of limit and use, and the part of the use that the kernel gives back when asked.
_CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def size_text(size: int) -> str:
    """Bytes in a message: 1.50 GB (of 2^30), 12.0 MB or 18 KB; a larger unit begins at a tenth of itself."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.2f} GB"
    return f"{size / MIB:.1f} MB" if size >= 0.1 * MIB else f"{-(-size // 1024)} KB"


def available_memory_bytes(root: str | Path = "/") -> int:
    """Main memory that can still be used, bounded by every container limit above this process.

    A large number where nothing is known. root replaces the root of the file system (for tests).
    """
    root = Path(root)
    free = min([UNKNOWN, *_system_free(root), *_container_free(root)])
    if free == UNKNOWN and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(free, 0)


def _system_free(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _container_free(root: Path) -> Iterator[int]:
    """What each control group from this process's own up to the topmost one leaves free, in both versions."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        mount = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
        folder = mount / group.lstrip("/")
        # A container may see its own group mounted as the top although its name is a longer one.
        for place in (folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))):
            yield from _group_free(place, version)


def _group_free(folder: Path, version: int) -> Iterator[int]:
    limit_name, used_name, reclaimable_name = _CGROUP_FILES[version]
    limit, used = _read(folder / limit_name), _read(folder / used_name)
    if not (limit.isdigit() and used.isdigit()):  # absent, or "max"
        return
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    reclaimable = next((int(pair[1]) for pair in pairs if pair[0] == reclaimable_name), 0)
    yield int(limit) - int(used) + reclaimable


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def keep_freed_memory() -> bool:
    """Let this process reuse freed memory instead of handing it back; for loader workers, gives False where unknown.

    By default the C library returns every block of a picture's size to the system and gets a new one, zeroed page by
    page, for the next picture: about a tenth of a worker's time. At most KEPT_BYTES stay unused.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        change = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # a C library other than glibc
        return False
    return bool(change(_MMAP_THRESHOLD, MAPPED_FROM_BYTES) and change(_TRIM_THRESHOLD, KEPT_BYTES))


class SharedBytes:
    """A flat uint8 array that exists once, whatever the start method of the processes that use it.

    Forked processes inherit the mapping; started ones (spawn, forkserver) get the file behind it when the object is
    pickled for them. That file is memory without a name on Linux, which the size of /dev/shm does not limit, and an
    unnamed temporary file elsewhere.
    """

    def __init__(self, size: int) -> None:
        if sys.platform == "win32":
            raise OSError("memory shared between loader processes is not available on Windows")
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("pictures")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, max(size, 1))
        self._attach(descriptor, size)

    def _attach(self, descriptor: int, size: int) -> None:
        self._descriptor, self.size = descriptor, size
        self.array = np.frombuffer(mmap.mmap(descriptor, max(size, 1)), np.uint8, size)

    def __reduce__(self) -> tuple:
        return _shared_bytes, (reduction.DupFd(self._descriptor), self.size)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _shared_bytes(handle: reduction.DupFd, size: int) -> SharedBytes:
    """Map the same bytes in a process that was started rather than forked."""
    other = SharedBytes.__new__(SharedBytes)
    other._attach(handle.detach(), size)
    return other
