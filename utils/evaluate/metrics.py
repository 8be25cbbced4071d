"""Detection figures: matching of predictions with labels, average precision per class, fitness.

The numbers are upstream's to the last digit: one label per prediction and threshold, curves over 1000 confidences,
area under 101 recall values, operating point where the smoothed mean F1 is highest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.evaluate import plots
from utils.evaluate.curves import compute_ap, confidence_axis, smooth

__all__ = [
    "ap_per_class",
    "class_curves",
    "compute_ap",
    "fitness",
    "iou_thresholds",
    "match_predictions",
    "pad_rows",
    "process_batch",
    "smooth",
]

FITNESS_WEIGHTS = (0.0, 0.0, 0.1, 0.9)  # of precision, recall, mAP at 0.5, mAP at 0.5 … 0.95
PAD_LABEL, PAD_DETECTION = -1.0, -2.0  # classes of filler rows; they differ, so fillers never match each other
MAX_PAIRS = 20_000_000  # IoU values held at once while a batch is matched (about 0.5 GB with the intermediates)


class RowBatch(NamedTuple):
    """Rows of a batch as one block per image, and where each row went."""

    block: Tensor  # (B, longest, W)
    image_index: Tensor  # (R,)
    position: Tensor  # (R,) within its image


def iou_thresholds(device: torch.device | str = "cpu") -> Tensor:
    """Return the ten thresholds 0.50, 0.55 … 0.95, shape (10,)."""
    return torch.linspace(0.5, 0.95, 10, device=device)


def fitness(x: np.ndarray) -> np.ndarray:
    """Return one number per row of ``x`` (n, ≥ 4: P, R, mAP50, mAP50-95, …) by which checkpoints are ranked."""
    return (x[:, : len(FITNESS_WEIGHTS)] * np.array(FITNESS_WEIGHTS)).sum(1)


def process_batch(detections: Tensor, labels: Tensor, iouv: Tensor) -> Tensor:
    """Return which detections of one image are correct at which IoU threshold, (N, T) bool.

    Args:
        detections: (N, 6) x1 y1 x2 y2 confidence class, by falling confidence.
        labels: (G, 5) class x1 y1 x2 y2, in the same pixels.
        iouv: (T,) IoU thresholds; a pair counts from the threshold on.
    """
    return match_predictions(detections[None].to(iouv.device), labels[None].to(iouv.device), iouv)[0]


def match_predictions(detections: Tensor, labels: Tensor, thresholds: Tensor) -> Tensor:
    """Return which detections of each image are correct, (B, N, T) bool; rows as in ``process_batch``.

    Images with fewer rows are filled up (see ``pad_rows``). Each detection bids for the one label of its class that
    it overlaps most; the label goes to the most confident bidder, and the others get no second chance.

    Args:
        detections: (B, N, 6), by falling confidence within an image.
        labels: (B, G, 5).
        thresholds: (T,).
    """
    batch, count, objects = detections.shape[0], detections.shape[1], labels.shape[1]
    if batch > 1 and batch * count * objects > MAX_PAIRS:
        halves = zip(detections.split((batch + 1) // 2), labels.split((batch + 1) // 2), strict=True)
        return torch.cat([match_predictions(part, truth, thresholds) for part, truth in halves])
    if not count or not objects:
        return torch.zeros(batch, count, len(thresholds), dtype=torch.bool, device=detections.device)

    overlap = _pairwise_iou(labels[..., 1:5], detections[..., :4])  # (B, G, N)
    same_class = labels[..., :1] == detections[:, None, :, 5]
    overlap = torch.where(same_class, overlap, -1.0)
    best_overlap = overlap.amax(1)  # (B, N)
    # of labels that fit equally well the last one is taken, as upstream's reversed sort does
    best_label = torch.where(overlap == best_overlap[:, None], _column(objects, overlap), 0).amax(1)
    bids = best_overlap[..., None] >= thresholds  # (B, N, T)
    rank = _column(count, overlap).where(bids, count)
    target = best_label[..., None].expand_as(rank)
    winner = rank.new_full((batch, objects, len(thresholds)), count).scatter_reduce(1, target, rank, "amin")
    return bids & (winner.gather(1, target) == rank)


def pad_rows(rows: Tensor, image_index: Tensor, batch: int, filler_class: float, class_column: int) -> RowBatch:
    """Lay rows of a whole batch out as one block per image, as ``match_predictions`` wants them.

    Args:
        rows: (R, W), grouped by image in ascending order.
        image_index: (R,) image of each row, 0 … ``batch`` - 1.
        filler_class: class of the rows that fill an image up (``PAD_LABEL`` or ``PAD_DETECTION``).
    """
    counts = torch.bincount(image_index, minlength=batch)
    position = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[image_index]
    block = rows.new_zeros(batch, int(counts.max()) if batch else 0, rows.shape[1])
    block[..., class_column] = filler_class
    block[image_index, position] = rows
    return RowBatch(block, image_index, position)


def _column(count: int, like: Tensor) -> Tensor:
    """Return the numbers 0 … ``count`` - 1 as (1, count, 1)."""
    return torch.arange(count, device=like.device)[None, :, None]


def _pairwise_iou(first: Tensor, second: Tensor, eps: float = 1e-7) -> Tensor:
    """Return the IoU of xyxy boxes (B, G, 4) with (B, N, 4) as (B, G, N)."""
    low = torch.maximum(first[:, :, None, :2], second[:, None, :, :2])
    high = torch.minimum(first[:, :, None, 2:], second[:, None, :, 2:])
    shared = (high - low).clamp_(min=0).prod(3)
    area_first = (first[..., 2:] - first[..., :2]).prod(2)[:, :, None]
    area_second = (second[..., 2:] - second[..., :2]).prod(2)[:, None]
    return shared / (area_first + area_second - shared + eps)


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


def ap_per_class(
    tp: np.ndarray,
    conf: np.ndarray,
    pred_cls: np.ndarray,
    target_cls: np.ndarray,
    plot: bool = False,
    save_dir: str | Path = ".",
    names: Mapping[int, str] | Sequence[str] = (),
    eps: float = 1e-16,
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
    if plot:
        plots.plot_curves(curves, Path(save_dir), names, prefix)
    best = smooth(curves.f1.mean(0), 0.1).argmax()
    precision, recall, f1 = curves.precision[:, best], curves.recall[:, best], curves.f1[:, best]
    hits = (recall * curves.labels).round()
    false_alarms = (hits / (precision + eps) - hits).round()
    return hits, false_alarms, precision, recall, f1, curves.ap, curves.classes


def class_curves(
    tp: np.ndarray, conf: np.ndarray, pred_cls: np.ndarray, target_cls: np.ndarray, *, eps: float = 1e-16
) -> ClassCurves:
    """Return the curves of every labelled class; arguments as in ``ap_per_class``."""
    order = np.argsort(-conf, kind="stable")
    tp, conf, pred_cls = tp[order], conf[order], pred_cls[order]
    classes, labels = np.unique(target_cls, return_counts=True)
    axis = confidence_axis()
    shape = (len(classes), len(axis))
    precision, recall, at_recall = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    ap = np.zeros((len(classes), tp.shape[1]))

    for row, (number, count) in enumerate(zip(classes, labels, strict=True)):
        mine = pred_cls == number
        if not mine.any():
            continue
        hits = tp[mine].cumsum(0, dtype=np.float64)  # (n, T)
        tried = np.arange(1, len(hits) + 1)[:, None]
        class_recall, class_precision = hits / (count + eps), hits / tried
        # np.interp wants a rising axis, confidences fall: both sides negated
        recall[row] = np.interp(-axis, -conf[mine], class_recall[:, 0], left=0)
        precision[row] = np.interp(-axis, -conf[mine], class_precision[:, 0], left=1)
        for column in range(tp.shape[1]):
            ap[row, column], envelope, closed = compute_ap(class_recall[:, column], class_precision[:, column])
            if column == 0:
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
