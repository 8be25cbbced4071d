"""Triton programs that move maps: into a part of a wider one, to a larger size, and the largest of neighbours.

Maps are channels_last, as in :mod:`utils.kernels.programs.norm_forward`: matrices of rows (positions) by channels.
A ``stride`` is the distance in values between neighbours in a line; the lines of all images follow each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from utils.kernels.programs.norm_forward import store_rows
from utils.kernels.programs.streaming import load_raw, place_of_tile


@triton.jit(do_not_specialize=["rows"])
def copy_rows(
    y: tl.tensor,
    y_stride: int,
    x: tl.tensor,
    x_stride: int,
    rows: int,
    channels: int,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of a copy between matrices of different widths."""
    columns, is_column, first = place_of_tile(channels, BLOCK_R, BLOCK_C)
    values = load_raw(x, x_stride, first, rows, columns, is_column, BLOCK_R)
    store_rows(y, values, first, rows, y_stride, columns, is_column, BLOCK_R)


@triton.jit(do_not_specialize=["rows"])
def add_rows(
    y: tl.tensor,
    a: tl.tensor,
    a_stride: int,
    b: tl.tensor,
    b_stride: int,
    rows: int,
    channels: int,
    IS_DOUBLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of the sum of two matrices, each perhaps a part of a wider one; ``y`` is without gaps."""
    ACC: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    columns, is_column, first = place_of_tile(channels, BLOCK_R, BLOCK_C)
    values = load_raw(a, a_stride, first, rows, columns, is_column, BLOCK_R).to(ACC)
    values += load_raw(b, b_stride, first, rows, columns, is_column, BLOCK_R).to(ACC)
    store_rows(y, values, first, rows, channels, columns, is_column, BLOCK_R)


@triton.jit(do_not_specialize=["rows", "tiles"])
def partial_totals(
    x: tl.tensor,
    x_stride: int,
    partials: tl.tensor,  # (programs, C)
    rows: int,
    channels: int,
    tiles: int,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums over the rows of one program: every so many tiles of 4 * BLOCK_R rows."""
    ACC: tl.constexpr = partials.dtype.element_ty
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    program, programs = tl.program_id(1), tl.num_programs(1)
    total = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    for visit in range(0, (tiles - program + programs - 1) // programs):
        first = (program + visit * programs) * (4 * BLOCK_R)
        a = load_raw(x, x_stride, first, rows, columns, is_column, BLOCK_R).to(ACC)
        b = load_raw(x, x_stride, first + BLOCK_R, rows, columns, is_column, BLOCK_R).to(ACC)
        c = load_raw(x, x_stride, first + 2 * BLOCK_R, rows, columns, is_column, BLOCK_R).to(ACC)
        d = load_raw(x, x_stride, first + 3 * BLOCK_R, rows, columns, is_column, BLOCK_R).to(ACC)
        total += (a + b) + (c + d)
    tl.store(partials + program * channels + columns, tl.sum(total, 0), mask=is_column)


@triton.jit
def _place(width, channels, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr):
    """Line of all images, columns of positions and channels of this program, and which of them exist."""
    column_blocks = (channels + BLOCK_C - 1) // BLOCK_C
    width_blocks = (width + BLOCK_W - 1) // BLOCK_W
    program = tl.program_id(0)
    channel = (program % column_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    program = program // column_blocks
    column = (program % width_blocks) * BLOCK_W + tl.arange(0, BLOCK_W)
    return program // width_blocks, column, channel, (column < width)[:, None] & (channel < channels)[None, :]


@triton.jit(do_not_specialize=["height", "width"])
def enlarge(
    y: tl.tensor,
    x: tl.tensor,
    x_stride: int,
    height: int,
    width: int,
    channels: int,
    SCALE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Every value of a line of ``x`` SCALE x SCALE times; ``y`` is without gaps."""
    line, column, channel, mask = _place(width, channels, BLOCK_W, BLOCK_C)
    values = tl.load(
        x + line.to(tl.int64) * width * x_stride + (column[:, None] * x_stride + channel[None, :]), mask=mask
    )
    out_line = width * SCALE * channels
    for down in tl.static_range(SCALE):
        target = y + (line.to(tl.int64) * SCALE + down) * out_line
        for right in tl.static_range(SCALE):
            at = (column * SCALE + right)[:, None] * channels + channel[None, :]
            tl.store(target + at, values, mask=mask)


@triton.jit(do_not_specialize=["height", "width"])
def reduce(
    dx: tl.tensor,
    dy: tl.tensor,
    dy_stride: int,
    height: int,
    width: int,
    channels: int,
    IS_DOUBLE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums of SCALE x SCALE neighbours: one line of ``dx``, which is without gaps and ``height`` by ``width``."""
    ACC: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    line, column, channel, mask = _place(width, channels, BLOCK_W, BLOCK_C)
    total = tl.zeros((BLOCK_W, BLOCK_C), ACC)
    in_line = width * SCALE * dy_stride
    for down in tl.static_range(SCALE):
        source = dy + (line.to(tl.int64) * SCALE + down) * in_line
        for right in tl.static_range(SCALE):
            at = (column * SCALE + right)[:, None] * dy_stride + channel[None, :]
            total += tl.load(source + at, mask=mask, other=0.0).to(ACC)
    at = column[:, None] * channels + channel[None, :]
    tl.store(dx + line.to(tl.int64) * width * channels + at, total.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["height", "width"])
def largest(
    y: tl.tensor,
    winner: tl.tensor,  # uint8, number of the neighbour that is the largest, line by line
    x: tl.tensor,
    x_stride: int,
    height: int,
    width: int,
    channels: int,
    IS_DOUBLE: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One line of the largest of KERNEL x KERNEL neighbours, the first of several that are equal."""
    line, column, channel, mask = _place(width, channels, BLOCK_W, BLOCK_C)
    image, row = line // height, line % height
    ACC: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    best = tl.full((BLOCK_W, BLOCK_C), float("-inf"), ACC)
    number = tl.full((BLOCK_W, BLOCK_C), 255, tl.int32)
    for down in tl.static_range(KERNEL):
        there = row + down - KERNEL // 2
        is_line = (there >= 0) & (there < height)
        source = x + (image.to(tl.int64) * height + there) * width * x_stride
        for right in tl.static_range(KERNEL):
            beside = column + right - KERNEL // 2
            is_there = mask & is_line & ((beside >= 0) & (beside < width))[:, None]
            at = beside[:, None] * x_stride + channel[None, :]
            values = tl.load(source + at, mask=is_there, other=float("-inf")).to(ACC)
            # As torch does: a value that is no number wins, of several the last one.
            is_better = is_there & ((values > best) | (values != values) | (number == 255))
            best = tl.where(is_better, values, best)
            number = tl.where(is_better, down * KERNEL + right, number)
    at = line.to(tl.int64) * width * channels + column[:, None] * channels + channel[None, :]
    tl.store(y + at, best.to(y.dtype.element_ty), mask=mask)
    tl.store(winner + at, number.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["height", "width"])
def largest_backward(
    dx: tl.tensor,
    dy: tl.tensor,
    dy_stride: int,
    winner: tl.tensor,
    height: int,
    width: int,
    channels: int,
    IS_DOUBLE: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One line of gradients: what all neighbours give that had this place as their largest."""
    ACC: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    line, column, channel, mask = _place(width, channels, BLOCK_W, BLOCK_C)
    image, row = line // height, line % height
    total = tl.zeros((BLOCK_W, BLOCK_C), ACC)
    for down in tl.static_range(KERNEL):
        there = row - down + KERNEL // 2
        is_line = (there >= 0) & (there < height)
        first = (image.to(tl.int64) * height + there) * width
        for right in tl.static_range(KERNEL):
            beside = column - right + KERNEL // 2
            is_there = mask & is_line & ((beside >= 0) & (beside < width))[:, None]
            at = first * channels + beside[:, None] * channels + channel[None, :]
            is_winner = tl.load(winner + at, mask=is_there, other=255).to(tl.int32) == down * KERNEL + right
            at = first * dy_stride + beside[:, None] * dy_stride + channel[None, :]
            total += tl.where(is_winner, tl.load(dy + at, mask=is_there, other=0.0).to(ACC), 0.0)
    at = line.to(tl.int64) * width * channels + column[:, None] * channels + channel[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=mask)
