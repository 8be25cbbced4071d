"""Which detection belongs to which label: all images of a batch at once, on the device that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

PAD_LABEL, PAD_DETECTION = -1.0, -2.0  # classes of filler rows; they differ, so fillers never match each other
MAX_PAIRS = 20_000_000  # IoU values held at once while a batch is matched (about 0.5 GB with the intermediates)
PAIR_OVERLAP = 0.499  # pairs below cannot match at 0.5, also where the IoU is computed anew in double precision


class BatchMatch(NamedTuple):
    """What matching finds out. Rows are counted over the whole batch, R detections and M labels."""

    correct: Tensor  # (R, T) bool, hit at each threshold
    pairs: Tensor  # (P, 2) detection and label of one class that overlap by PAIR_OVERLAP, or by the lowest threshold
    nearest: Tensor  # (R,) largest IoU with any label of the image, whatever its class
    nearest_label: Tensor  # (R,) that label; meaningless where ``nearest`` is 0

    def cpu(self) -> BatchMatch:
        """Return the same in host memory; three transfers."""
        values = torch.cat((self.correct.float(), self.nearest[:, None]), 1).cpu()
        return BatchMatch(values[:, :-1] > 0, self.pairs.cpu(), values[:, -1], self.nearest_label.cpu())


def iou_thresholds(device: torch.device | str = "cpu") -> Tensor:
    """Return the ten thresholds 0.50, 0.55 … 0.95, shape (10,)."""
    return torch.linspace(0.5, 0.95, 10, device=device)


def process_batch(detections: Tensor, labels: Tensor, iouv: Tensor) -> Tensor:
    """Return which detections of one image are correct at which IoU threshold, (N, T) bool.

    Args:
        detections: (N, 6) x1 y1 x2 y2 confidence class, by falling confidence.
        labels: (G, 5) class x1 y1 x2 y2, in the same pixels.
        iouv: (T,) IoU thresholds; a pair counts from the threshold on.
    """
    detections, labels = detections.to(iouv.device), labels.to(iouv.device)
    return match_batch(detections, [len(detections)], labels, [len(labels)], iouv).correct


def match_batch(
    detections: Tensor, found: Sequence[int], labels: Tensor, wanted: Sequence[int], thresholds: Tensor
) -> BatchMatch:
    """Match the detections of a batch with its labels.

    Each detection bids for the one label of its class that it overlaps most; the label goes to the most confident
    bidder, and the others get no second chance.

    Args:
        detections: (R, 6) x1 y1 x2 y2 confidence class, image by image, by falling confidence within each.
        found: detections of each image.
        labels: (M, 5) class x1 y1 x2 y2, image by image.
        wanted: labels of each image.
        thresholds: (T,) IoU; a pair counts from the threshold on.
    """
    starts, label_starts = [0, *accumulate(found)], [0, *accumulate(wanted)]
    parts = []
    for first, last in _portions(found, wanted, 0, len(found)):
        rows, truth = slice(starts[first], starts[last]), slice(label_starts[first], label_starts[last])
        part = _match_portion(
            _Block.lay_out(detections[rows], found[first:last], PAD_DETECTION, class_column=5),
            _Block.lay_out(labels[truth], wanted[first:last], PAD_LABEL, class_column=0),
            thresholds,
        )
        offset = torch.tensor([rows.start, truth.start], device=part.pairs.device)
        parts.append(part._replace(pairs=part.pairs + offset, nearest_label=part.nearest_label + truth.start))
    if not parts:
        return _nothing(0, thresholds)
    return parts[0] if len(parts) == 1 else BatchMatch(*map(torch.cat, zip(*parts, strict=True)))


def _portions(found: Sequence[int], wanted: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of images whose tables of overlaps fit into memory, halving as long as they do not."""
    if first == last:
        return
    size = (last - first) * max(found[first:last]) * max(wanted[first:last])
    if last - first == 1 or size <= MAX_PAIRS:
        yield first, last
        return
    middle = (first + last) // 2
    yield from _portions(found, wanted, first, middle)
    yield from _portions(found, wanted, middle, last)


@dataclass(frozen=True)
class _Block:
    """Rows of some images as one block, images with fewer rows filled up."""

    rows: Tensor  # (B, longest, W)
    image: Tensor  # (R,) of each row
    position: Tensor  # (R,) within its image
    start: Tensor  # (B,) number of each image's first row

    @classmethod
    def lay_out(cls, rows: Tensor, counts: Sequence[int], filler_class: float, *, class_column: int) -> _Block:
        """Lay out ``rows`` (R, W), grouped by image; fillers are empty boxes of ``filler_class``."""
        number = torch.tensor(counts)
        image = torch.repeat_interleave(torch.arange(len(counts)), number)
        start = number.cumsum(0) - number
        position = torch.arange(len(rows)) - start[image]
        image, position, start = (part.to(rows.device) for part in (image, position, start))
        block = rows.new_zeros(len(counts), max(counts), rows.shape[1])
        block[..., class_column] = filler_class
        block[image, position] = rows
        return cls(block, image, position, start)


def _match_portion(detections: _Block, labels: _Block, thresholds: Tensor) -> BatchMatch:
    """Match images side by side; row numbers of the result count from the portion's first rows."""
    if not detections.rows.shape[1] or not labels.rows.shape[1] or not len(thresholds):
        return _nothing(len(detections.image), thresholds)
    own = (detections.image, detections.position)
    overlap = _pairwise_iou(labels.rows[..., 1:5], detections.rows[..., :4])  # (B, G, N)
    nearest, nearest_label = overlap.max(1)  # (B, N)
    same_class = labels.rows[..., :1] == detections.rows[:, None, :, 5]
    lowest = thresholds.amin().clamp(max=PAIR_OVERLAP)
    image, label, position = (same_class & (overlap >= lowest)).nonzero(as_tuple=True)
    pairs = torch.stack((detections.start[image] + position, labels.start[image] + label), 1)
    correct = _award(pairs, overlap[image, label, position], len(detections.image), len(labels.image), thresholds)
    return BatchMatch(correct, pairs, nearest[own], labels.start[detections.image] + nearest_label[own])


def _award(pairs: Tensor, overlap: Tensor, found: int, wanted: int, thresholds: Tensor) -> Tensor:
    """Return which of ``found`` detections win the label they bid for, (R, T) bool.

    Args:
        pairs: (P, 2) detection, of falling confidence within an image, and label of its class.
        overlap: (P,) IoU of each pair; pairs that reach no threshold may be missing.
        wanted: number of labels.
        thresholds: (T,)
    """
    detection, label = pairs.unbind(1)
    best = overlap.new_zeros(found).scatter_reduce(0, detection, overlap, "amax")
    # of labels that fit equally well the last one is taken, as upstream's reversed sort does
    fitting = torch.where(overlap == best[detection], label, -1)
    choice = label.new_full((found,), -1).scatter_reduce(0, detection, fitting, "amax")
    bid = (label == choice[detection]).nonzero()[:, 0]  # one for each detection that overlaps a label
    detection, label = detection[bid], label[bid]
    reaches = overlap[bid, None] >= thresholds  # (bids, T)
    rank = torch.where(reaches, detection[:, None], found)
    target = label[:, None].expand_as(rank)
    winner = rank.new_full((wanted, len(thresholds)), found).scatter_reduce(0, target, rank, "amin")
    correct = reaches.new_zeros(found, len(thresholds))
    correct[detection] = reaches & (winner[label] == rank)
    return correct


def _nothing(count: int, thresholds: Tensor) -> BatchMatch:
    """Return the outcome for ``count`` detections where there is no label, or none of either."""
    device = thresholds.device
    number = torch.zeros(count, dtype=torch.int64, device=device)
    correct = torch.zeros(count, len(thresholds), dtype=torch.bool, device=device)
    return BatchMatch(correct, number.new_zeros(0, 2), number.float(), number)


def _pairwise_iou(first: Tensor, second: Tensor, eps: float = 1e-7) -> Tensor:
    """Return the IoU of xyxy boxes (B, G, 4) with (B, N, 4) as (B, G, N)."""
    ax1, ay1, ax2, ay2 = first.movedim(-1, 0)[..., None]  # (B, G, 1) each
    bx1, by1, bx2, by2 = second.movedim(-1, 0).contiguous()[:, :, None]  # (B, 1, N) each, numbers side by side
    # in place, as each of these tables is large: fresh memory takes longer than the arithmetic
    shared = torch.minimum(ax2, bx2).sub_(torch.maximum(ax1, bx1)).clamp_(min=0)
    shared *= torch.minimum(ay2, by2).sub_(torch.maximum(ay1, by1)).clamp_(min=0)
    joint = ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1)).sub_(shared).add_(eps)
    return shared.div_(joint)
