"""Greedy suppression in plain Python, in the precision of Python floats and without class offsets."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return the detections of one image from rows x, y, w, h, probabilities."""
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
