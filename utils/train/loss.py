"""Detection loss of one or several heads: class, box and distribution terms on task-aligned targets.

Everything is computed in at least float32, outside autocast, and without reading anything back from the device.
The box terms visit only the anchors that some object may have chosen, ten per object, instead of all of them.
On request the loss of a head is computed by fused kernels, see :mod:`utils.kernels.loss_head`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.anchors import bbox2dist, dist2bbox, make_anchors
from utils.boxes import iou_of_columns, xywh2xyxy
from utils.kernels.loss_head import HeadLoss, head_items
from utils.train.assigner import Assignment, Objects, TaskAlignedAssigner

FOCAL_BALANCE = 0.25  # weight of a positive against 0.75 of a negative once fl_gamma is above zero (Lin et al. 2017)

Maps = Sequence[Tensor]


@dataclass(frozen=True)
class Branch:
    """Flattened output of one head."""

    bins: Tensor  # (B, A, 4, R) logits of the distances left, top, right, bottom, in the type of the maps
    logits: Tensor  # (B, A, C) class logits, float32 or float64


class DetectionLoss:
    """Weighted sum of the loss of every head; the last head leads, the others are auxiliary.

    Args:
        strides: pixels per cell of each level.
        num_classes: number of classes C.
        reg_max: bins R per box side; a side reaches R - 1 cells from its anchor at most.
        gains: weights of the box, class and distribution terms.
        cls_pw: weight of the positive part of the class term.
        fl_gamma: exponent of the focal factor; 0 switches it off.
        label_smoothing: default of the argument of the same name at the call.
        aux_weight: weight of each auxiliary head; that of the leading one is 1.
        topk: anchors per object.
        alpha: exponent of the class probability in the assignment.
        beta: exponent of the overlap in the assignment.
        use_kernels: let fused kernels compute what they can: maps on a CUDA device in at most float32, without a focal
            factor. Everything else goes the plain way, and so does all of it by default.

    Example:
        >>> loss = DetectionLoss(strides=(8, 16, 32), num_classes=3)
        >>> total, items = loss(model(images), targets)
    """

    def __init__(
        self,
        *,
        strides: Sequence[float],
        num_classes: int,
        reg_max: int = 16,
        gains: tuple[float, float, float] = (7.5, 0.5, 1.5),
        cls_pw: float = 1.0,
        fl_gamma: float = 0.0,
        label_smoothing: float = 0.0,
        aux_weight: float = 0.25,
        topk: int = 10,
        alpha: float = 0.5,
        beta: float = 6.0,
        use_kernels: bool = False,
    ) -> None:
        _check_smoothing(label_smoothing)
        self.use_kernels = use_kernels
        self.strides = tuple(float(stride) for stride in strides)
        self.num_classes, self.reg_max = num_classes, reg_max
        self.gains, self.aux_weight = gains, aux_weight
        self.cls_pw, self.fl_gamma, self.label_smoothing = cls_pw, fl_gamma, label_smoothing
        self.assigner = TaskAlignedAssigner(topk, num_classes, alpha, beta)

    def __call__(
        self,
        predictions: Sequence,
        targets: Tensor,
        *,
        label_smoothing: float | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch.

        Args:
            predictions: maps (B, 4R + C, H, W), one per level, of a model with one head; a list of such lists,
                leading head last; or what the model returns in eval mode, a tuple with either of them second.
            targets: (T, 6) rows image index, class, x, y, w, h, normalised to the input size, in any order and on
                any device.
            label_smoothing: share of each foreground score that is spread over both outcomes of every class: the
                assigned class aims at q(1 - s/2), the others at q s/2. The background stays as it is: its many
                anchors would drown everything else. A tensor without axes is used where it lies, unread.

        Returns:
            The scalar to differentiate, which is the sum of the terms times the batch size, and the three terms
            (box, class, distribution) with gains, detached and not multiplied.

        Raises:
            ValueError: number of levels or channels do not fit this loss.
        """
        smoothing = self.label_smoothing if label_smoothing is None else label_smoothing
        _check_smoothing(smoothing)
        heads = self._heads(predictions)
        first = heads[0][0]
        weights = [self.aux_weight] * (len(heads) - 1) + [1.0]
        with torch.autocast(first.device.type, enabled=False):
            dtype = torch.promote_types(first.dtype, torch.float32)
            objects = self._objects(targets, heads[0], dtype)
            items = self._fused_items(heads, weights, objects, smoothing)
            if items is None:
                items = self._plain_items(heads, weights, objects, smoothing)
            return items.sum() * first.shape[0], items.detach()

    def _plain_items(
        self, heads: list[Maps], weights: Sequence[float], objects: Objects, smoothing: float | Tensor
    ) -> Tensor:
        """Return the three terms with gains, summed over the heads."""
        dtype = objects.boxes.dtype
        points, strides = make_anchors(heads[0], self.strides, dtype=dtype)
        rows = []
        for maps, weight in zip(heads, weights, strict=True):
            terms = self._terms(self._flatten(maps, dtype), points, strides, objects, smoothing)
            rows.append(torch.stack([gain * weight * term for gain, term in zip(self.gains, terms, strict=True)]))
        return torch.stack(rows).sum(0)  # (3,)

    def _fused_items(
        self, heads: list[Maps], weights: Sequence[float], objects: Objects, smoothing: float | Tensor
    ) -> Tensor | None:
        """Return the same from the kernels, or None where they are not wanted or cannot compute it."""
        if not self.use_kernels or self.fl_gamma > 0:
            return None
        assigner = self.assigner
        settings = [
            HeadLoss(
                strides=self.strides,
                num_classes=self.num_classes,
                reg_max=self.reg_max,
                gains=tuple(gain * weight for gain in self.gains),
                pos_weight=self.cls_pw,
                topk=assigner.topk,
                alpha=assigner.alpha,
                beta=assigner.beta,
                eps=assigner.eps,
            )
            for weight in weights
        ]
        if not all(head.fits(maps) for head, maps in zip(settings, heads, strict=True)):
            return None
        if not isinstance(smoothing, Tensor):
            smoothing = objects.boxes.new_full((), smoothing)  # filled there, nothing is copied from the host
        items = [head_items(head, maps, objects, smoothing) for head, maps in zip(settings, heads, strict=True)]
        return torch.stack(items).sum(0)

    def _heads(self, predictions: Sequence) -> list[Maps]:
        """Find the maps of every head in train or eval output, and check that they fit."""
        if isinstance(predictions, tuple) and len(predictions) > 1 and not isinstance(predictions[1], Tensor):
            predictions = predictions[1]
        heads = [predictions] if isinstance(predictions[0], Tensor) else list(predictions)
        channels = 4 * self.reg_max + self.num_classes
        for maps in heads:
            shapes = [tuple(level.shape) for level in maps]
            if len(shapes) != len(self.strides) or any(len(s) != 4 or s[1] != channels for s in shapes):
                raise ValueError(
                    f"head output has shapes {shapes}: the loss was built for {len(self.strides)} levels of "
                    f"4*{self.reg_max}+{self.num_classes}={channels} channels; build it from the same model"
                )
        return heads

    def _flatten(self, maps: Maps, dtype: torch.dtype) -> Branch:
        """Join the levels, each row by row."""
        rows = torch.cat([level.flatten(2).transpose(1, 2) for level in maps], 1)  # (B, A, 4R + C)
        bins, logits = rows.split((4 * self.reg_max, self.num_classes), 2)
        return Branch(bins.unflatten(2, (4, self.reg_max)), logits.to(dtype))

    def _objects(self, targets: Tensor, maps: Maps, dtype: torch.dtype) -> Objects:
        """Bring the targets to the device, in pixels of the network input."""
        height, width = (size * self.strides[0] for size in maps[0].shape[-2:])
        targets = targets.to(maps[0].device, dtype, non_blocking=True)
        size = targets.new_full((4,), height)
        size[0::2].fill_(width)  # filled there: a list would have to be copied from the host
        boxes = xywh2xyxy(targets[:, 2:6] * size)
        return Objects(targets[:, 0].long(), targets[:, 1].long(), boxes, boxes.sum(1) > 0)

    def _terms(
        self, branch: Branch, points: Tensor, strides: Tensor, objects: Objects, smoothing: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the box, class and distribution terms of one head, without gains."""
        with torch.no_grad():
            boxes = dist2bbox(_expected(branch.bins.to(points.dtype)), points, xywh=False) * strides
            from_logits = True
            found = self.assigner.assign(branch.logits, boxes, points * strides, objects, from_logits)
            normaliser = found.score.sum().clamp(min=1)
        box, dfl = self._box_terms(branch, points, strides, objects, found)
        cls = self._class_term(branch.logits, objects, found, smoothing)
        return box / normaliser, cls / normaliser, dfl / normaliser

    def _class_term(self, logits: Tensor, objects: Objects, found: Assignment, smoothing: float | Tensor) -> Tensor:
        """Sum the binary cross-entropy over all anchors and classes."""
        with torch.no_grad():
            target = torch.zeros_like(logits)
            if len(objects.label):
                target.scatter_(2, objects.label[found.object_row][..., None], found.score[..., None])
            if isinstance(smoothing, Tensor) or smoothing:
                target.mul_(1 - smoothing).add_(found.score[..., None] * (smoothing / 2))
        pos_weight = None if self.cls_pw == 1 else logits.new_full((1,), self.cls_pw)
        if self.fl_gamma <= 0:
            return functional.binary_cross_entropy_with_logits(logits, target, pos_weight=pos_weight, reduction="sum")
        entropy = functional.binary_cross_entropy_with_logits(logits, target, pos_weight=pos_weight, reduction="none")
        probability = logits.sigmoid()
        missing = 1 - (target * probability + (1 - target) * (1 - probability))
        # A sure background has missing = 0, where a power below one has no finite slope.
        factor = missing.clamp(min=torch.finfo(missing.dtype).tiny).pow(self.fl_gamma)
        balance = target * FOCAL_BALANCE + (1 - target) * (1 - FOCAL_BALANCE)
        return (entropy * balance * factor).sum()

    def _box_terms(
        self, branch: Branch, points: Tensor, strides: Tensor, objects: Objects, found: Assignment
    ) -> tuple[Tensor, Tensor]:
        """Sum 1 - CIoU and the distribution focal loss over the foreground, each weighted by the score.

        The distribution focal loss (Li et al. 2020) is the cross-entropy to the two bins beside the wanted distance,
        each weighted by how near it is, averaged over the four sides.
        """
        anchors = len(points)
        slot = found.slot_anchor  # (S,) into B * A
        weight = found.score.view(-1)[slot] * found.slot_used
        point, stride = points[slot % anchors], strides[slot % anchors]
        truth = objects.boxes[found.object_row.view(-1)[slot]] / stride  # (S, 4) in cells
        bins = branch.bins.flatten(0, 1).index_select(0, slot).to(points.dtype)  # (S, 4, R)

        boxes = dist2bbox(_expected(bins), point, xywh=False)
        overlap = iou_of_columns(boxes.unbind(-1), truth.unbind(-1), "ciou")
        box = ((1 - overlap) * weight).sum()

        distance = bbox2dist(point, truth, self.reg_max - 1)  # (S, 4)
        lower = distance.long()
        upper_share = distance - lower
        log_probability = bins.log_softmax(-1)
        at_lower = log_probability.gather(-1, lower[..., None]).squeeze(-1)
        at_upper = log_probability.gather(-1, lower[..., None] + 1).squeeze(-1)
        entropy = -(at_lower * (1 - upper_share) + at_upper * upper_share)
        return box, (entropy.mean(-1) * weight).sum()


def _check_smoothing(value: float | Tensor) -> None:
    if isinstance(value, Tensor):  # to look at its value would make the host wait
        if value.ndim:
            raise ValueError(f"label_smoothing has shape {tuple(value.shape)}: give a number or a tensor without axes")
    elif not 0 <= value < 1:
        raise ValueError(f"label_smoothing is {value}: give a value from 0 to below 1, such as 0.1")


def _expected(bins: Tensor) -> Tensor:
    """Return the mean bin (..., 4) of distributions (..., 4, R).

    Not a matrix product: with TF32 allowed that would keep ten bits of each probability.
    """
    index = torch.arange(bins.shape[-1], dtype=bins.dtype, device=bins.device)
    return (bins.softmax(-1) * index).sum(-1)


class ComputeLoss(DetectionLoss):
    """The loss of a model, with upstream's name and call: ``ComputeLoss(model)(predictions, targets)``.

    Args:
        model: anything with ``hyp`` (mapping; ``box``, ``cls``, ``dfl``, ``cls_pw``, ``fl_gamma`` and
            ``label_smoothing`` are read, missing keys have upstream's values) and with a head at ``model[-1]`` of its
            attribute ``model`` that tells ``nc``, ``stride`` and ``reg_max``. A parallel wrapper is looked through.
        use_dfl: leave the distribution term in.
        use_kernels: see :class:`DetectionLoss`.

    The environment variables YOLOM, YOLOA and YOLOB replace the assignment's topk, alpha and beta.
    """

    def __init__(self, model: nn.Module, use_dfl: bool = True, *, use_kernels: bool = False) -> None:
        inner = getattr(model, "module", model)
        hyp: Mapping[str, float] = getattr(model, "hyp", None) or getattr(inner, "hyp", None) or {}
        head = inner.model[-1]
        super().__init__(
            strides=[float(stride) for stride in head.stride],
            num_classes=head.nc,
            reg_max=head.reg_max,
            gains=(hyp.get("box", 7.5), hyp.get("cls", 0.5), hyp.get("dfl", 1.5) if use_dfl else 0.0),
            cls_pw=hyp.get("cls_pw", 1.0),
            fl_gamma=hyp.get("fl_gamma", 0.0),
            label_smoothing=hyp.get("label_smoothing", 0.0),
            topk=int(os.getenv("YOLOM", "10")),
            alpha=float(os.getenv("YOLOA", "0.5")),
            beta=float(os.getenv("YOLOB", "6.0")),
            use_kernels=use_kernels,
        )
