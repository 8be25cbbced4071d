"""TIFF files of every number type: read where it can be done, else refused by what they are, never as damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.data.drawing import BOXES, colour_faults, paint
from utils.data.images import ImageError, check_image, imread_bgr
from utils.data.scan import scan_dataset

UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # values of the tag SampleFormat


def tiff(array: np.ndarray, sample_format: int, orientation: int = 1, order: str = "<") -> bytes:
    """Uncompressed TIFF of an array (H, W) or (H, W, C), RGB(A)."""
    array = array.astype(array.dtype.newbyteorder(order))
    height, width, channels = (*array.shape, 1)[:3]
    bits, data = array.dtype.itemsize * 8, array.tobytes()
    entries = [
        (256, 4, [width]), (257, 4, [height]), (258, 3, [bits] * channels), (259, 3, [1]),
        (262, 3, [1 if channels == 1 else 2]), (273, 4, [0]), (274, 3, [orientation]), (277, 3, [channels]),
        (278, 4, [height]), (279, 4, [len(data)]), (339, 3, [sample_format] * channels),
    ]  # fmt: skip
    extra_at = 8 + 2 + 12 * len(entries) + 4
    extra = b"".join(struct.pack(f"{order}{len(v)}H", *v) for _, kind, v in entries if kind == 3 and len(v) > 2)
    rows, used = b"", 0
    for tag, kind, values in entries:
        if tag == 273:
            values = [extra_at + len(extra)]
        packed = struct.pack(f"{order}{len(values)}{'H' if kind == 3 else 'I'}", *values)
        if len(packed) > 4:
            packed, used = struct.pack(f"{order}I", extra_at + used), used + len(packed)
        rows += struct.pack(f"{order}HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return mark + struct.pack(f"{order}IH", 8, len(entries)) + rows + bytes(4) + extra + data


def with_channels(channels: int) -> np.ndarray:
    """The painted picture as RGB, RGBA or grey, (H, W, C) or (H, W) uint8."""
    image = paint()[..., ::-1]
    return image.mean(2).astype(np.uint8) if channels == 1 else np.dstack([image, image[..., :1]])[..., :channels]


@pytest.mark.parametrize("kind", ["f4", "f8"])
@pytest.mark.parametrize("scale", [1.0, 255.0])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("order", ["<", ">"])
def test_floats_are_read(tmp_path: Path, kind: str, scale: float, channels: int, order: str) -> None:
    path = tmp_path / "a.tif"
    picture = with_channels(channels)
    path.write_bytes(tiff((picture / 255 * scale).astype(kind), FLOAT, order=order))
    assert check_image(path).height == 64
    image = imread_bgr(path)
    assert image.shape == (64, 96, 3)
    assert image.dtype == np.uint8 and image.flags.c_contiguous
    wanted = paint() if channels > 1 else np.repeat(picture[..., None], 3, 2)
    assert np.abs(image.astype(int) - wanted).max() <= 1
    if channels > 1:
        assert colour_faults(image, np.array(BOXES)) == []


@pytest.mark.parametrize("channels", [1, 3])
def test_floats_are_turned_once(tmp_path: Path, channels: int) -> None:
    path = tmp_path / "a.tif"
    path.write_bytes(tiff((with_channels(channels) / 255).astype("f4"), FLOAT, orientation=3))
    turned = imread_bgr(path)[::-1, ::-1]
    path.write_bytes(tiff((with_channels(channels) / 255).astype("f4"), FLOAT))
    assert np.array_equal(turned, imread_bgr(path))


def test_floats_beyond_255_and_nonsense_are_remarked(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    values = with_channels(3).astype("f4") * 40
    path.write_bytes(tiff(values, FLOAT))
    assert "largest value is 9000" in (check_image(path).remark or "")
    values[0, 0] = np.nan
    values[1, 1] = np.inf
    path.write_bytes(tiff(values / values[5].max() / 2, FLOAT))
    assert imread_bgr(path).shape == (64, 96, 3)


@pytest.mark.parametrize(
    ("kind", "sample_format", "words"),
    [
        ("f2", FLOAT, "16-bit float"),
        ("u4", UNSIGNED, "32-bit integer"),
        ("i4", SIGNED, "32-bit integer"),
        ("u8", UNSIGNED, "64-bit integer"),
        ("i8", SIGNED, "64-bit integer"),
    ],
)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_other_depths_are_named_with_a_way_out(
    tmp_path: Path, kind: str, sample_format: int, words: str, channels: int, capfd: pytest.CaptureFixture
) -> None:
    path = tmp_path / "a.tif"
    path.write_bytes(tiff(with_channels(channels).astype(kind), sample_format))
    for read in (check_image, imread_bgr):
        with pytest.raises(ImageError, match=words) as caught:
            read(path)
        assert "damaged" not in str(caught.value)
        assert "-depth 8" in str(caught.value)
    assert "sample_format" not in capfd.readouterr().err


def test_signed_values_are_remarked(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    for kind in ("i1", "i2"):
        path.write_bytes(tiff((with_channels(1).astype("i2") - 60).astype(kind), SIGNED))
        assert "negative" in (check_image(path).remark or "")
    path.write_bytes(tiff(with_channels(1).astype("i2"), SIGNED))
    assert "almost black" in (check_image(path).remark or "")
    path.write_bytes(tiff(with_channels(1).astype("i2") * 128, SIGNED))
    assert check_image(path).remark is None


def test_a_damaged_file_is_still_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    path.write_bytes(tiff(with_channels(3), UNSIGNED)[:200])
    with pytest.raises(ImageError, match="damaged TIFF"):
        imread_bgr(path)


def test_the_scan_names_the_depth(tmp_path: Path, messages: list[str]) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.tif").write_bytes(tiff(with_channels(3), UNSIGNED))
    (folder / "b.tif").write_bytes(tiff(with_channels(3).astype("u4"), UNSIGNED))
    assert len(scan_dataset(folder, use_cache=False)) == 1
    assert any("b.tif" in message and "32-bit integer" in message for message in messages)
