"""Small pictures whose boxes are filled with the colour of their class, so that pixels and labels can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

Box = tuple[int, float, float, float, float]  # class, x, y, w, h as fractions
COLOURS = {0: (20, 20, 225), 1: (20, 190, 20), 2: (220, 60, 20), 3: (20, 215, 215)}  # BGR
# No flip or quarter turn maps these onto each other.
BOXES: tuple[Box, ...] = ((0, 0.2, 0.25, 0.24, 0.3), (1, 0.72, 0.3, 0.3, 0.24), (2, 0.6, 0.78, 0.2, 0.26))


def paint(width: int = 96, height: int = 64, boxes: Sequence[Box] = BOXES) -> np.ndarray:
    """Dark picture (H, W, 3) BGR with one flat rectangle per box."""
    image = np.full((height, width, 3), 40, np.uint8)
    for cls, x, y, w, h in boxes:
        left, top = round((x - w / 2) * width), round((y - h / 2) * height)
        right, bottom = round((x + w / 2) * width), round((y + h / 2) * height)
        image[max(top, 0) : bottom, max(left, 0) : right] = COLOURS[cls]
    return image


def pattern(shape: tuple[int, int]) -> np.ndarray:
    """The reference picture: 255 - |((2x + 3y + 60c) mod 510) - 255|."""
    y, x, c = np.ogrid[: shape[0], : shape[1], :3]
    return (255 - np.abs((2 * x + 3 * y + 60 * c) % 510 - 255)).astype(np.uint8)


def encode(image: np.ndarray, suffix: str = ".png") -> bytes:
    """Bytes of an encoded picture."""
    done, data = cv2.imencode(suffix, image)
    assert done
    return data.tobytes()


def label_text(boxes: Sequence[Box] = BOXES) -> str:
    """Rows of a label file."""
    return "".join(f"{row[0]} " + " ".join(f"{value:.6f}" for value in row[1:]) + "\n" for row in boxes)


def write_set(root: Path, files: Mapping[str, tuple[bytes | np.ndarray, str | None]], split: str = "train") -> Path:
    """Write images/SPLIT and labels/SPLIT below root from {name: (picture, label text or None)}; gives images/SPLIT."""
    images, labels = root / "images" / split, root / "labels" / split
    images.mkdir(parents=True, exist_ok=True)
    labels.mkdir(parents=True, exist_ok=True)
    for name, (picture, text) in files.items():
        data = picture if isinstance(picture, bytes) else encode(picture, Path(name).suffix.lower())
        (images / name).write_bytes(data)
        if text is not None:
            (labels / name).with_suffix(".txt").write_text(text, encoding="utf-8")
    return images


def colour_faults(
    image_bgr: np.ndarray, boxes: np.ndarray, tolerance: float = 60, grey: bool = False, shrink: float = 0.6
) -> list[str]:
    """Complaints about boxes (n, 5) class, x, y, w, h as fractions whose middle does not have their class's colour."""
    faults = []
    height, width = image_bgr.shape[:2]
    for cls, x, y, w, h in np.asarray(boxes, np.float64):
        left, right = ((x + sign * shrink * w / 2) * width for sign in (-1, 1))
        top, bottom = ((y + sign * shrink * h / 2) * height for sign in (-1, 1))
        rows = slice(max(int(top), 0), max(int(np.ceil(bottom)), int(top) + 1))
        columns = slice(max(int(left), 0), max(int(np.ceil(right)), int(left) + 1))
        middle = image_bgr[rows, columns].reshape(-1, 3).mean(0)
        wanted = np.full(3, 225.0) if grey else np.array(COLOURS[int(cls)], np.float64)
        if np.abs(middle - wanted).max() > tolerance:
            faults.append(f"class {int(cls)}: {middle.round()} instead of {wanted}")
    return faults
