"""Triton programs of the backward pass of batch norm with activation in training mode.

What the forward pass did not keep is computed again from the inputs. With z the value before the activation, dz its
gradient, n the normalised input and R the number of rows (Ioffe and Szegedy 2015, section 3, put together):

    dbias = sum(dz),  dweight = sum(dz * n),  dx = weight / std * (dz - (dbias + n * dweight) / R)

Layout and order of sums are those of :mod:`utils.kernels.programs.norm_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from utils.kernels.programs.norm_forward import load_channels, load_coefficients, store_rows
from utils.kernels.programs.streaming import NO_ROWS, load_raw, place_of_tile, sigmoid, wait_for_inputs


@triton.jit
def _before_activation(dy, z, HAS_SILU: tl.constexpr, FAST: tl.constexpr):
    """Gradient of z; with s = sigmoid(z), the derivative of z * s is s * (1 + z * (1 - s))."""
    if HAS_SILU:
        s = sigmoid(z, FAST)
        dy = dy * (s * (z * (1.0 - s) + 1.0))
    return dy


@triton.jit(do_not_specialize=["rows", "tiles"])
def partial_sums(
    dy: tl.tensor, dy_stride: int,
    x: tl.tensor, x_stride: int,
    statistics: tl.tensor,  # (2, C)
    weight: tl.tensor, bias: tl.tensor,
    # A second input, or None:
    other: tl.tensor, other_stride: int,
    other_statistics: tl.tensor, other_weight: tl.tensor, other_bias: tl.tensor,
    partials: tl.tensor,  # (2, programs, C), or 3 with a second input
    rows: int, channels: int, tiles: int,
    HAS_SILU: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of dz, dz * (x - mean) [and dz * (other - mean)] over every so many tiles of BLOCK_R rows.

    The next tile is loaded before the present one is added.
    """
    ACC: tl.constexpr = partials.dtype.element_ty
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    program, programs = tl.program_id(1), tl.num_programs(1)
    visits = (tiles - program + programs - 1) // programs
    first = (tiles - 1 - program) * BLOCK_R
    wait_for_inputs(PDL)

    raw_dy = load_raw(dy, dy_stride, first, rows, columns, is_column, BLOCK_R)
    raw_x = load_raw(x, x_stride, first, rows, columns, is_column, BLOCK_R)
    mean, _, scale, shift = load_coefficients(statistics, weight, bias, channels, columns, is_column)
    total = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    moment = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    if other is not None:
        raw_other = load_raw(other, other_stride, first, rows, columns, is_column, BLOCK_R)
        other_mean, _, other_scale, other_shift = load_coefficients(
            other_statistics, other_weight, other_bias, channels, columns, is_column
        )
        shift += other_shift
        other_moment = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    for visit in range(0, visits):
        gradient, centred = raw_dy.to(ACC), raw_x.to(ACC) - mean
        ahead = first - (visit + 1) * programs * BLOCK_R
        limit = tl.where(visit + 1 < visits, rows, NO_ROWS)
        raw_dy = load_raw(dy, dy_stride, ahead, limit, columns, is_column, BLOCK_R)
        raw_x = load_raw(x, x_stride, ahead, limit, columns, is_column, BLOCK_R)
        z = centred * scale + shift
        if other is not None:
            other_centred = raw_other.to(ACC) - other_mean
            raw_other = load_raw(other, other_stride, ahead, limit, columns, is_column, BLOCK_R)
            z += other_centred * other_scale
        dz = _before_activation(gradient, z, HAS_SILU, FAST)  # 0 beyond the last row, like dy
        total += dz
        moment = tl.fma(dz, centred, moment)  # written as a sum of products, it takes more registers than there are
        if other is not None:
            other_moment = tl.fma(dz, other_centred, other_moment)
    at = program * channels + columns
    tl.store(partials + at, tl.sum(total, 0), mask=is_column)
    tl.store(partials + programs * channels + at, tl.sum(moment, 0), mask=is_column)
    if other is not None:
        tl.store(partials + 2 * programs * channels + at, tl.sum(other_moment, 0), mask=is_column)


@triton.jit
def _column_sums(partials, programs, channels, columns, is_column, BLOCK_P: tl.constexpr):
    program = tl.arange(0, BLOCK_P)
    mask = (program < programs)[:, None] & is_column[None, :]
    return tl.sum(tl.load(partials + program[:, None] * channels + columns[None, :], mask=mask, other=0.0), 0)


@triton.jit(do_not_specialize=["programs"])
def finish_sums(
    partials: tl.tensor,  # (2, programs, C), or 3 with a second input
    statistics: tl.tensor,  # (2, C)
    other_statistics: tl.tensor,  # or None
    gradients: tl.tensor,  # (2, C): of weight and bias; (4, C) with a second input
    channels: int,
    programs: int,
    PDL: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Gradients of weights and biases from the sums of the programs."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    # May come before the wait: the kernel right before is partial_sums, which does not write statistics.
    rstd = tl.load(statistics + channels + columns, mask=is_column, other=0.0)
    wait_for_inputs(PDL)
    total = _column_sums(partials, programs, channels, columns, is_column, BLOCK_P)
    moment = _column_sums(partials + programs * channels, programs, channels, columns, is_column, BLOCK_P)
    tl.store(gradients + columns, moment * rstd, mask=is_column)
    tl.store(gradients + channels + columns, total, mask=is_column)
    if other_statistics is not None:
        moment = _column_sums(partials + 2 * programs * channels, programs, channels, columns, is_column, BLOCK_P)
        rstd = tl.load(other_statistics + channels + columns, mask=is_column, other=0.0)
        tl.store(gradients + 2 * channels + columns, moment * rstd, mask=is_column)
        tl.store(gradients + 3 * channels + columns, total, mask=is_column)


@triton.jit
def _slopes(gradients, rstd, scale, rows, channels, columns, is_column):
    """Factor and summand (1, BLOCK_C) of the part of dx that is linear in the centred x."""
    share = 1.0 / rows.to(gradients.dtype.element_ty)
    dweight = load_channels(gradients, columns, is_column)
    dbias = load_channels(gradients + channels, columns, is_column)
    return -(dweight * rstd) * (scale * share), -dbias * (scale * share)


@triton.jit(do_not_specialize=["rows"])
def input_gradients(
    dx: tl.tensor,
    dx_stride: int,
    dy: tl.tensor,
    dy_stride: int,
    x: tl.tensor,
    x_stride: int,
    statistics: tl.tensor,  # (2, C)
    weight: tl.tensor,
    bias: tl.tensor,
    other_dx: tl.tensor,  # or None, like what belongs to it
    other_dx_stride: int,
    other: tl.tensor,
    other_stride: int,
    other_statistics: tl.tensor,
    other_weight: tl.tensor,
    other_bias: tl.tensor,
    gradients: tl.tensor,  # (2, C) or (4, C)
    rows: int,
    channels: int,
    HAS_SILU: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of the gradients of the inputs."""
    ACC: tl.constexpr = statistics.dtype.element_ty
    columns, is_column, first = place_of_tile(channels, BLOCK_R, BLOCK_C)
    # All but the sums may come before the wait: the kernel right before is finish_sums, which writes nothing else.
    raw_dy = load_raw(dy, dy_stride, first, rows, columns, is_column, BLOCK_R)
    raw_x = load_raw(x, x_stride, first, rows, columns, is_column, BLOCK_R)
    if other is not None:
        raw_other = load_raw(other, other_stride, first, rows, columns, is_column, BLOCK_R)
    mean, rstd, scale, shift = load_coefficients(statistics, weight, bias, channels, columns, is_column)
    if other is not None:
        other_mean, other_rstd, other_scale, other_shift = load_coefficients(
            other_statistics, other_weight, other_bias, channels, columns, is_column
        )
        shift += other_shift
    wait_for_inputs(PDL)

    slope, offset = _slopes(gradients, rstd, scale, rows, channels, columns, is_column)
    centred = raw_x.to(ACC) - mean
    z = centred * scale + shift
    if other is not None:
        other_slope, other_offset = _slopes(
            gradients + 2 * channels, other_rstd, other_scale, rows, channels, columns, is_column
        )
        other_centred = raw_other.to(ACC) - other_mean
        z += other_centred * other_scale
    dz = _before_activation(raw_dy.to(ACC), z, HAS_SILU, FAST)
    gradient = dz * scale + (centred * slope + offset)
    store_rows(dx, gradient, first, rows, dx_stride, columns, is_column, BLOCK_R)
    if other is not None:
        gradient = dz * other_scale + (other_centred * other_slope + other_offset)
        store_rows(other_dx, gradient, first, rows, other_dx_stride, columns, is_column, BLOCK_R)
