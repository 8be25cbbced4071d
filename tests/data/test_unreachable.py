"""Entries of a data set that are there but cannot be read: each is named, none ends or hangs a run."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import pytest

from tests.data.drawing import label_text, paint, write_set
from utils.data.file_scan import scan_one
from utils.data.listing import list_images
from utils.data.scan import scan_dataset
from utils.data.sources import resolve_source
from utils.files import lock_folder

needs_posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
pytestmark = needs_posix


def odd_entries(folder: Path, suffix: str) -> dict[str, str]:
    """Make a link to itself and a pipe; return their names with a word of the reason expected for each."""
    (folder / f"loop{suffix}").symlink_to(f"loop{suffix}")
    os.mkfifo(folder / f"pipe{suffix}")
    return {f"loop{suffix}": "symbolic links", f"pipe{suffix}": "pipe"}


def huge_png(path: Path, side: int) -> None:
    """A few bytes that announce side x side pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def test_pictures_that_cannot_be_opened_are_left_out_by_name(tmp_path: Path) -> None:
    images = write_set(tmp_path, {"a.png": (paint(), label_text())})
    odd = odd_entries(images, ".jpg")
    listed = list_images(images)
    assert [Path(file).name for file in listed.files] == ["a.png"]
    reasons = {Path(path).name: reason for path, reason in listed.left_out}
    assert reasons.keys() == odd.keys()
    assert all(word in reasons[name] for name, word in odd.items())


def test_detection_passes_them_over_too(tmp_path: Path) -> None:
    images = write_set(tmp_path, {"a.png": (paint(), label_text())})
    odd = odd_entries(images, ".jpg")
    source = resolve_source(str(images))
    assert odd.keys() == {Path(str(name)).name for name, _ in source.missing}


def test_a_pipe_named_outright_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    record = scan_one(str(tmp_path / "pipe.jpg"), None)
    assert "pipe" in record.error


@pytest.mark.parametrize("kind", ["dead link", "loop", "pipe", "folder"])
def test_a_label_file_that_cannot_be_read_is_no_background(tmp_path: Path, kind: str) -> None:
    images = write_set(tmp_path, {"a.png": (paint(), label_text()), "b.png": (paint(), label_text())})
    (label,) = tmp_path.rglob("b.txt")
    label.unlink()
    if kind == "folder":
        label.mkdir()
    elif kind == "pipe":
        os.mkfifo(label)
    else:
        label.symlink_to(label.name if kind == "loop" else "gone.txt")
    scan = scan_dataset(images)
    assert [Path(file).name for file in scan.im_files] == ["a.png"]
    problem = next(problem for problem in scan.problems if "b.png" in str(problem))
    assert "b.txt cannot be read" in str(problem)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_labels_in_a_closed_folder_are_no_background(tmp_path: Path) -> None:
    images = write_set(tmp_path, {"a.png": (paint(), label_text())})
    (label,) = tmp_path.rglob("a.txt")
    label.parent.chmod(0)
    try:
        with pytest.raises(ValueError, match="Permission denied"):
            scan_dataset(images)
    finally:
        label.parent.chmod(0o755)


def test_a_header_that_announces_too_many_pixels_is_refused(tmp_path: Path) -> None:
    images = write_set(tmp_path, {"a.png": (paint(), label_text())})
    huge_png(images / "bomb.png", 100_000)
    scan = scan_dataset(images)
    assert [Path(file).name for file in scan.im_files] == ["a.png"]
    assert any("100000 x 100000" in str(problem) for problem in scan.problems)


def test_a_child_process_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    (ready, say_ready), (end, say_end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # lives on after the parent has given the folder back
        os.write(say_ready, b"x")
        os.read(end, 1)
        os._exit(0)
    os.read(ready, 1)
    lock.close()
    try:
        lock_folder(tmp_path).close()
    finally:
        os.write(say_end, b"x")
        os.waitpid(child, 0)
        for number in (ready, say_ready, end, say_end):
            os.close(number)
