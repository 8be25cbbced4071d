"""Test-time augmentation: the lead predictions of scaled and mirrored copies of a batch, joined."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.heads import lead_prediction

PASSES = ((1.0, False), (0.83, True), (0.67, False))
"""Scale and left-right mirroring of each pass."""

PADDING_VALUE = 0.447
"""Mean intensity of ImageNet pictures."""


def scale_images(images: Tensor, ratio: float, multiple: int) -> Tensor:
    """Resize (B, C, H, W) by ``ratio`` and pad right and below to multiples of ``multiple``."""
    if ratio == 1.0:
        return images
    height, width = images.shape[2:]
    scaled = F.interpolate(images, (int(height * ratio), int(width * ratio)), mode="bilinear", align_corners=False)
    padded_height, padded_width = (math.ceil(side * ratio / multiple) * multiple for side in (height, width))
    padding = (0, padded_width - scaled.shape[3], 0, padded_height - scaled.shape[2])
    return F.pad(scaled, padding, value=PADDING_VALUE)


def restore_boxes(prediction: Tensor, ratio: float, is_mirrored: bool, width: int) -> Tensor:
    """Bring the boxes of a pass back to the pixels of the original image of the given ``width``."""
    boxes, scores = prediction.split((4, prediction.shape[1] - 4), 1)
    boxes = boxes / ratio
    if is_mirrored:
        x, rest = boxes.split((1, 3), 1)
        boxes = torch.cat((width - x, rest), 1)
    return torch.cat((boxes, scores), 1)


def augmented_prediction(model: nn.Module, images: Tensor) -> Tensor:
    """Return the joined predictions (B, 4 + nc, A') of all passes over ``images`` (B, C, H, W).

    The coarsest level of the full-size pass and the finest of the smallest pass are left out: they would add little
    but very large and very small boxes.
    """
    levels = model.head.nl
    multiple = int(model.stride.max())
    forward: Callable[[Tensor], object] = model.forward
    joined = []
    for ratio, is_mirrored in PASSES:
        inputs = scale_images(images.flip(3) if is_mirrored else images, ratio, multiple)
        joined.append(restore_boxes(lead_prediction(forward(inputs)), ratio, is_mirrored, images.shape[3]))
    # Each level has four times the cells of the next coarser one.
    cells = sum(4**level for level in range(levels))
    coarsest = joined[0].shape[2] // cells
    finest = joined[-1].shape[2] // cells * 4 ** (levels - 1)
    joined[0] = joined[0][..., : joined[0].shape[2] - coarsest]
    joined[-1] = joined[-1][..., finest:]
    return torch.cat(joined, 2)
