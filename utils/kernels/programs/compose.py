"""Pictures of a batch put together from a pool of decoded ones: each program makes a small rectangle of one picture.

Every step is that of the plain functions in utils/data/gpu_augment.py, which explain it. Most rectangles read one tile
only, or nothing at all; their programs learn so from their corners and look no tile up for single pixels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from utils.kernels.layout import ceil_div

BLOCK_WIDTH, BLOCK_HEIGHT = 64, 8  # the fastest of nine on an H200: few programs, few of them on a border of tiles
# Columns of the three arrays, which utils/data/plan_batches.py describes, as numbers that a kernel can read.
TILE_COLUMNS, PITCH, SHIFT, X1, Y1, X2, Y2 = (tl.constexpr(number) for number in (7, 1, 2, 3, 4, 5, 6))
VIEW_COLUMNS, CENTRE_X, CENTRE_Y, GRID, SHARE, MASK = (tl.constexpr(number) for number in (14, 9, 10, 11, 12, 13))
LOOK_COLUMNS, UPSIDE_DOWN, MIRRORED = (tl.constexpr(number) for number in (5, 3, 4))
FAR, MIX_SHIFT, GREY = tl.constexpr(1e6), tl.constexpr(1 / 512), tl.constexpr(114.0)


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
    blocks = ceil_div(width, BLOCK_WIDTH) * ceil_div(height, BLOCK_HEIGHT)
    _compose[(blocks, len(tiles))](
        pool, offsets, tiles, views, looks, masks if has_masks else looks, images, height, width,
        masks.shape[1], masks.shape[2], HAS_COLOURS=has_colours, HAS_MASKS=has_masks,
        BLOCK_WIDTH=BLOCK_WIDTH, BLOCK_HEIGHT=BLOCK_HEIGHT,
    )  # fmt: skip
    return images


@triton.jit
def _compose(
    pool, offsets, tiles, views, looks, masks, images, height, width, side, mask_pitch,
    HAS_COLOURS: tl.constexpr, HAS_MASKS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_HEIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(width, BLOCK_WIDTH)
    start_x, start_y = tl.program_id(0) % across * BLOCK_WIDTH, tl.program_id(0) // across * BLOCK_HEIGHT
    end_x, end_y = tl.minimum(start_x + BLOCK_WIDTH, width) - 1, tl.minimum(start_y + BLOCK_HEIGHT, height) - 1
    number = tl.arange(0, BLOCK_WIDTH * BLOCK_HEIGHT)
    x, y = start_x + number % BLOCK_WIDTH, start_y + number // BLOCK_WIDTH
    is_real = (x <= end_x) & (y <= end_y)
    target = images + row * 3 * height * width + y * width + x
    x, y = tl.minimum(x, end_x), tl.minimum(y, end_y)  # pixels outside read what their neighbours read
    look, view, tile = looks + row * LOOK_COLUMNS, views + row * 2 * VIEW_COLUMNS, tiles + row * 8 * TILE_COLUMNS
    if tl.load(look + MIRRORED) > 0:
        x, start_x, end_x = width - 1 - x, width - 1 - end_x, width - 1 - start_x
    if tl.load(look + UPSIDE_DOWN) > 0:
        y, start_y, end_y = height - 1 - y, height - 1 - end_y, height - 1 - start_y
    x, y = x.to(tl.float32), y.to(tl.float32)
    red, green, blue = tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x)
    layers = 1 + (tl.load(view + VIEW_COLUMNS + SHARE) > 0).to(tl.int32)
    for _ in range(layers):
        share = tl.load(view + SHARE)  # 1 where there is one layer
        r, g, b = _layer(
            pool, offsets, tile, view, masks, x, y, start_x, end_x, start_y, end_y, side, mask_pitch, HAS_MASKS
        )
        red, green, blue = red + r * share, green + g * share, blue + b * share
        tile, view = tile + 4 * TILE_COLUMNS, view + VIEW_COLUMNS
    red, green, blue = tl.floor(red + MIX_SHIFT), tl.floor(green + MIX_SHIFT), tl.floor(blue + MIX_SHIFT)
    if HAS_COLOURS:
        red, green, blue = _recolour(red, green, blue, tl.load(look), tl.load(look + 1), tl.load(look + 2))
    plane = height * width
    tl.store(target, red.to(tl.uint8), is_real)
    tl.store(target + plane, green.to(tl.uint8), is_real)
    tl.store(target + 2 * plane, blue.to(tl.uint8), is_real)


@triton.jit
def _layer(
    pool, offsets, tile, view, masks, x, y, start_x, end_x, start_y, end_y, side, mask_pitch, HAS_MASKS: tl.constexpr
):
    """Red, green and blue of one layer for pixels x, y of a rectangle: each the mean of points of a plane of tiles."""
    left, right, top, bottom = _reach(view, start_x - 0.5, end_x + 0.5, start_y - 0.5, end_y + 0.5)
    centre_x, centre_y = tl.load(view + CENTRE_X).to(tl.int32), tl.load(view + CENTRE_Y).to(tl.int32)
    is_plain = tl.load(view + MASK) < 0  # with copies anything may show anywhere
    is_empty = is_plain
    for position in tl.static_range(4):
        other = tile + position * TILE_COLUMNS
        is_beside = (right < tl.load(other + X1)) | (left >= tl.load(other + X2))
        is_empty &= is_beside | (bottom < tl.load(other + Y1)) | (top >= tl.load(other + Y2))
    quarter = tile + ((left >= centre_x).to(tl.int32) + 2 * (top >= centre_y).to(tl.int32)) * TILE_COLUMNS
    is_whole = is_plain & ((left >= centre_x) == (right >= centre_x)) & ((top >= centre_y) == (bottom >= centre_y))
    is_whole &= (left >= tl.load(quarter + X1)) & (right < tl.load(quarter + X2))
    is_whole &= (top >= tl.load(quarter + Y1)) & (bottom < tl.load(quarter + Y2))
    grid = tl.load(view + GRID).to(tl.int32)
    red, green, blue = tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x)
    if is_empty:
        red, green, blue = red + GREY, green + GREY, blue + GREY
    else:
        start = pool + (tl.load(offsets + tl.load(quarter), is_whole, 0) - tl.load(quarter + SHIFT))
        pitch = tl.load(quarter + PITCH)
        for step in range(grid * grid):
            px = x + ((step % grid).to(tl.float32) + 0.5) / grid - 0.5
            py = y + ((step // grid).to(tl.float32) + 0.5) / grid - 0.5
            u, v, _ = _point(view, px, py)
            left_u, top_v = tl.floor(u), tl.floor(v)
            right_share, low_share = u - left_u, v - top_v
            column, line = left_u.to(tl.int32), top_v.to(tl.int32)
            if is_whole:
                for corner in tl.static_range(4):
                    share = _corner_share(right_share, low_share, corner)
                    address = start + (line + corner // 2) * pitch + (column + corner % 2) * 3
                    red += tl.load(address + 2).to(tl.float32) * share
                    green += tl.load(address + 1).to(tl.float32) * share
                    blue += tl.load(address).to(tl.float32) * share
            else:
                for corner in tl.static_range(4):
                    share = _corner_share(right_share, low_share, corner)
                    r, g, b = _pixel(
                        pool, offsets, tile, view, masks, column + corner % 2, line + corner // 2, centre_x, centre_y,
                        side, mask_pitch, HAS_MASKS,
                    )  # fmt: skip
                    red += r.to(tl.float32) * share
                    green += g.to(tl.float32) * share
                    blue += b.to(tl.float32) * share
        points = (grid * grid).to(tl.float32)
        red, green, blue = tl.floor(red / points + 0.5), tl.floor(green / points + 0.5), tl.floor(blue / points + 0.5)
    return red, green, blue


@triton.jit
def _corner_share(right_share, low_share, corner: tl.constexpr):
    """What one of the four pixels around a point counts."""
    return (right_share if corner % 2 else 1 - right_share) * (low_share if corner // 2 else 1 - low_share)


@triton.jit
def _point(view, x, y):
    """Where the plane is read for points of the result, and what they were divided by."""
    w = tl.load(view + 6) * x + tl.load(view + 7) * y + tl.load(view + 8)
    scale = tl.where(w == 0, 0.0, 1.0 / w)
    u = (tl.load(view) * x + tl.load(view + 1) * y + tl.load(view + 2)) * scale
    v = (tl.load(view + 3) * x + tl.load(view + 4) * y + tl.load(view + 5)) * scale
    return tl.minimum(tl.maximum(u, -FAR), FAR), tl.minimum(tl.maximum(v, -FAR), FAR), w


@triton.jit
def _reach(view, left, right, top, bottom):
    """Columns and lines of the plane, first and last, that a rectangle of the result may read, with one to spare.

    The picture of a rectangle lies between those of its corners, unless the horizon goes through it: then all is said
    to be read.
    """
    u0, v0, w0 = _point(view, left, top)
    u1, v1, w1 = _point(view, right, top)
    u2, v2, w2 = _point(view, left, bottom)
    u3, v3, w3 = _point(view, right, bottom)
    is_far = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3)) <= 0
    low_u, high_u = (
        tl.minimum(tl.minimum(u0, u1), tl.minimum(u2, u3)),
        tl.maximum(tl.maximum(u0, u1), tl.maximum(u2, u3)),
    )
    low_v, high_v = (
        tl.minimum(tl.minimum(v0, v1), tl.minimum(v2, v3)),
        tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)),
    )
    first_column = tl.where(is_far, -FAR, tl.floor(low_u) - 1).to(tl.int32)
    last_column = tl.where(is_far, FAR, tl.floor(high_u) + 2).to(tl.int32)
    first_line = tl.where(is_far, -FAR, tl.floor(low_v) - 1).to(tl.int32)
    last_line = tl.where(is_far, FAR, tl.floor(high_v) + 2).to(tl.int32)
    return first_column, last_column, first_line, last_line


@triton.jit
def _pixel(
    pool, offsets, tile, view, masks, column, line, centre_x, centre_y, side, mask_pitch, HAS_MASKS: tl.constexpr
):
    """One pixel of a plane for each place: of the tile that shows there, or grey."""
    if HAS_MASKS:
        mask, mirrored = tl.load(view + MASK).to(tl.int32), side - 1 - column
        is_masked = (mask >= 0) & (column >= 0) & (column < side) & (line >= 0) & (line < side)
        bits = tl.load(masks + (mask.to(tl.int64) * side + line) * mask_pitch + (mirrored >> 3), is_masked, 0)
        column = tl.where(((bits.to(tl.int32) >> (mirrored & 7)) & 1) > 0, mirrored, column)
    quarter = tile + ((column >= centre_x).to(tl.int32) + 2 * (line >= centre_y).to(tl.int32)) * TILE_COLUMNS
    inside = (column >= tl.load(quarter + X1)) & (column < tl.load(quarter + X2))
    inside = inside & (line >= tl.load(quarter + Y1)) & (line < tl.load(quarter + Y2))
    start = tl.load(offsets + tl.load(quarter), inside, 0) - tl.load(quarter + SHIFT)
    address = pool + start + line * tl.load(quarter + PITCH) + column * 3
    red, green, blue = (
        tl.load(address + 2, inside, 114),
        tl.load(address + 1, inside, 114),
        tl.load(address, inside, 114),
    )
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
