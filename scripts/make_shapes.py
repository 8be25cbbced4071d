"""Render a labelled picture set of geometric shapes, for trying the software out without any download.

The class is the outline (rectangle, ellipse, triangle, star) and nothing else: colour, filling, size, rotation,
background, lines and strokes in the way, blur, light and JPEG quality all vary at random. The same seed gives
the same pictures.

    python scripts/make_shapes.py --folder ../datasets/shapes --train 400 --val 80 --test 24 --size 256
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

CLASS_NAMES = ("rectangle", "ellipse", "triangle", "star")
SPLITS = ("train", "val", "test")
DEFAULT_COUNTS = {"train": 400, "val": 80, "test": 24}

EMPTY_SHARE = 0.06  # pictures without any object
OBJECTS_PER_PICTURE = (1, 6)  # lowest, highest number asked for; crowded pictures may hold fewer
OBJECT_SIDE = (0.14, 0.45)  # long side of an object as a share of the picture side
MAX_COVER = 0.20  # share of the smaller of two boxes that may lie inside the other
MIN_VISIBLE = 0.70  # share of the outline's box that must lie inside the picture
MIN_CONTRAST = 100.0  # distance in BGR between an object and what is behind it
PLACING_TRIES = 20  # positions tried before an object is left out
OVERSAMPLING = 2  # pictures are drawn this much larger and reduced, which gives smooth edges


@dataclass(frozen=True)
class Shape:
    """One object: class index, outline and hole ((P, 2) points in pixels) and its box in pixels."""

    cls: int
    outline: np.ndarray
    hole: np.ndarray | None
    box_xyxy: np.ndarray


# --- backgrounds -------------------------------------------------------------------------------------------------


def _random_colour(rng: np.random.Generator, low: int = 20, high: int = 236) -> np.ndarray:
    return rng.integers(low, high, 3).astype(np.float32)


def _blend(mask: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Mix two colours by a mask (H, W) in 0..1."""
    return mask[..., None] * first + (1 - mask[..., None]) * second  # (H, W, 3)


def _ramp(rng: np.random.Generator, side: int) -> np.ndarray:
    """Linear ramp 0..1 (side, side) in a random direction."""
    angle = rng.uniform(0, 2 * np.pi)
    rows, columns = np.mgrid[0:side, 0:side].astype(np.float32)
    ramp = np.cos(angle) * columns + np.sin(angle) * rows
    return (ramp - ramp.min()) / (np.ptp(ramp) + 1e-6)


def _clouds(rng: np.random.Generator, side: int) -> np.ndarray:
    """Soft random structure 0..1 (side, side): coarse noise grids of several widths, enlarged and added."""
    clouds = np.zeros((side, side), np.float32)
    for cells, weight in ((3, 1.0), (7, 0.6), (17, 0.35), (41, 0.15)):
        grid = rng.random((cells, cells), dtype=np.float32)
        clouds += weight * cv2.resize(grid, (side, side), interpolation=cv2.INTER_CUBIC)
    return (clouds - clouds.min()) / (np.ptp(clouds) + 1e-6)


def _bands(rng: np.random.Generator, side: int) -> np.ndarray:
    """Waves 0..1 (side, side), sometimes crossed to a soft grid of squares."""
    waves = np.sin(2 * np.pi * rng.uniform(2, 9) * _ramp(rng, side))
    if rng.random() < 0.5:
        waves = waves * np.sin(2 * np.pi * rng.uniform(2, 9) * _ramp(rng, side))
    return (0.5 + 0.5 * waves).astype(np.float32)


def _background(rng: np.random.Generator, side: int) -> np.ndarray:
    """Picture (side, side, 3) float32 without objects: two or three random structures between random colours."""
    structures = (_ramp, _clouds, _bands)
    first = structures[rng.integers(len(structures))](rng, side)
    base = _random_colour(rng)
    picture = _blend(first, base, np.clip(base + rng.normal(0, 45, 3), 10, 245))
    layer = _clouds(rng, side) if rng.random() < 0.7 else _bands(rng, side)
    picture += (layer[..., None] - 0.5) * rng.uniform(10, 55) * rng.uniform(0.5, 1.0, 3)
    return np.clip(picture, 0, 255).astype(np.float32)


def _draw_distractors(rng: np.random.Generator, canvas: np.ndarray, most: int) -> None:
    """Draw lines, open arcs, specks and text-like strokes that belong to no class, in place."""
    side = canvas.shape[0]
    for _ in range(int(rng.integers(0, most + 1))):
        colour = tuple(float(value) for value in _random_colour(rng))
        thickness = max(1, int(side * rng.uniform(0.003, 0.012)))
        kind = rng.integers(4)
        if kind == 0:
            ends = rng.uniform(-0.1, 1.1, 4) * side
            cv2.line(canvas, _pixel(ends[:2]), _pixel(ends[2:]), colour, thickness, cv2.LINE_AA)
        elif kind == 1:
            axes = _pixel(rng.uniform(0.05, 0.35, 2) * side)
            start, span = rng.uniform(0, 360), rng.uniform(40, 170)
            centre = _pixel(rng.uniform(0, 1, 2) * side)
            cv2.ellipse(canvas, centre, axes, rng.uniform(0, 180), start, start + span, colour, thickness, cv2.LINE_AA)
        elif kind == 2:
            for point in rng.normal(rng.uniform(0, 1, 2), 0.06, (12, 2)) * side:
                cv2.circle(canvas, _pixel(point), thickness, colour, -1, cv2.LINE_AA)
        else:
            _draw_strokes(rng, canvas, colour, thickness)


def _draw_strokes(rng: np.random.Generator, canvas: np.ndarray, colour: tuple[float, ...], thickness: int) -> None:
    """Draw a short row of zigzag marks that looks like a word from afar, in place."""
    side = canvas.shape[0]
    height = side * rng.uniform(0.03, 0.08)
    start = rng.uniform((0, 0.05), (0.7, 0.95)) * side
    for letter in range(int(rng.integers(3, 8))):
        corner = start + (letter * height * 0.9, 0)
        points = corner + rng.uniform(0, 1, (int(rng.integers(3, 5)), 2)) * (height * 0.6, height)
        cv2.polylines(canvas, [points.round().astype(np.int32)], False, colour, thickness, cv2.LINE_AA)


def _pixel(point: np.ndarray) -> tuple[int, int]:
    return int(round(float(point[0]))), int(round(float(point[1])))


# --- objects -----------------------------------------------------------------------------------------------------


def _unit_outline(rng: np.random.Generator, cls: int) -> np.ndarray:
    """Outline (P, 2) of a class around the origin, not rotated, long side about 1."""
    if cls == 0:
        half = 0.5 * np.array([1.0, rng.uniform(0.45, 1.0)])
        return half * [[-1, -1], [1, -1], [1, 1], [-1, 1]]
    if cls == 1:
        angles = np.linspace(0, 2 * np.pi, 72, endpoint=False)
        return 0.5 * np.stack([np.cos(angles), rng.uniform(0.5, 1.0) * np.sin(angles)], axis=1)
    if cls == 2:
        angles = np.deg2rad([90, 210, 330]) + rng.uniform(-0.25, 0.25, 3)
        return 0.55 * np.stack([np.cos(angles), rng.uniform(0.75, 1.0) * np.sin(angles)], axis=1)
    tips = int(rng.integers(5, 7))
    radii = np.where(np.arange(2 * tips) % 2 == 0, 0.52, 0.52 * rng.uniform(0.36, 0.5))
    angles = np.pi * np.arange(2 * tips) / tips
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _place(rng: np.random.Generator, side: int, taken: Sequence[Shape], num_classes: int) -> Shape | None:
    """Return a shape at a free position, or None if PLACING_TRIES positions were all too crowded."""
    cls = int(rng.integers(num_classes))
    outline = _unit_outline(rng, cls)
    angle = rng.uniform(0, 2 * np.pi)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    low, high = OBJECT_SIDE
    outline = outline @ turn.T * side * low * (high / low) ** rng.random()  # sizes even on a logarithmic scale
    rim = rng.uniform(0.55, 0.75) if rng.random() < 0.3 else None
    for _ in range(PLACING_TRIES):
        moved = outline + rng.uniform(0.03, 0.97, 2) * side
        full = np.concatenate([moved.min(0), moved.max(0)])
        if _area(np.clip(full, 0, side)) < MIN_VISIBLE * _area(full):
            continue
        box = _visible_box(moved, side)
        if all(_cover(box, other.box_xyxy) <= MAX_COVER for other in taken):
            hole = None if rim is None else moved.mean(0) + (moved - moved.mean(0)) * rim
            return Shape(cls, moved, hole, box)
    return None


def _visible_box(outline: np.ndarray, side: int) -> np.ndarray:
    """Box (4,) around the part of an outline that lies inside the picture.

    Cutting the box of the whole outline instead would be too large where a slanted side leaves the picture.
    """
    steps = np.linspace(0, 1, 100)[:, None, None]
    points = (outline + steps * (np.roll(outline, -1, axis=0) - outline)).reshape(-1, 2)  # (100 * P, 2)
    points = points[((points >= 0) & (points <= side)).all(1)]
    return np.concatenate([points.min(0), points.max(0)])


def _area(box_xyxy: np.ndarray) -> float:
    return float(np.prod(np.clip(box_xyxy[2:] - box_xyxy[:2], 0, None)))


def _cover(first: np.ndarray, second: np.ndarray) -> float:
    """Common area of two boxes over the area of the smaller one."""
    common = np.concatenate([np.maximum(first[:2], second[:2]), np.minimum(first[2:], second[2:])])
    return _area(common) / min(_area(first), _area(second))


def _paint(rng: np.random.Generator, canvas: np.ndarray, shape: Shape) -> None:
    """Fill a shape with a colour, a gradient, stripes or a texture that stands out from what is behind, in place."""
    side = canvas.shape[0]
    mask = np.zeros((side, side), np.float32)
    cv2.fillPoly(mask, [shape.outline.round().astype(np.int32)], 1.0, cv2.LINE_AA)
    if shape.hole is not None:
        cv2.fillPoly(mask, [shape.hole.round().astype(np.int32)], 0.0, cv2.LINE_AA)
    behind = (canvas * mask[..., None]).sum((0, 1)) / max(float(mask.sum()), 1.0)
    colour = _contrasting_colour(rng, behind)
    second = np.clip(colour + rng.normal(0, 25, 3), 0, 255)
    structure = (_ramp, _bands, _clouds)[rng.integers(3)]
    filling = _blend(structure(rng, side), colour, second) if rng.random() < 0.6 else colour
    canvas[:] = mask[..., None] * filling + (1 - mask[..., None]) * canvas
    if rng.random() < 0.3:
        edge = tuple(float(value) for value in _contrasting_colour(rng, colour))
        thickness = max(1, round(side * 0.008))
        cv2.polylines(canvas, [shape.outline.round().astype(np.int32)], True, edge, thickness, cv2.LINE_AA)


def _contrasting_colour(rng: np.random.Generator, behind: np.ndarray) -> np.ndarray:
    """Draw colours until one lies MIN_CONTRAST from ``behind``; every colour has such partners."""
    while True:
        colour = _random_colour(rng, 5, 250)
        if np.linalg.norm(colour - behind) >= MIN_CONTRAST:
            return colour


# --- whole pictures ----------------------------------------------------------------------------------------------


def _camera(rng: np.random.Generator, picture: np.ndarray) -> np.ndarray:
    """Treat a picture as a modest camera would: blur, light, contrast and sensor noise; returns uint8."""
    side = picture.shape[0]
    if rng.random() < 0.4:
        picture = cv2.GaussianBlur(picture, (0, 0), sigmaX=side / 256 * rng.uniform(0.4, 1.4))
    picture = (picture - 128) * rng.uniform(0.75, 1.15) + 128 + rng.uniform(-25, 25)
    picture = picture + rng.normal(0, rng.uniform(1, 9), picture.shape)
    return np.clip(picture, 0, 255).astype(np.uint8)


def render(size: int, rng: np.random.Generator, num_classes: int = len(CLASS_NAMES)) -> tuple[np.ndarray, np.ndarray]:
    """Render one picture.

    Returns the picture (size, size, 3) BGR uint8 and its labels (n, 5) float64: class, then centre x, y, width and
    height as shares of the side. ``n`` may be 0.
    """
    side = size * OVERSAMPLING
    canvas = _background(rng, side)
    _draw_distractors(rng, canvas, most=6)
    shapes: list[Shape] = []
    wanted = 0 if rng.random() < EMPTY_SHARE else int(rng.integers(OBJECTS_PER_PICTURE[0], OBJECTS_PER_PICTURE[1] + 1))
    for _ in range(wanted):
        shape = _place(rng, side, shapes, num_classes)
        if shape is not None:
            _paint(rng, canvas, shape)
            shapes.append(shape)
    _draw_distractors(rng, canvas, most=2)
    picture = _camera(rng, cv2.resize(canvas, (size, size), interpolation=cv2.INTER_AREA))
    rows = [(shape.cls, *_xywhn(shape.box_xyxy, side)) for shape in shapes]
    return picture, np.array(rows, np.float64).reshape(-1, 5)


def _xywhn(box_xyxy: np.ndarray, side: int) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = (float(value) / side for value in box_xyxy)
    return (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1


def _write_picture(file: Path, picture: np.ndarray, quality: int) -> None:
    # Encoded here and written by Python, since OpenCV's own writer fails on some names under Windows.
    encoded, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not encoded:
        raise OSError(f"{file}: OpenCV could not encode the picture as JPEG")
    file.write_bytes(data.tobytes())


def _write_sample(folder: Path, split: str, index: int, size: int, seed: int, num_classes: int) -> None:
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    picture, labels = render(size, rng, num_classes)
    name = f"{split}_{index:05d}"
    _write_picture(folder / "images" / split / f"{name}.jpg", picture, int(rng.integers(45, 96)))
    if len(labels) or rng.random() < 0.5:  # a picture without objects may have an empty label file or none
        text = "".join(f"{int(row[0])} " + " ".join(f"{value:.6f}" for value in row[1:]) + "\n" for row in labels)
        (folder / "labels" / split / f"{name}.txt").write_text(text, encoding="utf-8")


def _write_yaml(folder: Path, splits: Sequence[str], num_classes: int) -> Path:
    lines = ["# Rendered by scripts/make_shapes.py. The paths are relative to this file.", "path: ."]
    lines += [f"{split}: images/{split}" for split in splits]
    lines += ["names:"] + [f"  {index}: {name}" for index, name in enumerate(CLASS_NAMES[:num_classes])]
    file = folder / "shapes.yaml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _check(folder: Path, counts: Mapping[str, int], size: int, num_classes: int) -> None:
    for split, count in counts.items():
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
        if count < 1 and split != "test":
            raise ValueError(f"{split} = {count} pictures: at least 1 is needed")
    if not {"train", "val"} <= set(counts):
        raise ValueError(f"counts name {', '.join(counts) or 'nothing'}: both train and val are needed")
    if size < 32:
        raise ValueError(f"size {size}: pictures need 32 pixels or more for shapes to be told apart")
    if not 1 <= num_classes <= len(CLASS_NAMES):
        raise ValueError(f"{num_classes} classes: there are 1 to {len(CLASS_NAMES)} ({', '.join(CLASS_NAMES)})")
    if (folder / "images").exists() and any((folder / "images").rglob("*.*")):
        raise FileExistsError(f"{folder / 'images'} already holds files: choose another --folder or remove it first")


def make_shapes(
    folder: str | Path, counts: Mapping[str, int], size: int, seed: int, *, num_classes: int = len(CLASS_NAMES)
) -> Path:
    """Render a picture set into ``folder`` and return the path of its data YAML.

    ``counts`` maps train, val and (optionally) test to numbers of pictures, ``size`` is their side in pixels. A picture
    depends only on seed, split, its index, size and num_classes. Raises FileExistsError where pictures already lie.
    """
    folder = Path(folder)
    _check(folder, counts, size, num_classes)
    splits = [split for split in SPLITS if counts.get(split, 0) > 0]
    for split in splits:
        (folder / "images" / split).mkdir(parents=True, exist_ok=True)
        (folder / "labels" / split).mkdir(parents=True, exist_ok=True)
    tasks = [(split, index) for split in splits for index in range(counts[split])]
    redraw_s = 0.2 if sys.stderr.isatty() else 10.0  # keeps log files short
    for split, index in tqdm(tasks, desc="rendering pictures", unit="picture", mininterval=redraw_s):
        _write_sample(folder, split, index, size, seed, num_classes)
    return _write_yaml(folder, splits, num_classes)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Render a labelled picture set of geometric shapes.")
    parser.add_argument("--folder", default="../datasets/shapes", help="where to write images, labels and shapes.yaml")
    for split in SPLITS:
        parser.add_argument(f"--{split}", type=int, default=DEFAULT_COUNTS[split], help=f"pictures for {split}")
    parser.add_argument("--size", type=int, default=256, help="side of the pictures in pixels")
    parser.add_argument("--classes", type=int, default=len(CLASS_NAMES), help=f"first N of: {', '.join(CLASS_NAMES)}")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same pictures")
    args = parser.parse_args(argv)
    counts = {split: getattr(args, split) for split in SPLITS}
    try:
        file = make_shapes(args.folder, counts, args.size, args.seed, num_classes=args.classes)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{sum(counts.values())} pictures rendered, data file: {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
