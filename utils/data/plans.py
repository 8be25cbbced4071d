"""What a training sample consists of, without its pixels: where each of them comes from, and the finished labels.

The draws are those of `LoadImagesAndLabels`, in the same order, so that a plan and the sample of the same key show the
same thing. Pictures are named by slots: places in a pool of decoded pictures, which is all of the set or a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from utils.data.augment import (
    MIX_BETA,
    affine_matrix,
    choose_copies,
    draw_centre,
    draw_flips,
    draw_hsv,
    flip_labels,
    mosaic_labels,
    mosaic_tile,
    network_targets,
    outlines_mask,
    to_pixels,
    warp_targets,
    with_copies,
)
from utils.data.dataset import MAX_REPLACEMENTS, LoadImagesAndLabels, SampleKey, Shapes, outlines_in_pixels
from utils.data.images import fitted_size
from utils.data.mosaic_view import shrink_of

NOTHING = -1  # slot of a grey picture without labels
NOWHERE = (0, 0, 0, 0)  # rectangle of a tile that shows nothing
FAR = 1 << 20  # a mosaic centre that leaves the whole plane to the first tile


class PlacedTile(NamedTuple):
    """A picture on a plane: its slot, its width, the rectangle x1, y1, x2, y2 that shows it, and plane minus picture.

    shift (x, y) is what has to be added to the picture's coordinates to get those of the plane.
    """

    slot: int
    width: int
    rectangle: tuple[int, int, int, int]
    shift: tuple[int, int]


@dataclass(frozen=True)
class Layer:
    """A plane of four pictures, or of one, and the look at it that gives one picture of the network's size.

    Left of the centre (x, y) and above it lies tile 0, right of it and above tile 1, then 2 and 3 below. inverse (3, 3)
    takes a pixel of the result to the plane. Each pixel is the mean of grid x grid points. Where mask (H, W) of the
    plane is 1, the pixel is shown at its mirrored place as well. labels (n, 5) are corners in the result.
    """

    tiles: tuple[PlacedTile, ...]
    centre: tuple[int, int]
    inverse: np.ndarray
    labels: np.ndarray
    grid: int = 1
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class SamplePlan:
    """One or two layers, the share of the first in the mixture, colour factors (3,), flips and targets (n, 6).

    size is the (height, width) of the picture to be made; is_flipped says upside down, then left to right.
    """

    layers: tuple[Layer, ...]
    share: float
    factors: np.ndarray | None
    is_flipped: tuple[bool, bool]
    targets: np.ndarray
    size: tuple[int, int]
    path: str
    shapes: Shapes | None


@dataclass(frozen=True)
class Slots:
    """Which picture lies in which slot: pictures (P,) holds indices; None where slot i holds picture i of `count`."""

    count: int
    pictures: np.ndarray | None = None

    def picture(self, slot: int) -> int:
        """Index of the picture in a slot; -1 for NOTHING."""
        return slot if self.pictures is None or slot == NOTHING else int(self.pictures[slot])


class PlannedImagesAndLabels(LoadImagesAndLabels):
    """A training set that also plans its samples, for whoever has the decoded pictures at hand."""

    def plan(self, key: SampleKey, slots: Slots | None = None, slot: int | None = None) -> SamplePlan:
        """The plan of `self[key]`; with slots, the other pictures are drawn among those, and `slot` holds the first.

        Pictures known to be unreadable are replaced by others, as in `self[key]`. The key's partners are taken where
        every picture has its slot; elsewhere the pictures in the slots were chosen in the same way already.
        """
        slots = Slots(len(self)) if slots is None else slots
        slot = key.index if slot is None else slot
        partners = key.partners if slots.pictures is None else ()
        rng, share, shapes = self.generator(key), 1.0, None
        if self.augment and not self.rect and key.is_mosaic and rng.random() < self.settings.mosaic:
            layers, size = [self._plan_mosaic(slot, slots, rng, partners[:3])], (self.img_size, self.img_size)
            if rng.random() < self.settings.mixup:
                layers.append(self._plan_mosaic(int(rng.integers(slots.count)), slots, rng, partners[3:]))
                share = float(rng.beta(MIX_BETA, MIX_BETA))
        else:
            layer, size, shapes = self._plan_plain(key.index, slot, slots, rng)
            layers = [layer]
        s = self.settings
        targets = network_targets(np.concatenate([layer.labels for layer in layers]), *size)
        factors, is_flipped = draw_hsv(rng, s.hsv_h, s.hsv_s, s.hsv_v), draw_flips(rng, s.flipud, s.fliplr)
        for is_turned, is_vertical in zip(is_flipped, (True, False), strict=True):
            if is_turned:
                flip_labels(targets[:, 1:], vertical=is_vertical)
        return SamplePlan(tuple(layers), share, factors, is_flipped, targets, size, self.im_files[key.index], shapes)

    def known_broken(self) -> int:
        """How many pictures are known to be unreadable so far."""
        return int(np.count_nonzero(np.frombuffer(self._broken, np.uint8)))

    def pixels(self, index: int) -> np.ndarray | None:
        """Decoded picture (h, w, 3) BGR of an index in the size that plans expect; None (noted) if unreadable."""
        image = self._load_or_none(index)
        return image if image is None or image.shape[1::-1] == self.fitted(index) else self._refitted(index, image)

    def fitted(self, index: int) -> tuple[int, int]:
        """(width, height) of a picture as it lies in its slot."""
        return fitted_size(*self.shapes[index].tolist(), self.img_size)

    def _refitted(self, index: int, image: np.ndarray) -> np.ndarray:
        """A picture that has another shape than at the scan, stretched: labels are fractions, so they still fit."""
        return cv2.resize(image, self.fitted(index))

    def _settled(self, slot: int, slots: Slots, rng: np.random.Generator) -> int:
        """The slot, or another one where its picture is unreadable, drawn as `_load` draws; NOTHING after too many."""
        for _ in range(1 + MAX_REPLACEMENTS):
            if slot == NOTHING or not self._broken[slots.picture(slot)]:
                return slot
            slot = int(rng.integers(slots.count))
        if min(self._broken):
            raise RuntimeError(
                f"{self.prefix}none of the {len(self)} pictures can be read any more, is the disk still there?"
            )
        return NOTHING

    def _tiles(self, held: Sequence[int], slots: Slots, centre: tuple[int, int]) -> list[PlacedTile]:
        """Four slots around the centre of a mosaic."""
        tiles = []
        for position, slot in enumerate(held):
            width, height = self._size_in(slot, slots)
            tile = mosaic_tile(position, width, height, centre, 2 * self.img_size)
            tiles.append(PlacedTile(slot, width, NOWHERE if slot == NOTHING else tile.canvas, tile.shift))
        return tiles

    def _size_in(self, slot: int, slots: Slots) -> tuple[int, int]:
        """(width, height) of the picture in a slot; nothing fills a square."""
        return (self.img_size, self.img_size) if slot == NOTHING else self.fitted(slots.picture(slot))

    def _plan_mosaic(self, slot: int, slots: Slots, rng: np.random.Generator, partners: Sequence[int] = ()) -> Layer:
        """Plan what `load_mosaic` draws."""
        centre = draw_centre(rng, self.img_size)
        held = [slot, *(partners or rng.integers(slots.count, size=3).tolist())]
        rng.shuffle(held)
        draws = self._draw_affine(rng)
        matrix, window = self._view(draws)
        side = 2 * self.img_size
        for position, other in enumerate(held):
            if window.shows(position, *self._size_in(other, slots), centre, side):
                held[position] = self._settled(other, slots, rng)
        sizes = [self._size_in(other, slots) for other in held]
        labels, segments = mosaic_labels(
            sizes, self._rows_of_all([slots.picture(other) for other in held]), centre, self.img_size
        )
        chosen, mask = choose_copies(labels, segments, side, self.settings.copy_paste, rng=rng), None
        if len(chosen):
            held = [self._settled(other, slots, rng) for other in held]
            mask = outlines_mask(segments, chosen, (side, side))
            labels, segments = with_copies(labels, segments, chosen, side)
        is_whole = self._may_copy() or self.is_exact or bool(self.settings.perspective)
        return Layer(
            tuple(self._tiles(held, slots, centre)),
            centre,
            np.linalg.inv(matrix),
            self._warp_targets(matrix, draws, labels, segments),
            1 if is_whole else shrink_of(matrix, side),
            mask,
        )

    def _plan_plain(
        self, index: int, slot: int, slots: Slots, rng: np.random.Generator
    ) -> tuple[Layer, tuple[int, int], Shapes]:
        """Plan what `_load_plain` draws: the layer, its (height, width), and shapes."""
        slot = self._settled(slot, slots, rng)
        shown = slots.picture(slot)
        width, height = self.fitted(index if slot == NOTHING else shown)
        target = (self.img_size, self.img_size)
        if self.batch_shapes is not None:
            target = tuple(self.batch_shapes[self.batch_index[index]].tolist())
        ratio, border, pad = _letterbox_place((width, height), target)
        size = (ratio * width, ratio * height)
        rows, segments = self._rows(shown)
        labels, outlines = to_pixels(rows, *size, pad), outlines_in_pixels(rows, segments, size, pad)
        draws = self._draw_affine(rng)
        matrix = affine_matrix(draws, target, target)
        labels = warp_targets(
            labels, outlines, matrix, draws.scale, target, is_projective=bool(self.settings.perspective)
        )
        offset = [(0.5 - side) / ratio - 0.5 for side in border]  # resizing keeps outer edges, not middles of pixels
        to_picture = np.array([(1 / ratio, 0, offset[0]), (0, 1 / ratio, offset[1]), (0, 0, 1)])
        tile = PlacedTile(slot, width, NOWHERE if slot == NOTHING else (0, 0, width, height), (0, 0))
        full_w, full_h = self.shapes[index if slot == NOTHING else shown].tolist()
        layer = Layer((tile,), (FAR, FAR), to_picture @ np.linalg.inv(matrix), labels)
        return layer, target, ((full_h, full_w), ((height / full_h, width / full_w), pad))


def _letterbox_place(
    size: tuple[int, int], target: tuple[int, int]
) -> tuple[float, tuple[int, int], tuple[float, float]]:
    """Where `letterbox` puts a (width, height) in a target (height, width): ratio, left and top border, padding."""
    width, height = size
    ratio = min(target[0] / height, target[1] / width)
    pad = ((target[1] - max(round(width * ratio), 1)) / 2, (target[0] - max(round(height * ratio), 1)) / 2)
    return ratio, (round(pad[0] - 0.1), round(pad[1] - 0.1)), pad
