"""Prepared mosaics: canvases of four pictures drawn once, stored on disk, and used many times.

Decoding four pictures is most of the work of a training sample; a prepared mosaic replaces it by reading a memory map.
What a use still draws anew: the affine change, copy-paste, mixup, colours and flips.

Trade-off. Four pictures stay together, with their common centre, for REFRESH_EPOCHS epochs, and a prepared mosaic
serves (pictures / mosaics) samples of each of these epochs, instead of a new combination for every sample. Fewer
mosaics and rarer refreshing mean less variety and over-fitting; as many mosaics as pictures come closest to mosaics
made anew. Accuracy has to be compared for each data set before relying on it.

Stored per mosaic are its pixels, its centre, and index and size of its four pictures. Its labels and polygons follow
from these and from the label tables in memory; because pictures, labels and their order are part of the folder's name,
they cannot be those of another state of the data set.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.data.cache_folder import MOSAICS, CacheFolder, CutFile, cache_root, data_set_of, free_disk_bytes, size_of
from utils.data.disk_cache import DISK_RESERVE_BYTES
from utils.data.memory import size_text
from utils.data.shards import Stamp
from utils.log import LOGGER

REFRESH_EPOCHS = 10  # epochs that one set of mosaics serves
FORMAT_VERSION = 3
HEADER = 16  # int64 values per mosaic: is complete, centre, 4 indices, 4 sizes, checksum
EMPTY, WHOLE = 0, 1  # first value of a header
SUFFIX = ".mosaics"
PICTURE_STREAM, ORDER_STREAM, DRAW_STREAM = 1 << 41, 1 << 42, 1 << 43  # keep these draws apart from all others


class Mosaic(NamedTuple):
    """A canvas (2s, 2s, 3) BGR, its centre (x, y), and index (-1: grey, no labels) and (width, height) of each tile."""

    canvas: np.ndarray
    centre: tuple[int, int]
    indices: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]


Build = Callable[[Sequence[int], np.random.Generator], Mosaic]


class MosaicSchedule:
    """Which mosaic a sample uses, and of which pictures it consists: both follow from (seed, epoch, index) alone.

    Pictures are dealt from shuffled decks, four to a mosaic. With at least length / 4 mosaics each set of mosaics
    begins a new deck and holds every picture; with fewer, successive sets continue the deck until it is used up. Within
    an epoch the samples are spread evenly over the mosaics.
    """

    def __init__(self, length: int, count: int, seed: int) -> None:
        self.length, self.count, self.seed = length, count, seed
        self._decks: dict[tuple[int, int], np.ndarray] = {}

    def generation(self, epoch: int) -> int:
        """Number of the set of mosaics that an epoch uses."""
        return epoch // REFRESH_EPOCHS

    def slot(self, epoch: int, index: int) -> int:
        """Mosaic that sample `index` uses in an epoch."""
        return int(self._deck(ORDER_STREAM, epoch)[index]) % self.count

    def pictures(self, generation: int, slot: int) -> list[int]:
        """Indices of the four pictures of a mosaic."""
        per_set = 4 * self.count
        if per_set >= self.length:
            per_set = -(-per_set // self.length) * self.length  # whole decks
        start = generation * per_set + 4 * slot
        return [int(self._deck(PICTURE_STREAM, at // self.length)[at % self.length]) for at in range(start, start + 4)]

    def _deck(self, stream: int, number: int) -> np.ndarray:
        key = (stream, number)
        if key not in self._decks:
            while len(self._decks) >= 4:
                self._decks.pop(next(iter(self._decks)))
            self._decks[key] = np.random.default_rng([self.seed, number, 0, stream]).permutation(self.length)
        return self._decks[key]


class MosaicCache:
    """Mosaics in one file per generation, each drawn by the process that needs it first.

    Two processes that draw the same mosaic at once write the same bytes. A mosaic counts from the moment its header is
    written, after its pixels. The first use of a mosaic in a run compares its checksum; a damaged one is made anew and
    stored again, once: a place that spoils again is not used until the mosaics are renewed. Use `MosaicCache.open`.
    """

    def __init__(self, folder: CacheFolder, schedule: MosaicSchedule, size: int, prefix: str = "") -> None:
        self.folder, self.schedule, self.size, self.prefix = folder, schedule, size, prefix
        self.slot_bytes = (2 * size) ** 2 * 3
        self.file_bytes = schedule.count * (self.slot_bytes + 8 * HEADER)
        # One for all loader processes. Of each mosaic the generation (from 1 on) in which it was found sound, or minus
        # that in which it was found damaged; and whether damage has been told.
        self._states = multiprocessing.RawArray("q", schedule.count)
        self._damaged = multiprocessing.RawArray("q", schedule.count)
        self._is_told = multiprocessing.RawValue("B", 0)
        self._forget()

    def _forget(self) -> None:
        self._generation, self._descriptor, self._bytes = -1, -1, np.zeros(0, np.uint8)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_generation": -1, "_descriptor": -1, "_bytes": np.zeros(0, np.uint8)}

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    @classmethod
    def open(
        cls, count: int, size: int, seed: int, contents: Sequence[np.ndarray], files: Sequence[str],
        *, cache_dir: str | Path = "", prefix: str = "",
    ) -> MosaicCache | None:  # fmt: skip
        """Prepare for `count` mosaics of pictures with long side `size`; None, with a message, without disk space.

        files are the pictures; contents are arrays (labels, polygons) whose change must lead to new mosaics too.
        """
        if not hasattr(os, "pwrite"):
            LOGGER.warning(f"{prefix}--mosaic-cache left out: this system cannot write at a place in a shared file")
            return None
        wanted, count = count, min(count, len(files))
        if wanted > count:
            LOGGER.info(f"{prefix}--mosaic-cache {wanted}: as many mosaics as pictures are the most, {count} are used")
        root = cache_root(cache_dir)
        version = f"{FORMAT_VERSION}, renewed after {REFRESH_EPOCHS} epochs"
        settings = {"mosaics": count, "side": size, "seed": seed, "format": version}
        settings["contents"] = _digest(contents, files)
        try:
            folder = CacheFolder.open(root, MOSAICS, data_set_of(files), settings, prefix=prefix)
            cache = cls(folder, MosaicSchedule(len(files), count, seed), size, prefix)
            return cache if cache._has_room(prefix) else None
        except OSError as error:
            LOGGER.warning(
                f"{prefix}--mosaic-cache left out: {root} cannot be used ({error.strerror or error}); mosaics are "
                "made anew. --cache-dir names another folder"
            )
            return None

    def _has_room(self, prefix: str) -> bool:
        """Whether the disk holds two generations: the old one goes only when every process has left it."""
        place, once = self.folder.path, self.schedule.count * self.slot_bytes
        needed, free = max(2 * once - size_of(place), 0), free_disk_bytes(place)
        if needed + DISK_RESERVE_BYTES > free:
            LOGGER.warning(
                f"{prefix}--mosaic-cache left out: {self.schedule.count} mosaics of {size_text(self.slot_bytes)}, "
                f"twice while they are renewed, need {size_text(needed)} in {place} and "
                f"{size_text(DISK_RESERVE_BYTES)} must stay free, {size_text(free)} are free; mosaics are made anew. "
                f"Ask for fewer, name a folder on another disk with --cache-dir, or make room: "
                f"{self.folder.total_text()}"
            )
            return False
        LOGGER.info(
            f"{prefix}{self.schedule.count} prepared mosaics, renewed every {REFRESH_EPOCHS} epochs, up to "
            f"{size_text(2 * once)} in {place}; {self.folder.total_text()}"
        )
        return True

    def get(self, epoch: int, index: int, build: Build) -> Mosaic:
        """The mosaic for a sample, from the file or from build(indices of four pictures, generator)."""
        generation, slot = self.schedule.generation(epoch), self.schedule.slot(epoch, index)
        stored = self._read(slot) if self._enter(generation) else None
        if stored is not None:
            return stored
        rng = np.random.default_rng([self.schedule.seed, generation, slot, DRAW_STREAM])
        mosaic = build(self.schedule.pictures(generation, slot), rng)
        self._write(slot, mosaic)
        return mosaic

    def _enter(self, generation: int) -> bool:
        """Open the file of a generation, and delete earlier ones; False where that is not possible."""
        if generation == self._generation:
            return self._descriptor >= 0
        self.__del__()
        self._forget()
        self._generation = generation
        path = self._path()
        try:
            for other in path.parent.glob(f"*{SUFFIX}"):
                number = other.name.removesuffix(SUFFIX)
                if number.isdecimal() and int(number) < generation:
                    other.unlink(missing_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(
                self._descriptor, self.file_bytes
            )  # no blocks yet: holes read as zeros, which is "not complete"
            self._bytes = np.frombuffer(mmap.mmap(self._descriptor, self.file_bytes, access=mmap.ACCESS_READ), np.uint8)
        except OSError as error:
            LOGGER.warning(f"prepared mosaics cannot be stored ({error.strerror or error}), they are made anew")
            return False
        return True

    def _header_at(self, slot: int) -> int:
        return self.schedule.count * self.slot_bytes + slot * 8 * HEADER

    def cut_files(self) -> list[CutFile]:
        """Files that are shorter than they were made."""
        paths = sorted(self.folder.path.glob(f"*{SUFFIX}"))
        return [cut for path in paths for cut in CutFile.check(path, self.file_bytes, "--mosaic-cache")]

    def _read(self, slot: int) -> Mosaic | None:
        """The stored mosaic; None where there is none, or where it is damaged."""
        start, at = slot * self.slot_bytes, self._header_at(slot)
        if os.fstat(self._descriptor).st_size < self.file_bytes:  # cut: reading on would end the process
            self._tell_damage("is shorter than it was made")
            self._states[:] = [0] * self.schedule.count
            os.ftruncate(self._descriptor, self.file_bytes)
        values = self._bytes[at : at + 8 * HEADER].view(np.int64).tolist()
        if values[0] == EMPTY or self._damaged[slot] == -self._mark():
            return None
        pixels = self._bytes[start : start + self.slot_bytes]
        if self._states[slot] != self._mark():
            if values[0] != WHOLE or _checksum(pixels, values[:-1]) != values[-1]:
                self._tell_damage("holds a mosaic that does not have its checksum")
                self._damaged[slot] = self._mark() if self._damaged[slot] != self._mark() else -self._mark()
                return None
            self._states[slot] = self._mark()
        sizes = tuple((values[7 + 2 * k], values[8 + 2 * k]) for k in range(4))
        side = 2 * self.size
        return Mosaic(pixels.reshape(side, side, 3), (values[1], values[2]), tuple(values[3:7]), sizes)

    def _mark(self) -> int:
        """What stands for the present generation in the shared notes; 0 stands for none."""
        return self._generation + 1

    def _tell_damage(self, what: str) -> None:
        """Warn once in a run, whichever process finds the damage."""
        if not self._is_told.value:
            self._is_told.value = 1
            LOGGER.warning(
                f"{self.prefix}--mosaic-cache: {self._path()} {what}; mosaics that are damaged are made anew from the "
                "pictures, and this is not said again. Is the disk in order?"
            )

    def _path(self) -> Path:
        return self.folder.path / f"{self._generation}{SUFFIX}"

    def _write(self, slot: int, mosaic: Mosaic) -> None:
        if self._descriptor < 0 or self._damaged[slot] == -self._mark():
            return
        pixels = np.ascontiguousarray(mosaic.canvas).reshape(-1)
        values = [WHOLE, *mosaic.centre, *mosaic.indices, *(side for size in mosaic.sizes for side in size)]
        header = np.array([*values, _checksum(pixels, values)], np.int64)
        try:  # written, not mapped: a full disk is then an error and no crash
            if self._damaged[slot] == self._mark():  # what is there must not count while it is replaced
                _write_all(self._descriptor, np.zeros(8 * HEADER, np.uint8), self._header_at(slot))
            _write_all(self._descriptor, pixels, slot * self.slot_bytes)
            _write_all(self._descriptor, header.view(np.uint8), self._header_at(slot))
        except OSError as error:
            LOGGER.warning(f"prepared mosaics cannot be stored ({error.strerror or error}), they are made anew")
            os.close(self._descriptor)
            self._descriptor = -1


def is_idle(count: int, probability: float, *, augment: bool, rect: bool, prefix: str = "") -> bool:
    """Whether no mosaics are made, so that `count` prepared ones would be of no use; says so."""
    reason = "validation makes no mosaics" if not augment else "--rect makes no mosaics" if rect else ""
    if not reason and probability:
        return False
    LOGGER.warning(f"{prefix}--mosaic-cache {count} has no effect: {reason or 'the hyper-parameter mosaic is 0'}")
    return True


def _write_all(descriptor: int, data: np.ndarray, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def _checksum(pixels: np.ndarray, values: Sequence[int]) -> int:
    return zlib.crc32(pixels, zlib.crc32(np.array(values, np.int64).tobytes()))


def _digest(contents: Sequence[np.ndarray], files: Sequence[str]) -> str:
    """Digest of the state of a data set: labels, and name, size and time of change of every file, in their order."""
    digest = hashlib.sha256(b"\0".join(os.fsencode(os.path.abspath(path)) for path in files))
    for array in contents:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    digest.update(np.array([Stamp.of(path) for path in files], np.int64).tobytes())
    return digest.hexdigest()[:16]
