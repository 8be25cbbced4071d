"""Pictures of a batch put together from a pool of decoded ones: each program makes BLOCK pixels of one picture.

Every step is that of the plain functions in utils/data/gpu_augment.py, which explain it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from utils.kernels.layout import ceil_div

BLOCK = 128
# Columns of the three arrays, which utils/data/plan_batches.py describes, as numbers that a kernel can read.
TILE_COLUMNS, PITCH, SHIFT, X1, Y1, X2, Y2 = (tl.constexpr(number) for number in (7, 1, 2, 3, 4, 5, 6))
VIEW_COLUMNS, CENTRE_X, CENTRE_Y, GRID, SHARE, MASK = (tl.constexpr(number) for number in (14, 9, 10, 11, 12, 13))
LOOK_COLUMNS, UPSIDE_DOWN, MIRRORED = (tl.constexpr(number) for number in (5, 3, 4))
FAR, MIX_SHIFT = tl.constexpr(1e6), tl.constexpr(1 / 512)


def compose_pictures(
    pool: Tensor, offsets: Tensor, tiles: Tensor, views: Tensor, looks: Tensor, masks: Tensor, size: tuple[int, int],
    has_colours: bool,
) -> Tensor:  # fmt: skip
    """Pictures (B, 3, H, W) uint8 RGB of a size (height, width), all arguments on one device.

    Args:
        pool: flat uint8, pictures (h, w, 3) BGR, that of slot i from byte offsets[i] on.
        tiles, views, looks: (B, 2, 4, 7) int32, (B, 2, 14) and (B, 5) float32, see utils/data/plan_batches.py.
        masks: (K, H, W / 8) uint8, of planes where something is copied; may be empty.
        has_colours: whether hue, saturation and value change.
    """
    height, width = size
    images = torch.empty((len(tiles), 3, height, width), dtype=torch.uint8, device=pool.device)
    has_masks = masks.numel() > 0
    _compose[(ceil_div(height * width, BLOCK), len(tiles))](
        pool, offsets, tiles, views, looks, masks if has_masks else looks, images, height, width,
        masks.shape[1], masks.shape[2], HAS_COLOURS=has_colours, HAS_MASKS=has_masks, BLOCK=BLOCK,
    )  # fmt: skip
    return images


@triton.jit
def _compose(
    pool, offsets, tiles, views, looks, masks, images, height, width, side, mask_pitch,
    HAS_COLOURS: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = pixel < height * width
    y, x = pixel // width, pixel % width
    look, view, tile = looks + row * LOOK_COLUMNS, views + row * 2 * VIEW_COLUMNS, tiles + row * 8 * TILE_COLUMNS
    x = tl.where(tl.load(look + MIRRORED) > 0, width - 1 - x, x).to(tl.float32)
    y = tl.where(tl.load(look + UPSIDE_DOWN) > 0, height - 1 - y, y).to(tl.float32)
    red, green, blue = _layer(pool, offsets, tile, view, masks, x, y, is_real, side, mask_pitch, HAS_MASKS, BLOCK)
    share = tl.load(view + VIEW_COLUMNS + SHARE)
    if share > 0:
        first = tl.load(view + SHARE)
        red2, green2, blue2 = _layer(
            pool, offsets, tile + 4 * TILE_COLUMNS, view + VIEW_COLUMNS, masks, x, y, is_real, side, mask_pitch,
            HAS_MASKS, BLOCK,
        )  # fmt: skip
        red = tl.floor(red * first + red2 * share + MIX_SHIFT)
        green = tl.floor(green * first + green2 * share + MIX_SHIFT)
        blue = tl.floor(blue * first + blue2 * share + MIX_SHIFT)
    if HAS_COLOURS:
        red, green, blue = _recolour(red, green, blue, tl.load(look), tl.load(look + 1), tl.load(look + 2))
    plane = height * width
    target = images + row * 3 * plane + pixel
    tl.store(target, red.to(tl.uint8), is_real)
    tl.store(target + plane, green.to(tl.uint8), is_real)
    tl.store(target + 2 * plane, blue.to(tl.uint8), is_real)


@triton.jit
def _layer(
    pool, offsets, tile, view, masks, x, y, is_real, side, mask_pitch, HAS_MASKS: tl.constexpr, BLOCK: tl.constexpr
):
    m0, m1, m2 = tl.load(view), tl.load(view + 1), tl.load(view + 2)
    m3, m4, m5 = tl.load(view + 3), tl.load(view + 4), tl.load(view + 5)
    m6, m7, m8 = tl.load(view + 6), tl.load(view + 7), tl.load(view + 8)
    grid = tl.load(view + GRID).to(tl.int32)
    centre_x, centre_y = tl.load(view + CENTRE_X).to(tl.int32), tl.load(view + CENTRE_Y).to(tl.int32)
    mask = tl.load(view + MASK).to(tl.int32)
    red, green, blue = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for step in range(grid * grid):
        px = x + ((step % grid).to(tl.float32) + 0.5) / grid - 0.5
        py = y + ((step // grid).to(tl.float32) + 0.5) / grid - 0.5
        w = m6 * px + m7 * py + m8
        scale = tl.where(w == 0, 0.0, 1.0 / w)
        u = tl.minimum(tl.maximum((m0 * px + m1 * py + m2) * scale, -FAR), FAR)
        v = tl.minimum(tl.maximum((m3 * px + m4 * py + m5) * scale, -FAR), FAR)
        left, top = tl.floor(u), tl.floor(v)
        right_share, low_share = u - left, v - top
        for corner in tl.static_range(4):
            share = (right_share if corner % 2 else 1 - right_share) * (low_share if corner // 2 else 1 - low_share)
            column, line = left.to(tl.int32) + corner % 2, top.to(tl.int32) + corner // 2
            r, g, b = _pixel(
                pool, offsets, tile, masks, column, line, centre_x, centre_y, mask, is_real, side, mask_pitch, HAS_MASKS
            )
            red += r * share
            green += g * share
            blue += b * share
    points = (grid * grid).to(tl.float32)
    return tl.floor(red / points + 0.5), tl.floor(green / points + 0.5), tl.floor(blue / points + 0.5)


@triton.jit
def _pixel(
    pool, offsets, tile, masks, column, line, centre_x, centre_y, mask, is_real, side, mask_pitch,
    HAS_MASKS: tl.constexpr,
):  # fmt: skip
    if HAS_MASKS:
        mirrored = side - 1 - column
        is_masked = is_real & (mask >= 0) & (column >= 0) & (column < side) & (line >= 0) & (line < side)
        bits = tl.load(masks + (mask.to(tl.int64) * side + line) * mask_pitch + (mirrored >> 3), is_masked, 0)
        column = tl.where(((bits.to(tl.int32) >> (mirrored & 7)) & 1) > 0, mirrored, column)
    quarter = tile + ((column >= centre_x).to(tl.int32) + 2 * (line >= centre_y).to(tl.int32)) * TILE_COLUMNS
    inside = is_real & (column >= tl.load(quarter + X1)) & (column < tl.load(quarter + X2))
    inside = inside & (line >= tl.load(quarter + Y1)) & (line < tl.load(quarter + Y2))
    start = tl.load(offsets + tl.load(quarter), inside, 0) - tl.load(quarter + SHIFT)
    address = pool + start + line * tl.load(quarter + PITCH) + column * 3
    blue = tl.load(address, inside, 114).to(tl.float32)
    green = tl.load(address + 1, inside, 114).to(tl.float32)
    red = tl.load(address + 2, inside, 114).to(tl.float32)
    return red, green, blue


@triton.jit
def _scaled(number, factor):
    return ((number.to(tl.int32) * factor.to(tl.int32) + 2048) >> 12).to(tl.float32)


@triton.jit
def _channel(place, value, chroma):
    place = place - 6 * tl.floor(place / 6)
    share = tl.minimum(tl.maximum(tl.minimum(place, 4 - place), 0), 1)
    return tl.floor(tl.maximum(value - chroma * share, 0) * 255)


@triton.jit
def _recolour(red, green, blue, hue_share, saturation_share, value_share):
    largest = tl.maximum(tl.maximum(red, green), blue)
    spread = largest - tl.minimum(tl.minimum(red, green), blue)
    saturation = _scaled(spread, tl.floor(255 * 4096 / tl.maximum(largest, 1) + 0.5))
    sextant = tl.where(
        largest == red,
        green - blue,
        tl.where(largest == green, blue - red + 2 * spread, red - green + 4 * spread),
    )
    hue = _scaled(sextant, tl.floor(180 * 4096 / (6 * tl.maximum(spread, 1)) + 0.5))
    hue = tl.where(hue < 0, hue + 180, hue)
    hue += tl.floor(hue * hue_share)
    hue -= 180 * tl.floor(hue / 180)
    saturation = tl.minimum(tl.maximum(saturation + tl.floor(saturation * saturation_share), 0), 255) * (1 / 255)
    value = tl.minimum(tl.maximum(largest + tl.floor(largest * value_share), 0), 255) * (1 / 255)
    chroma = value * saturation
    place = hue * (6 / 180)
    return _channel(place + 5, value, chroma), _channel(place + 3, value, chroma), _channel(place + 1, value, chroma)
