"""Triton programs of the backward pass of batch norm with activation in training mode.

What the forward pass did not keep is computed again from the inputs. With z the value before the activation, dz its
gradient, n the normalised input and R the number of rows (Ioffe and Szegedy 2015, section 3, put together):

    dbias = sum(dz),  dweight = sum(dz * n),  dx = weight / std * (dz - (dbias + n * dweight) / R)

Layout and order of sums are those of :mod:`utils.kernels.programs.norm_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from utils.kernels.programs.norm_forward import load_channels, load_rows, sigmoid, store_rows


@triton.jit
def _load_coefficients(statistics, weight, bias, channels, columns, is_column):
    """Mean, 1 / std, factor and summand of the norm as matrices (1, BLOCK_C)."""
    mean = load_channels(statistics, columns, is_column)
    rstd = load_channels(statistics + channels, columns, is_column)
    scale = rstd * load_channels(weight, columns, is_column)
    return mean, rstd, scale, load_channels(bias, columns, is_column)


@triton.jit
def _before_activation(dy, z, HAS_SILU: tl.constexpr):
    """Gradient of z; with s = sigmoid(z), the derivative of z * s is s + z * s * (1 - s)."""
    if HAS_SILU:
        s = sigmoid(z)
        dy = dy * (s + z * s * (1.0 - s))
    return dy


@triton.jit(do_not_specialize=["rows", "tiles"])
def partial_sums(
    dy: tl.tensor,
    dy_stride: int,
    x: tl.tensor,
    x_stride: int,
    statistics: tl.tensor,  # (2, C)
    weight: tl.tensor,
    bias: tl.tensor,
    partials: tl.tensor,  # (2, programs, C)
    rows: int,
    channels: int,
    tiles: int,
    HAS_SILU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums of dz and of dz * (x - mean) over the rows of one program: every so many tiles of 2 * BLOCK_R rows."""
    ACC: tl.constexpr = partials.dtype.element_ty
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    program, programs = tl.program_id(1), tl.num_programs(1)
    mean, _, scale, shift = _load_coefficients(statistics, weight, bias, channels, columns, is_column)
    total = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    moment = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    for visit in range(0, (tiles - program + programs - 1) // programs):
        first = (tiles - 1 - program - visit * programs) * (2 * BLOCK_R)
        second = first + BLOCK_R
        # Everything is loaded before anything is computed; rows beyond the last have dy = 0 and add nothing.
        dy_a = load_rows(dy, dy_stride, first, rows, columns, is_column, ACC, BLOCK_R)
        dy_b = load_rows(dy, dy_stride, second, rows, columns, is_column, ACC, BLOCK_R)
        x_a = load_rows(x, x_stride, first, rows, columns, is_column, ACC, BLOCK_R) - mean
        x_b = load_rows(x, x_stride, second, rows, columns, is_column, ACC, BLOCK_R) - mean
        dz_a = _before_activation(dy_a, x_a * scale + shift, HAS_SILU)
        dz_b = _before_activation(dy_b, x_b * scale + shift, HAS_SILU)
        total += dz_a + dz_b
        moment += dz_a * x_a + dz_b * x_b
    at = program * channels + columns
    tl.store(partials + at, tl.sum(total, 0), mask=is_column)
    tl.store(partials + programs * channels + at, tl.sum(moment, 0), mask=is_column)


@triton.jit(do_not_specialize=["rows", "tiles"])
def partial_sums_of_two(
    dy: tl.tensor,
    dy_stride: int,
    x: tl.tensor,
    x_stride: int,
    statistics: tl.tensor,  # (2, C)
    weight: tl.tensor,
    bias: tl.tensor,
    other: tl.tensor,
    other_stride: int,
    other_statistics: tl.tensor,
    other_weight: tl.tensor,
    other_bias: tl.tensor,
    partials: tl.tensor,  # (3, programs, C)
    rows: int,
    channels: int,
    tiles: int,
    HAS_SILU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums of dz, dz * (x - mean) and dz * (other - mean) for z = norm(x) + norm(other)."""
    ACC: tl.constexpr = partials.dtype.element_ty
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    program, programs = tl.program_id(1), tl.num_programs(1)
    mean, _, scale, shift = _load_coefficients(statistics, weight, bias, channels, columns, is_column)
    other_mean, _, other_scale, other_shift = _load_coefficients(
        other_statistics, other_weight, other_bias, channels, columns, is_column
    )
    shift += other_shift
    total = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    moment = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    other_moment = tl.zeros((BLOCK_R, BLOCK_C), ACC)
    for visit in range(0, (tiles - program + programs - 1) // programs):
        first = (tiles - 1 - program - visit * programs) * (2 * BLOCK_R)
        second = first + BLOCK_R
        dy_a = load_rows(dy, dy_stride, first, rows, columns, is_column, ACC, BLOCK_R)
        dy_b = load_rows(dy, dy_stride, second, rows, columns, is_column, ACC, BLOCK_R)
        x_a = load_rows(x, x_stride, first, rows, columns, is_column, ACC, BLOCK_R) - mean
        x_b = load_rows(x, x_stride, second, rows, columns, is_column, ACC, BLOCK_R) - mean
        o_a = load_rows(other, other_stride, first, rows, columns, is_column, ACC, BLOCK_R) - other_mean
        o_b = load_rows(other, other_stride, second, rows, columns, is_column, ACC, BLOCK_R) - other_mean
        dz_a = _before_activation(dy_a, x_a * scale + o_a * other_scale + shift, HAS_SILU)
        dz_b = _before_activation(dy_b, x_b * scale + o_b * other_scale + shift, HAS_SILU)
        total += dz_a + dz_b
        moment += dz_a * x_a + dz_b * x_b
        other_moment += dz_a * o_a + dz_b * o_b
    at = program * channels + columns
    tl.store(partials + at, tl.sum(total, 0), mask=is_column)
    tl.store(partials + programs * channels + at, tl.sum(moment, 0), mask=is_column)
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
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Gradients of weights and biases from the sums of the programs."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    total = _column_sums(partials, programs, channels, columns, is_column, BLOCK_P)
    moment = _column_sums(partials + programs * channels, programs, channels, columns, is_column, BLOCK_P)
    rstd = tl.load(statistics + channels + columns, mask=is_column, other=0.0)
    tl.store(gradients + columns, moment * rstd, mask=is_column)
    tl.store(gradients + channels + columns, total, mask=is_column)
    if other_statistics is not None:
        moment = _column_sums(partials + 2 * programs * channels, programs, channels, columns, is_column, BLOCK_P)
        rstd = tl.load(other_statistics + channels + columns, mask=is_column, other=0.0)
        tl.store(gradients + 2 * channels + columns, moment * rstd, mask=is_column)
        tl.store(gradients + 3 * channels + columns, total, mask=is_column)


@triton.jit
def _input_gradient(dz, x, rstd, scale, gradients, rows, channels, columns, is_column):
    """dx from dz and the centred x."""
    dweight = load_channels(gradients, columns, is_column)
    dbias = load_channels(gradients + channels, columns, is_column)
    size = rows.to(gradients.dtype.element_ty)
    return dz * scale - (dbias * (scale / size) + x * (dweight * (rstd * scale / size)))


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
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of the gradients of the inputs."""
    ACC: tl.constexpr = statistics.dtype.element_ty
    blocks = (channels + BLOCK_C - 1) // BLOCK_C
    columns = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    first = (tl.program_id(0) // blocks) * BLOCK_R
    mean, rstd, scale, shift = _load_coefficients(statistics, weight, bias, channels, columns, is_column)
    dz = load_rows(dy, dy_stride, first, rows, columns, is_column, ACC, BLOCK_R)
    centred = load_rows(x, x_stride, first, rows, columns, is_column, ACC, BLOCK_R) - mean
    if other is not None:
        other_mean, other_rstd, other_scale, other_shift = _load_coefficients(
            other_statistics, other_weight, other_bias, channels, columns, is_column
        )
        other_centred = load_rows(other, other_stride, first, rows, columns, is_column, ACC, BLOCK_R) - other_mean
        dz = _before_activation(dz, centred * scale + other_centred * other_scale + (shift + other_shift), HAS_SILU)
        other_gradients = gradients + 2 * channels
        gradient = _input_gradient(
            dz, other_centred, other_rstd, other_scale, other_gradients, rows, channels, columns, is_column
        )
        store_rows(other_dx, gradient, first, rows, other_dx_stride, columns, is_column, BLOCK_R)
    else:
        dz = _before_activation(dz, centred * scale + shift, HAS_SILU)
    gradient = _input_gradient(dz, centred, rstd, scale, gradients, rows, channels, columns, is_column)
    store_rows(dx, gradient, first, rows, dx_stride, columns, is_column, BLOCK_R)
