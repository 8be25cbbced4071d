"""Average precision by object size as COCO defines it, for any data set, without pycocotools.

What differs from the figures in ``metrics``: a detection whose best label is taken may win its second best; at most
100 detections of a class count in an image; precision is the plain mean over 101 recalls; sizes are box areas in
pixels of the original image. Labels outside of a range of sizes, and what is found of them, count neither way there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from utils.evaluate.coco import CocoFigures

SIZE_NAMES = ("all", "small", "medium", "large")
SMALL_AREA, MEDIUM_AREA, LARGEST_AREA = 32.0**2, 96.0**2, 1e10  # square pixels; both ends of a range belong to it
RANGES = np.array(
    [(0, LARGEST_AREA), (0, SMALL_AREA), (SMALL_AREA, MEDIUM_AREA), (MEDIUM_AREA, LARGEST_AREA)]
)  # (A, 2)
THRESHOLDS = np.linspace(0.5, 0.95, 10)  # (T,)
RECALLS = np.linspace(0, 1, 101)
MAX_DETECTIONS = (1, 10, 100)  # of a class in an image
COLUMNS = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR")  # of results.csv, behind "coco/"
IN_RANGE = 2.0  # more appeal for a label in the range of sizes: above any overlap
PART = 1024  # detections that choose at once: what this takes stays small for large sets too
PIXEL_DIGITS = 3  # boxes are compared to a thousandth of a pixel: the noise of scaling would move sizes over limits


@dataclass(frozen=True)
class Instances:
    """Boxes of a whole data set, detections or labels."""

    image: np.ndarray  # (n,) number of the image, rising
    number: np.ndarray  # (n,) class
    boxes: np.ndarray  # (n, 4) x1 y1 x2 y2 in pixels of the original image
    confidence: np.ndarray | None = None  # (n,) of detections

    def rounded(self) -> np.ndarray:
        """Return the boxes in double precision, without the noise of scaling."""
        return self.boxes.astype(np.float64).round(PIXEL_DIGITS)


@dataclass(frozen=True, kw_only=True)
class SizeFigures:
    """COCO's twelve figures, and AP per class and size."""

    total: CocoFigures
    classes: np.ndarray  # (K,) class numbers that occur in the labels
    ap: np.ndarray  # (K, 4) mean AP of each class for SIZE_NAMES; NaN where it has no such label
    labels: np.ndarray  # (K, 4) number of labels of each class and size

    def columns(self) -> dict[str, float]:
        """Return the columns of results.csv; NaN where nothing could be measured."""
        total = self.total
        values = (total.ap, total.ap50, total.ap75, total.ap_small, total.ap_medium, total.ap_large, total.ar100)
        return {f"coco/{name}": float("nan") if v < 0 else v for name, v in zip(COLUMNS, values, strict=True)}


def size_figures(detections: Instances, labels: Instances, pairs: np.ndarray) -> SizeFigures:
    """Return COCO's figures of ``detections`` against ``labels``.

    Args:
        pairs: (P, 2) row of a detection and row of a label of the same image and class; complete for all pairs whose
            IoU reaches 0.5, others do no harm.
    """
    boxes, truth = detections.rounded(), labels.rounded()
    rank = _ranks(detections)
    known = rank < MAX_DETECTIONS[-1]
    outside = _is_outside(_areas(boxes))  # (A, N)
    ignored = _is_outside(_areas(truth))  # (A, M)
    pairs = pairs[known[pairs[:, 0]]]
    candidates, hits = _match(pairs, _pair_iou(boxes, truth, pairs), rank, ignored)
    classes, column_of = np.unique(labels.number, return_inverse=True)
    inside = np.stack([np.bincount(column_of[~part], minlength=len(classes)) for part in ignored], 1)  # (K, A)
    precision = np.full((len(THRESHOLDS), len(classes), len(RANGES)), -1.0)  # (T, K, A)
    recall = np.full((len(MAX_DETECTIONS), *precision.shape), -1.0)  # (D, T, K, A)
    row_of = np.full(len(boxes), -1)
    row_of[candidates] = np.arange(len(candidates))
    order = np.flatnonzero(known)
    order = order[np.lexsort((-detections.confidence[order], detections.number[order]))]
    first, last = (np.searchsorted(detections.number[order], classes, side) for side in ("left", "right"))
    for column in range(len(classes)):
        found = _ClassHits.gather(order[first[column] : last[column]], row_of, hits, outside, rank)
        precision[:, column], recall[:, :, column] = _curve_figures(found, inside[column])
    per_class = np.where(inside > 0, precision.mean(0), np.nan)
    return SizeFigures(total=_totals(precision, recall), classes=classes.astype(int), ap=per_class, labels=inside)


def _areas(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def _is_outside(areas: np.ndarray) -> np.ndarray:
    """Return for each range of sizes which areas (n,) it does not hold, (A, n)."""
    return (areas < RANGES[:, :1]) | (areas > RANGES[:, 1:])


def _ranks(detections: Instances) -> np.ndarray:
    """Return the place of each detection among those of its image and class, by falling confidence, (N,)."""
    image, confidence = detections.image, detections.confidence
    step, falls = np.diff(image), confidence[1:] <= confidence[:-1]
    is_sorted = ((step > 0) | ((step == 0) & falls)).all()  # as suppression leaves them
    order = np.lexsort((detections.number, image) if is_sorted else (-confidence, detections.number, image))
    image, number = detections.image[order], detections.number[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (image[1:] != image[:-1]) | (number[1:] != number[:-1])
    begin = np.flatnonzero(is_first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(begin, np.diff([*begin, len(order)]))
    return rank


def _pair_iou(boxes: np.ndarray, truth: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the IoU of each pair, (P,)."""
    one, other = boxes[pairs[:, 0]], truth[pairs[:, 1]]
    sides = np.minimum(one[:, 2:], other[:, 2:]) - np.maximum(one[:, :2], other[:, :2])
    shared = sides.clip(0).prod(1)
    return shared / np.maximum(_areas(one) + _areas(other) - shared, np.finfo(float).tiny)


@dataclass(frozen=True)
class _Hits:
    """For C detections that overlap some label: whether they won one, and whether that one is out of the range."""

    won: np.ndarray  # (T, A, C) bool
    void: np.ndarray  # (T, A, C) bool


def _match(pairs: np.ndarray, overlap: np.ndarray, rank: np.ndarray, ignored: np.ndarray) -> tuple[np.ndarray, _Hits]:
    """Hand out labels to detections; return the C detections that overlap any, and what they won.

    Detections that want the same label come one after the other, best first; others side by side. Each takes the label
    it overlaps most of those still free, one in the range of sizes before any outside of it.
    """
    pairs, overlap = pairs[overlap >= THRESHOLDS[0]], overlap[overlap >= THRESHOLDS[0]]
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    pairs, overlap = pairs[order], overlap[order]
    candidates, first, count = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    place = np.arange(len(pairs)) - np.repeat(first, count)
    row = np.repeat(np.arange(len(candidates)), count)
    label = np.zeros((len(candidates), count.max(initial=1)), np.int64)  # (C, P)
    label[row, place] = pairs[:, 1]
    value = np.full(label.shape, -1.0)
    value[row, place] = overlap

    shape = (len(THRESHOLDS), len(RANGES))
    hits = _Hits(np.zeros((*shape, len(candidates)), bool), np.zeros((*shape, len(candidates)), bool))
    taken = np.zeros((*shape, ignored.shape[1]), bool)  # (T, A, M)
    turns = _turns(row, pairs[:, 1], rank[candidates])
    for turn in range(turns.max(initial=-1) + 1):
        waiting = np.flatnonzero(turns == turn)
        for start in range(0, len(waiting), PART):
            now = waiting[start : start + PART]
            _one_turn(now, label[now], value[now], ignored, taken, hits)
    return candidates, hits


def _turns(row: np.ndarray, label: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return when each of C candidates has its turn, (C,): after all better ones that want one of its labels.

    Args:
        row, label: (P,) candidate and label of each pair.
        rank: (C,) place of a candidate among those of its image and class, to which its labels belong too.
    """
    order = np.lexsort((rank[row], label))
    row, label = row[order], label[order]
    is_new = np.r_[True, (row[1:] != row[:-1]) | (label[1:] != label[:-1])][: len(row)]  # a pair may be listed twice
    row, label = row[is_new], label[is_new]
    turns = np.zeros(len(rank), np.int64)
    while len(row):
        has_better = np.zeros(len(rank), bool)
        has_better[row[1:][label[1:] == label[:-1]]] = True
        turns += has_better
        row, label = row[has_better[row]], label[has_better[row]]
    return turns


def _one_turn(
    now: np.ndarray, label: np.ndarray, value: np.ndarray, ignored: np.ndarray, taken: np.ndarray, hits: _Hits
) -> None:
    """Let candidates ``now`` (n,) choose of ``label`` (n, P) with overlaps ``value``; no two of them compete."""
    best = np.full((*taken.shape[:2], len(now)), -1.0)  # (T, A, n)
    chosen = np.zeros(best.shape, np.int64)
    for one, overlap in zip(label.T, value.T, strict=True):  # (n,)
        free = (overlap >= THRESHOLDS[:, None, None]) & ~taken[..., one]
        appeal = np.where(free, overlap + IN_RANGE * ~ignored[:, one], -1.0)
        is_better = appeal >= best  # of equal ones the last, as the referee does
        best, chosen = np.where(is_better, appeal, best), np.where(is_better, one, chosen)
    won = best >= 0
    hits.won[..., now] = won
    hits.void[..., now] = won & (best < IN_RANGE)
    threshold, size, _ = np.nonzero(won)
    taken[threshold, size, chosen[won]] = True


@dataclass(frozen=True)
class _ClassHits:
    """The c detections of one class that overlap a label, by falling confidence; those neither right nor wrong count
    neither way. The others can only be false alarms, and are just counted."""

    right: np.ndarray  # (T, A, c) bool
    wrong: np.ndarray  # (T, A, c) bool
    alarms: np.ndarray  # (A, c) false alarms of the others that are more confident
    rank: np.ndarray  # (c,)

    @classmethod
    def gather(
        cls, mine: np.ndarray, row_of: np.ndarray, hits: _Hits, outside: np.ndarray, rank: np.ndarray
    ) -> _ClassHits:
        """Look up the detections ``mine`` (n,) of a class, sorted by falling confidence."""
        rows, is_outside = row_of[mine], outside[:, mine]
        overlapping = np.flatnonzero(rows >= 0)
        won, void = (part[..., rows[overlapping]] for part in (hits.won, hits.void))
        return cls(
            right=won & ~void,
            wrong=~won & ~is_outside[:, overlapping],
            alarms=(~is_outside & (rows < 0)).cumsum(-1)[:, overlapping],
            rank=rank[mine[overlapping]],
        )


def _curve_figures(found: _ClassHits, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return precision (T, A), meant over the recalls, and recall (D, T, A) of one class; -1 without such labels."""
    shape = found.right.shape[:2]
    precision, recall = np.full(shape, -1.0), np.full((len(MAX_DETECTIONS), *shape), -1.0)
    right = found.right.cumsum(-1)
    # Precision is best where a detection is right, so the curve may leave out those that overlap nothing.
    shares = right / np.maximum(right + found.wrong.cumsum(-1) + found.alarms, 1)
    best = np.maximum.accumulate(shares[..., ::-1], -1)[..., ::-1]
    reached_within = np.stack([found.right[..., found.rank < limit].sum(-1) for limit in MAX_DETECTIONS])
    for size in np.flatnonzero(wanted):
        recall[..., size] = reached_within[..., size] / wanted[size]
        for column, curve in enumerate(right[:, size] / wanted[size]):
            reached = np.searchsorted(curve, RECALLS)
            reached = reached[reached < best.shape[-1]]
            precision[column, size] = best[column, size, reached].sum() / len(RECALLS)
    return precision, recall


def _totals(precision: np.ndarray, recall: np.ndarray) -> CocoFigures:
    """Return the twelve figures from precision (T, K, A) and recall (D, T, K, A); -1 marks what was not there."""

    def mean(values: np.ndarray) -> float:
        values = values[values > -1]
        return float(values.mean()) if values.size else -1.0

    at_75 = int(np.argmin(abs(THRESHOLDS - 0.75)))
    return CocoFigures(
        ap=mean(precision[..., 0]),
        ap50=mean(precision[0, :, 0]),
        ap75=mean(precision[at_75, :, 0]),
        ap_small=mean(precision[..., 1]),
        ap_medium=mean(precision[..., 2]),
        ap_large=mean(precision[..., 3]),
        ar1=mean(recall[0, ..., 0]),
        ar10=mean(recall[1, ..., 0]),
        ar100=mean(recall[2, ..., 0]),
        ar_small=mean(recall[2, ..., 1]),
        ar_medium=mean(recall[2, ..., 2]),
        ar_large=mean(recall[2, ..., 3]),
    )
