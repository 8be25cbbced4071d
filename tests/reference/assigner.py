"""Task-aligned assignment of one image, anchor by anchor and object by object, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.reference.iou import ciou

EPS = 1e-9
Box = Sequence[float]


@dataclass(frozen=True)
class Expected:
    """Object of each anchor (None for background) and its score."""

    owner: list[int | None]
    score: list[float]


def is_inside(point: Sequence[float], box: Box) -> bool:
    x, y = point
    return min(x - box[0], y - box[1], box[2] - x, box[3] - y) > EPS


def assign_image(
    scores: Sequence[Sequence[float]],
    predicted: Sequence[Box],
    points: Sequence[Sequence[float]],
    labels: Sequence[int],
    boxes: Sequence[Box],
    valid: Sequence[bool],
    topk: int = 10,
    alpha: float = 0.5,
    beta: float = 6.0,
) -> Expected:
    """Assign the objects of one image; ties go to the lower index."""
    anchors, objects = range(len(points)), range(len(boxes))
    overlap = [[max(0.0, ciou(boxes[g], predicted[a])) for a in anchors] for g in objects]
    metric = [[scores[a][labels[g]] ** alpha * overlap[g][a] ** beta for a in anchors] for g in objects]
    wanted_by: list[list[int]] = [[] for _ in anchors]
    for g in objects:
        inside = [is_inside(points[a], boxes[g]) for a in anchors]
        best = sorted(anchors, key=lambda a: -metric[g][a] * inside[a])[:topk]  # noqa: B023 (used at once)
        for a in best:
            if inside[a] and valid[g]:
                wanted_by[a].append(g)
    owner: list[int | None] = []
    for a in anchors:
        if len(wanted_by[a]) > 1:
            owner.append(max(objects, key=lambda g: overlap[g][a]))  # noqa: B023 (used at once)
        else:
            owner.append(wanted_by[a][0] if wanted_by[a] else None)
    score = [0.0 for _ in anchors]
    for g in objects:
        mine = [a for a in anchors if owner[a] == g]
        if mine:
            best_metric = max(metric[g][a] for a in mine)
            best_overlap = max(overlap[g][a] for a in mine)
            for a in mine:
                score[a] = metric[g][a] * best_overlap / (best_metric + EPS)
    return Expected(owner, score)
