"""Random changes of training pictures together with their labels: mosaic, affine, mixup, copy-paste, colour, flips.

Every random draw comes from a NumPy Generator handed in, in a fixed order, so that one seed gives one sample.
Labels here are (n, 5) arrays `class, x1, y1, x2, y2` in pixels; segments hold one (k, 2) array per label row, or none.
The four Albumentations steps that upstream tries (blur, median blur, grey, CLAHE, each once in a hundred pictures) are
not part of it: they fail there with current releases of that package and are then left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import cv2
import numpy as np

from utils.boxes import bbox_ioa, xyxy2xywhn
from utils.data.images import FILL

MIX_SHIFT = 1 / 512 - 0.5
OVERLAP_LIMIT = 0.30  # a pasted object may hide less than this share of any object
MIX_BETA = 32.0  # both parameters of mixup's Beta distribution: ratios near one half
OUTLINE_POINTS = 1000  # of a polygon while it is warped
KEEP_AREA, KEEP_AREA_SEGMENTS = 0.10, 0.01  # smallest share of an object's area that must survive the warp


@dataclass(frozen=True)
class AugmentSettings:
    """The hyper-parameters that concern pictures; the neutral defaults change nothing."""

    hsv_h: float = 0.0
    hsv_s: float = 0.0
    hsv_v: float = 0.0
    degrees: float = 0.0
    translate: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    perspective: float = 0.0
    flipud: float = 0.0
    fliplr: float = 0.0
    mosaic: float = 0.0
    mixup: float = 0.0
    copy_paste: float = 0.0

    @classmethod
    def from_hyp(cls, hyp: object) -> AugmentSettings:
        """Take the values from a mapping or from an object with attributes; None and absent values stay neutral."""
        names = [item.name for item in fields(cls)]
        if isinstance(hyp, Mapping):
            return cls(**{name: float(hyp[name]) for name in names if name in hyp})
        return cls(**{name: float(getattr(hyp, name)) for name in names if hasattr(hyp, name)})


# ------------------------------------------------------------------------------------------------ colour and flips


def draw_hsv(rng: np.random.Generator, hgain: float, sgain: float, vgain: float) -> np.ndarray | None:
    """Draw the factors (3,) of hue, saturation and value, 1 + u^3 * gain with u in [-1, 1); None if all gains are 0."""
    if not (hgain or sgain or vgain):
        return None
    return rng.uniform(-1, 1, 3) ** 3 * (hgain, sgain, vgain) + 1


def hsv_tables(factors: np.ndarray) -> np.ndarray:
    """New hue, saturation and value (3, 256) for every old one."""
    values = np.arange(256) * factors[:, None]
    values[0] %= 180
    return np.clip(values, 0, 255).astype(np.uint8)


def augment_hsv(
    im: np.ndarray,
    hgain: float = 0.5,
    sgain: float = 0.5,
    vgain: float = 0.5,
    *,
    rng: np.random.Generator | None = None,
) -> None:
    """Change hue, saturation and value of a BGR picture in place by factors from `draw_hsv`."""
    factors = draw_hsv(_generator(rng), hgain, sgain, vgain)
    if factors is None:
        return
    hsv = cv2.cvtColor(im, cv2.COLOR_BGR2HSV)
    cv2.LUT(hsv, np.ascontiguousarray(hsv_tables(factors).T)[None], dst=hsv)  # one table per channel
    cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR, dst=im)


def draw_flips(rng: np.random.Generator, flipud: float, fliplr: float) -> tuple[bool, bool]:
    """Draw whether a picture is turned upside down, and whether it is mirrored left to right."""
    return bool(rng.random() < flipud), bool(rng.random() < fliplr)


def network_targets(labels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Labels (n, 5) class and pixel corners -> targets (n, 6) 0, class, x, y, w, h as fractions of a picture."""
    targets = np.zeros((len(labels), 6), np.float32)
    if len(labels):
        targets[:, 1] = labels[:, 0]
        targets[:, 2:] = xyxy2xywhn(labels[:, 1:5], w=width, h=height, clip=True, eps=1e-3)
    return targets


def flip_labels(labels_xywhn: np.ndarray, *, vertical: bool) -> None:
    """Mirror normalised labels (n, 5) in place: y -> 1 - y if vertical, else x -> 1 - x."""
    column = 2 if vertical else 1
    labels_xywhn[:, column] = 1 - labels_xywhn[:, column]


# ------------------------------------------------------------------------------------------------------------ affine


class AffineDraws(NamedTuple):
    """The eight random numbers of one affine change, in drawing order.

    perspective_x, perspective_y: last matrix row; angle and shears in degrees; translations as fractions of the output.
    """

    perspective_x: float
    perspective_y: float
    angle: float
    scale: float
    shear_x: float
    shear_y: float
    translate_x: float
    translate_y: float


def draw_affine(
    rng: np.random.Generator, degrees: float, translate: float, scale: float, shear: float, perspective: float
) -> AffineDraws:
    """Draw the parameters of one affine change."""
    return AffineDraws(
        rng.uniform(-perspective, perspective),
        rng.uniform(-perspective, perspective),
        rng.uniform(-degrees, degrees),
        rng.uniform(1 - scale, 1 + scale),
        rng.uniform(-shear, shear),
        rng.uniform(-shear, shear),
        rng.uniform(0.5 - translate, 0.5 + translate),
        rng.uniform(0.5 - translate, 0.5 + translate),
    )


def affine_matrix(draws: AffineDraws, in_shape: tuple[int, int], out_shape: tuple[int, int]) -> np.ndarray:
    """Matrix (3, 3) from input to output pixels: centre, perspective, rotation and scale, shear, translation.

    Shapes are (height, width). The steps are applied in the order named, so the product reads from right to left.
    """
    centre, tilt, shear, shift = np.eye(3), np.eye(3), np.eye(3), np.eye(3)
    centre[:2, 2] = -in_shape[1] / 2, -in_shape[0] / 2
    tilt[2, :2] = draws.perspective_x, draws.perspective_y
    rotation = np.eye(3)
    rotation[:2] = cv2.getRotationMatrix2D(center=(0, 0), angle=draws.angle, scale=draws.scale)
    shear[0, 1] = math.tan(math.radians(draws.shear_x))
    shear[1, 0] = math.tan(math.radians(draws.shear_y))
    shift[:2, 2] = draws.translate_x * out_shape[1], draws.translate_y * out_shape[0]
    return shift @ shear @ rotation @ tilt @ centre


def random_perspective(
    im: np.ndarray,
    targets: np.ndarray | Sequence[Sequence[float]] = (),
    segments: Sequence[np.ndarray] = (),
    degrees: float = 10,
    translate: float = 0.1,
    scale: float = 0.1,
    shear: float = 10,
    perspective: float = 0.0,
    border: tuple[int, int] = (0, 0),
    *,
    rng: np.random.Generator | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Warp a picture and its targets (n, 5) by a random affine change; border (y, x) is added on every side.

    Returns the warped picture and the targets that are still worth keeping.
    """
    draws = draw_affine(_generator(rng), degrees, translate, scale, shear, perspective)
    return apply_affine(im, targets, segments, draws, border, is_projective=bool(perspective))


def apply_affine(
    im: np.ndarray,
    targets: np.ndarray | Sequence[Sequence[float]],
    segments: Sequence[np.ndarray],
    draws: AffineDraws,
    border: tuple[int, int] = (0, 0),
    *,
    is_projective: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Warp with given draws; the deterministic half of `random_perspective`."""
    height, width = im.shape[0] + 2 * border[0], im.shape[1] + 2 * border[1]
    matrix = affine_matrix(draws, im.shape[:2], (height, width))
    if border != (0, 0) or not np.array_equal(matrix, np.eye(3)):
        if is_projective:
            im = cv2.warpPerspective(im, matrix, dsize=(width, height), borderValue=FILL)
        else:
            im = cv2.warpAffine(im, matrix[:2], dsize=(width, height), borderValue=FILL)
    return im, warp_targets(targets, segments, matrix, draws.scale, (height, width), is_projective=is_projective)


def warp_targets(
    targets: np.ndarray | Sequence[Sequence[float]],
    segments: Sequence[np.ndarray],
    matrix: np.ndarray,
    scale: float,
    out_shape: tuple[int, int],
    *,
    is_projective: bool = False,
) -> np.ndarray:
    """Move targets (n, 5) by a matrix (3, 3) into a picture of out_shape (height, width); only those worth keeping."""
    targets = np.asarray(targets)
    if not len(targets):
        return np.zeros((0, 5), np.float32)
    height, width = out_shape
    use_segments = len(segments) == len(targets) and any(np.any(points) for points in segments)
    if use_segments:
        corners = _warp_segments(segments, matrix, width, height, is_projective)
    else:
        corners = _warp_boxes(targets[:, 1:5], matrix, width, height, is_projective)
    area = KEEP_AREA_SEGMENTS if use_segments else KEEP_AREA
    kept = box_candidates(targets[:, 1:5].T * scale, corners.T, area_thr=area)
    targets = targets[kept]
    targets[:, 1:5] = corners[kept]
    return targets


def _warp_points(points: np.ndarray, matrix: np.ndarray, is_projective: bool) -> np.ndarray:
    """Move points (..., 2) by a matrix (3, 3)."""
    moved = points @ matrix[:, :2].T + matrix[:, 2]
    return moved[..., :2] / moved[..., 2:] if is_projective else moved[..., :2]


def _warp_boxes(boxes: np.ndarray, matrix: np.ndarray, width: int, height: int, is_projective: bool) -> np.ndarray:
    """Envelopes (n, 4) of the four warped corners of each box, clipped to the output."""
    corners = boxes[:, [0, 1, 2, 3, 0, 3, 2, 1]].reshape(-1, 4, 2)  # (N, corner, xy)
    moved = _warp_points(corners, matrix, is_projective)
    envelope = np.concatenate((moved.min(1), moved.max(1)), 1)  # (N, 4)
    envelope[:, 0::2] = envelope[:, 0::2].clip(0, width)
    envelope[:, 1::2] = envelope[:, 1::2].clip(0, height)
    return envelope


def _warp_segments(
    segments: Sequence[np.ndarray], matrix: np.ndarray, width: int, height: int, is_projective: bool
) -> np.ndarray:
    """Envelopes (n, 4) of the warped outlines, of those points that lie in the output (zeros if none does)."""
    vertices = np.concatenate(segments).astype(np.float64)
    if is_projective:  # a straight line keeps its points evenly spread under an affine change only
        x, y = np.moveaxis(_warp_points(outline_points(vertices, segments), matrix, True), 2, 0)
    else:
        x, y = np.moveaxis(outline_points(_warp_points(vertices, matrix, False), segments), 2, 0)
    inside = (x >= 0) & (y >= 0) & (x <= width) & (y <= height)  # (N, points)
    low = [np.where(inside, axis, np.inf).min(1) for axis in (x, y)]
    high = [np.where(inside, axis, -np.inf).max(1) for axis in (x, y)]
    return np.where(inside.any(1)[:, None], np.stack((*low, *high), 1), 0.0)


def outline_points(vertices: np.ndarray, segments: Sequence[np.ndarray], count: int = OUTLINE_POINTS) -> np.ndarray:
    """Points (n, count, 2) spread evenly, by index, along n closed outlines; all of `resample_segments` at once.

    vertices (sum k, 2) are those of all segments (k, 2), perhaps moved.
    """
    lengths = np.array([len(points) for points in segments])
    first = np.cumsum(lengths) - lengths
    steps = np.roll(vertices, -1, 0) - vertices  # to the next vertex
    last = first + lengths - 1
    steps[last] = vertices[first] - vertices[last]
    wanted = np.linspace(0, lengths, count, axis=1)  # (N, count)
    before = np.minimum(wanted.astype(np.int32), lengths[:, None] - 1)
    at, share = (first[:, None] + before).reshape(-1), (wanted - before).reshape(-1)
    points = [vertices[:, k].take(at) + steps[:, k].take(at) * share for k in (0, 1)]
    return np.stack(points, 1).reshape(len(segments), count, 2)


def box_candidates(
    box1: np.ndarray,
    box2: np.ndarray,
    wh_thr: float = 2,
    ar_thr: float = 100,
    area_thr: float = 0.1,
    eps: float = 1e-16,
) -> np.ndarray:
    """Which boxes (4, n) are worth keeping after a change from box1 to box2: (n,) bool.

    Kept are boxes larger than wh_thr pixels on both sides, with more than area_thr of the old area and with sides
    whose ratio stays below ar_thr.
    """
    w1, h1 = box1[2] - box1[0], box1[3] - box1[1]
    w2, h2 = box2[2] - box2[0], box2[3] - box2[1]
    aspect = np.maximum(w2 / (h2 + eps), h2 / (w2 + eps))
    return (w2 > wh_thr) & (h2 > wh_thr) & (w2 * h2 / (w1 * h1 + eps) > area_thr) & (aspect < ar_thr)


# ------------------------------------------------------------------------------------------- several pictures in one


class Tile(NamedTuple):
    """Where one picture of a mosaic goes: rectangles x1, y1, x2, y2 on the canvas and in the picture."""

    canvas: tuple[int, int, int, int]
    source: tuple[int, int, int, int]

    @property
    def shift(self) -> tuple[int, int]:
        """What has to be added to the picture's x and y to get canvas coordinates."""
        return self.canvas[0] - self.source[0], self.canvas[1] - self.source[1]


def mosaic_tile(position: int, width: int, height: int, centre: tuple[int, int], side: int) -> Tile:
    """Place a picture in a quarter (0 top left, 1 top right, 2 bottom left, 3 bottom right) of a side x side canvas.

    The picture touches the centre (x, y) with its inner corner; what reaches beyond the canvas is cut.
    """
    centre_x, centre_y = centre
    left = centre_x - width if position in (0, 2) else centre_x
    top = centre_y - height if position in (0, 1) else centre_y
    x1, y1, x2, y2 = max(left, 0), max(top, 0), min(left + width, side), min(top + height, side)
    return Tile((x1, y1, x2, y2), (x1 - left, y1 - top, x2 - left, y2 - top))


def draw_centre(rng: np.random.Generator, size: int) -> tuple[int, int]:
    """Draw the mosaic's centre (x, y) from the middle half of the canvas of 2 * size pixels; y is drawn first."""
    centre_y = int(rng.uniform(size / 2, 2 * size - size / 2))
    return int(rng.uniform(size / 2, 2 * size - size / 2)), centre_y


def mosaic4(
    parts: Sequence[tuple[np.ndarray, np.ndarray, Sequence[np.ndarray]]], centre: tuple[int, int], size: int
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Join four pictures (top left, top right, bottom left, bottom right) on a canvas of 2 * size pixels.

    Each part is (picture with long side `size`, labels (n, 5) class x y w h, segments, one per row), both as fractions.
    Returns the canvas, labels (n, 5) in pixel corners and segments in pixels, clipped to the canvas.
    """
    side = 2 * size
    canvas = np.full((side, side, 3), FILL[0], np.uint8)
    for position, (image, _, _) in enumerate(parts):
        height, width = image.shape[:2]
        (cx1, cy1, cx2, cy2), (sx1, sy1, sx2, sy2) = mosaic_tile(position, width, height, centre, side)
        canvas[cy1:cy2, cx1:cx2] = image[sy1:sy2, sx1:sx2]
    sizes = [(image.shape[1], image.shape[0]) for image, _, _ in parts]
    return canvas, *mosaic_labels(sizes, [(rows, outlines) for _, rows, outlines in parts], centre, size)


def mosaic_labels(
    sizes: Sequence[tuple[int, int]],
    labels: Sequence[tuple[np.ndarray, Sequence[np.ndarray]]],
    centre: tuple[int, int],
    size: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Labels and segments of `mosaic4` from the four pictures' (width, height) and their (rows, segments) alone."""
    joined, segments = [np.zeros((0, 5), np.float32)], []
    for position, ((width, height), (rows, outlines)) in enumerate(zip(sizes, labels, strict=True)):
        tile = mosaic_tile(position, width, height, centre, 2 * size)
        joined.append(to_pixels(rows, width, height, tile.shift))
        segments += [points * np.float32((width, height)) + np.float32(tile.shift) for points in outlines]
    moved = np.concatenate(joined)
    np.clip(moved[:, 1:], 0, 2 * size, out=moved[:, 1:])
    for points in segments:
        np.clip(points, 0, 2 * size, out=points)
    return moved, segments


def to_pixels(rows: np.ndarray, width: float, height: float, shift: tuple[float, float] = (0, 0)) -> np.ndarray:
    """Labels (n, 5) class x y w h as fractions -> class and pixel corners, moved by shift (x, y)."""
    half = rows[:, 3:5] / 2
    corners = np.concatenate((rows[:, 1:3] - half, rows[:, 1:3] + half), 1)  # (N, 4)
    scale = np.float32((width, height, width, height))
    return np.concatenate((rows[:, :1], corners * scale + np.float32((*shift, *shift))), 1)


def mixup(
    im: np.ndarray, labels: np.ndarray, im2: np.ndarray, labels2: np.ndarray, *, rng: np.random.Generator | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Blend two pictures of one size with a ratio drawn from Beta(32, 32) and join their labels."""
    ratio = _generator(rng).beta(MIX_BETA, MIX_BETA)
    # OpenCV rounds; the shift makes it cut fractions off instead, and stays clear of exact integers.
    blended = cv2.addWeighted(im, ratio, im2, 1 - ratio, MIX_SHIFT)
    return blended, np.concatenate((labels, labels2))


def copy_paste(
    im: np.ndarray,
    labels: np.ndarray,
    segments: Sequence[np.ndarray],
    p: float = 0.5,
    *,
    rng: np.random.Generator | None = None,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Paste mirrored copies of a share p of the outlined objects where they hide little of the others.

    Labels (n, 5) in pixel corners, segments in pixels, one per row. The picture is changed in place; returns picture,
    labels and segments, the copies last.
    """
    chosen = choose_copies(labels, segments, im.shape[1], p, rng=_generator(rng))
    return paste_copies(im, labels, segments, chosen) if len(chosen) else (im, labels, list(segments))


def choose_copies(
    labels: np.ndarray, segments: Sequence[np.ndarray], width: int, p: float, *, rng: np.random.Generator
) -> np.ndarray:
    """Draw which rows `copy_paste` mirrors in a picture of a width: indices (k,), none without one segment per row."""
    if not p or not len(segments) or len(segments) != len(labels):
        return np.zeros(0, np.int64)
    overlap = bbox_ioa(_mirrored(labels, width), labels[:, 1:5])  # (N copies, N objects)
    candidates = np.flatnonzero((overlap < OVERLAP_LIMIT).all(1))
    return rng.permutation(candidates)[: round(p * len(candidates))]


def paste_copies(
    im: np.ndarray, labels: np.ndarray, segments: Sequence[np.ndarray], chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Paste the mirrored copies of chosen rows into a picture, in place; the deterministic half of `copy_paste`."""
    where = cv2.flip(outlines_mask(segments, chosen, im.shape[:2]), 1).view(bool)
    im[where] = cv2.flip(im, 1)[where]
    return im, *with_copies(labels, segments, chosen, im.shape[1])


def outlines_mask(segments: Sequence[np.ndarray], chosen: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Where chosen outlines lie in a picture of a shape: (H, W) uint8, 1 inside, else 0."""
    mask = np.zeros(shape, np.uint8)
    for index in chosen:
        cv2.drawContours(mask, [segments[index].astype(np.int32)], -1, 1, cv2.FILLED)
    return mask


def with_copies(
    labels: np.ndarray, segments: Sequence[np.ndarray], chosen: np.ndarray, width: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Labels (n, 5) and segments, and behind them those of the mirrored copies of chosen rows."""
    outlines = [np.stack((width - segments[index][:, 0], segments[index][:, 1]), 1) for index in chosen]
    copies = np.concatenate((labels[chosen, :1], _mirrored(labels, width)[chosen]), 1)
    return np.concatenate((labels, copies)), [*segments, *outlines]


def _mirrored(labels: np.ndarray, width: int) -> np.ndarray:
    """Corners (n, 4) of labels (n, 5), mirrored left to right in a picture of a width."""
    corners = labels[:, 1:5].copy()
    corners[:, [0, 2]] = width - labels[:, [3, 1]]
    return corners


def _generator(rng: np.random.Generator | None) -> np.random.Generator:
    return np.random.default_rng() if rng is None else rng
