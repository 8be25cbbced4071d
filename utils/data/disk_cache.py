"""Decoded pictures kept on disk, in a folder of their own, and read through memory maps.

A folder holds pictures of one size made in one way, in shards of raw pixels with one index file each. An entry is
found by the picture's full path and holds as long as size and time of change of that file are the same; what changed
is decoded again into a new shard. Shards and indexes are written under another name and renamed when complete, the
index last, so that a killed run leaves nothing that a later one would read. Nothing here is pickled.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.data.images import fitted_size
from utils.data.tables import TextTable, offsets_of
from utils.files import atomic_write
from utils.log import LOGGER, progress

try:
    import fcntl
except ImportError:  # Windows: unique names alone keep two runs apart
    fcntl = None  # type: ignore[assignment]

FORMAT_VERSION = 1  # raise it whenever decoding or resizing gives other pixels
SHARD_BYTES = 1 << 30
DISK_RESERVE_BYTES = 1 << 30  # stays free for everything else
DECODE_AHEAD = 64  # pictures decoded before they are written: bounds the memory of a fill
GIB = 1 << 30
PIXELS, INDEX, PARTIAL = ".pixels", ".index.npz", ".partial"


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


def cache_root(cache_dir: str | Path = "") -> Path:
    """Folder of prepared pictures: cache_dir, else the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    if cache_dir:
        return Path(cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "yolov9" / "pictures"


def free_disk_bytes(folder: Path) -> int:
    """Free space of the disk that a folder is on; the folder need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


class DiskCache:
    """Pictures scaled to one long side; entry i is a read-only view (h_i, w_i, 3) of a file, or None.

    Use `DiskCache.fill`. Loader processes map the same files, so that the kernel keeps one copy for all of them.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.shards: list[str] = []
        self.shard_of = np.full(count, -1, np.int32)
        self.offsets = np.zeros(count, np.int64)
        self.sizes = np.zeros((count, 2), np.int64)  # width, height
        self._maps: dict[int, np.ndarray | None] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": {}}  # a started process opens the files itself

    def get(self, index: int) -> np.ndarray | None:
        """Read-only picture (h, w, 3) of an index, or None."""
        shard = int(self.shard_of[index])
        if shard < 0:
            return None
        if shard not in self._maps:
            self._maps[shard] = _map_file(self.folder / (self.shards[shard] + PIXELS))
        pixels = self._maps[shard]
        if pixels is None:
            return None
        (width, height), start = self.sizes[index], self.offsets[index]
        return pixels[start : start + width * height * 3].reshape(height, width, 3)

    @classmethod
    def fill(
        cls,
        files: Sequence[str],
        shapes: np.ndarray,
        size: int,
        load: Callable[[int], np.ndarray | None],
        *,
        smooth: bool,
        cache_dir: str | Path = "",
        prefix: str = "",
    ) -> DiskCache | None:
        """Find the stored pictures and store the missing ones; None where the folder or the disk's space forbids it.

        files are the pictures' paths, shapes (N, 2) their width and height, load(i) gives picture i at its final size
        (long side `size`, resized as `smooth` says).
        """
        folder = cache_root(cache_dir) / f"{size}-{'linear' if smooth else 'area'}-v{FORMAT_VERSION}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _only_writer(folder, prefix) as is_alone:
                return _Filler(folder, files, shapes, size, load, prefix).run(is_alone)
        except OSError as error:
            LOGGER.warning(
                f"{prefix}--cache disk left out: {folder} cannot be used ({error.strerror or error}); pictures are "
                "read from their files. --cache-dir names another folder"
            )
            return None


class _Filler:
    """One fill of a cache folder; to be used while no other process writes there."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        shapes: np.ndarray,
        size: int,
        load: Callable[[int], np.ndarray | None],
        prefix: str,
    ) -> None:
        self.folder, self.load, self.prefix = folder, load, prefix
        self.names = [os.path.abspath(path) for path in files]
        self.stamps = [Stamp.of(path) for path in self.names]  # before decoding: a later change is noticed next time
        self.sizes = [fitted_size(int(width), int(height), size) for width, height in shapes]
        self.cache = DiskCache(folder, len(self.names))

    def run(self, is_alone: bool) -> DiskCache | None:
        if is_alone:  # then unfinished files belong to nobody any more
            for leftover in self.folder.glob(f"*{PARTIAL}"):
                leftover.unlink(missing_ok=True)
        self._find()
        todo = np.flatnonzero(self.cache.shard_of < 0).tolist()
        needed = sum(self.sizes[i][0] * self.sizes[i][1] * 3 for i in todo)
        free = free_disk_bytes(self.folder)
        if todo and needed + DISK_RESERVE_BYTES > free:
            LOGGER.warning(
                f"{self.prefix}--cache disk: nothing is added, {len(todo)} more pictures need {needed / GIB:.2f} GB "
                f"in {self.folder} and {DISK_RESERVE_BYTES / GIB:.0f} GB must stay free, {free / GIB:.2f} GB are "
                "free. Delete what is not needed, or name a folder on another disk with --cache-dir"
            )
            return self.cache if len(todo) < len(self.names) else None
        self._store(todo)
        used = sum(path.stat().st_size for path in self.folder.glob(f"*{PIXELS}"))
        LOGGER.info(
            f"{self.prefix}{int((self.cache.shard_of >= 0).sum())} pictures ready in {self.folder} ({len(todo)} of "
            f"them new); the folder takes {used / GIB:.2f} GB and can be deleted at any time"
        )
        return self.cache

    def _find(self) -> None:
        """Take over the entries that fit; of several for one path the newest counts, and dead shards are deleted."""
        position = {name: i for i, name in enumerate(self.names)}
        owner: dict[str, str] = {}
        indexes = sorted(self.folder.glob(f"*{INDEX}"))  # names begin with the time
        for path in indexes:
            shard = path.name.removesuffix(INDEX)
            entries = _read_index(path, self.folder / (shard + PIXELS))
            if entries is None:
                continue
            names, stamps, offsets, sizes = entries
            self.cache.shards.append(shard)
            for row, name in enumerate(names):
                owner[name] = shard
                i = position.get(name)
                if i is not None:
                    fits = tuple(stamps[row]) == self.stamps[i] and tuple(sizes[row]) == tuple(self.sizes[i])
                    self.cache.shard_of[i] = len(self.cache.shards) - 1 if fits else -1
                    owner[name] = shard if fits else ""
                    self.cache.offsets[i], self.cache.sizes[i] = offsets[row], sizes[row]
        alive = set(owner.values())
        for path in indexes:
            shard = path.name.removesuffix(INDEX)
            if shard not in alive:
                path.unlink(missing_ok=True)
                (self.folder / (shard + PIXELS)).unlink(missing_ok=True)

    def _store(self, todo: Sequence[int]) -> None:
        """Decode pictures in threads and write them to new shards; a full disk ends it with what is complete."""
        if not todo:
            return
        threads = max(1, min(8, os.cpu_count() or 1))
        with (
            ThreadPoolExecutor(threads) as pool,
            progress(total=len(todo), desc=f"{self.prefix}storing pictures on disk", unit="img") as bar,
        ):
            try:
                with _ShardWriter(self) as writer:
                    for start in range(0, len(todo), DECODE_AHEAD):
                        part = todo[start : start + DECODE_AHEAD]
                        for i, image in zip(part, pool.map(self.load, part), strict=True):
                            writer.add(i, image)
                            bar.update()
            except OSError as error:
                LOGGER.warning(f"{self.prefix}storing pictures in {self.folder} stopped: {error.strerror or error}")


class _ShardWriter:
    """Appends pictures to a shard, and begins another one when it is full."""

    def __init__(self, filler: _Filler) -> None:
        self.filler, self.indices, self.file = filler, [], None

    def __enter__(self) -> _ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self.file is not None:
            self.file.close()
            Path(self.file.name).unlink(missing_ok=True)

    def add(self, index: int, image: np.ndarray | None) -> None:
        """Append picture `index`; one that could not be read, or of an unexpected size, is left out."""
        width, height = self.filler.sizes[index]
        if image is None or image.shape != (height, width, 3):
            return
        if self.file is None:
            self.name = f"{time.time_ns():020d}-{os.getpid()}"
            self.file = open(self.filler.folder / (self.name + PARTIAL), "wb")  # noqa: SIM115 - closed by close()
        self.file.write(np.ascontiguousarray(image).data)
        self.indices.append(index)
        if self.file.tell() >= SHARD_BYTES:
            self.close()

    def close(self) -> None:
        """Complete the shard: pixels under their final name, then the index that makes them count."""
        if self.file is None:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        filler, cache = self.filler, self.filler.cache
        os.replace(self.file.name, filler.folder / (self.name + PIXELS))
        sizes = np.array([filler.sizes[i] for i in self.indices], np.int64).reshape(-1, 2)
        offsets = offsets_of((sizes[:, 0] * sizes[:, 1] * 3).tolist())
        names = TextTable(filler.names[i] for i in self.indices)
        with atomic_write(filler.folder / (self.name + INDEX)) as temporary, open(temporary, "wb") as file:
            stamps = np.array([filler.stamps[i] for i in self.indices], np.int64).reshape(-1, 2)
            np.savez(file, names=names.blob, name_offsets=names.offsets, stamps=stamps, offsets=offsets, sizes=sizes)
        cache.shard_of[self.indices] = len(cache.shards)
        cache.offsets[self.indices], cache.sizes[self.indices] = offsets[:-1], sizes
        cache.shards.append(self.name)
        self.indices, self.file = [], None


def _read_index(path: Path, pixels: Path) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray] | None:
    """Names, stamps (n, 2), offsets (n + 1,), sizes (n, 2) of a shard; None where it is damaged or has no pixels."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            blob, ends = stored["names"].tobytes(), stored["name_offsets"]
            stamps, offsets, sizes = stored["stamps"], stored["offsets"], stored["sizes"]
        if pixels.stat().st_size != int(offsets[-1]) or not len(stamps) == len(sizes) == len(ends) - 1:
            return None
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile):
        return None
    return [os.fsdecode(blob[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)], stamps, offsets, sizes


def _map_file(path: Path) -> np.ndarray | None:
    """Bytes of a file as a read-only array; None where it has been deleted meanwhile."""
    try:
        with open(path, "rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError):
        return None


@contextmanager
def _only_writer(folder: Path, prefix: str) -> Iterator[bool]:
    """Let one process at a time fill a folder; the lock ends with its process, however that ends.

    Gives False where the disk knows no locks: two runs then store the same pictures twice, under names of their own.
    """
    with open(folder / "lock", "ab") as file:
        yield fcntl is not None and _lock(file.fileno(), folder, prefix)


def _lock(descriptor: int, folder: Path, prefix: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        LOGGER.info(f"{prefix}another run stores pictures in {folder}, waiting until it is done")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
