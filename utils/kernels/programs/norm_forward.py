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


@triton.jit
def load_channels(values: tl.tensor, columns: tl.tensor, is_column: tl.tensor):
    """Load one value per channel as a matrix (1, BLOCK_C)."""
    return tl.load(values + columns, mask=is_column, other=0.0)[None, :]


@triton.jit
def load_rows(
    x: tl.tensor,
    x_stride: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Load BLOCK_R rows from row ``first`` on, in the type of sums; 0 beyond the last row."""
    row = tl.arange(0, BLOCK_R)
    mask = (first + row < rows)[:, None] & is_column[None, :]
    base = x + first.to(tl.int64) * x_stride
    return tl.load(base + (row[:, None] * x_stride + columns[None, :]), mask=mask, other=0.0).to(ACC)


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
def sigmoid(z: tl.tensor):
    """1 / (1 + exp(-z)), without an overflow that matters."""
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _is_row(first, rows, BLOCK_R: tl.constexpr):
    return (first + tl.arange(0, BLOCK_R) < rows)[:, None]


@triton.jit(do_not_specialize=["rows", "tiles"])
def partial_statistics(
    x: tl.tensor,
    x_stride: int,
    partials: tl.tensor,  # (2, programs, C)
    rows: int,
    channels: int,
    tiles: int,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Mean, and sum of squared distances from it, of the rows of one program: every so many tiles of 4 * BLOCK_R rows.

    Distances are taken from the mean of the first tile, so that nothing cancels where the mean is large.
    """
    ACC: tl.constexpr = partials.dtype.element_ty
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    program, programs = tl.program_id(1), tl.num_programs(1)
    visits = (tiles - program + programs - 1) // programs

    first = (tiles - 1 - program) * (4 * BLOCK_R)
    a = load_rows(x, x_stride, first, rows, columns, is_column, ACC, BLOCK_R)
    b = load_rows(x, x_stride, first + BLOCK_R, rows, columns, is_column, ACC, BLOCK_R)
    c = load_rows(x, x_stride, first + 2 * BLOCK_R, rows, columns, is_column, ACC, BLOCK_R)
    d = load_rows(x, x_stride, first + 3 * BLOCK_R, rows, columns, is_column, ACC, BLOCK_R)
    count = tl.minimum(rows - first, 4 * BLOCK_R)
    origin = (tl.sum((a + b) + (c + d), 0) / count.to(ACC))[None, :]
    a = tl.where(_is_row(first, rows, BLOCK_R), a - origin, 0.0)
    b = tl.where(_is_row(first + BLOCK_R, rows, BLOCK_R), b - origin, 0.0)
    c = tl.where(_is_row(first + 2 * BLOCK_R, rows, BLOCK_R), c - origin, 0.0)
    d = tl.where(_is_row(first + 3 * BLOCK_R, rows, BLOCK_R), d - origin, 0.0)
    total = (a + b) + (c + d)
    squares = (a * a + b * b) + (c * c + d * d)

    for visit in range(1, visits):  # only the last tile may be cut, and program 0 has visited it first
        start = (tiles - 1 - program - visit * programs) * (4 * BLOCK_R)
        a = load_rows(x, x_stride, start, rows, columns, is_column, ACC, BLOCK_R) - origin
        b = load_rows(x, x_stride, start + BLOCK_R, rows, columns, is_column, ACC, BLOCK_R) - origin
        c = load_rows(x, x_stride, start + 2 * BLOCK_R, rows, columns, is_column, ACC, BLOCK_R) - origin
        d = load_rows(x, x_stride, start + 3 * BLOCK_R, rows, columns, is_column, ACC, BLOCK_R) - origin
        total += (a + b) + (c + d)
        squares += (a * a + b * b) + (c * c + d * d)

    size = (count + (visits - 1) * (4 * BLOCK_R)).to(ACC)
    mean = tl.sum(total, 0) / size
    at = program * channels + columns
    tl.store(partials + at, mean + tl.sum(origin, 0), mask=is_column)
    tl.store(partials + programs * channels + at, tl.sum(squares, 0) - mean * mean * size, mask=is_column)


@triton.jit(do_not_specialize=["rows", "tiles", "programs", "eps", "momentum"])
def finish_statistics(
    partials: tl.tensor,  # (2, programs, C)
    statistics: tl.tensor,  # (2, C)
    running_mean: tl.tensor,
    running_var: tl.tensor,
    batches: tl.tensor,  # or None
    rows: int,
    channels: int,
    tiles: int,
    programs: int,
    eps: float,
    momentum: float,
    TILE_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Join the parts: sums of squares add up, plus count times squared distance of the means (Chan et al. 1983).

    Also moves the running statistics, as torch does: by ``momentum``, towards the mean and the unbiased variance. A
    channel whose statistics are not finite leaves them alone.
    """
    ACC: tl.constexpr = statistics.dtype.element_ty
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    program = tl.arange(0, BLOCK_P)
    mask = (program < programs)[:, None] & is_column[None, :]
    at = program[:, None] * channels + columns[None, :]
    missing = tl.where(program == 0, tiles * TILE_ROWS - rows, 0)
    count = (((tiles - program + programs - 1) // programs) * TILE_ROWS - missing).to(ACC)[:, None]
    size = rows.to(ACC)

    origin = load_channels(partials, columns, is_column)
    means = tl.load(partials + at, mask=mask, other=0.0) - origin
    squares = tl.load(partials + programs * channels + at, mask=mask, other=0.0)
    centre = tl.sum(tl.where(mask, count * means, 0.0), 0)[None, :] / size
    distance = means - centre
    squares = tl.sum(tl.where(mask, squares + count * distance * distance, 0.0), 0)
    mean = tl.sum(origin + centre, 0)
    tl.store(statistics + columns, mean, mask=is_column)
    tl.store(statistics + channels + columns, 1.0 / tl.sqrt(squares / size + eps), mask=is_column)

    variance = squares / (size - 1.0)
    is_finite = is_column & (tl.abs(mean) < float("inf")) & (variance < float("inf"))
    old_mean = tl.load(running_mean + columns, mask=is_column, other=0.0)
    old_variance = tl.load(running_var + columns, mask=is_column, other=0.0)
    tl.store(running_mean + columns, momentum * mean + (1.0 - momentum) * old_mean, mask=is_finite)
    tl.store(running_var + columns, momentum * variance + (1.0 - momentum) * old_variance, mask=is_finite)
    if batches is not None:
        is_first = tl.program_id(0) == 0
        tl.store(batches, tl.load(batches, mask=is_first) + 1, mask=is_first)


@triton.jit
def _normalised(
    x, x_stride, statistics, weight, bias, first, rows, channels, columns, is_column, BLOCK_R: tl.constexpr
):
    values = load_rows(x, x_stride, first, rows, columns, is_column, statistics.dtype.element_ty, BLOCK_R)
    mean = load_channels(statistics, columns, is_column)
    rstd = load_channels(statistics + channels, columns, is_column)
    weights, biases = load_channels(weight, columns, is_column), load_channels(bias, columns, is_column)
    return (values - mean) * (rstd * weights) + biases


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
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of y = [residual +] activation(norm(x) [+ norm(other)])."""
    blocks = (channels + BLOCK_C - 1) // BLOCK_C
    columns = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column = columns < channels
    first = (tl.program_id(0) // blocks) * BLOCK_R
    z = _normalised(x, x_stride, statistics, weight, bias, first, rows, channels, columns, is_column, BLOCK_R)
    if other is not None:
        z += _normalised(
            other, other_stride, other_statistics, other_weight, other_bias,
            first, rows, channels, columns, is_column, BLOCK_R,
        )  # fmt: skip
    if HAS_SILU:
        z = z * sigmoid(z)
    if residual is not None:
        z += load_rows(residual, residual_stride, first, rows, columns, is_column, statistics.dtype.element_ty, BLOCK_R)
    store_rows(y, z, first, rows, y_stride, columns, is_column, BLOCK_R)
