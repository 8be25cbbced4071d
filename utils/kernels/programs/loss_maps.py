"""Triton programs of the detection loss that pass over whole maps: one of the forward, one of the backward pass.

A map of a level is a matrix of rows (image by image, cells row by row) by channels: four sides with BINS logits each,
then CLASSES class logits. Everything is computed in float32 whatever the type of the map.
"""

from __future__ import annotations

import triton
import triton.language as tl

from utils.kernels.programs.loss_math import softplus
from utils.kernels.programs.norm_forward import sigmoid


@triton.jit(do_not_specialize=["first_partial", "rows", "cells", "width", "offset", "anchors"])
def read_maps(
    x: tl.tensor,
    x_stride: int,
    boxes: tl.tensor,  # (B, A, 4) float32
    partials: tl.tensor,  # one per program, from ``first_partial`` on
    first_partial: int,
    rows: int,
    cells: int,
    width: int,
    offset: int,
    anchors: int,
    stride: float,
    BINS: tl.constexpr,
    BINS_P: tl.constexpr,  # BINS or the next power of two
    CLASSES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Decode the boxes of BLOCK_N rows in pixels, and sum softplus of their class logits.

    That sum is the class term of a picture without objects; ``offset`` is the first anchor of the level. A box that is
    no number overlaps nothing and would go unnoticed, so it makes the sum no number either.
    """
    first = tl.program_id(0) * BLOCK_N
    base = x + first.to(tl.int64) * x_stride
    number = tl.arange(0, 4 * BLOCK_N)
    side, local = number % 4, number // 4
    is_row = first + local < rows
    bins = tl.arange(0, BINS_P)
    at = (local * x_stride + side * BINS)[:, None] + bins[None, :]
    logits = tl.load(base + at, mask=is_row[:, None] & (bins < BINS)[None, :], other=0.0).to(tl.float32)
    if BINS_P > BINS:
        logits = tl.where((bins < BINS)[None, :], logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    distance = tl.sum(weights * bins[None, :].to(tl.float32), 1) / tl.sum(weights, 1)
    row = first + local
    image = row // cells
    cell = row - image * cells
    place = tl.where(side % 2 == 0, cell % width, cell // width).to(tl.float32) + 0.5
    corner = tl.where(side < 2, place - distance, place + distance) * stride
    tl.store(boxes + (image * anchors + offset + cell).to(tl.int64) * 4 + side, corner, mask=is_row)
    faults = tl.sum(tl.where(is_row & (distance != distance), distance, 0.0), 0)

    local = tl.arange(0, BLOCK_N)
    is_row = first + local < rows
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, CLASSES, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        mask = is_row[:, None] & (column < CLASSES)[None, :]
        class_at = (local * x_stride)[:, None] + (4 * BINS + column)[None, :]
        values = tl.load(base + class_at, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(mask, softplus(values), 0.0)
    tl.store(partials + first_partial + tl.program_id(0), tl.sum(tl.sum(total, 1), 0) + faults)


@triton.jit(do_not_specialize=["rows"])
def background_gradient(
    dx: tl.tensor,  # (rows, 4 * BINS + CLASSES) without gaps
    x: tl.tensor,
    x_stride: int,
    slopes: tl.tensor,  # (3,) gradients of the items
    scales: tl.tensor,  # (3,) of the items by their sums
    rows: int,
    BINS: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,  # a power of two from 4 * BINS up
):
    """Gradient of BLOCK_N rows as if there were no objects: nothing for the boxes, the probability for each class."""
    channels = 4 * BINS + CLASSES
    first = tl.program_id(0) * BLOCK_N
    base, target = x + first.to(tl.int64) * x_stride, dx + first.to(tl.int64) * channels
    scale = tl.load(slopes + 1) * tl.load(scales + 1)
    local = tl.arange(0, BLOCK_N)
    is_row = first + local < rows
    bins = tl.arange(0, BLOCK_B)
    zeros = tl.zeros((BLOCK_N, BLOCK_B), dx.dtype.element_ty)
    at = (local * channels)[:, None] + bins[None, :]
    tl.store(target + at, zeros, mask=is_row[:, None] & (bins < 4 * BINS)[None, :])
    for start in range(0, CLASSES, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        mask = is_row[:, None] & (column < CLASSES)[None, :]
        column += 4 * BINS
        values = tl.load(base + ((local * x_stride)[:, None] + column[None, :]), mask=mask, other=0.0).to(tl.float32)
        gradient = (sigmoid(values) * scale).to(dx.dtype.element_ty)
        tl.store(target + ((local * channels)[:, None] + column[None, :]), gradient, mask=mask)
