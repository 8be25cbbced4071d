"""Pictures in and out: decode to three 8-bit BGR channels, read a part, check a file, letterbox.

Training, validation and detection read through `imread_bgr`, so that all see the same pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from utils.data.decoder import decode
from utils.data.headers import (
    FLOAT_SAMPLES,
    JPEG_END,
    UNSIGNED_SAMPLES,
    ImageHeader,
    foreign_kind,
    image_kind,
    jpeg_has_end,
    png_damage,
    read_header,
)

IMAGE_SUFFIXES = frozenset((".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp", ".pfm"))
MIN_SIDE = 10  # pixels; smaller pictures hold nothing to learn from
MAX_PIXELS = 2**30  # OpenCV's own limit
FILL = (114, 114, 114)  # grey of letterbox borders and empty mosaic areas
_PLAIN = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
# EXIF orientation -> OpenCV calls that turn the stored picture upright
_TURNS: dict[int, tuple[Callable[[np.ndarray], np.ndarray], ...]] = {
    2: (lambda im: cv2.flip(im, 1),),
    3: (lambda im: cv2.rotate(im, cv2.ROTATE_180),),
    4: (lambda im: cv2.flip(im, 0),),
    5: (cv2.transpose,),
    6: (lambda im: cv2.rotate(im, cv2.ROTATE_90_CLOCKWISE),),
    7: (cv2.transpose, lambda im: cv2.rotate(im, cv2.ROTATE_180)),
    8: (lambda im: cv2.rotate(im, cv2.ROTATE_90_COUNTERCLOCKWISE),),
}


class ImageError(ValueError):
    """A picture file that cannot be used; the message names the file and the reason."""


@dataclass(frozen=True)
class ImageFacts:
    """Outcome of `check_image`: size of the turned picture and a remark about a usable but odd file."""

    width: int
    height: int
    remark: str | None = None


def imread_bgr(path: str | Path, *, allow_partial: bool = False) -> np.ndarray:
    """Read any picture as a contiguous (H, W, 3) uint8 BGR array, turned upright.

    Alpha is dropped, more than 8 bits are scaled, the first frame or page counts. With allow_partial a cut-off JPEG
    gives what can be decoded. Raises ImageError (unreadable) or OSError (cannot be opened).
    """
    return decode_bgr(_read_bytes(path), str(path), allow_partial=allow_partial)


def _read_bytes(path: str | Path) -> np.ndarray:
    """All bytes of a file as an array; opened by Python, so that any name works on any system."""
    data = np.fromfile(path, np.uint8)
    if not data.size:
        raise ImageError(f"{path}: empty file (0 bytes)")
    return data


def decode_bgr(data: np.ndarray, name: str, *, allow_partial: bool = False) -> np.ndarray:
    """Decode encoded bytes (uint8 array) as `imread_bgr` does; name is used in messages."""
    view = memoryview(data)
    kind = image_kind(view)
    if kind == "tiff":
        _refuse_depth(read_header(view), name)
    image, damage = decode(data, _PLAIN)
    if damage and not allow_partial:
        raise ImageError(f"{name}: JPEG is cut off or damaged, although it ends like a whole one ({damage})")
    if image is None and kind == "jpeg":
        if not allow_partial and not _jpeg_is_complete(data):
            raise ImageError(f"{name}: JPEG is cut off, part of the picture data is missing")
        image = decode(_with_tail(data, JPEG_END), _PLAIN).image
    elif image is None or kind == "pfm":
        image = _decode_float(data)
    if image is None:
        foreign = foreign_kind(view)
        detail = f"it is {foreign}" if foreign else "the content is no picture format known here"
        detail = f"damaged {kind.upper()} data" if kind else detail
        raise ImageError(f"{name}: cannot be decoded, {detail}")
    return _upright(image, kind, view)


def _refuse_depth(header: ImageHeader, name: str) -> None:
    """Raise ImageError for a TIFF of numbers that are no picture to any decoder here."""
    is_float = header.sample_format == FLOAT_SAMPLES
    if header.bit_depth in (32, 64) if is_float else header.bit_depth <= 16:
        return
    what = "float" if is_float else "integer"
    raise ImageError(
        f"{name}: TIFF with {header.bit_depth}-bit {what} values, which cannot be read; expected 8 or 16 bits or "
        "32-bit floats. To convert it: magick in.tif -auto-level -depth 8 out.tif"
    )


def _decode_float(data: np.ndarray) -> np.ndarray | None:
    """Floating-point pictures (PFM, some TIFF): values up to 1 are taken as fractions, others as 0 to 255."""
    image = decode(data, cv2.IMREAD_UNCHANGED).image
    if image is None or image.dtype not in (np.float32, np.float64):
        return None
    image = np.repeat(image[..., None], 3, 2) if image.ndim == 2 else image[..., :3]
    image = np.nan_to_num(image, posinf=255.0, neginf=0.0)
    factor = 255.0 if image.max(initial=0.0) <= 1.0 else 1.0
    return np.ascontiguousarray(np.clip(np.rint(image * factor), 0, 255).astype(np.uint8))


def _upright(image: np.ndarray, kind: str, data: memoryview) -> np.ndarray:
    """Turn a decoded picture by its EXIF orientation; TIFF comes out of the decoder turned already."""
    if kind in ("jpeg", "png", "webp"):
        for turn in _TURNS.get(read_header(data).orientation, ()):
            image = turn(image)
    return image


def _with_tail(data: np.ndarray, tail: bytes) -> np.ndarray:
    return np.concatenate((data, np.frombuffer(tail, np.uint8)))


def _jpeg_is_complete(data: np.ndarray) -> bool:
    """Whether a JPEG without end marker holds all its picture data.

    Appended noise is ignored by the decoder when all blocks were already there, and shows up as pixels otherwise.
    """
    noise = bytes(range(1, 255)) * 256
    plain = decode(_with_tail(data, JPEG_END), _PLAIN).image
    noisy = decode(_with_tail(data, noise + JPEG_END), _PLAIN).image
    return plain is not None and noisy is not None and np.array_equal(plain, noisy)


class Region(NamedTuple):
    """A part of a picture (h, w, 3) and the (height, width) of the whole picture it was cut from."""

    image: np.ndarray
    original: tuple[int, int]


def read_region(path: str | Path, x: int, y: int, w: int, h: int) -> Region:
    """Read the w x h pixels whose top left corner is (x, y), counted in the picture as seen (turned upright).

    The part is a copy, so that the whole picture does not stay in memory. Raises ValueError where the rectangle is
    empty or not inside the picture, and what `imread_bgr` raises.
    """
    image = imread_bgr(path)
    height, width = image.shape[:2]
    if w < 1 or h < 1 or x < 0 or y < 0 or x + w > width or y + h > height:
        raise ValueError(
            f"{path}: no part of {w} x {h} pixels at x={x}, y={y}; the picture has {width} x {height} pixels, and the "
            "part must lie inside"
        )
    return Region(image[y : y + h, x : x + w].copy(), (height, width))


def check_image(path: str | Path) -> ImageFacts:
    """Judge a picture file for training; cheap for sound JPEG and PNG files, decoding whatever is doubtful.

    Raises ImageError with file and reason for files to be left out, OSError where the file cannot be opened.
    """
    data = _read_bytes(path)
    view = memoryview(data)
    header = read_header(view)
    width, height, remark = header.width, header.height, None
    check_pixels(path, width, height)
    damage = png_damage(view) if header.kind == "png" else None
    if damage:
        raise ImageError(f"{path}: {damage}")
    is_doubtful = header.kind == "jpeg" and not jpeg_has_end(view)
    if is_doubtful and not _jpeg_is_complete(data):
        raise ImageError(f"{path}: JPEG is cut off, part of the picture data is missing")
    if is_doubtful or min(width, height) <= 0:
        height, width = decode_bgr(data, str(path)).shape[:2]
    if min(width, height) < MIN_SIDE:
        raise ImageError(f"{path}: {width} x {height} pixels, smaller than the {MIN_SIDE} pixels needed on each side")
    if header.bit_depth > 8 or header.sample_format != UNSIGNED_SAMPLES:
        remark = _range_remark(data)
    return ImageFacts(width, height, remark)


def check_pixels(path: str | Path, width: int, height: int) -> None:
    """Raise ImageError for sizes that no decoder here takes: a few bytes can announce any number of pixels."""
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{path}: its header announces {width} x {height} pixels, more than the {MAX_PIXELS:,} that can be decoded"
        )


def _range_remark(data: np.ndarray) -> str | None:
    """Warn of deep files that come out almost black, such as 12-bit cameras write, almost white, or wrapped round."""
    deep = decode(data, cv2.IMREAD_UNCHANGED).image
    if deep is None or deep.dtype == np.uint8:
        return None
    values = deep[..., :3] if deep.ndim == 3 else deep
    if deep.dtype in (np.uint16, np.int16) and values.max() < 4096 and values.min() >= 0:
        largest = int(values.max())
        return (
            f"16-bit picture whose largest value is {largest} of 65535: after scaling the range to 8 bits almost black"
        )
    if deep.dtype in (np.int8, np.int16) and values.min() < 0:
        return f"signed picture with negative values down to {values.min()}, which come out as bright pixels"
    if deep.dtype in (np.float32, np.float64) and np.nanmax(values, initial=0.0) > 255:
        return f"picture of floats whose largest value is {np.nanmax(values):g}: all beyond 255 becomes white"
    return None


def image_size(path: str | Path) -> tuple[int, int]:
    """Return (width, height) of the turned picture, without decoding where the header tells."""
    data = _read_bytes(path)
    header = read_header(memoryview(data))
    if header.width and header.height:
        return header.width, header.height
    height, width = decode_bgr(data, str(path)).shape[:2]
    return width, height


def fitted_size(width: int, height: int, size: int) -> tuple[int, int]:
    """(width, height) after scaling the long side to size; fractions are cut, no side shrinks to nothing."""
    ratio = size / max(width, height)
    return max(int(width * ratio), 1), max(int(height * ratio), 1)


def resize_long_side(image: np.ndarray, size: int, *, smooth: bool) -> np.ndarray:
    """Scale so that the long side is size pixels: bilinear for training (smooth) and enlarging, else by area."""
    height, width = image.shape[:2]
    if max(height, width) == size:
        return image
    is_bilinear = smooth or size > max(height, width)
    method = cv2.INTER_LINEAR if is_bilinear else cv2.INTER_AREA
    return cv2.resize(image, fitted_size(width, height, size), interpolation=method)


def letterbox(
    im: np.ndarray,
    new_shape: int | Sequence[int] = (640, 640),
    color: tuple[int, int, int] = FILL,
    auto: bool = True,
    scaleFill: bool = False,  # noqa: N803 - upstream's argument name
    scaleup: bool = True,
    stride: int = 32,
) -> tuple[np.ndarray, tuple[float, float], tuple[float, float]]:
    """Scale a picture into new_shape (height, width) and pad it evenly; auto pads to a multiple of stride only.

    Returns the picture, the ratios (width, height) and the padding (dw, dh) of one side in pixels.
    """
    height, width = im.shape[:2]
    target_h, target_w = (new_shape, new_shape) if isinstance(new_shape, int) else new_shape
    ratio = min(target_h / height, target_w / width)
    if not scaleup:
        ratio = min(ratio, 1.0)
    ratios = (ratio, ratio)
    new_w, new_h = max(round(width * ratio), 1), max(round(height * ratio), 1)
    dw, dh = float(target_w - new_w), float(target_h - new_h)
    if auto:
        dw, dh = dw % stride, dh % stride
    elif scaleFill:
        dw, dh, new_w, new_h = 0.0, 0.0, target_w, target_h
        ratios = (target_w / width, target_h / height)
    dw, dh = dw / 2, dh / 2
    if (width, height) != (new_w, new_h):
        im = cv2.resize(im, (new_w, new_h), interpolation=cv2.INTER_LINEAR)
    top, bottom = round(dh - 0.1), round(dh + 0.1)
    left, right = round(dw - 0.1), round(dw + 0.1)
    if top or bottom or left or right:
        im = cv2.copyMakeBorder(im, top, bottom, left, right, cv2.BORDER_CONSTANT, value=color)
    return im, ratios, (dw, dh)


def aspect_ratios(shapes: np.ndarray) -> np.ndarray:
    """Height over width (N,) of shapes (N, 2) width, height."""
    return shapes[:, 1] / shapes[:, 0]


def rectangle_shapes(shapes: np.ndarray, batch_size: int, size: int, stride: int, pad: float) -> np.ndarray:
    """Picture shape (height, width) of every batch, int64 (batches, 2), for shapes sorted by aspect ratio."""
    aspect = aspect_ratios(shapes)
    ratios = []
    for start in range(0, len(aspect), batch_size):
        low, high = aspect[start], aspect[min(start + batch_size, len(aspect)) - 1]
        ratios.append((high, 1.0) if high < 1 else (1.0, 1 / low) if low > 1 else (1.0, 1.0))
    return (np.ceil(np.array(ratios) * size / stride + pad) * stride).astype(np.int64)
