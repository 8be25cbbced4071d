"""Arithmetic on curves, shared by the figures and their plots: smoothing, and the area under one curve."""

from __future__ import annotations

import numpy as np

CONFIDENCE_STEPS = 1000  # samples of the confidence axis on which the curves of all classes are compared
RECALL_STEPS = 101  # samples of the recall axis under which the area is taken, as COCO has them
_RECALLS = np.linspace(0, 1, RECALL_STEPS)
_RECALL_WIDTHS = np.diff(_RECALLS)


def confidence_axis() -> np.ndarray:
    """Return the confidences 0 … 1 at which the curves are sampled, shape (CONFIDENCE_STEPS,)."""
    return np.linspace(0, 1, CONFIDENCE_STEPS)


def smooth(y: np.ndarray, f: float = 0.05) -> np.ndarray:
    """Return ``y`` (n,) averaged over a centred window of about ``2 f n`` samples; its ends are continued flat."""
    width = round(len(y) * f * 2) // 2 + 1
    padded = np.pad(y, width // 2, mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")


def compute_ap(recall: np.ndarray, precision: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the average precision of one curve and the curve it was taken from.

    Both inputs are (n,), recall ascending. The curve is closed with (0, 1) and (1, 0), precision is replaced by its
    envelope (the best precision at this recall or any higher one), and the area is the trapezoid integral over 101
    recall values. It exceeds COCO's mean of 101 values a little, because the closing point is joined linearly.

    Returns:
        AP, precision envelope (n + 2,), closed recall (n + 2,).
    """
    closed_recall = np.concatenate(([0.0], recall, [1.0]))
    closed_precision = np.concatenate(([1.0], precision, [0.0]))
    envelope = np.maximum.accumulate(closed_precision[::-1])[::-1]
    heights = np.interp(_RECALLS, closed_recall, envelope)
    area = (_RECALL_WIDTHS * (heights[1:] + heights[:-1]) / 2).sum()
    return float(area), envelope, closed_recall
