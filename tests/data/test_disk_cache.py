"""Pictures kept on disk: same pixels, noticed changes, interrupted and concurrent fills, full disks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.drawing import label_text, paint, write_set
from utils.data import disk_cache
from utils.data.dataset import LoadImagesAndLabels
from utils.data.disk_cache import INDEX, PARTIAL, PIXELS, DiskCache, cache_root
from utils.data.images import imread_bgr, resize_long_side

SIZES = [(96, 64), (64, 96), (80, 80), (120, 30)]


class Pictures:
    """A small set of files, and a loader that counts what is decoded."""

    def __init__(self, root: Path) -> None:
        self.images = write_set(root, {f"{i}.png": (paint(*size), label_text()) for i, size in enumerate(SIZES)})
        self.files = [str(self.images / f"{i}.png") for i in range(4)]
        self.shapes, self.folder, self.decoded = np.array(SIZES), root / "kept", []

    def load(self, index: int) -> np.ndarray:
        self.decoded.append(index)
        return resize_long_side(imread_bgr(self.files[index]), self.size, smooth=True)

    def fill(self, size: int = 64) -> DiskCache | None:
        self.size, self.decoded = size, []
        return DiskCache.fill(self.files, self.shapes, size, self.load, smooth=True, cache_dir=self.folder)


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    return Pictures(tmp_path)


def assert_right(pictures: Pictures, cache: DiskCache | None) -> None:
    assert cache is not None
    for i in range(len(pictures.files)):
        kept = cache.get(i)
        assert kept is not None
        assert not kept.flags.writeable
        assert np.array_equal(kept, pictures.load(i))


@pytest.mark.parametrize("augment", [True, False])
def test_same_samples_as_without(pictures: Pictures, augment: bool) -> None:
    hyp = {"mosaic": 0.5, "hsv_v": 0.4, "fliplr": 0.5, "scale": 0.5}
    before = sorted(path.name for path in pictures.images.rglob("*"))
    plain = LoadImagesAndLabels(pictures.images, 64, augment=augment, hyp=hyp)
    kept = LoadImagesAndLabels(pictures.images, 64, augment=augment, hyp=hyp, cache="disk", cache_dir=pictures.folder)
    for epoch in range(2):
        for index in range(4):
            for one, two in zip(plain[(epoch, index, True)], kept[(epoch, index, True)], strict=True):
                assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
    assert sorted(path.name for path in pictures.images.rglob("*")) == before


def test_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "yolov9" / "pictures"
    assert cache_root(tmp_path / "mine") == tmp_path / "mine"


def test_second_start_decodes_nothing(pictures: Pictures) -> None:
    assert_right(pictures, pictures.fill())
    cache = pictures.fill()
    assert pictures.decoded == []
    assert_right(pictures, cache)


def test_only_changed_pictures_are_redone(pictures: Pictures) -> None:
    pictures.fill()
    Path(pictures.files[1]).write_bytes(Path(pictures.files[1]).read_bytes())  # only the time is another one
    os.utime(pictures.files[1], ns=(1, 12345))
    cache = pictures.fill()
    assert pictures.decoded == [1]
    assert_right(pictures, cache)
    assert len(list(pictures.folder.rglob(f"*{PIXELS}"))) == 2
    for path in pictures.files:
        os.utime(path, ns=(1, 54321))
    pictures.fill()
    assert len(list(pictures.folder.rglob(f"*{PIXELS}"))) == 1  # shards without a living entry are gone


def test_pictures_that_swap_their_names_are_redone_although_size_and_time_are_equal(pictures: Pictures) -> None:
    first, second, parked = (Path(name) for name in (*pictures.files[:2], pictures.files[0] + ".parked"))
    size = max(first.stat().st_size, second.stat().st_size) + 8
    for path in (first, second):
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))  # bytes behind a picture's end mean nothing
        os.utime(path, ns=(1, 777))
    pictures.fill()
    first.rename(parked)
    second.rename(first)
    parked.rename(second)
    pictures.fill()
    assert pictures.decoded == [0, 1]


def test_other_sizes_and_equal_stems_keep_apart(pictures: Pictures) -> None:
    pictures.fill(64)
    assert_right(pictures, pictures.fill(48))
    assert pictures.decoded[:4] != []
    twin = Path(pictures.files[0]).with_suffix(".jpg")
    write_set(pictures.images.parents[1], {twin.name: (np.full((64, 96, 3), 9, np.uint8), None)})
    pictures.files.append(str(twin))
    pictures.shapes = np.array([*SIZES, (96, 64)])
    cache = pictures.fill(64)
    assert pictures.decoded == [4]
    assert_right(pictures, cache)


def test_shards_are_split(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "SHARD_BYTES", 9000)
    assert_right(pictures, pictures.fill())
    assert len(list(pictures.folder.rglob(f"*{PIXELS}"))) > 1


def test_damaged_shards_are_not_used(pictures: Pictures) -> None:
    pictures.fill()
    pixels = next(pictures.folder.rglob(f"*{PIXELS}"))
    pixels.write_bytes(pixels.read_bytes()[:-1])
    assert_right(pictures, pictures.fill())
    for index in pictures.folder.rglob(f"*{INDEX}"):
        index.write_bytes(b"PK nonsense")
    assert_right(pictures, pictures.fill())


def test_unreadable_picture_is_left_out(pictures: Pictures) -> None:
    load = pictures.load
    pictures.load = lambda index: None if index == 2 else load(index)
    cache = pictures.fill()
    assert cache is not None
    assert cache.get(2) is None
    assert cache.get(3) is not None


def test_full_disk_is_refused(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_cache, "free_disk_bytes", lambda folder: disk_cache.DISK_RESERVE_BYTES + 100)
    monkeypatch.setattr(disk_cache.LOGGER, "propagate", True)
    assert pictures.fill() is None
    assert pictures.decoded == []
    assert "--cache-dir" in caplog.text
    monkeypatch.undo()
    pictures.fill()
    os.utime(pictures.files[0], ns=(1, 12345))
    monkeypatch.setattr(disk_cache, "free_disk_bytes", lambda folder: disk_cache.DISK_RESERVE_BYTES + 100)
    cache = pictures.fill()
    assert cache is not None  # what is there already can still be used
    assert [cache.get(i) is not None for i in range(4)] == [False, True, True, True]


def test_disk_that_fills_up_meanwhile_leaves_what_is_complete(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "SHARD_BYTES", 1)
    add, added = disk_cache._ShardWriter.add, []

    def fail_later(self: disk_cache._ShardWriter, index: int, image: np.ndarray | None) -> None:
        if len(added) == 2:
            raise OSError(28, "No space left on device")
        added.append(index)
        add(self, index, image)

    monkeypatch.setattr(disk_cache._ShardWriter, "add", fail_later)
    cache = pictures.fill()
    assert cache is not None
    assert [cache.get(i) is not None for i in range(4)] == [True, True, False, False]
    monkeypatch.setattr(disk_cache._ShardWriter, "add", add)
    cache = pictures.fill()
    assert pictures.decoded == [2, 3]
    assert_right(pictures, cache)


def test_folder_that_is_a_file_is_refused(pictures: Pictures) -> None:
    pictures.folder.write_text("", encoding="ascii")
    assert pictures.fill() is None


def slow_fill(pictures: Pictures, seconds: float) -> None:
    load = pictures.load

    def wait(index: int) -> np.ndarray:
        time.sleep(seconds)
        return load(index)

    pictures.load = wait
    pictures.fill()


def wait_for(pictures: Pictures, pattern: str) -> None:
    until = time.monotonic() + 20
    while not list(pictures.folder.rglob(pattern)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_killed_fill_leaves_nothing_broken(pictures: Pictures) -> None:
    process = multiprocessing.get_context("fork").Process(target=slow_fill, args=(pictures, 0.5))
    pictures.folder.mkdir()
    write = pictures.folder / "64-linear-v1" / f"1-1{PARTIAL}"
    process.start()
    wait_for(pictures, "lock")
    write.write_bytes(b"left by a killed run")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert_right(pictures, pictures.fill())
    assert not list(pictures.folder.rglob(f"*{PARTIAL}"))


def test_two_runs_at_once(pictures: Pictures) -> None:
    """The second waits for the first, and then finds everything."""
    process = multiprocessing.get_context("fork").Process(target=slow_fill, args=(pictures, 0.3))
    process.start()
    wait_for(pictures, f"*{PARTIAL}")
    cache = pictures.fill()
    process.join()
    assert pictures.decoded == []
    assert_right(pictures, cache)
