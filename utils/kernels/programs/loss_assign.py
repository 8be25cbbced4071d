"""Triton programs of the assignment of objects to anchors, one level of the pyramid at a time.

Objects are flat rows; each has TOPK candidates, kept as 64-bit keys from one level to the next: the bits of a positive
float32 in the upper half, which have its order, and in the lower half a number that falls as the index rises, so that
among equals the first wins. A key that is not positive stands for nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from utils.kernels.programs.loss_math import alignment, positive_overlap

LOWER_HALF = tl.constexpr(2**31 - 1)
LARGEST = tl.constexpr(2**63 - 1)


@triton.jit
def make_key(value: tl.tensor, index: tl.tensor):
    """Key of a float32 from 0 up and an index."""
    return (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (index ^ LOWER_HALF).to(tl.int64)


@triton.jit
def index_of(key: tl.tensor):
    """Index in a key."""
    return ((key & LOWER_HALF) ^ LOWER_HALF).to(tl.int32)


@triton.jit
def load_corners(boxes: tl.tensor, at: tl.tensor, mask: tl.tensor):
    """Load the four corner coordinates of the boxes (N, 4) at indices ``at``."""
    base = boxes + at.to(tl.int64) * 4
    x1, y1 = tl.load(base, mask=mask, other=0.0), tl.load(base + 1, mask=mask, other=0.0)
    x2, y2 = tl.load(base + 2, mask=mask, other=0.0), tl.load(base + 3, mask=mask, other=0.0)
    return x1, y1, x2, y2


@triton.jit
def _cell_range(low, high, stride, size):
    """First cell and number of cells of a range that holds every cell with its centre between ``low`` and ``high``."""
    last_cell = (size - 1).to(tl.float32)
    first = tl.minimum(tl.maximum(low / stride - 1.0, 0.0), last_cell + 1.0).to(tl.int32)
    last = tl.maximum(tl.minimum(high / stride, last_cell), -1.0).to(tl.int32)
    return first, tl.maximum(last - first + 1, 0)


@triton.jit
def _keep_best(top, key):
    """Exchange the lowest of the keys ``top`` for the highest of ``key`` until nothing is won by it."""
    best, worst = tl.max(key, 0), tl.min(top, 0)
    while best > worst:
        top = tl.where(top == worst, best, top)
        key = tl.where(key == best, -LARGEST, key)
        best, worst = tl.max(key, 0), tl.min(top, 0)
    return top


@triton.jit
def _mark_wanted(top, lane, row, picture, chosen_by, claims, anchors, slots, TOPK: tl.constexpr):
    """Count how many objects want an anchor, and note the first slot that does; integers come out the same anyhow."""
    is_wanted = (lane < TOPK) & (top > 0)
    at = picture * anchors + index_of(top)
    tl.atomic_add(chosen_by + at, 1, mask=is_wanted, sem="relaxed")
    tl.atomic_max(claims + at, slots - (row * TOPK + lane), mask=is_wanted, sem="relaxed")


@triton.jit(
    do_not_specialize=["height", "width", "offset", "anchors", "batch", "slots", "stride", "alpha", "beta", "eps"]
)
def find_candidates(
    keys: tl.tensor,  # (T, TOPK_P) int64, read unless IS_FIRST
    chosen_by: tl.tensor,  # (B * A) int32, zeros: how many objects want an anchor
    claims: tl.tensor,  # (B * A) int32, zeros: number of slots minus the first slot that wants it
    boxes: tl.tensor,  # (B, A, 4) pixels
    x: tl.tensor,
    x_stride: int,
    image: tl.tensor,  # (T,) int64
    label: tl.tensor,  # (T,) int64
    truth: tl.tensor,  # (T, 4) pixels
    valid: tl.tensor,  # (T,) bool
    height: int, width: int, offset: int, anchors: int, batch: int, slots: int,
    stride: float, alpha: float, beta: float, eps: float,
    CLASS_COLUMN: tl.constexpr,
    CLASSES: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_P: tl.constexpr,  # the next power of two
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the anchors of a level to the best TOPK of one object; after the last level, mark the anchors it wants.

    Only anchors strictly inside the object and with some alignment are candidates. Those lie in a rectangle of cells.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, TOPK_P)
    if IS_FIRST:
        top = tl.where(lane < TOPK, (lane - TOPK).to(tl.int64), LARGEST)  # distinct, none positive
    else:
        top = tl.load(keys + row * TOPK_P + lane)
    picture, kind = tl.load(image + row).to(tl.int32), tl.load(label + row).to(tl.int32)
    is_object = tl.load(valid + row) & (picture >= 0) & (picture < batch) & (kind >= 0) & (kind < CLASSES)
    x1, y1, x2, y2 = load_corners(truth, row, is_object)
    first_x, columns = _cell_range(x1, x2, stride, width)
    first_y, lines = _cell_range(y1, y2, stride, height)
    number = tl.where(is_object, columns * lines, 0)

    for start in range(0, number, BLOCK):
        index = start + tl.arange(0, BLOCK)
        line = index // columns
        cell_x, cell_y = first_x + index - line * columns, first_y + line
        centre_x, centre_y = (cell_x.to(tl.float32) + 0.5) * stride, (cell_y.to(tl.float32) + 0.5) * stride
        is_inside = (centre_x - x1 > eps) & (centre_y - y1 > eps) & (x2 - centre_x > eps) & (y2 - centre_y > eps)
        is_inside = is_inside & (index < number)
        cell = cell_y * width + cell_x
        px1, py1, px2, py2 = load_corners(boxes, picture * anchors + offset + cell, is_inside)
        at = (picture * (height * width) + cell).to(tl.int64) * x_stride + (CLASS_COLUMN + kind)
        logit = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
        metric = alignment(logit, positive_overlap(x1, y1, x2, y2, px1, py1, px2, py2), alpha, beta)
        key = tl.where(is_inside & (metric > 0.0), make_key(metric, offset + cell), -LARGEST)
        top = _keep_best(top, key)

    tl.store(keys + row * TOPK_P + lane, top)
    if IS_LAST:
        _mark_wanted(top, lane, row, picture, chosen_by, claims, anchors, slots, TOPK)


@triton.jit
def _closest_object(
    is_contested, picture, px1, py1, px2, py2, image, truth, objects,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Row of the object of the image that overlaps each contested box (BLOCK_S,) most."""
    winner = tl.full((BLOCK_S,), -1, tl.int64)
    for start in range(0, tl.max(tl.where(is_contested, objects, 0), 0), BLOCK_T):
        rival = start + tl.arange(0, BLOCK_T)
        rival_image = tl.load(image + rival, mask=rival < objects, other=-1).to(tl.int32)
        x1, y1, x2, y2 = load_corners(truth, rival, rival < objects)
        overlap = positive_overlap(
            x1[None, :], y1[None, :], x2[None, :], y2[None, :],
            px1[:, None], py1[:, None], px2[:, None], py2[:, None],
        )  # fmt: skip
        rival_key = tl.where(rival_image[None, :] == picture[:, None], make_key(overlap, rival[None, :]), -1)
        winner = tl.maximum(winner, tl.max(rival_key, 1))
    return index_of(winner)


@triton.jit(do_not_specialize=["objects", "slots", "cells", "offset", "anchors", "alpha", "beta"])
def settle_owners(
    slot_anchor: tl.tensor,  # (S,) int32, image * A + anchor
    slot_row: tl.tensor,  # (S,) int32, -1: row of the object that gets the anchor, in one slot of each such anchor
    slot_metric: tl.tensor,  # (S,) float32
    best: tl.tensor,  # (2, T) zeros: highest metric and overlap of each object, the bits of a float32
    keys: tl.tensor,
    chosen_by: tl.tensor,
    claims: tl.tensor,
    boxes: tl.tensor,
    x: tl.tensor,
    x_stride: int,
    image: tl.tensor,
    label: tl.tensor,
    truth: tl.tensor,
    objects: int,
    slots: int,
    cells: int,
    offset: int,
    anchors: int,
    alpha: float,
    beta: float,
    CLASS_COLUMN: tl.constexpr,
    CLASSES: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Say which object gets the anchors of BLOCK_S slots, as far as they lie on this level, and how well they fit.

    An anchor that several objects want goes to the one of its image that it overlaps most, be it one of them or not.
    """
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = slot // TOPK
    key = tl.load(keys + row * TOPK_P + slot % TOPK, mask=slot < slots, other=-1)
    anchor = index_of(key)
    cell = anchor - offset
    is_used = (key > 0) & (cell >= 0) & (cell < cells)
    picture = tl.load(image + row, mask=is_used, other=0).to(tl.int32)
    at = picture * anchors + anchor
    is_used = is_used & (tl.load(claims + at, mask=is_used, other=0) == slots - slot)
    is_contested = is_used & (tl.load(chosen_by + at, mask=is_used, other=0) > 1)
    px1, py1, px2, py2 = load_corners(boxes, at, is_used)

    closest = _closest_object(is_contested, picture, px1, py1, px2, py2, image, truth, objects, BLOCK_S, BLOCK_T)
    owner = tl.where(is_contested, closest, row)

    kind = tl.minimum(tl.maximum(tl.load(label + owner, mask=is_used, other=0).to(tl.int32), 0), CLASSES - 1)
    x1, y1, x2, y2 = load_corners(truth, owner, is_used)
    overlap = positive_overlap(x1, y1, x2, y2, px1, py1, px2, py2)
    logit_at = (picture * cells + cell).to(tl.int64) * x_stride + (CLASS_COLUMN + kind)
    metric = alignment(tl.load(x + logit_at, mask=is_used, other=0.0).to(tl.float32), overlap, alpha, beta)
    tl.store(slot_anchor + slot, at, mask=is_used)
    tl.store(slot_row + slot, owner, mask=is_used)
    tl.store(slot_metric + slot, metric, mask=is_used)
    # Positive floats have the order of their bits, and the highest of integers does not depend on who came first.
    tl.atomic_max(best + owner, metric.to(tl.int32, bitcast=True), mask=is_used, sem="relaxed")
    tl.atomic_max(best + objects + owner, overlap.to(tl.int32, bitcast=True), mask=is_used, sem="relaxed")
