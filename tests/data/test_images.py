"""Decoding to three upright 8-bit channels, judging files, letterbox."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.data.drawing import BOXES, colour_faults, encode, paint, pattern
from utils.data.headers import image_kind, jpeg_has_end, png_damage, read_header
from utils.data.images import (
    ImageError,
    check_image,
    decode_bgr,
    fitted_size,
    image_size,
    imread_bgr,
    letterbox,
    read_region,
    resize_long_side,
)

T = Image.Transpose
STORED = {  # EXIF orientation -> how an upright picture lies in the file
    1: None, 2: T.FLIP_LEFT_RIGHT, 3: T.ROTATE_180, 4: T.FLIP_TOP_BOTTOM,
    5: T.TRANSPOSE, 6: T.ROTATE_90, 7: T.TRANSVERSE, 8: T.ROTATE_270,
}  # fmt: skip


def save(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def with_pillow(image_bgr: np.ndarray, kind: str, orientation: int = 1, mode: str = "RGB", **options: object) -> bytes:
    picture = Image.fromarray(image_bgr[..., ::-1].copy())
    if STORED[orientation] is not None:
        picture = picture.transpose(STORED[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    picture.convert(mode).save(buffer, kind, exif=exif.tobytes(), **options)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("kind", "options"), [("JPEG", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})])
def test_every_orientation_of_every_kind_is_turned(
    tmp_path: Path, kind: str, options: dict[str, object], orientation: int
) -> None:
    path = save(tmp_path, "picture", with_pillow(paint(), kind, orientation, **options))
    image = imread_bgr(path)
    assert image.shape == (64, 96, 3)
    assert colour_faults(image, np.array(BOXES)) == []
    assert image_size(path) == (96, 64)
    facts = check_image(path)
    assert (facts.width, facts.height) == (96, 64)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P"])
def test_any_channels_become_three(mode: str) -> None:
    image = decode_bgr(np.frombuffer(with_pillow(paint(), "PNG", mode=mode), np.uint8), "x")
    assert image.shape == (64, 96, 3)
    assert image.dtype == np.uint8
    assert image.flags.c_contiguous
    if "L" not in mode:
        assert colour_faults(image, np.array(BOXES)) == []


def test_cmyk() -> None:
    data = with_pillow(paint(), "JPEG", mode="CMYK", quality=95)
    assert colour_faults(decode_bgr(np.frombuffer(data, np.uint8), "x"), np.array(BOXES)) == []


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_16_bits_are_scaled(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path, f"deep{suffix}", encode(paint().astype(np.uint16) * 257, suffix))
    assert np.abs(imread_bgr(path).astype(int) - paint()).max() <= 1
    assert check_image(path).remark is None


def test_12_bits_in_16_are_remarked(tmp_path: Path) -> None:
    path = save(tmp_path, "dark.png", encode(paint().astype(np.uint16) * 16))
    assert "16-bit" in (check_image(path).remark or "")


def test_float_picture() -> None:
    data = cv2.imencode(".pfm", (paint() / 255).astype(np.float32))[1]
    assert np.abs(decode_bgr(data, "x").astype(int) - paint()).max() <= 1


def test_content_decides_not_the_suffix(tmp_path: Path) -> None:
    path = save(tmp_path, "picture.jpg", encode(paint(), ".png"))
    assert check_image(path).width == 96
    assert np.array_equal(imread_bgr(path), paint())


@pytest.mark.parametrize("name", ["图像 一.jpg", "copy (1).jpg", "100% #2.jpg", "a" * 240 + ".jpg"])
def test_names_do_not_matter(tmp_path: Path, name: str) -> None:
    assert imread_bgr(save(tmp_path, name, encode(paint(), ".jpg"))).shape == (64, 96, 3)


def test_jpeg_without_end_marker_is_complete_or_not(tmp_path: Path) -> None:
    data = encode(paint(), ".jpg")
    whole = save(tmp_path, "whole.jpg", data[:-2])
    assert check_image(whole).height == 64
    assert np.array_equal(imread_bgr(whole), decode_bgr(np.frombuffer(data, np.uint8), "x"))
    cut = save(tmp_path, "cut.jpg", data[: len(data) * 6 // 10])
    for read in (check_image, imread_bgr):
        with pytest.raises(ImageError, match=r"cut\.jpg: JPEG is cut off"):
            read(cut)
    assert imread_bgr(cut, allow_partial=True).shape == (64, 96, 3)


def test_trailing_bytes_are_no_damage(tmp_path: Path) -> None:
    data = encode(paint(), ".jpg")
    for tail in (bytes(64), b"maker notes", bytes(5000)):
        path = save(tmp_path, "tail.jpg", data + tail)
        assert check_image(path).width == 96
        assert imread_bgr(path).shape == (64, 96, 3)
        assert path.read_bytes() == data + tail
    assert jpeg_has_end(data + bytes(64))
    assert not jpeg_has_end(data[:-2])


def test_damaged_png(tmp_path: Path) -> None:
    data = encode(paint())
    assert png_damage(data) is None
    with pytest.raises(ImageError, match="cut off"):
        check_image(save(tmp_path, "cut.png", data[: len(data) // 2]))
    with pytest.raises(ImageError, match="checksum"):
        check_image(save(tmp_path, "flip.png", data[:60] + bytes([data[60] ^ 1]) + data[61:]))


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "0 bytes"), (b"just text", "no picture"), (b"<html></html>", "web page"), (b"BM broken", "damaged BMP")],
)
def test_other_files_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = save(tmp_path, "x.jpg", data)
    for read in (check_image, imread_bgr):
        with pytest.raises(ImageError, match=words) as caught:
            read(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC .*convert it"),
        (b"\0\0\0\x20ftypavif\0\0\0\0", "AVIF"),
        (b"\0\0\0\x20ftypisom\0\0\2\0", "video"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"GIF89a", "GIF"),
        (b"%PDF-1.7\n", "PDF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"<html><body>404", "web page"),
        (b"PK\3\4\x14\0", "archive"),
        (b"\x93NUMPY\1\0", "NumPy"),
    ],
)
def test_what_lies_under_the_name_of_a_picture_is_told(tmp_path: Path, head: bytes, words: str) -> None:
    path = save(tmp_path, "a.jpg", head + bytes(300))
    for read in (check_image, imread_bgr):
        with pytest.raises(ImageError, match=words):
            read(path)


def test_small_pictures_are_left_out_of_training(tmp_path: Path) -> None:
    path = save(tmp_path, "tiny.png", encode(paint(9, 40, ())))
    with pytest.raises(ImageError, match="9 x 40"):
        check_image(path)
    assert imread_bgr(path).shape == (40, 9, 3)


def test_folder_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        check_image(tmp_path)


def test_headers_of_nonsense_raise_nothing() -> None:
    rng = np.random.default_rng(0)
    heads = (b"\xff\xd8\xff\xe1", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"II*\0", b"BM", b"")
    for head in heads:
        for length in range(0, 60, 3):
            read_header(head + rng.bytes(length))
    assert image_kind(b"GIF89a") == ""
    assert read_header(b"\xff\xd8\xff\xe0" + struct.pack(">H", 0)).width == 0


# ------------------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("height", "width", "wanted"),
    [(333, 500, (426, 640)), (375, 1242, (193, 640)), (100, 57, (640, 364)), (6500, 10, (640, 1)), (640, 1, (640, 1))],
)
def test_long_side(height: int, width: int, wanted: tuple[int, int]) -> None:
    image = np.zeros((height, width, 3), np.uint8)
    assert resize_long_side(image, 640, smooth=True).shape[:2] == wanted
    assert fitted_size(width, height, 640) == wanted[::-1]


def test_same_size_is_not_copied() -> None:
    image = np.zeros((64, 40, 3), np.uint8)
    assert resize_long_side(image, 64, smooth=False) is image


@pytest.mark.parametrize(
    ("shape", "auto", "scaleup", "out", "pad"),
    [
        ((427, 640), True, True, (448, 640), (0, 10.5)),
        ((427, 640), False, True, (640, 640), (0, 106.5)),
        ((333, 500), True, True, (448, 640), (0, 11)),
        ((1080, 1920), True, True, (384, 640), (0, 12)),
        ((375, 1242), True, True, (224, 640), (0, 15.5)),
        ((100, 57), True, True, (640, 384), (9.5, 0)),
        ((100, 57), False, True, (640, 640), (137.5, 0)),
        ((333, 500), True, False, (352, 512), (6, 9.5)),
        ((100, 57), True, False, (128, 64), (3.5, 14)),
    ],
)
def test_letterbox_table(
    shape: tuple[int, int], auto: bool, scaleup: bool, out: tuple[int, int], pad: tuple[float, float]
) -> None:
    image, ratio, padding = letterbox(np.zeros((*shape, 3), np.uint8), 640, auto=auto, scaleup=scaleup)
    assert image.shape[:2] == out
    assert padding == pad
    assert ratio[0] == ratio[1]
    assert (image[0, 0] == 114).all()


def test_letterbox_keeps_a_side_of_one_pixel() -> None:
    assert letterbox(np.zeros((6500, 10, 3), np.uint8), 320, auto=False)[0].shape == (320, 320, 3)


def test_letterbox_against_reference(golden: Callable[[str], Path]) -> None:
    for case in json.loads(golden("ops/letterbox.json").read_text())["cases"]:
        options = {key: case[key] for key in ("auto", "scaleFill", "scaleup", "stride")}
        image, ratio, pad = letterbox(pattern(case["shape"]), case["new_shape"], (114, 114, 114), **options)
        assert list(image.shape[:2]) == case["out_shape"]
        np.testing.assert_allclose(ratio, case["ratio"], atol=1e-9)
        np.testing.assert_allclose(pad, case["pad"], atol=1e-9)
        samples = np.array(case["pixels"])
        assert np.abs(image[samples[:, 0], samples[:, 1]].astype(int) - samples[:, 2:]).max() <= 1
        assert abs(image.mean() - case["mean"]) < 0.05
    with np.load(golden("ops/letterbox.npz"), allow_pickle=False) as stored:
        meta = json.loads(str(stored["meta"]))
        for name, case in meta.items():
            options = {key: case[key] for key in ("auto", "scaleFill", "scaleup", "stride") if key in case}
            image = letterbox(stored[f"{name}.image"], case["new_shape"], (114, 114, 114), **options)[0]
            assert np.abs(image.astype(int) - stored[f"{name}.output"]).max() <= 1


# ---------------------------------------------------------------------------------------------------------- a region


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_region_is_counted_in_the_turned_picture(tmp_path: Path, orientation: int) -> None:
    path = save(tmp_path, "turned.jpg", with_pillow(paint(), "JPEG", orientation))
    whole = imread_bgr(path)
    region = read_region(path, 5, 8, 20, 11)
    assert region.original == whole.shape[:2]
    assert np.array_equal(region.image, whole[8:19, 5:25])
    assert region.image.base is None
    height, width = region.original
    assert np.array_equal(read_region(path, 0, 0, width, height).image, whole)


@pytest.mark.parametrize("place", [(-1, 0, 5, 5), (0, 0, 0, 5), (90, 0, 10, 5), (0, 60, 5, 5)])
def test_region_outside_is_refused(tmp_path: Path, place: tuple[int, int, int, int]) -> None:
    path = save(tmp_path, "a.png", encode(paint(96, 64)))
    with pytest.raises(ValueError, match="96 x 64 pixels"):
        read_region(path, *place)
