"""Matching and average precision written out in plain Python, straight from their definitions. Slow, for tests only."""

from __future__ import annotations


def overlap(first: list[float], second: list[float]) -> float:
    """Return the IoU of two boxes x1 y1 x2 y2."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return width * height / (sum(areas) - width * height + 1e-7)


def match_by_definition(detections: list, labels: list, thresholds: list[float]) -> list[list[bool]]:
    """Return per detection (x1 y1 x2 y2 conf class) and threshold whether it is the hit of a label (class xyxy)."""
    correct = [[False] * len(thresholds) for _ in detections]
    for column, threshold in enumerate(thresholds):
        chosen = {}  # detection -> the label it fits best
        for row, (*box, _, number) in enumerate(detections):
            fits = [
                (overlap(box, label[1:]), index)
                for index, label in enumerate(labels)
                if label[0] == number and overlap(box, label[1:]) >= threshold
            ]
            if fits:
                chosen[row] = max(fits)[1]
        taken = set()
        for row in sorted(chosen):  # detections come by falling confidence
            if chosen[row] not in taken:
                taken.add(chosen[row])
                correct[row][column] = True
    return correct


def area_by_definition(recall: list[float], precision: list[float]) -> float:
    """Return the trapezoid area over 101 recalls under the envelope of a curve closed with (0, 1) and (1, 0)."""
    xs, ys = [0.0, *recall, 1.0], [1.0, *precision, 0.0]
    best = [max(ys[index:]) for index in range(len(ys))]

    def height(at: float) -> float:
        last = max(index for index, x in enumerate(xs) if x <= at)
        if last == len(xs) - 1:
            return best[last]
        share = (at - xs[last]) / (xs[last + 1] - xs[last])
        return best[last] + share * (best[last + 1] - best[last])

    samples = [step / 100 for step in range(101)]
    heights = [height(at) for at in samples]
    return sum((heights[step] + heights[step + 1]) / 2 * 0.01 for step in range(100))
