"""Two other ways to suppress: greedily in plain Python, and picture by picture with torchvision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.iou import corners_of, iou

Detection = tuple[float, float, float, float, float, int]  # x1, y1, x2, y2, confidence, class


def suppress(
    rows: Sequence[Sequence[float]],
    conf_thres: float,
    iou_thres: float,
    classes: Sequence[int] | None = None,
    agnostic: bool = False,
    multi_label: bool = False,
    max_det: int = 300,
) -> list[Detection]:
    """Return the detections of one image from rows x, y, w, h, probabilities, in the precision of Python floats."""
    candidates: list[Detection] = []
    for row in rows:
        scores = list(row[4:])
        labels = range(len(scores)) if multi_label else [scores.index(max(scores))]
        for label in labels:
            if scores[label] > conf_thres and (classes is None or label in classes):
                candidates.append((*corners_of(row[:4]), scores[label], label))
    candidates.sort(key=lambda candidate: -candidate[4])
    kept: list[Detection] = []
    for candidate in candidates:
        rivals = [other for other in kept if agnostic or other[5] == candidate[5]]
        if all(iou(candidate, other) <= iou_thres for other in rivals):
            kept.append(candidate)
    return kept[:max_det]


def one_by_one(
    prediction: Tensor,
    conf_thres: float,
    iou_thres: float,
    *,
    agnostic: bool = False,
    multi_label: bool = False,
    max_det: int = 300,
    max_candidates: int = 30_000,
) -> list[Tensor]:
    """Return the detections of each picture of (B, 4 + nc, A); classes are kept apart by moving them, in float64."""
    from torchvision.ops import nms

    results = []
    for rows in prediction.float().transpose(1, 2):
        boxes, scores = rows[:, :4], rows[:, 4:]
        corners = torch.cat((boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2), 1)
        if multi_label and scores.shape[1] > 1:
            row, label = (scores > conf_thres).nonzero(as_tuple=True)
        else:
            best, label = scores.max(1)
            row = (best > conf_thres).nonzero()[:, 0]
            label = label[row]
        found = torch.cat((corners[row], scores[row, label, None], label[:, None].float()), 1)
        found = found[found[:, 4].argsort(descending=True, stable=True)[:max_candidates]]
        moved = found[:, :4].double()
        if not agnostic and len(found):
            moved = moved + found[:, 5:6] * (moved.max() - moved.min() + 1)
        results.append(found[nms(moved, found[:, 4].double(), iou_thres)[:max_det]])
    return results
