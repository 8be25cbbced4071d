"""Batches of plans, as loader processes make them: a few flat arrays, and the pictures that were decoded for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from utils.data.batching import QUAD, BatchMaker, Failure, Travelling, quad_targets, reserve_bytes
from utils.data.dataset import SampleKey, Shapes
from utils.data.images import FILL
from utils.data.plans import NOTHING, Layer, PlannedImagesAndLabels, SamplePlan, Slots

LAYERS, TILES = 2, 4  # per sample, per layer
# Columns of `PlanBatch.tiles`: slot, bytes of a row, bytes from a pixel of the plane back to that of the picture, and
# the rectangle x1, y1, x2, y2 of the plane that shows the picture.
SLOT, PITCH, SHIFT, X1, Y1, X2, Y2 = range(7)
TILE_COLUMNS = 7
# Columns of `PlanBatch.views`: matrix from the result to the plane in 0 to 8, then these.
CENTRE_X, CENTRE_Y, GRID, SHARE, MASK = range(9, 14)
VIEW_COLUMNS = 14
# Columns of `PlanBatch.looks`: change of hue, saturation and value (factor - 1, which keeps the smallest changes apart
# from none), 1 where upside down, 1 where mirrored.
HUE, SATURATION, VALUE, UPSIDE_DOWN, MIRRORED = range(5)
LOOK_COLUMNS = 5


@dataclass(frozen=True)
class Request:
    """What a loader process is asked for: samples, or decoded pictures, or both.

    keys are planned with `pictures` (P,), the index in every slot (None: slot i holds picture i), the samples' own
    pictures lying in the slots from first_slot on, round the end. decoded are indices of pictures to deliver, each
    `stride` bytes after the one before, or one directly after the other with stride 0.
    """

    keys: tuple[SampleKey, ...] = ()
    pictures: np.ndarray | None = None
    first_slot: int = 0
    decoded: tuple[int, ...] = ()
    stride: int = 0

    def slots(self, length: int) -> Slots:
        """What lies in the slots, for a set of a length."""
        return Slots(length) if self.pictures is None else Slots(len(self.pictures), self.pictures)

    def own_slot(self, position: int) -> int | None:
        """Slot of the picture of keys[position]; None where it follows from the picture."""
        return None if self.pictures is None else (self.first_slot + position) % len(self.pictures)


@dataclass(frozen=True)
class PlanBatch(Travelling):
    """Plans of B samples; tiles (B, 2, 4, 7) int32, views (B, 2, 14) and looks (B, 5) float32, see the columns above.

    masks (K, H, W / 8) uint8 are what is copied of K planes, one bit per pixel, lowest first. targets (T, 6), paths
    and shapes are those of the batch. size is the (height, width) of its pictures; zoomed says for each group of four
    of --quad whether its first picture is enlarged. pixels is a flat array of decoded pictures to be stored from
    first_slot on. known_broken counts the unreadable pictures that the plans know of.
    """

    tiles: Tensor
    views: Tensor
    looks: Tensor
    masks: Tensor
    targets: Tensor
    pixels: Tensor
    paths: tuple[str, ...] = ()
    shapes: tuple[Shapes | None, ...] = ()
    size: tuple[int, int] = (0, 0)
    zoomed: tuple[bool, ...] = ()
    first_slot: int = 0
    known_broken: int = 0
    has_colours: bool = False

    def moved_to(self, device: torch.device) -> PlanBatch:
        """The same on a device, without waiting for it."""
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in self.tensors().items()})

    def batch(self) -> PlanBatch:
        """Itself: pictures are made where the device is known."""
        return self


class PlanMaker(Dataset):
    """`maker[request]` gives the PlanBatch of a Request, or a Failure that names the picture."""

    def __init__(self, dataset: PlannedImagesAndLabels, *, quad: bool = False, seed: int = 0) -> None:
        self.dataset, self.quad = dataset, quad
        self._zoomed = BatchMaker(dataset, quad=quad, seed=seed).zoomed

    def __getitem__(self, request: Request) -> PlanBatch | Failure:
        where, plans = f"a batch of {len(request.decoded)} decoded pictures", []
        try:
            pixels = self._decode(request)  # first, so that the plans know which of them are unreadable
            known, slots = self.dataset.known_broken(), request.slots(len(self.dataset))
            for position, key in enumerate(request.keys):
                where = f"the picture {self.dataset.im_files[key.index]}"
                plans.append(self.dataset.plan(key, slots, request.own_slot(position)))
            where = f"a batch of {len(plans)} pictures"
            zoomed = tuple(self._zoomed(request.keys)) if self.quad and plans else ()
            batch = replace(
                collate_plans(plans, zoomed=zoomed), pixels=pixels, first_slot=request.first_slot, known_broken=known
            )
            return batch.to_shared_memory() if get_worker_info() is not None else batch
        except Exception as error:  # noqa: BLE001 - whatever it is, the user has to learn where it was
            return Failure.from_error(where, error)

    def _decode(self, request: Request) -> Tensor:
        """The wanted pictures, flat; unreadable ones are grey."""
        sizes = [self.dataset.fitted(index) for index in request.decoded]
        lengths = [request.stride or 3 * width * height for width, height in sizes]
        flat, start = reserve_bytes(sum(lengths), shared=get_worker_info() is not None), 0
        for index, length, (width, height) in zip(request.decoded, lengths, sizes, strict=True):
            image, target = self.dataset.pixels(index), flat.numpy()[start : start + 3 * width * height]
            target[:] = FILL[0] if image is None else image.reshape(-1)
            start += length
        return flat


def collate_plans(plans: Sequence[SamplePlan], *, zoomed: Sequence[bool] = ()) -> PlanBatch:
    """Write plans into the arrays of a PlanBatch; column 0 of the joined targets tells the picture's position.

    zoomed has one entry for each group of four that --quad joins. Raises ValueError for pictures of different sizes.
    """
    sizes = {plan.size for plan in plans}
    if len(sizes) > 1:
        raise ValueError(f"pictures of one batch have different sizes: {sorted(sizes)}")
    tiles = np.zeros((len(plans), LAYERS, TILES, TILE_COLUMNS), np.int32)
    views = np.zeros((len(plans), LAYERS, VIEW_COLUMNS), np.float32)
    looks = np.zeros((len(plans), LOOK_COLUMNS), np.float32)
    masks: list[np.ndarray] = []
    for row, plan in enumerate(plans):
        for number, layer in enumerate(plan.layers):
            _write_layer(layer, tiles[row, number], views[row, number], masks)
            views[row, number, SHARE] = 1 - plan.share if number else plan.share
        looks[row, :UPSIDE_DOWN] = 0 if plan.factors is None else plan.factors - 1
        looks[row, UPSIDE_DOWN:] = plan.is_flipped
    targets, paths, shapes = _joined(plans, zoomed)
    return PlanBatch(
        tiles=torch.from_numpy(tiles),
        views=torch.from_numpy(views),
        looks=torch.from_numpy(looks),
        masks=torch.from_numpy(np.stack(masks) if masks else np.zeros((0, 0, 0), np.uint8)),
        targets=targets,
        pixels=torch.zeros(0, dtype=torch.uint8),
        paths=paths,
        shapes=shapes,
        size=sizes.pop() if sizes else (0, 0),
        zoomed=tuple(zoomed),
        has_colours=any(plan.factors is not None for plan in plans),
    )


def _write_layer(layer: Layer, tiles: np.ndarray, view: np.ndarray, masks: list[np.ndarray]) -> None:
    """Fill tiles (4, 7) and view (14,) of one layer; tiles that it has not show nothing."""
    tiles[:, SLOT] = NOTHING
    for position, tile in enumerate(layer.tiles):
        pitch = 3 * tile.width
        tiles[position, :X1] = tile.slot, pitch, tile.shift[1] * pitch + tile.shift[0] * 3
        tiles[position, X1:] = tile.rectangle
    view[:9] = layer.inverse.reshape(-1)
    view[[CENTRE_X, CENTRE_Y, GRID]] = *layer.centre, layer.grid
    view[MASK] = -1 if layer.mask is None else len(masks)
    if layer.mask is not None:
        masks.append(np.packbits(layer.mask, axis=1, bitorder="little"))


def _joined(
    plans: Sequence[SamplePlan], zoomed: Sequence[bool]
) -> tuple[Tensor, tuple[str, ...], tuple[Shapes | None, ...]]:
    """Targets (T, 6), paths and shapes of a batch, or of what --quad makes of it."""
    rows = [torch.from_numpy(plan.targets) for plan in plans]
    paths, shapes = tuple(plan.path for plan in plans), tuple(plan.shapes for plan in plans)
    if zoomed:
        groups = [rows[start : start + QUAD] for start in range(0, len(rows), QUAD)]
        rows = [group[0] if is_zoomed else quad_targets(group) for group, is_zoomed in zip(groups, zoomed, strict=True)]
        paths, shapes = paths[::QUAD], (None,) * len(rows)
    for position, part in enumerate(rows):
        part[:, 0] = position
    return torch.cat([torch.zeros(0, 6), *rows]), paths, shapes
