"""Detection figures as users of YOLO know them: average precision per class, operating point, fitness.

The numbers are upstream's to the last digit: one label per prediction and threshold (see ``matching``), curves over
1000 confidences, area under 101 recall values, operating point where the smoothed mean F1 is highest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.evaluate import plots
from utils.evaluate.curves import compute_ap, confidence_axis, smooth

__all__ = ["ClassCurves", "OperatingPoint", "ap_per_class", "class_curves", "compute_ap", "fitness", "smooth"]

FITNESS_WEIGHTS = (0.0, 0.0, 0.1, 0.9)  # of precision, recall, mAP at 0.5, mAP at 0.5 … 0.95
EPS = 1e-16  # keeps upstream's quotients finite


def fitness(x: np.ndarray) -> np.ndarray:
    """Return one number per row of ``x`` (n, ≥ 4: P, R, mAP50, mAP50-95, …) by which checkpoints are ranked."""
    return (x[:, : len(FITNESS_WEIGHTS)] * np.array(FITNESS_WEIGHTS)).sum(1)


@dataclass(frozen=True, kw_only=True)
class ClassCurves:
    """Curves of the K labelled classes over S confidences, and their AP at T thresholds."""

    classes: np.ndarray  # (K,) class numbers that occur in the labels
    labels: np.ndarray  # (K,) labels of each
    precision: np.ndarray  # (K, S) at IoU 0.5
    recall: np.ndarray  # (K, S)
    f1: np.ndarray  # (K, S)
    ap: np.ndarray  # (K, T)
    precision_at_recall: np.ndarray  # (K, S) envelope, zero for classes that were never predicted


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """The confidence at which the smoothed mean F1 is highest, and the figures of the K classes there."""

    confidence: float
    precision: np.ndarray  # (K,)
    recall: np.ndarray  # (K,)
    f1: np.ndarray  # (K,)

    @classmethod
    def of(cls, curves: ClassCurves) -> OperatingPoint:
        """Find it on ``curves``; without classes it is confidence 0 and nothing else."""
        if not len(curves.classes):
            return cls(confidence=0.0, precision=np.zeros(0), recall=np.zeros(0), f1=np.zeros(0))
        best = int(smooth(curves.f1.mean(0), 0.1).argmax())
        precision, recall, f1 = (part[:, best] for part in (curves.precision, curves.recall, curves.f1))
        return cls(confidence=float(confidence_axis()[best]), precision=precision, recall=recall, f1=f1)


def ap_per_class(
    tp: np.ndarray,
    conf: np.ndarray,
    pred_cls: np.ndarray,
    target_cls: np.ndarray,
    plot: bool = False,
    save_dir: str | Path = ".",
    names: Mapping[int, str] | Sequence[str] = (),
    eps: float = EPS,
    prefix: str = "",
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the figures of every class that occurs in the labels.

    Args:
        tp: (N, T) bool, correct at each IoU threshold.
        conf, pred_cls: (N,) confidence and class of each prediction.
        target_cls: (M,) class of each label.
        plot: write PR, F1, P and R curves to ``save_dir``, their names beginning with ``prefix``.

    Returns:
        TP, FP, precision, recall, F1 (K,) at the confidence where the smoothed mean F1 is highest; AP (K, T) float64;
        class numbers (K,) int. K = 0 without labels.
    """
    curves = class_curves(tp, conf, pred_cls, target_cls, eps=eps)
    if not len(curves.classes):
        nothing = np.zeros(0)
        return nothing, nothing, nothing, nothing, nothing, curves.ap, curves.classes
    point = OperatingPoint.of(curves)
    if plot:
        plots.plot_curves(curves, point, Path(save_dir), names, prefix)
    hits = (point.recall * curves.labels).round()
    false_alarms = (hits / (point.precision + eps) - hits).round()
    return hits, false_alarms, point.precision, point.recall, point.f1, curves.ap, curves.classes


def class_curves(
    tp: np.ndarray, conf: np.ndarray, pred_cls: np.ndarray, target_cls: np.ndarray, *, eps: float = EPS
) -> ClassCurves:
    """Return the curves of every labelled class; arguments as in ``ap_per_class``."""
    order = np.lexsort((-conf, pred_cls))  # class by class, by falling confidence within each
    tp, conf, pred_cls = tp[order], conf[order], pred_cls[order]
    classes, labels = np.unique(target_cls, return_counts=True)
    first, last = (np.searchsorted(pred_cls, classes, side) for side in ("left", "right"))
    axis = confidence_axis()
    shape = (len(classes), len(axis))
    precision, recall, at_recall = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    ap = np.zeros((len(classes), tp.shape[1]))

    for row, count in enumerate(labels):
        mine = slice(first[row], last[row])
        if mine.start == mine.stop:
            continue
        tried = np.arange(1.0, mine.stop - mine.start + 1)  # (n,)
        for column in range(tp.shape[1]):
            hits = tp[mine, column].cumsum(dtype=np.float64)
            class_recall, class_precision = hits / (count + eps), hits / tried
            ap[row, column], envelope, closed = compute_ap(class_recall, class_precision)
            if column == 0:
                # np.interp wants a rising axis, confidences fall: both sides negated
                recall[row] = np.interp(-axis, -conf[mine], class_recall, left=0)
                precision[row] = np.interp(-axis, -conf[mine], class_precision, left=1)
                at_recall[row] = np.interp(axis, closed, envelope)
    return ClassCurves(
        classes=classes.astype(int),
        labels=labels,
        precision=precision,
        recall=recall,
        f1=2 * precision * recall / (precision + recall + eps),
        ap=ap,
        precision_at_recall=at_recall,
    )
