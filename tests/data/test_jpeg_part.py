"""Upper rows and shrunk versions of JPEG files, against whole ones."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from utils.data.images import imread_bgr
from utils.data.jpeg_part import decoded_rows, jpeg_layout, read_jpeg_part

WIDTH, HEIGHT = 150, 130


def picture() -> np.ndarray:
    noise = np.random.default_rng(0).integers(0, 256, (10, 12, 3), np.uint8)
    return cv2.resize(noise, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.jpg"
    Image.fromarray(picture()).save(path, quality=90)
    return path


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 14, 15, 64, 110, 126, 127, 130])
def test_upper_rows_are_the_same(
    tmp_path: Path, subsampling: int, rows: int, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(picture()).save(path, quality=90, subsampling=subsampling)
    part = read_jpeg_part(path, (WIDTH, HEIGHT), rows)
    assert part is not None
    assert part.shape == (decoded_rows(rows, HEIGHT), WIDTH, 3)
    assert np.array_equal(part[:rows], imread_bgr(path)[:rows])
    assert capfd.readouterr() == ("", "")  # the decoder complains to the terminal where it misses something


@pytest.mark.parametrize("shrink", [2, 4])
@pytest.mark.parametrize("rows", [None, 60])
def test_shrunk_is_like_averaged(file: Path, shrink: int, rows: int | None) -> None:
    small = read_jpeg_part(file, (WIDTH, HEIGHT), rows, shrink)
    assert small is not None
    used = (rows or HEIGHT) // shrink
    whole = imread_bgr(file)[: used * shrink, : WIDTH // shrink * shrink]
    mean = whole.reshape(used, shrink, -1, shrink, 3).mean((1, 3))
    assert np.abs(small[:used, : mean.shape[1]] - mean).mean() < 3


@pytest.mark.parametrize(
    "options",
    [{"progressive": True}, {"restart_marker_blocks": 4}, {"exif": "turned"}, {"mode": "L"}, {"mode": "CMYK"}],
)
def test_other_kinds_are_left_to_the_whole_decoder(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "a.jpg"
    options = dict(options)
    if "exif" in options:
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    Image.fromarray(picture()).convert(str(options.pop("mode", "RGB"))).save(path, **options)
    assert jpeg_layout(path.read_bytes()) is None
    assert read_jpeg_part(path, (WIDTH, HEIGHT), 20) is None
    assert read_jpeg_part(path, (WIDTH, HEIGHT), None, 2) is None


def test_unexpected_files(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    assert read_jpeg_part(file, (HEIGHT, WIDTH), 20) is None
    for length in (0, 2, 5, 30, 300, len(data) - 2):
        file.write_bytes(data[:length])
        assert read_jpeg_part(file, (WIDTH, HEIGHT), 20) is None
    with pytest.raises(FileNotFoundError):
        read_jpeg_part(tmp_path / "none.jpg", (WIDTH, HEIGHT), 20)
