"""Decoded pictures kept on disk, in a folder of their own for each data set, size and way of resizing.

They lie in shards (`shards.py`) and are read through memory maps. An entry is found by the picture's full path and
holds as long as size and time of change of that file are the same; what changed is decoded again. A fill that is broken
off goes on with the picture at which it stopped. The first use of a picture in a run compares its checksum; a damaged
copy is not used, its file is decoded instead, and the next run stores it anew. Nothing here is pickled.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import multiprocessing
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from utils.data.cache_folder import DECODED, CacheFolder, CutFile, cache_root, data_set_of, free_disk_bytes
from utils.data.images import fitted_size
from utils.data.listing import printable
from utils.data.memory import size_text
from utils.data.shards import DAMAGED, PIXELS, ROWS, Row, Shard, ShardWriter, Stamp, shard_names
from utils.log import LOGGER, progress

FORMAT_VERSION = 2  # raise it whenever decoding or resizing gives other pixels
DISK_RESERVE_BYTES = 1 << 30  # stays free for everything else
DECODE_AHEAD = 64  # pictures decoded before they are written: bounds the memory of a fill
LEAST_USED_SHARE = 0.5  # of a shard's bytes; below it the shard is dropped, so that a folder is at most twice its use
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # no room on the disk, or for this user
UNREAD, SOUND, SPOILT = 0, 1, 2  # what the checksum of an entry has told


class DiskCache:
    """Pictures scaled to one long side; entry i is a read-only view (h_i, w_i, 3) of a file, or None.

    Use `DiskCache.fill`. Loader processes map the same files, so that the kernel keeps one copy for all of them.
    """

    def __init__(self, folder: CacheFolder, files: Sequence[str], prefix: str = "") -> None:
        self.folder, self.files, self.prefix = folder, files, prefix
        self.shards: list[Shard] = []
        self.shard_of = np.full(len(files), -1, np.int32)
        self.offsets = np.zeros(len(files), np.int64)
        self.sizes = np.zeros((len(files), 2), np.int64)  # width, height
        self.checksums = np.zeros(len(files), np.uint32)
        self._states = multiprocessing.RawArray("B", len(files))  # one for all loader processes
        self._maps: dict[int, mmap.mmap | None] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": {}}  # a started process opens the files itself

    def get(self, index: int) -> np.ndarray | None:
        """Read-only picture (h, w, 3) of an index, or None."""
        shard = int(self.shard_of[index])
        if shard < 0 or self._states[index] == SPOILT:
            return None
        if shard not in self._maps:
            self._maps[shard] = self.shards[shard].map()
        mapped = self._maps[shard]
        (width, height), start = self.sizes[index].tolist(), int(self.offsets[index])
        end = start + width * height * 3
        if mapped is None or end > min(len(mapped), mapped.size()):  # cut: reading on would end the process
            self._leave_out(index)
            return None
        picture = np.frombuffer(mapped, np.uint8, end - start, start)
        if self._states[index] == UNREAD:
            if zlib.crc32(picture) != self.checksums[index]:
                self._leave_out(index)
                return None
            self._states[index] = SOUND
        return picture.reshape(height, width, 3)

    def cut_files(self) -> list[CutFile]:
        """Files that are shorter than what was stored in them."""
        ends = self.offsets + self.sizes.prod(1) * 3
        return [
            cut
            for number in np.unique(self.shard_of[self.shard_of >= 0]).tolist()
            for cut in CutFile.check(
                self.shards[number].path(PIXELS), int(ends[self.shard_of == number].max()), "--cache disk"
            )
        ]

    def take(self, index: int, shard: int, row: Row) -> None:
        """Let an index be a row of a shard."""
        self.shard_of[index] = shard
        self.offsets[index], self.sizes[index], self.checksums[index] = row.offset, row.size, row.checksum

    def spoilt(self) -> int:
        """Number of entries whose checksum was found to be wrong, in any loader process."""
        return int((np.frombuffer(self._states, np.uint8) == SPOILT).sum()) if len(self.files) else 0

    def _leave_out(self, index: int) -> None:
        """Do without an entry from now on; the first, the tenth, the hundredth … is told by name."""
        self._states[index] = SPOILT
        try:
            self.shards[self.shard_of[index]].note_damage(int(self.offsets[index]))
            outlook = "stored anew by the next run"
        except OSError as error:
            outlook = f"delete {self.folder.path} to be rid of it ({error.strerror or error})"
        count = self.spoilt()
        if count in (1, 10, 100, 1000, 10_000):
            LOGGER.warning(
                f"{self.prefix}--cache disk: {count} stored picture(s) are gone or do not have their checksum, at last "
                f"that of {printable(self.files[index])} in {self.folder.path}; read from the file instead, and "
                f"{outlook}. Is the disk in order?"
            )

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
        root = cache_root(cache_dir)
        settings = {"side": size, "resizing": "linear" if smooth else "area", "format": FORMAT_VERSION}
        try:
            folder = CacheFolder.open(root, DECODED, data_set_of(files), settings, beside=("resizing",), prefix=prefix)
            with folder.only_writer(prefix) as is_only_writer:
                return _Filler(cls(folder, files, prefix), shapes, size, load).run(is_only_writer)
        except OSError as error:
            LOGGER.warning(
                f"{prefix}--cache disk left out: {root} cannot be used ({error.strerror or error}); pictures are "
                "read from their files. --cache-dir names another folder"
            )
            return None


class _Filler:
    """One fill of a cache folder."""

    def __init__(
        self, cache: DiskCache, shapes: np.ndarray, size: int, load: Callable[[int], np.ndarray | None]
    ) -> None:
        self.cache, self.load, self.prefix = cache, load, cache.prefix
        self.place = cache.folder.path
        self.names = [os.path.abspath(path) for path in cache.files]
        self.stamps = [Stamp.of(path) for path in self.names]  # before decoding: a later change is noticed next time
        self.sizes = [fitted_size(int(width), int(height), size) for width, height in shapes]

    def run(self, is_only_writer: bool) -> DiskCache | None:
        shards = self._read_shards()
        if is_only_writer:
            with self.cache.folder.alone() as is_alone:
                if is_alone:
                    shards = self._without_dead(shards)
        self._find(shards)
        todo = np.flatnonzero(self.cache.shard_of < 0).tolist()
        needed, free = self._bytes_of(todo), free_disk_bytes(self.place)
        if todo and needed + DISK_RESERVE_BYTES > free:
            LOGGER.warning(
                f"{self.prefix}--cache disk: nothing is added, {len(todo)} more pictures need {size_text(needed)} in "
                f"{self.place} and {size_text(DISK_RESERVE_BYTES)} must stay free, {size_text(free)} are free. "
                f"Name a folder on another disk with --cache-dir, or make room: {self.cache.folder.total_text()}"
            )
            return self.cache if len(todo) < len(self.names) else None
        self._store(todo, shards[-1] if shards and is_only_writer and not shards[-1].has_tail else None)
        ready = int((self.cache.shard_of >= 0).sum())
        if not ready:
            return None
        LOGGER.info(
            f"{self.prefix}{ready} pictures ready in {self.place} ({ready - len(self.names) + len(todo)} of them new); "
            f"{self.cache.folder.total_text()}"
        )
        return self.cache

    def _read_shards(self) -> list[Shard]:
        shards = []
        for name in shard_names(self.place):
            try:
                shards.append(Shard.read(self.place, name))
            except OSError:  # its pixels are gone
                shards.append(Shard(self.place, name))
        return shards

    def _newest(self, shards: Sequence[Shard]) -> dict[str, tuple[int, Row]]:
        """Last stored row of each path, with the number of its shard."""
        return {row.name: (number, row) for number, shard in enumerate(shards) for row in shard.rows}

    def _without_dead(self, shards: Sequence[Shard]) -> list[Shard]:
        """Delete what no run can use: shards whose pictures have mostly changed or gone, halves and ends of shards."""
        stamps = dict(zip(self.names, self.stamps, strict=True))
        used = [0] * len(shards)
        for name, (number, row) in self._newest(shards).items():
            if row.stamp == (stamps.get(name) or Stamp.of(name)):
                used[number] += row.end - row.offset
        alive = []
        for shard, used_bytes in zip(shards, used, strict=True):
            if used_bytes and used_bytes >= LEAST_USED_SHARE * shard.path(PIXELS).stat().st_size:
                shard.cut_tail()
                alive.append(shard)
            else:
                shard.delete()
        for suffix in (PIXELS, DAMAGED):
            for path in self.place.glob(f"*{suffix}"):
                if not path.with_suffix(ROWS).exists():
                    path.unlink(missing_ok=True)
        return alive

    def _find(self, shards: Sequence[Shard]) -> None:
        """Take over the rows that fit."""
        newest = self._newest(shards)
        self.cache.shards += shards
        for i, (name, stamp, size) in enumerate(zip(self.names, self.stamps, self.sizes, strict=True)):
            number, row = newest.get(name, (-1, None))
            if row is not None and row.stamp == stamp and row.size == size:
                self.cache.take(i, number, row)
        for shard in shards:
            shard.rows = []  # loader processes need none of them

    def _store(self, todo: Sequence[int], last: Shard | None) -> None:
        """Decode pictures in threads and append them to the last shard and to new ones.

        A disk that fails ends it with what is stored, a full one with what was there before.
        """
        if not todo:
            return
        threads = max(1, min(8, os.cpu_count() or 1))
        writer: ShardWriter | None = None
        failure: OSError | None = None
        count, ends = len(self.cache.shards), (last.rows_end, last.pixels_end) if last is not None else (0, 0)
        with (
            ThreadPoolExecutor(threads) as pool,
            progress(total=len(todo), desc=f"{self.prefix}storing pictures on disk", unit="img") as bar,
        ):
            try:
                writer = self._writer(last)
                for start in range(0, len(todo), DECODE_AHEAD):
                    part = todo[start : start + DECODE_AHEAD]
                    for i, image in zip(part, pool.map(self.load, part), strict=True):
                        if writer.is_full:
                            writer.close()
                            writer = self._writer(None)
                        self._add(writer, i, image)
                        bar.update()
            except OSError as error:
                failure = error
            finally:
                if writer is not None:
                    with contextlib.suppress(OSError):  # what did not reach the disk has a wrong checksum
                        writer.close()
        if failure is None:
            return
        if failure.errno not in DISK_FULL:
            LOGGER.warning(f"{self.prefix}storing pictures in {self.place} stopped: {failure.strerror or failure}")
            return
        for shard in self.cache.shards[count:]:
            shard.delete()
        if last is not None:
            last.rows_end, last.pixels_end = ends
            last.cut_tail()
        self._tell_full(failure, todo)
        del self.cache.shards[count:]
        self.cache.shard_of[todo] = -1

    def _tell_full(self, failure: OSError, todo: Sequence[int]) -> None:
        """Say that the disk filled up, after what had been added was removed: others need its last bytes."""
        stored = int((self.cache.shard_of[todo] >= 0).sum())
        LOGGER.warning(
            f"{self.prefix}--cache disk given up: no room left in {self.place} after {stored} of {len(todo)} pictures "
            f"({failure.strerror or failure}). They are removed again and {size_text(free_disk_bytes(self.place))} are "
            f"free; all {len(todo)} need {size_text(self._bytes_of(todo))} and {size_text(DISK_RESERVE_BYTES)} must "
            "stay free. Pictures are read from their files. Name a folder on another disk with --cache-dir, or make "
            "room before the next run"
        )

    def _bytes_of(self, indices: Sequence[int]) -> int:
        return sum(self.sizes[i][0] * self.sizes[i][1] * 3 for i in indices)

    def _writer(self, last: Shard | None) -> ShardWriter:
        """Go on with a shard, or begin a new one."""
        if last is None:
            last = Shard.new(self.place)
            self.cache.shards.append(last)
        return ShardWriter(last)

    def _add(self, writer: ShardWriter, index: int, image: np.ndarray | None) -> None:
        """Append picture `index`; one that could not be read, or of an unexpected size, is left out."""
        width, height = self.sizes[index]
        if image is not None and image.shape == (height, width, 3):
            row = writer.add(self.names[index], self.stamps[index], image)
            self.cache.take(index, self.cache.shards.index(writer.shard), row)
