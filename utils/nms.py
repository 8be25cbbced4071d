"""Non-maximum suppression of the predictions of one batch, without a time limit: no picture is ever left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import nms

MAX_CANDIDATES = 30_000  # rows per picture that enter the suppression, best first


def non_max_suppression(
    prediction: Tensor | Sequence,
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    classes: Sequence[int] | None = None,
    agnostic: bool = False,
    multi_label: bool = False,
    labels: Sequence[Tensor] = (),
    max_det: int = 300,
    nm: int = 0,
) -> list[Tensor]:
    """Return for each picture its detections (n, 6 + nm): x1, y1, x2, y2, confidence, class, further values.

    Args:
        prediction: (B, 4 + nc + nm, A): centre and size in pixels, class probabilities, further values. Output of
            a model as it comes (with maps, with several branches) is taken too: the last branch counts.
        conf_thres: a class must be more probable than this.
        iou_thres: of two boxes that overlap more than this, the less confident goes.
        classes: keep only these class indices.
        agnostic: let boxes of different classes suppress each other.
        multi_label: a box may be reported once for every class above the threshold, not only for its best one.
        labels: per picture rows (k, 5) class, x, y, w, h in pixels that join as certain detections.
        max_det: detections kept per picture.
        nm: number of further values behind the classes.

    The result is float32 and in order of falling confidence, whatever the type of the prediction: half precision
    cannot hold pixel coordinates.

    Raises:
        ValueError: a threshold lies outside 0..1, or the prediction has no class channel.
    """
    for name, value in (("conf_thres", conf_thres), ("iou_thres", iou_thres)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}: give a value from 0 to 1")
    prediction = _lead_tensor(prediction)
    num_classes = prediction.shape[1] - 4 - nm
    if num_classes < 1:
        raise ValueError(f"prediction has shape {tuple(prediction.shape)}: expected (batch, 4 + classes + {nm}, boxes)")
    multi_label = multi_label and num_classes > 1
    results = []
    for index, rows in enumerate(prediction.detach().transpose(1, 2)):  # (A, 4 + nc + nm)
        # The cheap test comes first: at a usual threshold it drops nearly all rows.
        rows = rows[rows[:, 4 : 4 + num_classes].amax(1) > conf_thres].float()
        if len(labels):
            rows = torch.cat((rows, _as_predictions(labels[index], rows)))
        candidates = _candidates(rows, num_classes, conf_thres, multi_label)
        if classes is not None:
            wanted = torch.as_tensor(list(classes), dtype=candidates.dtype, device=candidates.device)
            candidates = candidates[torch.isin(candidates[:, 5], wanted)]
        results.append(_suppress(candidates, iou_thres, agnostic, max_det))
    return results


def _lead_tensor(output: Tensor | Sequence) -> Tensor:
    """Find (B, channels, A) in nested output of a model: of the branches decoded side by side the last one leads."""
    while not isinstance(output, Tensor):
        decoded = [item for item in output if isinstance(item, Tensor) and item.ndim == 3]
        output = decoded[-1] if decoded else output[0]
    return output


def _as_predictions(labels: Tensor, like: Tensor) -> Tensor:
    """Write label rows (k, 5) as prediction rows of probability 1."""
    rows = like.new_zeros((len(labels), like.shape[1]))
    rows[:, :4] = labels[:, 1:5]
    rows.scatter_(1, labels[:, :1].long().to(rows.device) + 4, 1.0)
    return rows


def _candidates(rows: Tensor, num_classes: int, conf_thres: float, multi_label: bool) -> Tensor:
    """Turn prediction rows into detection rows x1, y1, x2, y2, confidence, class, further values."""
    boxes, scores, further = rows.split((4, num_classes, rows.shape[1] - 4 - num_classes), 1)
    corners = torch.cat((boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2), 1)
    if multi_label:
        row, label = (scores > conf_thres).nonzero(as_tuple=True)
        found = (corners[row], scores[row, label, None], label[:, None].to(rows.dtype), further[row])
    else:
        confidence, label = scores.max(1, keepdim=True)
        found = (corners, confidence, label.to(rows.dtype), further)
    return torch.cat(found, 1)


def _suppress(candidates: Tensor, iou_thres: float, agnostic: bool, max_det: int) -> Tensor:
    """Sort by confidence, drop what overlaps a better box of the same class, keep ``max_det`` rows."""
    candidates = candidates[candidates[:, :4].isfinite().all(1)]
    order = candidates[:, 4].argsort(descending=True, stable=True)[:MAX_CANDIDATES]
    candidates = candidates[order]
    if not len(candidates):
        return candidates
    # Classes are kept apart by moving each to a place of its own. In float32 that would round the coordinates of
    # high classes to a sixteenth of a pixel and change which boxes survive; MPS has nothing better to offer.
    boxes = candidates[:, :4]
    if not agnostic:
        boxes = boxes.to(torch.float32 if boxes.device.type == "mps" else torch.float64)
        boxes = boxes + candidates[:, 5:6] * (boxes.max() - boxes.min() + 1)
    return candidates[nms(boxes, candidates[:, 4].to(boxes.dtype), iou_thres)[:max_det]]
