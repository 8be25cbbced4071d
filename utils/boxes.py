"""Box formats, clipping, scaling and overlap measures.

Names, argument order and in-place behaviour are those of upstream, for NumPy arrays and tensors alike.
Formats: ``xyxy`` two corners, ``xywh`` centre and size, trailing ``n`` normalised to the image size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["xyxy2xywh", "xywh2xyxy", "xywhn2xyxy", "xyxy2xywhn", "xyn2xy", "clip_boxes", "scale_boxes"]
__all__ += ["segment2box", "segments2boxes", "resample_segments", "bbox_iou", "box_iou", "bbox_ioa", "iou_of_columns"]

Boxes = TypeVar("Boxes", np.ndarray, Tensor)
Columns = tuple[Tensor, Tensor, Tensor, Tensor]
IouKind = Literal["iou", "giou", "diou", "ciou"]

# --------------------------------------------------------------------------------------------------------- formats


def _copy(boxes: Boxes) -> Boxes:
    return boxes.clone() if isinstance(boxes, Tensor) else np.copy(boxes)


def xyxy2xywh(x: Boxes) -> Boxes:
    """Turn corners (..., 4) into centre and size; further columns are copied."""
    y = _copy(x)
    y[..., 0] = (x[..., 0] + x[..., 2]) / 2
    y[..., 1] = (x[..., 1] + x[..., 3]) / 2
    y[..., 2] = x[..., 2] - x[..., 0]
    y[..., 3] = x[..., 3] - x[..., 1]
    return y


def xywh2xyxy(x: Boxes) -> Boxes:
    """Turn centre and size (..., 4) into corners; further columns are copied."""
    return xywhn2xyxy(x, w=1, h=1)


def xywhn2xyxy(x: Boxes, w: float = 640, h: float = 640, padw: float = 0, padh: float = 0) -> Boxes:
    """Turn normalised centre and size into pixel corners of a ``w`` x ``h`` picture that starts at (padw, padh)."""
    y = _copy(x)
    y[..., 0] = w * (x[..., 0] - x[..., 2] / 2) + padw
    y[..., 1] = h * (x[..., 1] - x[..., 3] / 2) + padh
    y[..., 2] = w * (x[..., 0] + x[..., 2] / 2) + padw
    y[..., 3] = h * (x[..., 1] + x[..., 3] / 2) + padh
    return y


def xyxy2xywhn(x: Boxes, w: float = 640, h: float = 640, clip: bool = False, eps: float = 0.0) -> Boxes:
    """Turn pixel corners into normalised centre and size.

    With ``clip`` the corners are first limited to ``[0, w - eps]`` and ``[0, h - eps]``, in ``x`` itself.
    """
    if clip:
        clip_boxes(x, (h - eps, w - eps))
    y = xyxy2xywh(x)
    y[..., [0, 2]] = y[..., [0, 2]] / w
    y[..., [1, 3]] = y[..., [1, 3]] / h
    return y


def xyn2xy(x: Boxes, w: float = 640, h: float = 640, padw: float = 0, padh: float = 0) -> Boxes:
    """Turn normalised points (..., 2) into pixels of a ``w`` x ``h`` picture that starts at (padw, padh)."""
    y = _copy(x)
    y[..., 0] = w * x[..., 0] + padw
    y[..., 1] = h * x[..., 1] + padh
    return y


# -------------------------------------------------------------------------------------------------------- polygons


def segment2box(segment: np.ndarray, width: float = 640, height: float = 640) -> np.ndarray:
    """Return the corners (4,) around those polygon points that lie in the picture; zeros if none does."""
    x, y = segment.T
    inside = (x >= 0) & (y >= 0) & (x <= width) & (y <= height)
    if not inside.any():
        return np.zeros(4)
    x, y = x[inside], y[inside]
    return np.array([x.min(), y.min(), x.max(), y.max()])


def segments2boxes(segments: Sequence[np.ndarray]) -> np.ndarray:
    """Return the ``xywh`` boxes (n, 4) around n polygons, in the polygons' unit."""
    corners = [np.concatenate((points.min(axis=0), points.max(axis=0))) for points in segments]
    return xyxy2xywh(np.array(corners).reshape(-1, 4))


def resample_segments(segments: list[np.ndarray], n: int = 1000) -> list[np.ndarray]:
    """Replace each polygon of the list by ``n`` points spread evenly, by index, along its closed outline."""
    for i, points in enumerate(segments):
        closed = np.concatenate((points, points[:1]))
        wanted = np.linspace(0, len(closed) - 1, n)
        known = np.arange(len(closed))
        segments[i] = np.stack([np.interp(wanted, known, axis) for axis in closed.T], axis=1)
    return segments


# -------------------------------------------------------------------------------------------- picture and its border


def clip_boxes(boxes: Boxes, shape: Sequence[float]) -> Boxes:
    """Limit corners (..., 4+) in place to a picture of ``shape`` (height, width); the same object is returned."""
    height, width = shape[:2]
    for column, limit in enumerate((width, height, width, height)):
        part = boxes[..., column]
        if isinstance(part, Tensor):
            part.clamp_(0, limit)
        else:
            np.clip(part, 0, limit, out=part)
    return boxes


def scale_boxes(
    img1_shape: Sequence[float],
    boxes: Boxes,
    img0_shape: Sequence[float],
    ratio_pad: Sequence[Sequence[float]] | None = None,
) -> Boxes:
    """Move corners in place from a letterboxed picture back to the original one, and clip them there.

    Args:
        img1_shape: (height, width) of the letterboxed picture.
        boxes: (..., 4+) pixel corners in that picture.
        img0_shape: (height, width) of the original.
        ratio_pad: ``((height gain, width gain), (pad x, pad y))`` as stored by the loader. The height gain serves
            both axes. Without it gain and padding follow from the two shapes.
    """
    if ratio_pad is None:
        gain = min(img1_shape[0] / img0_shape[0], img1_shape[1] / img0_shape[1])
        pad_x = (img1_shape[1] - img0_shape[1] * gain) / 2
        pad_y = (img1_shape[0] - img0_shape[0] * gain) / 2
    else:
        gain = ratio_pad[0][0]
        pad_x, pad_y = ratio_pad[1]
    boxes[..., [0, 2]] -= pad_x
    boxes[..., [1, 3]] -= pad_y
    boxes[..., :4] /= gain
    return clip_boxes(boxes, img0_shape)


# --------------------------------------------------------------------------------------------------------- overlaps


def iou_of_columns(
    first: Columns,
    second: Columns,
    kind: IouKind = "iou",
    eps: float = 1e-7,
    sizes: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Return an overlap measure of boxes given as separate corner tensors ``x1, y1, x2, y2`` that broadcast.

    Separate columns keep every intermediate at the size of the result, which is what makes this form the one for
    large tables of pairs. ``sizes`` (w, h of the first, w, h of the second) is taken from the corners if left out;
    then ``eps`` is added to the heights, which keeps the aspect ratio of a point finite.

    GIoU: Rezatofighi et al. 2019. DIoU and CIoU: Zheng et al. 2020; the weight alpha of the aspect term of CIoU
    takes no gradient.
    """
    ax1, ay1, ax2, ay2 = first
    bx1, by1, bx2, by2 = second
    aw, ah, bw, bh = sizes or (ax2 - ax1, ay2 - ay1 + eps, bx2 - bx1, by2 - by1 + eps)
    shared_w = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp(0)
    shared_h = (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp(0)
    inter = shared_w * shared_h
    union = aw * ah + bw * bh - inter + eps
    iou = inter / union
    if kind == "iou":
        return iou
    hull_w = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)
    hull_h = torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    if kind == "giou":
        hull = hull_w * hull_h + eps
        return iou - (hull - union) / hull
    diagonal = hull_w**2 + hull_h**2 + eps
    distance = ((bx1 + bx2 - ax1 - ax2) ** 2 + (by1 + by2 - ay1 - ay2) ** 2) / 4
    if kind == "diou":
        return iou - distance / diagonal
    aspect = (4 / math.pi**2) * (torch.atan(bw / bh) - torch.atan(aw / ah)) ** 2
    with torch.no_grad():
        alpha = aspect / (aspect - iou + (1 + eps))
    return iou - (distance / diagonal + aspect * alpha)


def bbox_iou(
    box1: Tensor,
    box2: Tensor,
    xywh: bool = True,
    GIoU: bool = False,
    DIoU: bool = False,
    CIoU: bool = False,
    eps: float = 1e-7,
) -> Tensor:
    """Return IoU (or GIoU, DIoU, CIoU) of boxes (..., 4) that broadcast; the last axis of the result has length 1."""
    kind: IouKind = "ciou" if CIoU else "diou" if DIoU else "giou" if GIoU else "iou"
    first, second = box1.chunk(4, -1), box2.chunk(4, -1)
    if not xywh:
        return iou_of_columns(first, second, kind, eps)
    (x1, y1, w1, h1), (x2, y2, w2, h2) = first, second
    # A box without any height would make the aspect ratio 0/0.
    sizes = (w1, torch.where(h1 == 0, h1 + eps, h1), w2, torch.where(h2 == 0, h2 + eps, h2))
    corners1 = (x1 - w1 / 2, y1 - h1 / 2, x1 + w1 / 2, y1 + h1 / 2)
    corners2 = (x2 - w2 / 2, y2 - h2 / 2, x2 + w2 / 2, y2 + h2 / 2)
    return iou_of_columns(corners1, corners2, kind, eps, sizes)


def box_iou(box1: Tensor, box2: Tensor, eps: float = 1e-7) -> Tensor:
    """Return the table (n, m) of plain IoU between corners (n, 4) and (m, 4)."""
    x1, y1, x2, y2 = box1[:, None].unbind(-1)
    u1, v1, u2, v2 = box2[None].unbind(-1)
    inter = (torch.minimum(x2, u2) - torch.maximum(x1, u1)).clamp(0) * (
        torch.minimum(y2, v2) - torch.maximum(y1, v1)
    ).clamp(0)
    return inter / ((x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - inter + eps)


def bbox_ioa(box1: np.ndarray, box2: np.ndarray, eps: float = 1e-7) -> np.ndarray:
    """Return intersection over the area of ``box2``: corners (n, 4) and (m, 4) to (n, m); (4,) and (m, 4) to (m,)."""
    x1, y1, x2, y2 = (box1[..., i, None] for i in range(4))
    u1, v1, u2, v2 = box2.T
    width = (np.minimum(x2, u2) - np.maximum(x1, u1)).clip(0)
    height = (np.minimum(y2, v2) - np.maximum(y1, v1)).clip(0)
    return width * height / ((u2 - u1) * (v2 - v1) + eps)
