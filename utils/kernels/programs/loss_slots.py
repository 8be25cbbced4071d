"""Triton programs of the detection loss on the anchors that learn an object: terms, gradients, and the final sums.

Such anchors are held in slots, see :mod:`utils.kernels.programs.loss_assign`; each program takes BLOCK_S of them, as
far as they lie on one level. The distribution focal loss (Li et al. 2020) is the cross-entropy to the two bins beside
the wanted distance, each weighted by how near it is: to a tent over the bins with its peak there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from utils.kernels.programs.loss_assign import load_corners
from utils.kernels.programs.loss_math import complete_iou, complete_iou_slopes, softplus
from utils.kernels.programs.norm_forward import sigmoid

DFL_MARGIN = tl.constexpr(0.01)  # by which a wanted distance stays below the last bin


@triton.jit
def _find_slots(slot_anchor, slot_row, slots, cells, width, offset, anchors, BLOCK_S: tl.constexpr):
    """Slot, whether it is on this level and used, row of its object, row of the map, and its point in cells."""
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    owner = tl.load(slot_row + slot, mask=slot < slots, other=-1)
    anchor = tl.load(slot_anchor + slot, mask=owner >= 0, other=0)
    image = anchor // anchors
    cell = anchor - image * anchors - offset
    is_used = (owner >= 0) & (cell >= 0) & (cell < cells)
    cell = tl.where(is_used, cell, 0)
    point_x, point_y = (cell % width).to(tl.float32) + 0.5, (cell // width).to(tl.float32) + 0.5
    return slot, is_used, tl.where(is_used, owner, 0), image * cells + cell, point_x, point_y


@triton.jit
def _load_side(x, at, is_used, side, BINS: tl.constexpr, BINS_P: tl.constexpr):
    """Logits of one side (BLOCK_S, BINS_P), their log of the sum of exponentials, probabilities, and mean bin."""
    bins = tl.arange(0, BINS_P)
    mask = is_used[:, None] & (bins < BINS)[None, :]
    logits = tl.load(x + at[:, None] + (side * BINS + bins)[None, :], mask=mask, other=0.0).to(tl.float32)
    highest = tl.max(tl.where((bins < BINS)[None, :], logits, float("-inf")), 1)
    weights = tl.where((bins < BINS)[None, :], tl.exp(logits - highest[:, None]), 0.0)
    total = tl.sum(weights, 1)
    probability = weights / total[:, None]
    distance = tl.sum(probability * bins[None, :].to(tl.float32), 1)
    return logits, highest + tl.log(total), probability, distance


@triton.jit
def _tent(wanted, BINS: tl.constexpr, BINS_P: tl.constexpr):
    """Weight of each bin (BLOCK_S, BINS_P) for wanted distances (BLOCK_S,)."""
    bins = tl.arange(0, BINS_P)[None, :].to(tl.float32)
    limited = tl.minimum(tl.maximum(wanted, 0.0), BINS - 1 - DFL_MARGIN)
    return tl.maximum(1.0 - tl.abs(bins - limited[:, None]), 0.0)


@triton.jit
def _distribution_loss(logits, log_total, wanted, BINS: tl.constexpr, BINS_P: tl.constexpr):
    """Cross-entropy of one side (BLOCK_S,)."""
    return log_total - tl.sum(_tent(wanted, BINS, BINS_P) * logits, 1)


@triton.jit
def _class_targets(column, kind, score, smoothing):
    """Wanted scores (BLOCK_S, BLOCK_C): the share ``smoothing`` of the score goes to both outcomes of every class."""
    is_kind = (column[None, :] == kind[:, None]).to(tl.float32)
    return score[:, None] * (is_kind * (1.0 - smoothing) + smoothing * 0.5)


@triton.jit
def _class_correction(
    x, at, is_used, kind, score, share, pos_weight,
    BINS: tl.constexpr, CLASSES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """What the class term has beyond a sum of softplus, in these slots."""
    missing = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for start in range(0, CLASSES, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        mask = is_used[:, None] & (column < CLASSES)[None, :]
        logit = tl.load(x + at[:, None] + (4 * BINS + column)[None, :], mask=mask, other=0.0).to(tl.float32)
        wanted = _class_targets(column, kind, score, share)
        missing += tl.where(mask, wanted * ((pos_weight - 1.0) * softplus(logit) - pos_weight * logit), 0.0)
    return tl.sum(tl.sum(missing, 1), 0)


@triton.jit(
    do_not_specialize=[
        "objects", "slots", "cells", "width", "offset", "anchors", "first_partial", "all_partials", "stride",
        "pos_weight", "eps",
    ]
)  # fmt: skip
def sum_terms(
    slot_score: tl.tensor,  # (S,) float32
    partials: tl.tensor,  # (4, all programs): sums of box, class, distribution term and score
    slot_anchor: tl.tensor,
    slot_row: tl.tensor,
    slot_metric: tl.tensor,
    best: tl.tensor,  # (2, T) float32
    x: tl.tensor,
    x_stride: int,
    label: tl.tensor,
    truth: tl.tensor,
    smoothing: tl.tensor,  # one float32
    objects: int,
    slots: int,
    cells: int,
    width: int,
    offset: int,
    anchors: int,
    first_partial: int,
    all_partials: int,
    stride: float,
    pos_weight: float,
    eps: float,
    BINS: tl.constexpr,
    BINS_P: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scores of the slots, and sums of their terms; the class term is what is missing from a sum of softplus."""
    slot, is_used, owner, map_row, point_x, point_y = _find_slots(
        slot_anchor, slot_row, slots, cells, width, offset, anchors, BLOCK_S
    )
    metric = tl.load(slot_metric + slot, mask=is_used, other=0.0)
    best_metric = tl.load(best + owner, mask=is_used, other=0.0)
    score = metric * tl.load(best + objects + owner, mask=is_used, other=0.0) / (best_metric + eps)
    tl.store(slot_score + slot, score, mask=is_used)

    at = map_row.to(tl.int64) * x_stride
    x1, y1, x2, y2 = load_corners(truth, owner, is_used)
    x1, y1, x2, y2 = x1 / stride, y1 / stride, x2 / stride, y2 / stride
    logits, log_total, _p, left = _load_side(x, at, is_used, 0, BINS, BINS_P)
    entropy = _distribution_loss(logits, log_total, point_x - x1, BINS, BINS_P)
    logits, log_total, _p, top = _load_side(x, at, is_used, 1, BINS, BINS_P)
    entropy += _distribution_loss(logits, log_total, point_y - y1, BINS, BINS_P)
    logits, log_total, _p, right = _load_side(x, at, is_used, 2, BINS, BINS_P)
    entropy += _distribution_loss(logits, log_total, x2 - point_x, BINS, BINS_P)
    logits, log_total, _p, bottom = _load_side(x, at, is_used, 3, BINS, BINS_P)
    entropy += _distribution_loss(logits, log_total, y2 - point_y, BINS, BINS_P)
    overlap = complete_iou(point_x - left, point_y - top, point_x + right, point_y + bottom, x1, y1, x2, y2)

    kind = tl.load(label + owner, mask=is_used, other=0).to(tl.int32)
    missing = _class_correction(
        x, at, is_used, kind, score, tl.load(smoothing), pos_weight, BINS, CLASSES, BLOCK_S, BLOCK_C
    )
    target = partials + first_partial + tl.program_id(0)
    tl.store(target, tl.sum(tl.where(is_used, (1.0 - overlap) * score, 0.0), 0))
    tl.store(target + all_partials, missing)
    tl.store(target + 2 * all_partials, tl.sum(tl.where(is_used, 0.25 * entropy * score, 0.0), 0))
    tl.store(target + 3 * all_partials, tl.sum(score, 0))


@triton.jit
def _sum_of(values, number, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, number, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(values + index, mask=index < number, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["backgrounds", "parts", "box_gain", "cls_gain", "dfl_gain"])
def finish_items(
    items: tl.tensor,  # (3,) box, class, distribution
    scales: tl.tensor,  # (3,) gain over normaliser
    background: tl.tensor,  # parts of the sum of softplus
    partials: tl.tensor,  # (4, parts)
    backgrounds: int,
    parts: int,
    box_gain: float,
    cls_gain: float,
    dfl_gain: float,
    BLOCK: tl.constexpr,
):
    """Join the parts and divide by the sum of the scores, at least 1."""
    box = _sum_of(partials, parts, BLOCK)
    cls = _sum_of(background, backgrounds, BLOCK) + _sum_of(partials + parts, parts, BLOCK)
    dfl = _sum_of(partials + 2 * parts, parts, BLOCK)
    normaliser = tl.maximum(_sum_of(partials + 3 * parts, parts, BLOCK), 1.0)
    normaliser = tl.where(cls == cls, normaliser, cls)  # gradients of what is no number are none either
    tl.store(items, box / normaliser * box_gain)
    tl.store(items + 1, cls / normaliser * cls_gain)
    tl.store(items + 2, dfl / normaliser * dfl_gain)
    tl.store(scales, box_gain / normaliser)
    tl.store(scales + 1, cls_gain / normaliser)
    tl.store(scales + 2, dfl_gain / normaliser)


@triton.jit
def _store_side(
    dx, at, is_used, side, logits_probability, distance, wanted, box_slope, dfl_slope,
    BINS: tl.constexpr, BINS_P: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits of one side: by the mean bin, and by the cross-entropy."""
    bins = tl.arange(0, BINS_P)
    by_mean = logits_probability * (bins[None, :].to(tl.float32) - distance[:, None]) * box_slope[:, None]
    by_entropy = (logits_probability - _tent(wanted, BINS, BINS_P)) * dfl_slope[:, None]
    mask = is_used[:, None] & (bins < BINS)[None, :]
    values = (by_mean + by_entropy).to(dx.dtype.element_ty)
    tl.store(dx + at[:, None] + (side * BINS + bins)[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["slots", "cells", "width", "offset", "anchors", "stride", "pos_weight"])
def slot_gradients(
    dx: tl.tensor,  # (rows, 4 * BINS + CLASSES) without gaps; rows of used slots are replaced
    slot_anchor: tl.tensor,
    slot_row: tl.tensor,
    slot_score: tl.tensor,
    x: tl.tensor,
    x_stride: int,
    label: tl.tensor,
    truth: tl.tensor,
    smoothing: tl.tensor,
    slopes: tl.tensor,  # (3,) gradients of the items
    scales: tl.tensor,  # (3,)
    slots: int,
    cells: int,
    width: int,
    offset: int,
    anchors: int,
    stride: float,
    pos_weight: float,
    BINS: tl.constexpr,
    BINS_P: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Whole gradient of the rows of BLOCK_S slots."""
    slot, is_used, owner, map_row, point_x, point_y = _find_slots(
        slot_anchor, slot_row, slots, cells, width, offset, anchors, BLOCK_S
    )
    score = tl.load(slot_score + slot, mask=is_used, other=0.0)
    at = map_row.to(tl.int64) * x_stride
    to = map_row.to(tl.int64) * (4 * BINS + CLASSES)
    x1, y1, x2, y2 = load_corners(truth, owner, is_used)
    x1, y1, x2, y2 = x1 / stride, y1 / stride, x2 / stride, y2 / stride
    _l, _t, left_p, left = _load_side(x, at, is_used, 0, BINS, BINS_P)
    _l, _t, top_p, top = _load_side(x, at, is_used, 1, BINS, BINS_P)
    _l, _t, right_p, right = _load_side(x, at, is_used, 2, BINS, BINS_P)
    _l, _t, bottom_p, bottom = _load_side(x, at, is_used, 3, BINS, BINS_P)
    by_x1, by_y1, by_x2, by_y2 = complete_iou_slopes(
        point_x - left, point_y - top, point_x + right, point_y + bottom, x1, y1, x2, y2
    )
    box = tl.load(slopes) * tl.load(scales) * score  # the term falls as the overlap rises
    dfl = tl.load(slopes + 2) * tl.load(scales + 2) * 0.25 * score
    _store_side(dx, to, is_used, 0, left_p, left, point_x - x1, box * by_x1, dfl, BINS, BINS_P)
    _store_side(dx, to, is_used, 1, top_p, top, point_y - y1, box * by_y1, dfl, BINS, BINS_P)
    _store_side(dx, to, is_used, 2, right_p, right, x2 - point_x, -box * by_x2, dfl, BINS, BINS_P)
    _store_side(dx, to, is_used, 3, bottom_p, bottom, y2 - point_y, -box * by_y2, dfl, BINS, BINS_P)

    kind = tl.load(label + owner, mask=is_used, other=0).to(tl.int32)
    share = tl.load(smoothing)
    cls = tl.load(slopes + 1) * tl.load(scales + 1)
    for start in range(0, CLASSES, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        mask = is_used[:, None] & (column < CLASSES)[None, :]
        place = (4 * BINS + column)[None, :]
        probability = sigmoid(tl.load(x + at[:, None] + place, mask=mask, other=0.0).to(tl.float32))
        wanted = _class_targets(column, kind, score, share)
        gradient = cls * (probability + wanted * ((pos_weight - 1.0) * probability - pos_weight))
        tl.store(dx + to[:, None] + place, gradient.to(dx.dtype.element_ty), mask=mask)
