"""A set of JPEG files of one size and about one weight, so that loading can be compared between machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np

from utils.data.images import IMAGE_SUFFIXES, ImageError, imread_bgr

WIDTH, HEIGHT = 640, 480
TARGET_BYTES = 63_000  # mean weight of the pictures of the COCO training set at this size
QUALITY = (30, 99)  # lowest and highest JPEG quality tried
CLASSES = 80
MEAN_OBJECTS = 7  # boxes per picture, as in COCO
SOURCES = 200  # pictures kept in memory to cut from


def make_pictures(folder: Path, number: int, sources: Sequence[Path] = (), seed: int = 0) -> Path:
    """Write `number` JPEG files with label files below folder and return the folder of the pictures.

    The content is cut out of the pictures found under `sources`, or drawn (clouds of noise) where there are none.
    """
    images, labels = folder / "images" / "train", folder / "labels" / "train"
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    originals = read_sources(sources)

    def write(index: int) -> None:
        rng = np.random.default_rng([seed, index])
        picture = cut(originals[index % len(originals)], rng) if originals else clouds(rng)
        (images / f"{index:06d}.jpg").write_bytes(encode_to_size(picture, TARGET_BYTES))
        (labels / f"{index:06d}.txt").write_text(random_rows(rng), encoding="utf-8")

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(write, range(number)))
    return images


def read_sources(folders: Sequence[Path]) -> list[np.ndarray]:
    """Pictures under some folders, at most SOURCES of them; files that cannot be read are passed over."""
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    pictures = []
    for file in files[:: max(1, len(files) // SOURCES)][:SOURCES]:
        try:
            pictures.append(imread_bgr(file))
        except (ImageError, OSError):
            continue
    return pictures


def cut(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random part (H, W, 3) of a picture with the proportions of the set, scaled to its size, perhaps mirrored."""
    height, width = picture.shape[:2]
    share = rng.uniform(0.6, 1.0) * min(width / WIDTH, height / HEIGHT)
    part_w, part_h = max(int(WIDTH * share), 1), max(int(HEIGHT * share), 1)
    left, top = int(rng.integers(width - part_w + 1)), int(rng.integers(height - part_h + 1))
    part = cv2.resize(picture[top : top + part_h, left : left + part_w], (WIDTH, HEIGHT))
    return cv2.flip(part, 1) if rng.random() < 0.5 else part


def clouds(rng: np.random.Generator) -> np.ndarray:
    """Noise of several grain sizes (H, W, 3), with about as much detail as a photograph."""
    picture = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for grain, strength in ((120, 60), (30, 30), (8, 14), (1, 5)):
        field = rng.standard_normal((max(HEIGHT // grain, 2), max(WIDTH // grain, 2), 3), dtype=np.float32)
        picture += strength * cv2.resize(field, (WIDTH, HEIGHT), interpolation=cv2.INTER_LINEAR)
    return np.clip(picture + 120, 0, 255).astype(np.uint8)


def encode_to_size(picture: np.ndarray, target: int) -> bytes:
    """JPEG bytes of the highest quality that stays at or below target bytes, found by halving."""
    low, high = QUALITY
    best = _jpeg(picture, low)
    while low < high:
        middle = (low + high + 1) // 2
        data = _jpeg(picture, middle)
        if len(data) <= target:
            low, best = middle, data
        else:
            high = middle - 1
    return best


def _jpeg(picture: np.ndarray, quality: int) -> bytes:
    done, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise RuntimeError("this build of OpenCV cannot write JPEG files")
    return data.tobytes()


def random_rows(rng: np.random.Generator) -> str:
    """Text of a label file with boxes inside the picture."""
    rows = []
    for _ in range(1 + rng.poisson(MEAN_OBJECTS - 1)):
        width, height = rng.uniform(0.05, 0.5, 2)
        x, y = rng.uniform(width / 2, 1 - width / 2), rng.uniform(height / 2, 1 - height / 2)
        rows.append(f"{rng.integers(CLASSES)} {x:.6f} {y:.6f} {width:.6f} {height:.6f}\n")
    return "".join(rows)
