"""Box overlaps of two plain tuples, written straight from the formulas and slow on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPS = 1e-7


def corners_of(box_xywh: Sequence[float]) -> tuple[float, float, float, float]:
    x, y, w, h = box_xywh
    return x - w / 2, y - h / 2, x + w / 2, y + h / 2


def intersection(a: Sequence[float], b: Sequence[float]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Plain IoU of two corner boxes without any guard: 0 where both are empty."""
    inter = intersection(a, b)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter
    return inter / union if union > 0 else 0.0


def guarded_iou(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """IoU and union with the guard on heights and union."""
    inter = intersection(a, b)
    union = (a[2] - a[0]) * (a[3] - a[1] + EPS) + (b[2] - b[0]) * (b[3] - b[1] + EPS) - inter + EPS
    return inter / union, union


def giou(a: Sequence[float], b: Sequence[float]) -> float:
    value, union = guarded_iou(a, b)
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1])) + EPS
    return value - (hull - union) / hull


def diou(a: Sequence[float], b: Sequence[float]) -> float:
    value, _ = guarded_iou(a, b)
    diagonal = (max(a[2], b[2]) - min(a[0], b[0])) ** 2 + (max(a[3], b[3]) - min(a[1], b[1])) ** 2 + EPS
    apart = ((a[0] + a[2] - b[0] - b[2]) / 2) ** 2 + ((a[1] + a[3] - b[1] - b[3]) / 2) ** 2
    return value - apart / diagonal


def ciou(a: Sequence[float], b: Sequence[float]) -> float:
    value, _ = guarded_iou(a, b)
    slope_a = math.atan((a[2] - a[0]) / (a[3] - a[1] + EPS))
    slope_b = math.atan((b[2] - b[0]) / (b[3] - b[1] + EPS))
    v = 4 / math.pi**2 * (slope_b - slope_a) ** 2
    return diou(a, b) - v * v / (v - value + 1 + EPS)
