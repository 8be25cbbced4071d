"""What first and last bytes of pictures say, and when they are not enough."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.drawing import encode, paint
from utils.data import headers
from utils.data.headers import image_kind, jpeg_has_end, peek_jpeg, png_damage, read_header, tiff_orientation
from utils.data.images import check_image

JPEG = encode(paint(96, 64), ".jpg")
PNG = encode(paint(96, 64), ".png")


def exif(orientation: int, order: str = "<") -> bytes:
    """EXIF segment of a JPEG with one entry, the orientation."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    tiff = mark + struct.pack(order + "IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    return b"\xff\xe1" + struct.pack(">H", len(tiff) + 8) + b"Exif\0\0" + tiff


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (JPEG, "jpeg"),
        (PNG, "png"),
        (encode(paint(), ".webp"), "webp"),
        (encode(paint(), ".tiff"), "tiff"),
        (encode(paint(), ".bmp"), "bmp"),
        (b"PF\n1 1\n-1\n", "pfm"),
        (b"<html>", ""),
        (b"", ""),
    ],
)
def test_content_decides(data: bytes, kind: str) -> None:
    assert image_kind(data) == kind


@pytest.mark.parametrize("data", [JPEG, PNG])
def test_sizes(data: bytes) -> None:
    header = read_header(data)
    assert (header.width, header.height, header.orientation, header.bit_depth) == (96, 64, 1, 8)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_turns_the_size(orientation: int, order: str) -> None:
    header = read_header(JPEG[:2] + exif(orientation, order) + JPEG[2:])
    assert header.orientation == orientation
    assert (header.width, header.height) == ((64, 96) if orientation >= 5 else (96, 64))


@pytest.mark.parametrize("orientation", [0, 9, 700])
def test_impossible_orientations_are_passed_over(orientation: int) -> None:
    assert read_header(JPEG[:2] + exif(orientation) + JPEG[2:]).orientation == 1


def test_peek_agrees_with_the_full_check(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    large = encode(noise, ".jpg")
    assert len(large) > headers.HEAD_BYTES
    variants = {"small": JPEG, "large": large, "turned": JPEG[:2] + exif(6) + JPEG[2:], "zeros": large + bytes(64)}
    for name, data in variants.items():
        path = tmp_path / f"{name}.jpg"
        path.write_bytes(data)
        header, facts = peek_jpeg(path), check_image(path)
        assert header is not None, name
        assert (header.width, header.height) == (facts.width, facts.height), name


def test_peek_leaves_whatever_is_doubtful_to_the_full_check(tmp_path: Path) -> None:
    comment = b"\xff\xfe" + struct.pack(">H", 60_000) + bytes(59_998)
    doubtful = {
        "cut": JPEG[: len(JPEG) // 2],
        "no_end": JPEG[:-2],
        "trailing": JPEG + b"rubbish",
        "long_header": JPEG[:2] + comment * 2 + JPEG[2:],
        "png": PNG,
        "text": b"hello",
        "empty": b"",
    }
    for name, data in doubtful.items():
        path = tmp_path / f"{name}.jpg"
        path.write_bytes(data)
        assert peek_jpeg(path) is None, name
    with pytest.raises(OSError):
        peek_jpeg(tmp_path)
    assert check_image(tmp_path / "long_header.jpg").width == 96


def test_damage() -> None:
    assert jpeg_has_end(JPEG)
    assert jpeg_has_end(JPEG + bytes(64))
    assert not jpeg_has_end(JPEG[:-2])
    assert png_damage(PNG) is None
    assert "cut off" in (png_damage(PNG[:-20]) or "")
    wrong = bytearray(PNG)
    wrong[60] ^= 1
    assert "checksum" in (png_damage(bytes(wrong)) or "")


@settings(max_examples=300)
@given(st.sampled_from([JPEG, PNG, encode(paint(), ".webp"), encode(paint(), ".tiff")]), st.data())
def test_no_bytes_are_too_strange(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data[: draw.draw(st.integers(0, len(data)))])
    for position in draw.draw(st.lists(st.integers(0, max(len(damaged) - 1, 0)), max_size=8)) if damaged else ():
        damaged[position] = draw.draw(st.integers(0, 255))
    header = read_header(bytes(damaged))
    assert 1 <= header.orientation <= 8
    assert min(header.width, header.height) >= 0
    assert 1 <= tiff_orientation(bytes(damaged)) <= 8
    png_damage(bytes(damaged))
