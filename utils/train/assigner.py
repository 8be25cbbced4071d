"""Task-aligned assignment of objects to anchor points (Feng et al. 2021, TOOD), as upstream computes it.

All objects of a batch form one flat list of rows, each with the index of its image. So there is no padding to the most
crowded image, no size has to be read back from the device, and rows are worked through in pieces of bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from utils.boxes import Columns, iou_of_columns

PAIRS_PER_CHUNK = 2**22  # object-anchor pairs held at once: 16 MiB per float32 table, about ten tables alive

Convert = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Assignment:
    """Which anchor learns which object. B images, A anchors, T object rows, K candidates per row."""

    foreground: Tensor  # (B, A) bool
    object_row: Tensor  # (B, A) int64, row of the object of a foreground anchor; elsewhere any row
    score: Tensor  # (B, A) alignment in [0, 1], zero outside the foreground
    slot_anchor: Tensor  # (T * K,) int64, image * A + anchor: covers every foreground anchor
    slot_used: Tensor  # (T * K,) bool, true for exactly one slot of each foreground anchor


@dataclass(frozen=True)
class Objects:
    """Ground truth as flat rows; the order of the rows of one image breaks ties."""

    image: Tensor  # (T,) int64
    label: Tensor  # (T,) int64
    boxes: Tensor  # (T, 4) x1, y1, x2, y2 in pixels
    valid: Tensor  # (T,) bool; an invalid row chooses no anchor


@dataclass(frozen=True)
class _Candidates:
    """The best anchors of each row, and for each anchor the row of its image that overlaps it most."""

    anchor: Tensor  # (T, K) int64
    positive: Tensor  # (T, K) bool
    best_row: Tensor  # (B, A) int64


class TaskAlignedAssigner(nn.Module):
    """Choose for each object the ``topk`` anchors inside it of highest ``probability^alpha * CIoU^beta``.

    Args:
        topk: anchors per object.
        num_classes: number of classes.
        alpha: exponent of the class probability.
        beta: exponent of the overlap.
        eps: margin in pixels by which an anchor must lie inside, and guard of the normalisation.
    """

    def __init__(
        self, topk: int = 13, num_classes: int = 80, alpha: float = 1.0, beta: float = 6.0, eps: float = 1e-9
    ) -> None:
        super().__init__()
        self.topk, self.num_classes = topk, num_classes
        self.alpha, self.beta, self.eps = alpha, beta, eps

    @torch.no_grad()
    def forward(
        self,
        pd_scores: Tensor,
        pd_bboxes: Tensor,
        anc_points: Tensor,
        gt_labels: Tensor,
        gt_bboxes: Tensor,
        mask_gt: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Assign objects that are padded to G slots per image.

        Args:
            pd_scores: (B, A, C) class probabilities.
            pd_bboxes: (B, A, 4) predicted corners in pixels.
            anc_points: (A, 2) anchor points in pixels.
            gt_labels: (B, G, 1) classes.
            gt_bboxes: (B, G, 4) corners in pixels.
            mask_gt: (B, G, 1) one for an object, zero for padding.

        Returns:
            Labels (B, A), boxes (B, A, 4), scores (B, A, C) and foreground (B, A). The background carries the label
            and box of slot 0, with scores of zero; without any slot the label is C and the box zero.
        """
        batch, slots = gt_bboxes.shape[:2]
        anchors = pd_scores.shape[1]
        if slots == 0:
            labels = torch.full((batch, anchors), self.num_classes, dtype=torch.long, device=pd_scores.device)
            return labels, torch.zeros_like(pd_bboxes), torch.zeros_like(pd_scores), torch.zeros_like(labels).bool()
        first_slot = torch.arange(batch, device=gt_bboxes.device)[:, None] * slots  # (B, 1)
        objects = Objects(
            image=(first_slot // slots).expand(-1, slots).reshape(-1),
            label=gt_labels.reshape(-1).long(),
            boxes=gt_bboxes.reshape(-1, 4),
            valid=mask_gt.reshape(-1) > 0,
        )
        found = self.assign(pd_scores, pd_bboxes, anc_points, objects)
        row = torch.where(found.foreground, found.object_row, first_slot)
        labels = objects.label[row].clamp(0)
        scores = torch.zeros_like(pd_scores).scatter_(2, labels[..., None], found.score[..., None].to(pd_scores.dtype))
        return labels, objects.boxes[row], scores, found.foreground

    @torch.no_grad()
    def assign(
        self, scores: Tensor, boxes: Tensor, points: Tensor, objects: Objects, from_logits: bool = False
    ) -> Assignment:
        """Assign flat object rows to the anchors of their images.

        Args:
            scores: (B, A, C) class probabilities, or with ``from_logits`` their logits. Only the classes of the
                objects are looked at, which makes logits the cheaper choice.
            boxes: (B, A, 4) predicted corners in pixels.
            points: (A, 2) anchor points in pixels.
            objects: T rows of ground truth.
        """
        batch, anchors = scores.shape[:2]
        if len(objects.image) == 0:
            return _nothing(scores)
        columns = boxes.permute(2, 0, 1).contiguous()  # (4, B, A)
        to_probability = torch.sigmoid if from_logits else _unchanged
        found = self._candidates(scores, columns, points, objects, to_probability)

        # Integer sums are the same in any order, so that scattering stays reproducible on a GPU.
        slot_anchor = (objects.image[:, None] * anchors + found.anchor).view(-1)  # (T * K,)
        positive = found.positive.view(-1)
        rows = torch.arange(len(objects.image), device=scores.device)
        slot_row = rows[:, None].expand_as(found.anchor).reshape(-1)
        empty = torch.zeros(batch * anchors, dtype=torch.long, device=scores.device)
        chosen_by = empty.scatter_add(0, slot_anchor, positive.long()).view(batch, anchors)
        only_row = empty.scatter_add(0, slot_anchor, positive * slot_row).view(batch, anchors)
        # An anchor that several objects want goes to the one it overlaps most, be it one of them or not.
        object_row = torch.where(chosen_by > 1, found.best_row, only_row).clamp(0, len(rows) - 1)
        foreground = chosen_by > 0
        return Assignment(
            foreground=foreground,
            object_row=object_row,
            score=self._normalised_score(scores, columns, objects, object_row, foreground, to_probability),
            slot_anchor=slot_anchor,
            slot_used=_one_slot_per_anchor(slot_anchor, positive, batch * anchors),
        )

    def _candidates(
        self, scores: Tensor, columns: Tensor, points: Tensor, objects: Objects, to_probability: Convert
    ) -> _Candidates:
        """Walk over the pairs of rows and anchors in pieces that fit in memory."""
        batch, anchors = scores.shape[:2]
        total = len(objects.image)
        step = max(1, PAIRS_PER_CHUNK // max(1, anchors))
        best_overlap = scores.new_full((batch, anchors), -1.0)
        best_row = torch.zeros((batch, anchors), dtype=torch.long, device=scores.device)
        index, positive = [], []
        for start in range(0, total, step):
            part = slice(start, start + step)
            image, label, valid = objects.image[part], objects.label[part], objects.valid[part]
            truth = objects.boxes[part].unbind(-1)
            truth = tuple(side[:, None] for side in truth)  # 4 x (t, 1)
            overlap = iou_of_columns(truth, columns.index_select(1, image).unbind(0), "ciou").clamp_(0)  # (t, A)
            metric = to_probability(scores[image, :, label]).pow_(self.alpha).mul_(overlap.pow(self.beta))
            inside = _strictly_inside(points, truth, self.eps)
            top = metric.mul_(inside).topk(min(self.topk, anchors), dim=1, sorted=False).indices  # (t, K)
            index.append(top)
            positive.append(inside.gather(1, top) & valid[:, None])
            best_overlap, best_row = _keep_best(best_overlap, best_row, overlap, image, start, total)
        return _Candidates(torch.cat(index), torch.cat(positive), best_row)

    def _normalised_score(
        self,
        scores: Tensor,
        columns: Tensor,
        objects: Objects,
        object_row: Tensor,
        foreground: Tensor,
        to_probability: Convert,
    ) -> Tensor:
        """Scale the metric so that the best anchor of each object gets the object's best overlap, (B, A)."""
        truth = objects.boxes[object_row].unbind(-1)
        label = objects.label[object_row]
        overlap = iou_of_columns(truth, columns.unbind(0), "ciou").clamp_(0)  # (B, A)
        probability = to_probability(scores.gather(2, label[..., None]).squeeze(-1))
        metric = probability.pow(self.alpha) * overlap.pow(self.beta)
        overlap = torch.where(foreground, overlap, 0)
        metric = torch.where(foreground, metric, 0)
        none = scores.new_zeros(len(objects.image))  # (T,)
        best_metric = none.scatter_reduce(0, object_row.view(-1), metric.view(-1), "amax")
        best_overlap = none.scatter_reduce(0, object_row.view(-1), overlap.view(-1), "amax")
        return metric * best_overlap[object_row] / (best_metric[object_row] + self.eps)


def _unchanged(values: Tensor) -> Tensor:
    return values


def _nothing(scores: Tensor) -> Assignment:
    """Leave every anchor to the background."""
    rows = torch.zeros(scores.shape[:2], dtype=torch.long, device=scores.device)
    no_slot = rows.new_zeros(0)
    return Assignment(rows.bool(), rows, scores.new_zeros(scores.shape[:2]), no_slot, no_slot.bool())


def _strictly_inside(points: Tensor, corners: Columns, margin: float) -> Tensor:
    """Tell which points (A, 2) lie inside boxes given as 4 x (t, 1) by more than ``margin``: (t, A)."""
    x, y = points.unbind(-1)
    x1, y1, x2, y2 = corners
    return (x - x1 > margin) & (y - y1 > margin) & (x2 - x > margin) & (y2 - y > margin)


def _keep_best(
    best_overlap: Tensor, best_row: Tensor, overlap: Tensor, image: Tensor, start: int, total: int
) -> tuple[Tensor, Tensor]:
    """Update the highest overlap (B, A) of each anchor, and its first row, by rows ``start`` onwards (t, A)."""
    where = image[:, None].expand_as(overlap)
    higher = best_overlap.scatter_reduce(0, where, overlap, "amax")
    rows = torch.arange(start, start + len(image), device=image.device)[:, None]
    rows = torch.where(overlap == higher[image], rows, total)  # (t, A)
    first = torch.full_like(best_row, total).scatter_reduce_(0, where, rows, "amin")
    # Only a truly higher overlap replaces the row: among equals the earliest object wins.
    return higher, torch.where(higher > best_overlap, first, best_row)


def _one_slot_per_anchor(slot_anchor: Tensor, positive: Tensor, num_anchors: int) -> Tensor:
    """Mark the first positive slot of each anchor that has one."""
    slots = len(slot_anchor)
    number = torch.arange(slots, device=slot_anchor.device)
    number = torch.where(positive, number, slots)
    first = torch.full((num_anchors,), slots, device=slot_anchor.device).scatter_reduce_(0, slot_anchor, number, "amin")
    return positive & (first[slot_anchor] == number)
