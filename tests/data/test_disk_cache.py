"""Pictures kept on disk: same pixels, noticed changes and damage, interrupted and concurrent fills, full disks."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.data.drawing import label_text, paint, write_set
from utils.data import disk_cache, shards
from utils.data.cache_folder import cache_root
from utils.data.dataset import LoadImagesAndLabels
from utils.data.disk_cache import DiskCache
from utils.data.images import imread_bgr, resize_long_side
from utils.data.memory import size_text
from utils.data.shards import PIXELS, ROWS, ShardWriter

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
    del cache
    for time_ns in range(8):
        for path in pictures.files:
            os.utime(path, ns=(1, time_ns))
        assert_right(pictures, pictures.fill())
    assert stored_bytes(pictures) <= 2 * needed_bytes(pictures)  # former states are gone


def test_deleted_pictures_go_too(pictures: Pictures) -> None:
    """What nobody can use any more is at most as much as what is used, whatever happens to a data set."""
    for turn in range(12):
        name = pictures.images / f"more{turn}.png"
        write_set(pictures.images.parents[1], {name.name: (paint(96, 64), label_text())})
        pictures.files.append(str(name))
        pictures.shapes = np.array([*SIZES, (96, 64)])
        assert_right(pictures, pictures.fill())
        assert stored_bytes(pictures) <= 2 * needed_bytes(pictures)
        name.unlink()
        pictures.files.pop()


def test_pictures_of_another_list_of_the_same_folder_stay(pictures: Pictures) -> None:
    files, shapes = pictures.files, pictures.shapes
    pictures.fill()
    for part in (slice(0, 2), slice(2, 4), slice(0, 4)):
        pictures.files, pictures.shapes = files[part], shapes[part]
        assert_right(pictures, pictures.fill())
        assert pictures.decoded == list(range(len(pictures.files)))  # by the comparison only


def stored_bytes(pictures: Pictures) -> int:
    return sum(path.stat().st_size for path in pictures.folder.rglob(f"*{PIXELS}"))


def needed_bytes(pictures: Pictures) -> int:
    return sum(pictures.load(i).size for i in range(len(pictures.files)))


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
    assert {0, 1} <= set(pictures.decoded)


def test_other_sizes_and_equal_stems_keep_apart(pictures: Pictures) -> None:
    first = pictures.fill(64)
    assert_right(pictures, pictures.fill(48))
    assert pictures.decoded[:4] != []
    assert first is not None  # in use, and therefore kept
    twin = Path(pictures.files[0]).with_suffix(".jpg")
    write_set(pictures.images.parents[1], {twin.name: (np.full((64, 96, 3), 9, np.uint8), None)})
    pictures.files.append(str(twin))
    pictures.shapes = np.array([*SIZES, (96, 64)])
    cache = pictures.fill(64)
    assert pictures.decoded == [4]
    assert_right(pictures, cache)


def test_shards_are_split(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 9000)
    assert_right(pictures, pictures.fill())
    assert len(list(pictures.folder.rglob(f"*{PIXELS}"))) > 1


@pytest.mark.parametrize("suffix", [PIXELS, ROWS])
@pytest.mark.parametrize("damage", ["cut by a byte", "cut in half", "empty", "absent", "flipped", "zeros", "longer"])
def test_damaged_shards_are_not_used(pictures: Pictures, suffix: str, damage: str) -> None:
    """Whatever has happened to a file, only right pixels come out, and the next run has all of them again."""
    pictures.fill()
    path = next(pictures.folder.rglob(f"*{suffix}"))
    data = path.read_bytes()
    half = len(data) // 2
    changed = {
        "cut by a byte": data[:-1],
        "cut in half": data[:half],
        "empty": b"",
        "flipped": data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :],
        "zeros": data[:half] + bytes(len(data) - half),
        "longer": data + b"torn",
    }
    path.unlink() if damage == "absent" else path.write_bytes(changed[damage])
    for _ in range(3):
        cache = pictures.fill()
        assert cache is not None
        for i in range(4):
            kept = cache.get(i)
            assert kept is None or np.array_equal(kept, pictures.load(i))
        del cache
    assert_right(pictures, pictures.fill())


def test_a_flipped_bit_is_told_once_and_decoded_instead(pictures: Pictures, messages: list[str]) -> None:
    LoadImagesAndLabels(pictures.images, 64, cache="disk", cache_dir=pictures.folder)
    path = next(pictures.folder.rglob(f"*{PIXELS}"))
    data = bytearray(path.read_bytes())
    data[100] ^= 64
    path.write_bytes(data)
    messages.clear()
    for start in range(2):
        data = LoadImagesAndLabels(pictures.images, 64, prefix="train: ", cache="disk", cache_dir=pictures.folder)
        plain = LoadImagesAndLabels(pictures.images, 64)
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2 if start == 0 else 0)
        for _ in range(2):
            for i, sample in enumerate(loader):
                assert torch.equal(sample[0], plain[i][0])
        assert data._pictures.spoilt() == (start == 0)
        del loader, data
    mine = [text for text in messages if "checksum" in text]  # those of the loader processes are not seen here
    assert mine == []


def test_spoilt_pictures_are_counted_not_listed(pictures: Pictures, messages: list[str]) -> None:
    pictures.fill()
    path = next(pictures.folder.rglob(f"*{PIXELS}"))
    path.write_bytes(bytes(path.stat().st_size))
    cache = pictures.fill()
    assert [cache.get(i) for i in (*range(4), *range(4))] == [None] * 8
    assert cache.spoilt() == 4
    (line,) = [text for text in messages if "checksum" in text]
    assert "1 stored picture(s)" in line and pictures.files[0] in line and "stored anew" in line


def test_checksums_are_compared_once(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, calls = pictures.fill(), []
    monkeypatch.setattr(
        disk_cache.zlib, "crc32", lambda data, real=disk_cache.zlib.crc32: (calls.append(1), real(data))[1]
    )
    for _ in range(3):
        assert_right(pictures, cache)
    assert len(calls) == 4


def test_unreadable_picture_is_left_out(pictures: Pictures, messages: list[str]) -> None:
    load = pictures.load
    pictures.load = lambda index: None if index == 2 else load(index)
    cache = pictures.fill()
    assert cache is not None
    assert cache.get(2) is None
    assert cache.get(3) is not None
    assert any("3 pictures ready" in message and "3 of them new" in message for message in messages)


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


def test_the_refusal_names_what_is_needed_and_what_is_free(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    pictures.size = 64
    needed = needed_bytes(pictures)
    free = disk_cache.DISK_RESERVE_BYTES + needed - 1
    monkeypatch.setattr("utils.data.cache_folder.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    assert pictures.fill() is None and not pictures.decoded
    (line,) = (line for line in messages if "--cache disk" in line)
    assert f"4 more pictures need {size_text(needed)} in {pictures.folder}" in line
    assert f"1.00 GB must stay free, {size_text(free)} are free" in line and "--cache-dir" in line
    free += 1  # just enough
    assert_right(pictures, pictures.fill())


@pytest.fixture
def disk_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that lets the writing of the picture after so many others fail with an error number."""
    write = shards._write_all

    def arrange(pictures_before: int, number: int) -> None:
        written: list[int] = []

        def fail_later(descriptor: int, data: memoryview) -> None:
            if len(written) == 2 * pictures_before:  # pixels and row of each
                write(descriptor, data[:7])
                raise OSError(number, os.strerror(number))
            written.append(len(data))
            write(descriptor, data)

        monkeypatch.setattr(shards, "_write_all", fail_later)

    return arrange


def files_of(pictures: Pictures) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in pictures.folder.rglob("*") if path.suffix in (PIXELS, ROWS)}


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_a_disk_that_fails_meanwhile_leaves_what_is_complete(
    pictures: Pictures,
    monkeypatch: pytest.MonkeyPatch,
    disk_fails: Callable[[int, int], None],
    shard_bytes: int,
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", shard_bytes)
    disk_fails(2, errno.EIO)
    cache = pictures.fill()
    assert cache is not None
    assert [cache.get(i) is not None for i in range(4)] == [True, True, False, False]
    disk_fails(100, errno.EIO)
    del cache
    cache = pictures.fill()
    assert pictures.decoded == [2, 3]
    assert_right(pictures, cache)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
@pytest.mark.parametrize("before", [0, 3])
def test_a_disk_that_fills_up_meanwhile_gets_its_room_back(
    before: int,
    shard_bytes: int,
    number: int,
    pictures: Pictures,
    monkeypatch: pytest.MonkeyPatch,
    disk_fails: Callable[[int, int], None],
    messages: list[str],
) -> None:
    """Checkpoints need the last bytes; what another run or an earlier one has stored stays."""
    monkeypatch.setattr(shards, "SHARD_BYTES", shard_bytes)
    disk_fails(before, number)
    stored = pictures.fill()
    assert stored is None and not files_of(pictures)
    assert any(f"given up: no room left in {pictures.folder}" in line and "--cache-dir" in line for line in messages)


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_a_disk_that_fills_up_costs_nothing_that_was_stored_before(
    shard_bytes: int, pictures: Pictures, monkeypatch: pytest.MonkeyPatch, disk_fails: Callable[[int, int], None]
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", shard_bytes)
    reader = pictures.fill()
    for i in (1, 2):
        os.utime(pictures.files[i], ns=(1, 12345))
    files = files_of(pictures)
    disk_fails(1, errno.ENOSPC)
    cache = pictures.fill()
    assert pictures.decoded == [1, 2] and files_of(pictures) == files
    assert cache is not None
    assert [cache.get(i) is not None for i in range(4)] == [True, False, False, True]
    assert_right(pictures, reader)  # another run that uses the same files
    disk_fails(100, errno.ENOSPC)
    cache = pictures.fill()
    assert pictures.decoded == [1, 2]
    assert_right(pictures, cache)


def test_a_run_goes_on_without_the_cache_for_which_there_was_no_room(
    pictures: Pictures, disk_fails: Callable[[int, int], None]
) -> None:
    disk_fails(1, errno.ENOSPC)
    kept = LoadImagesAndLabels(pictures.images, 64, cache="disk", cache_dir=pictures.folder)
    plain = LoadImagesAndLabels(pictures.images, 64)
    for index in range(4):
        for found, wanted in zip(kept[index], plain[index], strict=True):
            assert torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted


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


@pytest.mark.parametrize("stored", [1, 3])
def test_a_killed_fill_goes_on_with_the_next_picture(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    monkeypatch.setattr(disk_cache, "DECODE_AHEAD", 1)
    add = ShardWriter.add

    def add_and_wait(writer: ShardWriter, *picture: object) -> object:
        row = add(writer, *picture)
        if picture[0] == pictures.files[stored - 1]:
            (pictures.folder / "reached").touch()
            time.sleep(60)
        return row

    monkeypatch.setattr(ShardWriter, "add", add_and_wait)
    process = multiprocessing.get_context("fork").Process(target=pictures.fill)
    process.start()
    wait_for(pictures, "reached")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    monkeypatch.undo()
    for suffix, tail in ((PIXELS, b"half a picture"), (ROWS, b"half a row")):  # as if it had been killed while writing
        with open(next(pictures.folder.rglob(f"*{suffix}")), "ab") as file:
            file.write(tail)
    cache = pictures.fill()
    assert pictures.decoded == list(range(stored, 4))
    assert_right(pictures, cache)
    assert stored_bytes(pictures) == needed_bytes(pictures)
    assert len(list(pictures.folder.rglob(f"*{PIXELS}"))) == 1


def test_an_interrupted_fill_goes_on_with_the_next_picture(pictures: Pictures) -> None:
    load = pictures.load

    def stop(index: int) -> np.ndarray:
        if index == 2:
            raise KeyboardInterrupt
        return load(index)

    pictures.load = stop
    with pytest.raises(KeyboardInterrupt):
        pictures.fill()
    pictures.load = load
    cache = pictures.fill()
    assert pictures.decoded == [2, 3]
    assert_right(pictures, cache)


def test_two_runs_at_once(pictures: Pictures) -> None:
    """The second waits for the first, and then finds everything."""
    process = multiprocessing.get_context("fork").Process(target=slow_fill, args=(pictures, 0.3))
    process.start()
    wait_for(pictures, f"*{PIXELS}")
    cache = pictures.fill()
    process.join()
    assert pictures.decoded == []
    assert_right(pictures, cache)


def test_a_run_that_still_reads_keeps_its_pictures(pictures: Pictures) -> None:
    """Files that another run has mapped are neither cut nor deleted, even if all they hold is out of date."""
    cache = pictures.fill()
    before = {path: path.read_bytes() for path in pictures.folder.rglob(f"*{PIXELS}")}
    with open(next(pictures.folder.rglob(f"*{ROWS}")), "r+b") as file:
        file.write(b"x")  # no row can be read any more
    wanted = [cache.get(i).copy() for i in range(4)]
    os.utime(pictures.files[0], ns=(1, 1))
    other = pictures.fill()
    assert_right(pictures, other)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert all(np.array_equal(cache.get(i), wanted[i]) for i in range(4))
    del cache, other
    assert_right(pictures, pictures.fill())
    assert stored_bytes(pictures) == needed_bytes(pictures)


@pytest.mark.parametrize("left", [0, 1, 0.5, 1.0])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_shard_that_is_cut_while_it_is_used_is_no_crash(
    pictures: Pictures, left: float, is_mapped: bool, messages: list[str]
) -> None:
    data = LoadImagesAndLabels(pictures.images, 640, cache="disk", cache_dir=pictures.folder)
    plain = LoadImagesAndLabels(pictures.images, 640)
    path = next(pictures.folder.rglob(f"*{PIXELS}"))
    size = path.stat().st_size
    if is_mapped:
        data[0]
    assert data.cut_files() == []
    os.truncate(path, int(size * left) if left != 1.0 else size - 1)  # several pages are gone, or one byte
    messages.clear()
    for _ in range(2):
        for i in range(4):
            assert torch.equal(data[i][0], plain[i][0])
    (cut,) = data.cut_files()
    assert (cut.path, cut.needed, cut.option) == (path, size, "--cache disk")
    assert len([text for text in messages if "do not have their checksum" in text]) == 1


def test_a_shard_that_is_gone_while_it_is_used_is_named(pictures: Pictures) -> None:
    data = LoadImagesAndLabels(pictures.images, 64, cache="disk", cache_dir=pictures.folder)
    next(pictures.folder.rglob(f"*{PIXELS}")).unlink()
    assert data[0][0].shape == (3, 64, 64)
    assert [cut.size for cut in data.cut_files()] == [0]
