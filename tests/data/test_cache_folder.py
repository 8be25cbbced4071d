"""Folders of prepared data: what is replaced goes, what is in use or belongs to others stays, sizes are told."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.data.drawing import label_text, paint, write_set
from utils.data import cache_folder
from utils.data.cache_folder import DECODED, IN_USE, MANIFEST, MOSAICS, CacheFolder, data_set_of, size_of
from utils.data.dataset import LoadImagesAndLabels

needs_locks = pytest.mark.skipif(cache_folder.fcntl is None, reason="this system has no file locks")


def folders(root: Path, kind: str = DECODED) -> list[str]:
    return sorted(path.name for path in (root / kind).iterdir()) if (root / kind).is_dir() else []


def make(root: Path, size: int = 64, data_set: str = "/data/images/train", **options: object) -> CacheFolder:
    """A folder with a file in it."""
    settings = {"side": size, **options.pop("settings", {})}
    folder = CacheFolder.open(root, str(options.pop("kind", DECODED)), data_set, settings, **options)
    (folder.path / "0.pixels").write_bytes(bytes(5000))
    return folder


@needs_locks
def test_another_size_replaces_a_folder(tmp_path: Path, messages: list[str]) -> None:
    first = make(tmp_path).path
    assert make(tmp_path).path == first and first.is_dir()  # the same settings: the same folder
    assert messages == []
    second = make(tmp_path, 128, prefix="train: ").path
    assert folders(tmp_path) == [second.name]
    assert "train: prepared data of /data/images/train (decoded, side 64" in messages[0] and "removed" in messages[0]
    assert "--cache-dir" in messages[0]


@needs_locks
def test_what_does_not_belong_together_stays(tmp_path: Path) -> None:
    kept = [
        make(tmp_path, data_set="/data/images/val").path,
        make(tmp_path, data_set="/data/other/images/train").path,
        make(tmp_path, kind=MOSAICS).path,
        make(tmp_path, settings={"resizing": "area"}).path,
    ]
    make(tmp_path, settings={"resizing": "linear"}, beside=["resizing"])
    new = make(tmp_path, 128, settings={"resizing": "linear"}, beside=["resizing"]).path
    assert folders(tmp_path) == sorted(path.name for path in [new, *kept] if path.parent.name == DECODED)
    assert folders(tmp_path, MOSAICS) == [kept[2].name]


@needs_locks
def test_foreign_files_and_folders_are_never_touched(tmp_path: Path) -> None:
    """A cache folder may be any folder of the user's: only files of our names, in folders with our manifest, go."""
    root, outside = tmp_path / "cache", tmp_path / "outside"
    mine = make(root).path
    manifest = (mine / MANIFEST).read_text(encoding="utf-8")
    changed = {
        "no manifest": None,
        "no JSON": "{",
        "a list": "[]",
        "made by another": manifest.replace("yolov9", "yolov8"),
        "other kind": manifest.replace(DECODED, "else"),
        "no data set": json.dumps({**json.loads(manifest), "data_set": 5}),
        "no settings": json.dumps({**json.loads(manifest), "settings": None}),
    }
    for name, text in changed.items():
        (root / DECODED / name).mkdir()
        (root / DECODED / name / "0.pixels").write_bytes(b"mine")
        if text is not None:
            (root / DECODED / name / MANIFEST).write_text(text, encoding="utf-8")
    outside.mkdir()
    (outside / MANIFEST).write_text(manifest, encoding="utf-8")
    (outside / "0.pixels").write_bytes(b"mine")
    (root / DECODED / "linked").symlink_to(outside, target_is_directory=True)
    (root / DECODED / "file").write_text(manifest, encoding="utf-8")
    (root / "notes.txt").write_text("mine", encoding="utf-8")
    (mine / "thesis.pdf").write_bytes(b"mine")
    (mine / "more").mkdir()
    (mine / "more" / "0.pixels").write_bytes(b"mine")
    (mine / "link.pixels").symlink_to(outside / "0.pixels")

    def others() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path not in ours}

    ours = {mine / name for name in (MANIFEST, IN_USE, "0.pixels")}
    before = others()
    new = make(root, 128).path
    ours |= set(new.iterdir())
    assert others() == before
    assert sorted(path.name for path in mine.iterdir()) == ["link.pixels", "more", "thesis.pdf"]


def hold(root: Path, until: Path) -> None:
    folder = make(root)
    (root / "held").touch()
    while not until.exists():
        time.sleep(0.01)
    assert folder.path.is_dir()


@needs_locks
def test_what_another_run_uses_stays_until_it_ends(tmp_path: Path, messages: list[str]) -> None:
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path, tmp_path / "end"))
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    new = make(tmp_path, 128)
    assert len(folders(tmp_path)) == 2
    assert "kept because they are in use" in messages[-1]
    (tmp_path / "end").touch()
    process.join()
    make(tmp_path, 128)
    assert folders(tmp_path) == [new.path.name]


@needs_locks
def test_processes_that_inherit_a_folder_use_it(tmp_path: Path) -> None:
    """Loader processes that outlive the object in the main process still read the files."""
    folder = make(tmp_path)
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    del folder
    new = make(tmp_path, 128)
    assert len(folders(tmp_path)) == 2
    os.kill(child, 9)
    os.waitpid(child, 0)
    make(tmp_path, 128)
    assert folders(tmp_path) == [new.path.name]


def open_and_leave(root: Path, size: int, number: int) -> None:
    for _ in range(number):
        folder = CacheFolder.open(root, DECODED, "/data/images/train", {"side": size})
        mine = folder.path / f"{os.getpid()}.pixels"
        mine.write_bytes(b"12345")
        time.sleep(0.001)
        assert (folder.path / MANIFEST).is_file() and mine.read_bytes() == b"12345"
        del folder


@needs_locks
def test_runs_that_replace_each_other_all_the_time(tmp_path: Path) -> None:
    """Whoever has opened a folder has it: it is never one that another process has just deleted."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=open_and_leave, args=(tmp_path, size, 60)) for size in (32, 64, 32, 64)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4


@needs_locks
def test_a_folder_that_is_removed_while_it_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, removed = make(tmp_path).path, cache_folder._lock, []

    def lock_late(file: BinaryIO, mode: int, **options: bool) -> bool:
        if mode == cache_folder.SHARED and len(removed) < 3:  # between opening and locking another run is quicker
            removed.append(True)
            assert cache_folder._remove(path)
        return lock(file, mode, **options)

    monkeypatch.setattr(cache_folder, "_lock", lock_late)
    folder = make(tmp_path)
    assert len(removed) == 3
    assert (folder.path / MANIFEST).is_file()
    assert os.path.samestat(os.fstat(folder._in_use.fileno()), os.stat(path / IN_USE))


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "fcntl", None)
    make(tmp_path)
    make(tmp_path, 128)
    assert len(folders(tmp_path)) == 2


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLocks:
        @staticmethod
        def flock(descriptor: int, mode: int) -> None:
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache_folder, "fcntl", NoLocks)
    make(tmp_path)
    folder = make(tmp_path, 128)
    assert len(folders(tmp_path)) == 2
    with folder.only_writer() as is_only, folder.alone() as is_alone:
        assert (is_only, is_alone) == (False, False)


def test_lock_files_are_opened_for_both_kinds_of_lock(tmp_path: Path) -> None:
    """Network disks give a shared lock only on a file that can be read, an exclusive one on one that can be written."""
    file = make(tmp_path)._in_use
    assert file.readable() and file.writable()


def test_data_set_is_the_innermost_common_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert data_set_of(["/a/b/c.jpg", "/a/b/d/e.jpg"]) == "/a/b"
    assert data_set_of(["/a/bc/c.jpg", "/a/bd/e.jpg"]) == "/a"
    assert data_set_of(["x/c.jpg"]) == str(tmp_path / "x")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    data_set = os.fsdecode(b"/data/\xff\xfe \xe7\x9a\x84")
    first = make(tmp_path, data_set=data_set).path
    assert make(tmp_path, data_set=data_set).path == first
    assert first.name.isascii()


# ------------------------------------------------------------------------------------------- both kinds together


@needs_locks
def test_a_history_of_runs_leaves_the_last_one(tmp_path: Path, messages: list[str]) -> None:
    """Sizes, seeds, counts, deleted and added pictures: what lies there is what the last run needs."""
    names = [f"{i}.png" for i in range(4)]
    images = write_set(tmp_path, {name: (paint(), label_text()) for name in names})
    kept = tmp_path / "kept"
    changes = ({}, {"img_size": 96}, {"seed": 1}, {"mosaic_cache": 2}, "delete", "add", {"img_size": 32})
    for change in changes:
        if change == "delete":
            (images / "0.png").unlink()
        elif change == "add":
            write_set(tmp_path, {"new.png": (paint(64, 64), label_text())})
        options = {"img_size": 64, "mosaic_cache": 4, **(change if isinstance(change, dict) else {})}
        messages.clear()
        for augment in (True, False):
            data = LoadImagesAndLabels(images, augment=augment, hyp={"mosaic": 1.0}, cache="disk", cache_dir=kept, **{
                **options, "mosaic_cache": options["mosaic_cache"] * augment,
            })  # fmt: skip
            assert [data[i][0].shape[1] for i in range(len(data))] == [options["img_size"]] * len(data)
            del data
        assert len(folders(kept)) == 2  # for training and for validation
        assert len(folders(kept, MOSAICS)) == 1
    total = sum(size_of(kept / kind / name) for kind in (DECODED, MOSAICS) for name in folders(kept, kind))
    told = [message for message in messages if "all prepared data in" in message]
    assert cache_folder.size_text(total) in told[-1]
    assert "can be deleted" in told[-1]
