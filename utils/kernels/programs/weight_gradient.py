"""Triton programs of the weight gradient of a 3x3 convolution; :mod:`utils.kernels.weight_gradient` launches them.

Maps are matrices of pixels by channels, the pixels of all images counted through line by line. At stride 1, with
what lies outside of an image counted as 0, the gradient is

    dw[o, r, s, i] = sum over pixels p of dy[p, o] x[p + (r - 1) lines + (s - 1) columns, i]
                   = sum over pixels q of dy[q - (r - 1) lines, o] x[q + (s - 1) columns, i]

which is a product of two matrices whose columns are shifted channels. In the first form x is shifted nine ways and
dy not at all; in the second x three ways by columns and dy three ways by lines, which takes fewer loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(-(2**29))  # added to a position: outside of every image


@triton.jit
def _is_below(position, size):
    """Whether 0 <= position < size."""
    return position.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)


@triton.jit
def _load_tiles(
    x, x_stride, x_shift, right, down, dy, y_at, up, column, line, is_real, height, width,
    SHARES_SHIFTS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Tiles of the shifted maps x (pixels, BLOCK_X) and dy (pixels, BLOCK_Y), 0 where a position is not on the image.

    ``right``, ``down`` and ``up`` are the shifts of the columns of the tiles, NOWHERE for empty columns.
    """
    row = tl.arange(0, column.shape[0])
    # Lines and columns of x lie between two of dy, as x is STRIDE times as high and wide.
    x_row = (STRIDE * STRIDE * row - STRIDE * (STRIDE - 1) * column) * x_stride
    column = tl.where(is_real, column, NOWHERE)
    is_x = _is_below(STRIDE * column[:, None] + right[None, :], STRIDE * width)
    if SHARES_SHIFTS:
        line = tl.where(is_real, line, NOWHERE)
        is_y = _is_below(line[:, None] + up[None, :], height)
    else:
        is_x &= _is_below(STRIDE * line[:, None] + down[None, :], STRIDE * height)
        is_y = is_real[:, None] & (up >= 0)[None, :]
    x_tile = tl.load(x + (x_row[:, None] + x_shift[None, :]), mask=is_x, other=0.0)
    return x_tile, tl.load(dy + y_at, mask=is_y, other=0.0)


@triton.jit
def _step(column, line, columns_on, lines_on, height, width):
    """Columns and lines of the pixels that lie so many columns and lines further on."""
    column += columns_on
    line += lines_on + (column >= width).to(tl.int32)
    return tl.where(column >= width, column - width, column), tl.where(line >= height, line - height, line)


@triton.jit
def _columns(inputs, outputs, SHARES_SHIFTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr):
    """What the columns of the tiles of this program are.

    For those of x: index of the shift, channel, whether there is such a column, shift in columns and in lines of
    the image; for those of dy: index of the shift, channel, whether there is such a column, shift in lines.
    """
    x_column, y_column = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_Y)
    if SHARES_SHIFTS:
        x_blocks = (4 * inputs + BLOCK_X - 1) // BLOCK_X
        shift, y_shift = x_column // (BLOCK_X // 4), y_column // (BLOCK_Y // 4)
        channel = tl.program_id(0) % x_blocks * (BLOCK_X // 4) + x_column % (BLOCK_X // 4)
        y_channel = tl.program_id(0) // x_blocks * (BLOCK_Y // 4) + y_column % (BLOCK_Y // 4)
        is_x, is_y = (shift < 3) & (channel < inputs), (y_shift < 3) & (y_channel < outputs)
        right, down, up = shift - 1, shift * 0, 1 - y_shift
    else:
        x_blocks = (9 * inputs + BLOCK_X - 1) // BLOCK_X
        value = tl.program_id(0) % x_blocks * BLOCK_X + x_column
        shift, channel = value // inputs, value % inputs
        y_channel = tl.program_id(0) // x_blocks * BLOCK_Y + y_column
        y_shift = y_channel * 0
        is_x, is_y = shift < 9, y_channel < outputs
        right, down, up = shift % 3 - 1, shift // 3 - 1, y_shift
    return shift, channel, is_x, right, down, y_shift, y_channel, is_y, up


@triton.jit(do_not_specialize=["height", "width", "pixels", "tiles"])
def partial_products(
    partials: tl.tensor, x: tl.tensor, x_stride: int, dy: tl.tensor, dy_stride: int, height: int, width: int,
    pixels: int, tiles: int, inputs: int, outputs: int,
    SHARES_SHIFTS: tl.constexpr, STRIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr, IS_AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums over one stretch of pixels, of BLOCK_X columns of shifted x by BLOCK_Y columns of dy.

    ``partials`` is (programs of axis 1, outputs, 3, 3, inputs) float32; height, width and pixels (of all images) are
    those of dy; ``tiles`` of BLOCK_P pixels make a stretch. Programs along axis 0 share a stretch and differ in the
    columns: with SHARES_SHIFTS (stride 1 only) BLOCK_X / 4 input channels at three shifts, a fourth being left empty,
    and BLOCK_Y / 4 output channels likewise; else nine shifts and input channels counted through, and BLOCK_Y output
    channels. Loads go ahead of the products, by one tile through registers and the first cache with IS_AHEAD, else by
    STAGES - 1 tiles past both.
    """
    columns = _columns(inputs, outputs, SHARES_SHIFTS, BLOCK_X, BLOCK_Y)
    shift, channel, is_x, right, down, y_shift, y_channel, is_y, up = columns
    x_shift = (down * (STRIDE * width) + right) * x_stride + channel
    y_at = tl.arange(0, BLOCK_P)[:, None] * dy_stride + (up * width * dy_stride + y_channel)[None, :]
    right, up = tl.where(is_x, right, NOWHERE), tl.where(is_y, up, NOWHERE)

    start = tl.program_id(1) * tiles * BLOCK_P
    end = tl.minimum(start + tiles * BLOCK_P, pixels)
    x += start.to(tl.int64) * x_stride * STRIDE * STRIDE
    dy += start.to(tl.int64) * dy_stride
    pixel = start + tl.arange(0, BLOCK_P)
    column, line = pixel % width, pixel // width % height
    columns_on, lines_on = BLOCK_P % width, BLOCK_P // width % height

    total = tl.zeros((BLOCK_X, BLOCK_Y), tl.float32)
    if IS_AHEAD:
        x_tile, y_tile = _load_tiles(
            x, x_stride, x_shift, right, down, dy, y_at, up, column, line, pixel < end, height, width,
            SHARES_SHIFTS, STRIDE,
        )  # fmt: skip
    for _ in tl.range(start, end, BLOCK_P, num_stages=STAGES):
        if IS_AHEAD:
            ready_x, ready_y = x_tile, y_tile
            x += BLOCK_P * STRIDE * STRIDE * x_stride
            dy += BLOCK_P * dy_stride
            pixel += BLOCK_P
            column, line = _step(column, line, columns_on, lines_on, height, width)
        x_tile, y_tile = _load_tiles(
            x, x_stride, x_shift, right, down, dy, y_at, up, column, line, pixel < end, height, width,
            SHARES_SHIFTS, STRIDE,
        )  # fmt: skip
        if IS_AHEAD:
            total = tl.dot(tl.trans(ready_x), ready_y, total)
        else:
            total = tl.dot(tl.trans(x_tile), y_tile, total)
            x += BLOCK_P * STRIDE * STRIDE * x_stride
            dy += BLOCK_P * dy_stride
            pixel += BLOCK_P
            column, line = _step(column, line, columns_on, lines_on, height, width)
    target = (y_channel * 9 + y_shift * 3)[None, :] * inputs + (shift * inputs + channel)[:, None]
    target += tl.program_id(1).to(tl.int64) * outputs * 9 * inputs
    tl.store(partials + target, total, mask=is_x[:, None] & is_y[None, :])


@triton.jit(do_not_specialize=["programs"])
def join_products(
    gradient: tl.tensor,  # (values), of the type that is wanted
    partials: tl.tensor,  # (programs, values) float32
    programs: int,
    values: int,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The sums over all programs, always in the same order."""
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.arange(0, BLOCK_P)
    total = tl.zeros((BLOCK_P, BLOCK_V), tl.float32)
    at = partials + row[:, None].to(tl.int64) * values + value[None, :]
    for first in range(0, programs, BLOCK_P):
        is_real = (first + row < programs)[:, None] & (value < values)[None, :]
        total += tl.load(at, mask=is_real, other=0.0)
        at += BLOCK_P * values
    tl.store(gradient + value, tl.sum(total, 0).to(gradient.dtype.element_ty), mask=value < values)
