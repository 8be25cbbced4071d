"""Anchor points of a feature pyramid, and boxes as distances from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def make_anchors(
    feats: Sequence[Tensor],
    strides: Sequence[float] | Tensor,
    grid_cell_offset: float = 0.5,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return one point per cell of every level, rows first, levels in order.

    Args:
        feats: one map (B, C, H, W) per level; only sizes, device and type are looked at.
        strides: pixels per cell of each level.
        grid_cell_offset: place of the point inside its cell.
        dtype: type of the result, by default that of the maps.

    Returns:
        Points (A, 2) as x, y in cells of their level, and the stride (A, 1) of each.
    """
    points, point_strides = [], []
    for level, stride in zip(feats, strides, strict=True):
        height, width = level.shape[-2:]
        kind = {"dtype": dtype or level.dtype, "device": level.device}
        y = torch.arange(height, **kind) + grid_cell_offset
        x = torch.arange(width, **kind) + grid_cell_offset
        grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
        points.append(torch.stack((grid_x, grid_y), -1).view(-1, 2))
        # torch.full would have to read a stride that is a tensor; multiplying leaves it where it is.
        point_strides.append(torch.ones((height * width, 1), **kind) * stride)
    return torch.cat(points), torch.cat(point_strides)


def dist2bbox(distance: Tensor, anchor_points: Tensor, xywh: bool = True, dim: int = -1) -> Tensor:
    """Turn distances left, top, right, bottom (4 along ``dim``) from their points into ``xywh`` or ``xyxy`` boxes."""
    left_top, right_bottom = distance.chunk(2, dim)
    corner1 = anchor_points - left_top
    corner2 = anchor_points + right_bottom
    if not xywh:
        return torch.cat((corner1, corner2), dim)
    return torch.cat(((corner1 + corner2) / 2, corner2 - corner1), dim)


def bbox2dist(anchor_points: Tensor, bbox: Tensor, reg_max: float) -> Tensor:
    """Turn corners (..., 4) into distances left, top, right, bottom, limited to ``[0, reg_max - 0.01]``."""
    corner1, corner2 = bbox.chunk(2, -1)
    return torch.cat((anchor_points - corner1, corner2 - anchor_points), -1).clamp(0, reg_max - 0.01)
