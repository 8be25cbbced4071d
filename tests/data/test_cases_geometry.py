"""Augmented boxes sit on their objects: judged by the colour of the pixels and by slow geometry, over many seeds.

Objects are rectangles filled with the colour of their class on dark ground, so a wrong shift, scale, flip or tile shows
up as a box on dark pixels or as a coloured object without a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.data.drawing import COLOURS, paint, write_set
from tests.data.oracles import is_kept, warped_box
from utils.data.augment import draw_affine, draw_centre
from utils.data.dataset import LoadImagesAndLabels

SIZE = 160
SEEDS = 200
CHANGES = {
    "straight": {"scale": 0.9, "translate": 0.1, "fliplr": 0.5, "flipud": 0.5},
    "turned": {"scale": 0.5, "translate": 0.2, "fliplr": 0.5, "degrees": 15.0, "shear": 5.0},
    "projected": {"scale": 0.5, "translate": 0.1, "fliplr": 0.5, "degrees": 5.0, "perspective": 0.0008},
}
AFFINE = ("degrees", "translate", "scale", "shear", "perspective")


@dataclass
class Expected:
    """An object after all changes: class, box x1, y1, x2, y2 in output pixels, and whether it is large enough."""

    cls: int
    box: list[float]
    is_kept: bool


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same pictures twice: labelled with boxes, and labelled with polygons of four corners."""
    rng = np.random.default_rng(7)
    boxes, polygons = {}, {}
    for number in range(12):
        width, height = (int(v) for v in rng.integers(SIZE // 2, SIZE, 2))
        width, height = (SIZE, height) if number % 2 else (width, SIZE)  # no scaling on loading
        rows = place(rng, width, height)
        fractions = [(c, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
                     for c, x1, y1, x2, y2 in rows]  # fmt: skip
        image = paint(width, height, fractions)
        text = "".join(" ".join(f"{v:.8f}" if i else str(v) for i, v in enumerate(row)) + "\n" for row in fractions)
        boxes[f"{number:02d}.png"] = (image, text)
        corners = [(c, x1, y1, x2, y1, x2, y2, x1, y2) for c, x1, y1, x2, y2 in rows]
        sides = (width, height) * 4
        polygons[f"{number:02d}.png"] = (
            image,
            "".join(
                f"{c} " + " ".join(f"{v / s:.8f}" for v, s in zip(points, sides, strict=True)) + "\n"
                for c, *points in corners
            ),
        )
    root = tmp_path_factory.mktemp("geometry")
    return {"boxes": write_set(root / "boxes", boxes), "polygons": write_set(root / "polygons", polygons)}


def place(rng: np.random.Generator, width: int, height: int) -> list[tuple[int, int, int, int, int]]:
    """Rectangles (class, x1, y1, x2, y2) in whole pixels that keep a distance from each other."""
    rows: list[tuple[int, int, int, int, int]] = []
    for _ in range(60):
        w, h = (int(v) for v in rng.integers(16, 50, 2))
        x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        if all(x > r[3] + 6 or x + w < r[1] - 6 or y > r[4] + 6 or y + h < r[2] - 6 for r in rows):
            rows.append((int(rng.integers(4)), x, y, x + w, y + h))
    return rows


def expected_objects(
    data: LoadImagesAndLabels, pixels: Sequence[np.ndarray], epoch: int, index: int, hyp: dict[str, float], share: float
) -> list[Expected]:
    """All objects of a mosaic sample, worked out one by one from the random draws in their documented order."""
    rng = np.random.default_rng([data.seed, epoch, index])
    rng.random()  # mosaic or not
    centre_x, centre_y = draw_centre(rng, SIZE)
    indices = [index, *rng.integers(len(data), size=3)]
    rng.shuffle(indices)
    draws = draw_affine(rng, *(hyp.get(name, 0.0) for name in AFFINE))
    rng.random()  # mixup or not
    flips = rng.random() < hyp.get("flipud", 0.0), rng.random() < hyp.get("fliplr", 0.0)
    objects = []
    for position, picture in enumerate(indices):
        width, height = data.shapes[picture].tolist()
        left = centre_x - width if position in (0, 2) else centre_x
        top = centre_y - height if position in (0, 1) else centre_y
        for cls, x1, y1, x2, y2 in pixels[picture].tolist():
            old = [min(max(v, 0), 2 * SIZE) for v in (x1 + left, y1 + top, x2 + left, y2 + top)]
            new = warped_box(old, draws, (2 * SIZE, 2 * SIZE), (SIZE, SIZE))
            kept = is_kept(old, new, draws.scale, share)
            if flips[0]:
                new[1], new[3] = SIZE - new[3], SIZE - new[1]
            if flips[1]:
                new[0], new[2] = SIZE - new[2], SIZE - new[0]
            objects.append(Expected(int(cls), new, kept))
    return objects


def pixel_rows(data: LoadImagesAndLabels) -> list[np.ndarray]:
    """Labels of each picture as class, x1, y1, x2, y2 in pixels."""
    tables = []
    for rows, (width, height) in zip(data.labels, data.shapes.tolist(), strict=True):
        half = rows[:, 3:].astype(np.float64) / 2
        corners = np.concatenate((rows[:, 1:3] - half, rows[:, 1:3] + half), 1) * (width, height, width, height)
        tables.append(np.concatenate((rows[:, :1], corners), 1))
    return tables


def output_boxes(labels: np.ndarray) -> np.ndarray:
    """Rows class, x1, y1, x2, y2 in output pixels from a sample's targets (n, 6)."""
    half = labels[:, 4:6].astype(np.float64) / 2
    corners = np.concatenate((labels[:, 2:4] - half, labels[:, 2:4] + half), 1) * SIZE
    return np.concatenate((labels[:, 1:2], corners), 1)


def mask_of(image_bgr: np.ndarray, cls: int) -> np.ndarray:
    """Where the picture has the colour of a class, (H, W) bool."""
    return np.abs(image_bgr.astype(np.int16) - np.int16(COLOURS[cls])).max(-1) < 40


def cut(mask: np.ndarray, box: Sequence[float], margin: float) -> np.ndarray:
    """The part of a mask inside a box that is moved outwards by a margin."""
    x1, y1 = (max(round(v - margin), 0) for v in box[:2])
    x2, y2 = (max(round(v + margin), 0) for v in box[2:])
    return mask[y1:y2, x1:x2]


def touches_border(box: Sequence[float]) -> bool:
    return min(box) < 1 or max(box) > SIZE - 1


def check_pixels(image: np.ndarray, boxes: np.ndarray, dropped: Sequence[Expected], is_straight: bool) -> None:
    """Boxes are full of their class's colour and end where it ends; other colour belongs to dropped objects."""
    masks = {cls: mask_of(image, cls) for cls in COLOURS}
    uncovered = {cls: mask.copy() for cls, mask in masks.items()}
    every = [(int(cls), box) for cls, *box in boxes.tolist()] + [(item.cls, item.box) for item in dropped]
    for number, (cls, *box) in enumerate(boxes.tolist()):
        mask = masks[int(cls)]
        x1, y1, x2, y2 = (round(v) for v in box)
        cut(uncovered[int(cls)], box, 3)[:] = False
        if min(x2 - x1, y2 - y1) < 8:
            continue  # too few pixels to judge
        middle_x, middle_y = (x1 + x2) // 2, (y1 + y2) // 2
        if is_straight:
            assert cut(mask, box, -1).mean() > 0.95, (cls, box)
        elif not touches_border(box):
            assert mask[middle_y - 1 : middle_y + 2, middle_x - 1 : middle_x + 2].mean() >= 0.5, (cls, box)
            ys, xs = np.nonzero(cut(mask, box, 1))  # the rectangle's corners reach the envelope
            assert np.ptp(xs) + 1 > 0.85 * (x2 - x1) - 2 and np.ptp(ys) + 1 > 0.85 * (y2 - y1) - 2, (cls, box)
        alone = mask.copy()
        for other, (other_cls, other_box) in enumerate(every):
            if other != number and other_cls == cls:
                cut(alone, other_box, 3)[:] = False
        ring = cut(alone, box, 3).sum() - cut(alone, box, 1).sum()
        assert ring <= 0.15 * (cut(mask, box, 3).size - cut(mask, box, 1).size), (cls, box)
    for cls, mask in uncovered.items():
        for item in dropped:
            if item.cls == cls:
                cut(mask, item.box, 3)[:] = False
        _, _, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8))
        assert (stats[1:, cv2.CC_STAT_AREA] < 12).all(), f"objects of class {cls} without a box: {stats[1:].tolist()}"


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.round(1).T[::-1])] if len(rows) else rows.reshape(0, 5)


def check_sample(
    data: LoadImagesAndLabels, pixels: Sequence[np.ndarray], epoch: int, hyp: dict[str, float], share: float
) -> tuple[int, int]:
    """Compare one mosaic sample with its pixels and with the slow geometry; kept and dropped objects."""
    index = epoch % len(data)
    image, labels, _, _ = data[(epoch, index, True)]
    objects = expected_objects(data, pixels, epoch, index, hyp, share)
    kept = [item for item in objects if item.is_kept]
    boxes = output_boxes(labels.numpy())
    assert len(boxes) == len(kept), (epoch, len(boxes), len(kept))
    for cls, *box in boxes.tolist():
        distances = [np.abs(np.subtract(item.box, box)).max() for item in kept if item.cls == cls]
        assert min(distances) < 0.3, (epoch, cls, box)
    is_straight = not (hyp.get("degrees") or hyp.get("perspective"))
    dropped = [item for item in objects if not item.is_kept]
    check_pixels(np.ascontiguousarray(image.numpy()[::-1].transpose(1, 2, 0)), boxes, dropped, is_straight)
    return len(kept), len(dropped)


@pytest.mark.parametrize("change", CHANGES)
def test_mosaic_boxes_sit_on_their_objects(folders: dict[str, Path], change: str) -> None:
    hyp = CHANGES[change]
    data = LoadImagesAndLabels(folders["boxes"], SIZE, augment=True, hyp={"mosaic": 1.0, **hyp})
    pixels = pixel_rows(data)
    kept, dropped = np.sum([check_sample(data, pixels, epoch, hyp, 0.10) for epoch in range(SEEDS)], axis=0)
    assert kept > 1000
    assert dropped > 100  # the test would be empty if the rule for small remains never applied


def test_polygons_sit_on_their_objects(folders: dict[str, Path]) -> None:
    hyp = {"scale": 0.5, "translate": 0.2, "fliplr": 0.5, "flipud": 0.5}
    data = LoadImagesAndLabels(folders["polygons"], SIZE, augment=True, hyp={"mosaic": 1.0, **hyp})
    pixels = pixel_rows(data)
    close = 0
    for epoch in range(60):
        index = epoch % len(data)
        image, labels, _, _ = data[(epoch, index, True)]
        boxes = output_boxes(labels.numpy())
        objects = expected_objects(data, pixels, epoch, index, hyp, 0.01)
        # outlines are sampled at 1000 points: at the border a box may be a fraction of a pixel smaller
        for cls, *box in boxes.tolist():
            assert min(np.abs(np.subtract(item.box, box)).max() for item in objects if item.cls == cls) < 1.0
        close += abs(len(boxes) - sum(item.is_kept for item in objects)) <= 1
        small = [item for item in objects if not item.is_kept or min(np.subtract(item.box[2:], item.box[:2])) < 3]
        check_pixels(np.ascontiguousarray(image.numpy()[::-1].transpose(1, 2, 0)), boxes, small, True)
    assert close == 60


def test_single_pictures_keep_their_boxes(folders: dict[str, Path]) -> None:
    hyp = {"scale": 0.5, "translate": 0.1, "fliplr": 0.5, "flipud": 0.5}
    data = LoadImagesAndLabels(folders["boxes"], SIZE, augment=True, hyp={"mosaic": 0.0, **hyp})
    found = 0
    for epoch in range(60):
        index = epoch % len(data)
        image, labels, _, _ = data[(epoch, index, False)]
        boxes = output_boxes(labels.numpy())
        bgr = np.ascontiguousarray(image.numpy()[::-1].transpose(1, 2, 0))
        for cls, *box in boxes.tolist():
            if min(np.subtract(box[2:], box[:2])) >= 8:
                assert cut(mask_of(bgr, int(cls)), box, -1).mean() > 0.95
                found += 1
    assert found > 100


def test_the_check_notices_wrong_boxes(folders: dict[str, Path]) -> None:
    hyp = CHANGES["straight"]
    data = LoadImagesAndLabels(folders["boxes"], SIZE, augment=True, hyp={"mosaic": 1.0, **hyp})
    image, labels, _, _ = data[(3, 3, True)]
    bgr = np.ascontiguousarray(image.numpy()[::-1].transpose(1, 2, 0))
    boxes = output_boxes(labels.numpy())
    objects = expected_objects(data, pixel_rows(data), 3, 3, hyp, 0.10)
    dropped = [item for item in objects if not item.is_kept]
    check_pixels(bgr, boxes, dropped, True)
    assert len(boxes) > 2
    large = int(np.argmax((boxes[:, 3] - boxes[:, 1]) * (boxes[:, 4] - boxes[:, 2])))
    moved, renamed, mirrored = boxes.copy(), boxes.copy(), boxes.copy()
    moved[large, 1:] += 4
    renamed[large, 0] = (renamed[large, 0] + 1) % 4
    mirrored[:, [1, 3]] = SIZE - boxes[:, [3, 1]]
    for wrong in (moved, renamed, mirrored, np.delete(boxes, large, 0)):
        with pytest.raises(AssertionError):
            check_pixels(bgr, wrong, dropped, True)
