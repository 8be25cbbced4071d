"""What decoders have to say: nothing of it reaches the terminal, damage is blamed on the right picture."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.data.drawing import encode, label_text, paint, pattern, write_set
from tests.data.loader_kit import loader_of
from utils.data import decoder
from utils.data.dataset import LoadImagesAndLabels
from utils.data.decoder import decode
from utils.data.images import ImageError, check_image, imread_bgr
from utils.data.jpeg_part import read_jpeg_part
from utils.data.report import say_unread

END = b"\xff\xd9"
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
needs_stderr = pytest.mark.skipif(sys.platform == "win32", reason="remarks are not caught on Windows")


def jpeg(mode: str = "RGB", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pattern((240, 320))).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def cut_and_closed(data: bytes, share: float = 0.5) -> bytes:
    return data[: int(len(data) * share)] + END


def flipped(data: bytes) -> bytes:
    """A bit that has fallen over where it turns the code into one that does not exist."""
    for at in range(len(data) // 2, len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x7F]) + data[at + 1 :]
        if b"\xff" not in (changed[at : at + 1], changed[at - 1 : at]) and decode(as_array(changed), 1).damage:
            return changed
    pytest.fail("no such place")


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


DAMAGED = {
    "baseline": lambda: cut_and_closed(jpeg()),
    "late": lambda: cut_and_closed(jpeg(), 0.97),
    "progressive": lambda: cut_and_closed(jpeg(progressive=True)),
    "grey": lambda: cut_and_closed(jpeg("L")),
    "cmyk": lambda: cut_and_closed(jpeg("CMYK")),
    "with bytes behind": lambda: cut_and_closed(jpeg()) + bytes(40),
    "flipped": lambda: flipped(jpeg()),
}
NOISY = {  # sound, or refused for other reasons
    "extraneous": lambda: jpeg()[:-2] + b"abc" * 9 + END,
    "cut jpeg": lambda: jpeg()[:900],
    "cut png": lambda: encode(paint())[:90],
    "flipped png": lambda: encode(paint())[:70] + b"\x99\x98" + encode(paint())[72:],
    "cut tiff": lambda: encode(paint(), ".tif")[:400],
    "cut bmp": lambda: encode(paint(), ".bmp")[:400],
    "text": lambda: b"no picture at all",
}


@needs_stderr
@pytest.mark.parametrize("kind", DAMAGED)
def test_jpegs_that_only_end_like_whole_ones_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(DAMAGED[kind]())
    check_image(path)  # the scan looks at both ends only
    with pytest.raises(ImageError, match=r"a\.jpg: JPEG is cut off or damaged"):
        imread_bgr(path)
    assert imread_bgr(path, allow_partial=True).shape == (240, 320, 3)


@needs_stderr
@pytest.mark.parametrize("kind", [*DAMAGED, *NOISY])
def test_nothing_reaches_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes((DAMAGED | NOISY)[kind]())
    capfd.readouterr()
    for read in (check_image, imread_bgr, lambda p: read_jpeg_part(p, (320, 240), 60)):
        try:
            read(path)
        except ImageError as error:
            assert str(path) in str(error)
    assert capfd.readouterr() == ("", "")


def test_sound_pictures_stay_sound(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    for data in (jpeg(), jpeg(progressive=True), jpeg("L"), jpeg()[:-2], NOISY["extraneous"]()):
        path.write_bytes(data)
        assert imread_bgr(path).shape == (240, 320, 3)
    path.write_bytes(DAMAGED["late"]())
    assert read_jpeg_part(path, (320, 240), 60) is not None  # the rows in question are there


@needs_stderr
def test_what_others_write_meanwhile_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def noisy(data: np.ndarray, flags: int) -> None:
        os.write(2, b"\rbar 50%Corrupt JPEG data: bad Huffman code\nan error of somebody else\n")
        os.write(2, b"libpng warning: iCCP: known incorrect sRGB profile\n[ WARN:0@0.1] global loadsave.cpp:1 x\n\n>")

    monkeypatch.setattr(decoder.cv2, "imdecode", noisy)
    assert decode(as_array(b"x"), 1) == (None, "Corrupt JPEG data: bad Huffman code")
    os.write(2, b" after")
    assert capfd.readouterr().err == "\rbar 50%an error of somebody else\n> after"


@needs_stderr
def test_threads_blame_the_right_picture(capfd: pytest.CaptureFixture[str]) -> None:
    good, bad = as_array(jpeg()), as_array(DAMAGED["baseline"]())
    wanted = [i % 7 == 3 for i in range(120)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda is_bad: bool(decode(bad if is_bad else good, 1).damage), wanted))
    assert found == wanted
    assert capfd.readouterr().err == ""


@needs_stderr
def test_pictures_decoded_together_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are under way when one of them is damaged: both are decoded again, alone."""
    together, calls = threading.Barrier(2), []

    def slow(data: np.ndarray, flags: int) -> np.ndarray:
        calls.append(len(data))
        if len(calls) <= 2:
            together.wait(5)
        if len(data) == 2:
            os.write(2, b"Corrupt JPEG data: premature end of data segment\n")
        if len(calls) <= 2:
            together.wait(5)
        return data

    monkeypatch.setattr(decoder.cv2, "imdecode", slow)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda size: bool(decode(np.zeros(size, np.uint8), 1).damage), (1, 2)))
    assert found == [False, True]
    assert sorted(calls) == [1, 1, 2, 2]


@needs_stderr
@needs_fork
def test_a_forked_process_writes_to_the_real_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    decode(as_array(jpeg()), 1)
    with decoder._LISTENER.listen() as heard:
        child = os.fork()
        if not child:
            os.write(2, b"child\n")
            damage = decode(as_array(DAMAGED["baseline"]()), 1).damage
            os.write(2, b"child again\n")
            os._exit(0 if damage else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert heard.remarks == []
    assert capfd.readouterr().err == "child\nchild again\n"


@needs_stderr
def test_stderr_may_be_replaced_at_any_time(tmp_path: Path) -> None:
    decode(as_array(jpeg()), 1)
    saved = os.dup(2)
    try:
        with open(tmp_path / "log", "wb") as log:
            os.dup2(log.fileno(), 2)
        decode(as_array(DAMAGED["baseline"]()), 1)
        os.write(2, b"goes to the log")
    finally:
        os.dup2(saved, 2)
        os.close(saved)
    assert (tmp_path / "log").read_bytes() == b"goes to the log"


def test_without_stderr_pictures_are_decoded_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(decoder.os, "dup", fail)
        assert decode(as_array(jpeg()), 1).image is not None
    monkeypatch.setattr(sys, "__stderr__", None)
    assert decode(as_array(jpeg()), 1).image is not None


def open_descriptors() -> set[tuple[str, str]]:
    """Number and target of what this process has open; empty where the system does not tell."""
    found = set()
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # the one that listed them is closed again
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@needs_stderr
def test_decoding_leaves_no_descriptors_behind() -> None:
    decode(as_array(jpeg()), 1)
    before = open_descriptors()
    for _ in range(20):
        decode(as_array(DAMAGED["baseline"]()), 1)
    assert open_descriptors() <= before


# --------------------------------------------------------------------------------------------- while training


def make_set(root: Path) -> Path:
    good, options = encode(paint(), ".jpg"), {"a.jpg": cut_and_closed(encode(paint(), ".jpg"), 0.7)}
    return write_set(root, {name: (options.get(name, good), label_text()) for name in ("a.jpg", "b.jpg", "c.jpg")})


@needs_stderr
@pytest.mark.parametrize("cache", ["", "ram", "disk"])
@pytest.mark.parametrize("mosaic", [0.0, 1.0])
def test_a_closed_cut_jpeg_is_not_trained_on(
    tmp_path: Path, messages: list[str], capfd: pytest.CaptureFixture[str], cache: str, mosaic: float
) -> None:
    images = make_set(tmp_path)
    data = LoadImagesAndLabels(images, 96, True, {"mosaic": mosaic}, cache=cache, cache_dir=tmp_path / "kept")
    for epoch in range(3):
        for index in range(3):
            image = data[(epoch, index, True)][0]
            assert image.shape == (3, 96, 96)
    assert [Path(path).name for path in data.broken_files()] == ["a.jpg"]
    named = [message for message in messages if "a.jpg" in message]
    assert len(named) == 1 and "cut off or damaged" in named[0]
    say_unread(data.broken_files(), len(data))
    assert "1 of 3 pictures" in messages[-1]
    assert "JPEG" not in capfd.readouterr().err


@needs_stderr
def test_workers_write_nothing_without_a_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    images = make_set(tmp_path / "images")
    (tmp_path / "data.yaml").write_text(f"train: {images}\nval: {images}\nnames: [a, b, c]\n")
    loader = loader_of(tmp_path / "data.yaml", 2, batch_size=2, imgsz=96)
    for epoch in range(2):
        loader.set_epoch(epoch)
        list(loader)
    assert [Path(path).name for path in loader.dataset.broken_files()] == ["a.jpg"]
    loader.close()
    out = capfd.readouterr()
    lines = [line for line in (out.out + out.err).splitlines() if "JPEG" in line]
    assert lines and all("a.jpg" in line for line in lines)


def test_reduced_sizes_are_decoded_the_same_way() -> None:
    data = as_array(jpeg())
    assert np.array_equal(
        decode(data, cv2.IMREAD_REDUCED_COLOR_2).image, cv2.imdecode(data, cv2.IMREAD_REDUCED_COLOR_2)
    )
