"""Triton program of 2x2 averages at stride 1; :mod:`utils.kernels.pool` launches it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_sums(x, row, x_column_stride, column, height_ok, width, columns, is_column, ACC: tl.constexpr):
    """Sums of two horizontal neighbours, ``column`` and the one right of it, in one row; 0 outside the map."""
    at = column[:, None] * x_column_stride + columns[None, :]
    left = height_ok & (column >= 0) & (column < width)
    right = height_ok & (column >= -1) & (column < width - 1)
    a = tl.load(x + row + at, mask=left[:, None] & is_column[None, :], other=0.0).to(ACC)
    b = tl.load(x + row + at + x_column_stride, mask=right[:, None] & is_column[None, :], other=0.0).to(ACC)
    return a + b


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "border"])
def average_2x2(
    y: tl.tensor,  # (B, out_height, out_width, C) without gaps
    x: tl.tensor,  # (B, height, width, C) with the strides below
    x_image_stride: tl.tensor,
    x_row_stride: int,
    x_column_stride: int,
    height: int,
    width: int,
    out_height: int,
    out_width: int,
    channels: int,
    border: int,
    OUT_ROWS: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """OUT_ROWS rows of y[h, w] = mean of x[h - border ... h - border + 1, w - border ... w - border + 1].

    What lies outside of x counts as 0. Border 0 is the forward pass, border 1 the backward pass. Every row of x is
    read once and used for two rows of y.
    """
    ACC: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    blocks = (channels + BLOCK_C - 1) // BLOCK_C
    spans = (out_width + BLOCK_W - 1) // BLOCK_W
    bands = (out_height + OUT_ROWS - 1) // OUT_ROWS
    index = tl.program_id(0)
    columns = (index % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    index = index // blocks
    out_column = (index % spans) * BLOCK_W + tl.arange(0, BLOCK_W)
    index = index // spans
    first = (index % bands) * OUT_ROWS
    image = (index // bands).to(tl.int64)

    is_column = columns < channels
    column = out_column - border
    source = x + image * x_image_stride
    target = y + image * out_height * out_width * channels
    offsets = out_column[:, None] * channels + columns[None, :]
    is_inside = (out_column < out_width)[:, None] & is_column[None, :]
    row = first - border
    above = _row_sums(
        source, row * x_row_stride, x_column_stride, column, (row >= 0) & (row < height), width, columns, is_column, ACC
    )
    for step in tl.static_range(OUT_ROWS):
        row = first - border + (step + 1)
        below = _row_sums(
            source, row * x_row_stride, x_column_stride, column, (row >= 0) & (row < height),
            width, columns, is_column, ACC,
        )  # fmt: skip
        out_row = first + step
        mean = ((above + below) * 0.25).to(y.dtype.element_ty)
        tl.store(target + out_row * out_width * channels + offsets, mean, mask=is_inside & (out_row < out_height))
        above = below
