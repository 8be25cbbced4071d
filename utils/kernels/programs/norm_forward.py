"""Triton programs of the forward pass of batch norm with activation in training mode.

:mod:`utils.kernels.norm` launches them. Maps are matrices of rows (positions) by channels; the statistics of a map are
a matrix of two rows, the means and the inverses of the standard deviations. Sums over rows are taken in two stages, by
many programs and then by one per few channels, in a fixed order: results do not vary from run to run. Sums are kept in
the type of the buffers that they are written to: float32, or float64 for maps of that type.

Reductions walk from the last row to the first, and the passes behind them from the first to the last: what one pass
has read last is still in the cache when the next one begins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from utils.kernels.programs.streaming import NO_ROWS, load_raw, place_of_tile, sigmoid, wait_for_inputs


@triton.jit
def load_channels(values: tl.tensor, columns: tl.tensor, is_column: tl.tensor):
    """Load one value per channel as a matrix (1, BLOCK_C)."""
    return tl.load(values + columns, mask=is_column, other=0.0)[None, :]


@triton.jit
def store_rows(
    y: tl.tensor,
    values: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    y_stride: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    BLOCK_R: tl.constexpr,
):
    """Store BLOCK_R rows of a matrix whose rows begin every ``y_stride`` values."""
    row = tl.arange(0, BLOCK_R)
    mask = (first + row < rows)[:, None] & is_column[None, :]
    base = y + first.to(tl.int64) * y_stride
    tl.store(base + (row[:, None] * y_stride + columns[None, :]), values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def load_coefficients(
    statistics: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    channels: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
):
    """Mean, 1 / std, factor and summand of the norm as matrices (1, BLOCK_C)."""
    mean = load_channels(statistics, columns, is_column)
    rstd = load_channels(statistics + channels, columns, is_column)
    scale = rstd * load_channels(weight, columns, is_column)
    return mean, rstd, scale, load_channels(bias, columns, is_column)


@triton.jit
def _is_row(first, rows, BLOCK_R: tl.constexpr):
    return (first + tl.arange(0, BLOCK_R) < rows)[:, None]


@triton.jit
def _load_four(x, x_stride, first, rows, columns, is_column, BLOCK_R: tl.constexpr):
    a = load_raw(x, x_stride, first, rows, columns, is_column, BLOCK_R)
    b = load_raw(x, x_stride, first + BLOCK_R, rows, columns, is_column, BLOCK_R)
    c = load_raw(x, x_stride, first + 2 * BLOCK_R, rows, columns, is_column, BLOCK_R)
    return a, b, c, load_raw(x, x_stride, first + 3 * BLOCK_R, rows, columns, is_column, BLOCK_R)


@triton.jit(do_not_specialize=["rows", "tiles"])
def partial_statistics(
    x: tl.tensor,
    x_stride: int,
    other: tl.tensor,  # or None; a second map of the same shape
    other_stride: int,
    partials: tl.tensor,  # (maps, 2, programs, C)
    rows: int,
    channels: int,
    tiles: int,
    PDL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Mean, and sum of squared distances from it, of the rows of one program: every so many tiles of 4 * BLOCK_R rows.

    Distances are taken from the mean of the first tile, so that nothing cancels where the mean is large. The next
    tile is loaded before the present one is added. Programs along axis 2 read different maps.
    """
    ACC: tl.constexpr = partials.dtype.element_ty
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    program, programs = tl.program_id(1), tl.num_programs(1)
    visits = (tiles - program + programs - 1) // programs
    step = programs * (4 * BLOCK_R)
    first = (tiles - 1 - program) * (4 * BLOCK_R)
    if other is not None:
        partials += tl.program_id(2) * (2 * programs * channels)
        x_stride = tl.where(tl.program_id(2) == 1, other_stride, x_stride)  # either may be a constant 1
        if tl.program_id(2) == 1:
            x = other
    wait_for_inputs(PDL)

    raw_a, raw_b, raw_c, raw_d = _load_four(x, x_stride, first, rows, columns, is_column, BLOCK_R)
    a, b, c, d = raw_a.to(ACC), raw_b.to(ACC), raw_c.to(ACC), raw_d.to(ACC)
    limit = tl.where(visits > 1, rows, NO_ROWS)
    raw_a, raw_b, raw_c, raw_d = _load_four(x, x_stride, first - step, limit, columns, is_column, BLOCK_R)
    count = tl.minimum(rows - first, 4 * BLOCK_R)
    origin = (tl.sum((a + b) + (c + d), 0) / count.to(ACC))[None, :]
    a = tl.where(_is_row(first, rows, BLOCK_R), a - origin, 0.0)
    b = tl.where(_is_row(first + BLOCK_R, rows, BLOCK_R), b - origin, 0.0)
    c = tl.where(_is_row(first + 2 * BLOCK_R, rows, BLOCK_R), c - origin, 0.0)
    d = tl.where(_is_row(first + 3 * BLOCK_R, rows, BLOCK_R), d - origin, 0.0)
    total = (a + b) + (c + d)
    squares = (a * a + b * b) + (c * c + d * d)

    for visit in range(1, visits):  # only the last tile may be cut, and program 0 has visited it first
        a, b, c, d = raw_a.to(ACC) - origin, raw_b.to(ACC) - origin, raw_c.to(ACC) - origin, raw_d.to(ACC) - origin
        ahead = first - (visit + 1) * step
        limit = tl.where(visit + 1 < visits, rows, NO_ROWS)
        raw_a, raw_b, raw_c, raw_d = _load_four(x, x_stride, ahead, limit, columns, is_column, BLOCK_R)
        total += (a + b) + (c + d)
        squares += (a * a + b * b) + (c * c + d * d)

    size = (count + (visits - 1) * (4 * BLOCK_R)).to(ACC)
    mean = tl.sum(total, 0) / size
    at = program * channels + columns
    tl.store(partials + at, mean + tl.sum(origin, 0), mask=is_column)
    tl.store(partials + programs * channels + at, tl.sum(squares, 0) - mean * mean * size, mask=is_column)


@triton.jit(do_not_specialize=["rows", "tiles", "programs", "eps", "momentum", "other_eps", "other_momentum"])
def finish_statistics(
    partials: tl.tensor,  # (maps, 2, programs, C)
    statistics: tl.tensor,  # (maps, 2, C)
    running_mean: tl.tensor, running_var: tl.tensor, batches: tl.tensor,  # the last may be None
    eps: float, momentum: float,
    # Those of a second norm, or None:
    other_running_mean: tl.tensor, other_running_var: tl.tensor, other_batches: tl.tensor,
    other_eps: float, other_momentum: float,
    rows: int, channels: int, tiles: int, programs: int,
    PDL: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Join the parts: sums of squares add up, plus count times squared distance of the means (Chan et al. 1983).

    Also moves the running statistics, as torch does: by ``momentum``, towards the mean and the unbiased variance. A
    channel whose statistics are not finite leaves them alone. Programs along axis 1 belong to different norms.
    """
    ACC: tl.constexpr = statistics.dtype.element_ty
    if other_running_mean is not None:
        partials += tl.program_id(1) * (2 * programs * channels)
        statistics += tl.program_id(1) * (2 * channels)
        if tl.program_id(1) == 1:
            running_mean, running_var, eps, momentum = other_running_mean, other_running_var, other_eps, other_momentum
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    program = tl.arange(0, BLOCK_P)
    mask = (program < programs)[:, None] & is_column[None, :]
    at = program[:, None] * channels + columns[None, :]
    missing = tl.where(program == 0, tiles * TILE_ROWS - rows, 0)
    count = (((tiles - program + programs - 1) // programs) * TILE_ROWS - missing).to(ACC)[:, None]
    size = rows.to(ACC)
    # May come before the wait: the kernel right before is partial_statistics, which does not write these.
    old_mean = tl.load(running_mean + columns, mask=is_column, other=0.0)
    old_variance = tl.load(running_var + columns, mask=is_column, other=0.0)
    wait_for_inputs(PDL)

    origin = load_channels(partials, columns, is_column)
    means = tl.load(partials + at, mask=mask, other=0.0)
    squares = tl.load(partials + programs * channels + at, mask=mask, other=0.0)
    means -= origin
    centre = tl.sum(tl.where(mask, count * means, 0.0), 0)[None, :] / size
    distance = means - centre
    squares = tl.sum(tl.where(mask, squares + count * distance * distance, 0.0), 0)
    mean = tl.sum(origin + centre, 0)
    tl.store(statistics + columns, mean, mask=is_column)
    tl.store(statistics + channels + columns, 1.0 / tl.sqrt(squares / size + eps), mask=is_column)

    variance = squares / (size - 1.0)
    is_finite = is_column & (tl.abs(mean) < float("inf")) & (variance < float("inf"))
    # A difference from 1 would be rounded to float32 like the number that it is taken from, for float64 maps too.
    tl.store(running_mean + columns, old_mean + momentum * (mean - old_mean), mask=is_finite)
    tl.store(running_var + columns, old_variance + momentum * (variance - old_variance), mask=is_finite)
    if batches is not None:
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.store(batches, tl.load(batches, mask=is_first) + 1, mask=is_first)
    if other_batches is not None:
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 1)
        tl.store(other_batches, tl.load(other_batches, mask=is_first) + 1, mask=is_first)


@triton.jit(do_not_specialize=["rows"])
def apply_norms(
    y: tl.tensor,
    y_stride: int,
    x: tl.tensor,
    x_stride: int,
    statistics: tl.tensor,  # (2, C)
    weight: tl.tensor,
    bias: tl.tensor,
    other: tl.tensor,  # or None, like what belongs to it
    other_stride: int,
    other_statistics: tl.tensor,
    other_weight: tl.tensor,
    other_bias: tl.tensor,
    residual: tl.tensor,  # or None
    residual_stride: int,
    rows: int,
    channels: int,
    HAS_SILU: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of y = [residual +] activation(norm(x) [+ norm(other)])."""
    ACC: tl.constexpr = statistics.dtype.element_ty
    columns, is_column, first = place_of_tile(channels, BLOCK_R, BLOCK_C)
    # Maps may come before the wait: the kernel right before is finish_statistics, which does not write them.
    raw = load_raw(x, x_stride, first, rows, columns, is_column, BLOCK_R)
    if other is not None:
        raw_other = load_raw(other, other_stride, first, rows, columns, is_column, BLOCK_R)
    if residual is not None:
        raw_residual = load_raw(residual, residual_stride, first, rows, columns, is_column, BLOCK_R)
    wait_for_inputs(PDL)

    mean, _, scale, shift = load_coefficients(statistics, weight, bias, channels, columns, is_column)
    z = (raw.to(ACC) - mean) * scale + shift
    if other is not None:
        mean, _, scale, shift = load_coefficients(
            other_statistics, other_weight, other_bias, channels, columns, is_column
        )
        z += (raw_other.to(ACC) - mean) * scale + shift
    if HAS_SILU:
        z = z * sigmoid(z, FAST)
    if residual is not None:
        z += raw_residual.to(ACC)
    store_rows(y, z, first, rows, y_stride, columns, is_column, BLOCK_R)
