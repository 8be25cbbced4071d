"""Pictures of a whole batch put together on the device: mosaic, copies, affine change, mixture, colours, flips.

Two implementations of one function: a Triton kernel, and the same in plain torch, which needs neither Triton nor CUDA.
The steps are those of `augment.py`, and numbers are rounded where OpenCV rounds. Only mosaics that are reduced to half
their size or less differ: instead of being drawn from reduced pictures, each pixel is the mean of several points.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from utils.data.batching import QUAD, Batch
from utils.data.images import FILL
from utils.data.plan_batches import (
    CENTRE_X,
    CENTRE_Y,
    GRID,
    MASK,
    MIRRORED,
    PITCH,
    SHARE,
    SHIFT,
    SLOT,
    UPSIDE_DOWN,
    X1,
    X2,
    Y1,
    Y2,
    PlanBatch,
)
from utils.data.pool import PicturePool, PoolLayout
from utils.kernels.layout import has_triton, on_device

MIX_SHIFT = 1 / 512  # keeps a mixture that is a whole number but for rounding from losing a level when it is cut
HUES = 180  # OpenCV's hue counts half degrees
FAR = 1e6  # coordinates are limited to this, so that they fit an integer


class Composer:
    """Makes batches of pictures from plans and a pool; `composer(plans)` gives a Batch on the device.

    Nothing in a call waits for the device. use_triton: None takes the kernel on CUDA devices if Triton is installed.
    """

    def __init__(self, layout: PoolLayout, device: torch.device, *, use_triton: bool | None = None) -> None:
        self.device = torch.device(device)
        self.pool = PicturePool(layout, self.device)
        self.use_triton = self.device.type == "cuda" and has_triton() if use_triton is None else use_triton

    def __call__(self, plans: PlanBatch) -> Batch:
        """Store the pictures that came along, then make the batch: images (B, 3, H, W) uint8 RGB, targets and so on."""
        if len(plans.pixels):
            self.pool.put(plans.first_slot, plans.pixels)
        images = self.compose(plans)
        if plans.zoomed:
            images = join_quads(images, plans.zoomed)
        return images, plans.targets.to(self.device, non_blocking=True), plans.paths, plans.shapes

    def compose(self, plans: PlanBatch) -> Tensor:
        """Pictures (B, 3, H, W) uint8 RGB of plans whose source pictures lie in the pool."""
        if not self.use_triton:
            return compose_plain(self.pool, plans)
        from utils.kernels.programs.compose import compose_pictures

        arrays = (plans.tiles, plans.views, plans.looks, plans.masks)
        moved = (array.to(self.device, non_blocking=True) for array in arrays)
        with on_device(self.pool.data):
            return compose_pictures(self.pool.data, self.pool.offsets, *moved, plans.size, plans.has_colours)


def join_quads(images: Tensor, zoomed: tuple[bool, ...]) -> Tensor:
    """Pictures (B / 4, 3, 2H, 2W) of groups of four: the first one enlarged where zoomed, else all tiled by columns."""
    groups = images.unflatten(0, (-1, QUAD))  # (B / 4, 4, 3, H, W)
    columns = [torch.cat((groups[:, k], groups[:, k + 1]), 2) for k in (0, 2)]
    joined = torch.cat(columns, 3)
    for row, is_zoomed in enumerate(zoomed):
        if is_zoomed:
            larger = F.interpolate(groups[row, :1].float(), scale_factor=2.0, mode="bilinear", align_corners=False)
            joined[row] = larger[0].round().to(torch.uint8)
    return joined


# ------------------------------------------------------------------------------------------------- in plain torch


def compose_plain(pool: PicturePool, plans: PlanBatch) -> Tensor:
    """Pictures (B, 3, H, W) uint8 RGB, one after the other; what the Triton kernel does at once."""
    height, width = plans.size
    images = torch.empty((len(plans.tiles), 3, height, width), dtype=torch.uint8, device=pool.device)
    masks = plans.masks.to(pool.device, non_blocking=True)
    looks = plans.looks.numpy()
    for row, (tiles, views) in enumerate(zip(plans.tiles.numpy(), plans.views.numpy(), strict=True)):
        picture = _layer(pool, tiles[0], views[0], masks, (height, width))
        if views[1, SHARE] > 0:
            other = _layer(pool, tiles[1], views[1], masks, (height, width))
            picture = (picture * float(views[0, SHARE]) + other * float(views[1, SHARE]) + MIX_SHIFT).floor()
        if plans.has_colours:
            picture = recolour(picture, looks[row, :UPSIDE_DOWN])
        axes = [axis for axis, column in ((1, UPSIDE_DOWN), (2, MIRRORED)) if looks[row, column]]
        images[row] = picture.flip(axes).to(torch.uint8)
    return images


def _layer(pool: PicturePool, tiles: np.ndarray, view: np.ndarray, masks: Tensor, size: tuple[int, int]) -> Tensor:
    """One layer as the network's picture (3, H, W) RGB, whole numbers as float32."""
    y, x = torch.meshgrid(
        *(torch.arange(length, dtype=torch.float32, device=pool.device) for length in size), indexing="ij"
    )
    grid, total = int(view[GRID]), torch.zeros(3, *size, device=pool.device)
    steps = [(step + 0.5) / grid - 0.5 for step in range(grid)]
    m = view[:9].tolist()
    mask = masks[int(view[MASK])] if view[MASK] >= 0 else None
    for dy in steps:
        for dx in steps:
            u, v, w = (m[k] * (x + dx) + m[k + 1] * (y + dy) + m[k + 2] for k in (0, 3, 6))
            scale = torch.where(w == 0, 0.0, 1 / w)
            total += _bilinear(pool, tiles, view, mask, (u * scale).clamp(-FAR, FAR), (v * scale).clamp(-FAR, FAR))
    return (total / grid**2 + 0.5).floor()


def _bilinear(
    pool: PicturePool, tiles: np.ndarray, view: np.ndarray, mask: Tensor | None, u: Tensor, v: Tensor
) -> Tensor:
    """Values (3, H, W) RGB at points u, v (H, W) of a plane."""
    left, top = u.floor(), v.floor()
    right_share, low_share = u - left, v - top
    columns, rows = left.int(), top.int()
    value = torch.zeros((), device=pool.device)
    for down, share_y in ((0, 1 - low_share), (1, low_share)):
        for across, share_x in ((0, 1 - right_share), (1, right_share)):
            value = value + _pixels(pool, tiles, view, mask, columns + across, rows + down) * (share_x * share_y)
    return value


def _pixels(
    pool: PicturePool, tiles: np.ndarray, view: np.ndarray, mask: Tensor | None, columns: Tensor, rows: Tensor
) -> Tensor:
    """Values (3, H, W) RGB float32 of pixels of a plane: of a tile's picture, or grey where there is none."""
    if mask is not None:
        mirrored = len(mask) - 1 - columns
        columns = torch.where(_is_copied(mask, mirrored, rows), mirrored, columns)
    quarter = (columns >= int(view[CENTRE_X])).int() + 2 * (rows >= int(view[CENTRE_Y])).int()
    values = torch.full((3, *columns.shape), float(FILL[0]), device=pool.device)
    for position, tile in enumerate(tiles.tolist()):
        inside = (quarter == position) & (columns >= tile[X1]) & (columns < tile[X2])
        inside &= (rows >= tile[Y1]) & (rows < tile[Y2])
        address = int(pool.layout.offsets[tile[SLOT]]) - tile[SHIFT] + rows.long() * tile[PITCH] + columns.long() * 3
        address = torch.where(inside, address, 0)
        for channel in range(3):  # pictures are stored blue first
            values[channel] = torch.where(inside, pool.data[address + 2 - channel].float(), values[channel])
    return values


def _is_copied(mask: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Whether pixels of a plane lie under its mask (side, side / 8), bits from the lowest on."""
    side = len(mask)
    inside = (columns >= 0) & (columns < side) & (rows >= 0) & (rows < side)
    columns, rows = columns.clamp(0, side - 1), rows.clamp(0, side - 1)
    bits = mask[rows.long(), (columns >> 3).long()].int() >> (columns & 7)
    return inside & ((bits & 1) == 1)


def recolour(picture: Tensor, changes: np.ndarray) -> Tensor:
    """Change hue, saturation and value of a picture (3, H, W) RGB by shares (3,), in the steps of OpenCV's 8-bit HSV.

    Hue counts from 0 to 179. Every product with 1 + share is cut to a whole number; computed as the number plus its
    share, it is exact in float32 however small the share.
    """
    hue_share, saturation_share, value_share = changes.tolist()
    red, green, blue = picture
    largest, smallest = picture.amax(0), picture.amin(0)
    spread = largest - smallest
    saturation = _scaled(spread, (255 * 4096 / largest.clamp(min=1) + 0.5).floor())
    sextant = torch.where(
        largest == red,
        green - blue,
        torch.where(largest == green, blue - red + 2 * spread, red - green + 4 * spread),
    )
    hue = _scaled(sextant, (HUES * 4096 / (6 * spread.clamp(min=1)) + 0.5).floor())
    hue = torch.where(hue < 0, hue + HUES, hue)
    hue = hue + (hue * hue_share).floor()
    hue = hue - HUES * (hue / HUES).floor()
    # As fractions and back again: some whole numbers lose a level by it, which OpenCV lets them lose too.
    saturation = (saturation + (saturation * saturation_share).floor()).clamp(0, 255) * (1 / 255)
    value = (largest + (largest * value_share).floor()).clamp(0, 255) * (1 / 255)
    chroma = value * saturation
    planes = []
    for start in (5, 3, 1):  # red, green, blue
        place = start + hue * (6 / HUES)
        place = place - 6 * (place / 6).floor()
        planes.append(((value - chroma * torch.minimum(place, 4 - place).clamp(0, 1)) * 255).floor())
    return torch.stack(planes)


def _scaled(number: Tensor, factor: Tensor) -> Tensor:
    """number * factor / 4096, rounded; whole numbers, whose product float32 would not hold."""
    return ((number.int() * factor.int() + 2048) >> 12).float()
