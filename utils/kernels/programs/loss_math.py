"""Arithmetic shared by the Triton programs of the detection loss, in float32: overlap of boxes, logs, alignment."""

from __future__ import annotations

import triton
import triton.language as tl

from utils.kernels.programs.norm_forward import sigmoid

EPS = tl.constexpr(1e-7)  # keeps quotients finite, as in utils.boxes
SMALLEST = tl.constexpr(1.2e-38)  # has a logarithm, and is a normal float32
ASPECT_SCALE = tl.constexpr(0.4052847345693511)  # 4 / pi^2
HALF_PI = tl.constexpr(1.5707963267948966)


@triton.jit
def softplus(x: tl.tensor):
    """log(1 + exp(x)), with a small relative error also where it is small.

    log(1 + e) = 2 artanh(e / (2 + e)) as a power series: with e from 0 to 1, eight terms reach the last bit.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    z = s * s
    series = z * (1.0 / 15) + 1.0 / 13
    series = series * z + 1.0 / 11
    series = series * z + 1.0 / 9
    series = series * z + 1.0 / 7
    series = series * z + 1.0 / 5
    series = series * z + 1.0 / 3
    series = series * z + 1.0
    return tl.where(x > 0.0, x, 0.0) + 2.0 * s * series


@triton.jit
def arc_tangent(numerator: tl.tensor, denominator: tl.tensor):
    """atan(numerator / denominator) of numbers from 0 up, not both 0, to about 1e-7.

    The polynomial is the one of its degree with the smallest relative error for quotients from 0 to 1.
    """
    t = tl.minimum(numerator, denominator) / tl.maximum(numerator, denominator)
    z = t * t
    series = z * -0.001753897032 + 0.01072678711
    series = series * z - 0.03080428406
    series = series * z + 0.05755176066
    series = series * z - 0.08377293337
    series = series * z + 0.1094202201
    series = series * z - 0.1426193112
    series = series * z + 0.1999826579
    series = series * z - 0.3333328363
    series = series * z + 0.9999999976
    angle = series * t
    return tl.where(numerator > denominator, -angle + HALF_PI, angle)


@triton.jit
def aspect_angle(w1: tl.tensor, h1: tl.tensor, w2: tl.tensor, h2: tl.tensor):
    """atan(w2 / h2) - atan(w1 / h1), by one arc tangent."""
    turn = w2 * h1 - w1 * h2
    angle = arc_tangent(tl.abs(turn), h1 * h2 + w1 * w2)
    return tl.where(turn < 0.0, -angle, angle)


@triton.jit
def complete_iou(
    ax1: tl.tensor,
    ay1: tl.tensor,
    ax2: tl.tensor,
    ay2: tl.tensor,
    bx1: tl.tensor,
    by1: tl.tensor,
    bx2: tl.tensor,
    by2: tl.tensor,
):
    """CIoU (Zheng et al. 2020) of boxes given by their corners."""
    w1, h1 = ax2 - ax1, ay2 - ay1 + EPS
    w2, h2 = bx2 - bx1, by2 - by1 + EPS
    shared_w = tl.maximum(tl.minimum(ax2, bx2) - tl.maximum(ax1, bx1), 0.0)
    shared_h = tl.maximum(tl.minimum(ay2, by2) - tl.maximum(ay1, by1), 0.0)
    inter = shared_w * shared_h
    iou = inter / (w1 * h1 + w2 * h2 - inter + EPS)
    hull_w = tl.maximum(ax2, bx2) - tl.minimum(ax1, bx1)
    hull_h = tl.maximum(ay2, by2) - tl.minimum(ay1, by1)
    across, down = bx1 + bx2 - ax1 - ax2, by1 + by2 - ay1 - ay2
    distance = (across * across + down * down) * 0.25 / (hull_w * hull_w + hull_h * hull_h + EPS)
    angle = aspect_angle(w1, h1, w2, h2)
    aspect = angle * angle * ASPECT_SCALE
    return iou - (distance + aspect * (aspect / (aspect - iou + (1.0 + EPS))))


@triton.jit
def positive_overlap(
    ax1: tl.tensor,
    ay1: tl.tensor,
    ax2: tl.tensor,
    ay2: tl.tensor,
    bx1: tl.tensor,
    by1: tl.tensor,
    bx2: tl.tensor,
    by2: tl.tensor,
):
    """CIoU where it is positive, else 0, also where it is no number."""
    overlap = complete_iou(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2)
    return tl.where(overlap > 0.0, overlap, 0.0)


@triton.jit
def alignment(logit: tl.tensor, overlap: tl.tensor, alpha: tl.tensor, beta: tl.tensor):
    """probability^alpha * overlap^beta (Feng et al. 2021), 0 without overlap."""
    probability = tl.maximum(sigmoid(logit), SMALLEST)
    exponent = alpha * tl.log2(probability) + beta * tl.log2(tl.maximum(overlap, SMALLEST))
    return tl.where(overlap > 0.0, tl.exp2(exponent), 0.0)


@triton.jit
def _share(is_larger, is_equal):
    """Slope of a maximum or minimum by one of its arguments: equal arguments share it."""
    return tl.where(is_larger, 1.0, tl.where(is_equal, 0.5, 0.0))


@triton.jit
def _axis_slopes(a1, a2, b1, b2):
    """Overlap and hull of two intervals, and the slopes of both by ``a1`` and ``a2``."""
    shared = tl.minimum(a2, b2) - tl.maximum(a1, b1)
    is_touching = shared >= 0.0
    shared_by_a1 = tl.where(is_touching, -_share(a1 > b1, a1 == b1), 0.0)
    shared_by_a2 = tl.where(is_touching, _share(a2 < b2, a2 == b2), 0.0)
    hull = tl.maximum(a2, b2) - tl.minimum(a1, b1)
    hull_by_a1 = -_share(a1 < b1, a1 == b1)
    hull_by_a2 = _share(a2 > b2, a2 == b2)
    return tl.maximum(shared, 0.0), shared_by_a1, shared_by_a2, hull, hull_by_a1, hull_by_a2


@triton.jit
def _corner_slope(union, iou, squared, distance, inter_slope, area_slope, hull_term, offset, aspect_slope):
    """Slope of CIoU by one corner coordinate: d(inter / union) - d(distance / squared hull) - d(aspect term)."""
    iou_slope = (inter_slope - iou * (area_slope - inter_slope)) / union
    distance_slope = (-0.5 * offset - distance * hull_term) / squared
    return iou_slope - distance_slope - aspect_slope


@triton.jit
def complete_iou_slopes(
    ax1: tl.tensor,
    ay1: tl.tensor,
    ax2: tl.tensor,
    ay2: tl.tensor,
    bx1: tl.tensor,
    by1: tl.tensor,
    bx2: tl.tensor,
    by2: tl.tensor,
):
    """Slopes of CIoU by ``ax1, ay1, ax2, ay2``; the weight of the aspect term counts as a constant."""
    w1, h1 = ax2 - ax1, ay2 - ay1 + EPS
    w2, h2 = bx2 - bx1, by2 - by1 + EPS
    shared_w, shared_x1, shared_x2, hull_w, hull_x1, hull_x2 = _axis_slopes(ax1, ax2, bx1, bx2)
    shared_h, shared_y1, shared_y2, hull_h, hull_y1, hull_y2 = _axis_slopes(ay1, ay2, by1, by2)
    inter = shared_w * shared_h
    area = w1 * h1
    union = area + w2 * h2 - inter + EPS
    iou = inter / union
    squared = hull_w * hull_w + hull_h * hull_h + EPS
    across, down = bx1 + bx2 - ax1 - ax2, by1 + by2 - ay1 - ay2
    distance = (across * across + down * down) * 0.25 / squared

    angle = aspect_angle(w1, h1, w2, h2)
    aspect = angle * angle * ASPECT_SCALE
    weight = aspect / (aspect - iou + (1.0 + EPS))
    turn = 2.0 * angle * ASPECT_SCALE * weight / (w1 * w1 + h1 * h1)
    by_w, by_h = -turn * h1, turn * w1  # of the aspect term

    x1 = _corner_slope(union, iou, squared, distance, shared_x1 * shared_h, -h1, 2.0 * hull_w * hull_x1, across, -by_w)
    x2 = _corner_slope(union, iou, squared, distance, shared_x2 * shared_h, h1, 2.0 * hull_w * hull_x2, across, by_w)
    y1 = _corner_slope(union, iou, squared, distance, shared_y1 * shared_w, -w1, 2.0 * hull_h * hull_y1, down, -by_h)
    y2 = _corner_slope(union, iou, squared, distance, shared_y2 * shared_w, w1, 2.0 * hull_h * hull_y2, down, by_h)
    return x1, y1, x2, y2
