"""Random predictions and objects for tests of the assignment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from utils.anchors import make_anchors
from utils.train.assigner import Objects

SIZE, STRIDES, CLASSES = 64, (8, 16, 32), 3


@dataclass
class Draw:
    """Random predictions and padded objects of a batch."""

    scores: Tensor  # (B, A, C)
    boxes: Tensor  # (B, A, 4)
    points: Tensor  # (A, 2)
    labels: Tensor  # (B, G, 1)
    truth: Tensor  # (B, G, 4)
    valid: Tensor  # (B, G, 1)

    def padded(self) -> tuple[Tensor, ...]:
        return self.scores, self.boxes, self.points, self.labels, self.truth, self.valid

    def flat(self) -> Objects:
        """The valid objects alone as flat rows."""
        image, slot = (self.valid.squeeze(-1) > 0).nonzero(as_tuple=True)
        valid = torch.ones(len(image), dtype=torch.bool)
        return Objects(image, self.labels[image, slot, 0].long(), self.truth[image, slot], valid)


def draw(
    seed: int, counts: tuple[int, ...] = (6, 3), slots: int | None = None, size: tuple[int, int] = (SIZE, SIZE)
) -> Draw:
    """Predictions and objects crowded around the middle: objects compete, and no choice hangs on equal metrics."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    height, width = size
    points, strides = make_anchors([torch.zeros(1, 1, height // s, width // s) for s in STRIDES], STRIDES)
    points = (points * strides).double()
    batch, slots = len(counts), slots or max(counts)

    def corners(count: int) -> Tensor:
        middle = (0.4 + 0.2 * uniform(batch, count, 2)) * torch.tensor([width, height])
        half = 12 + uniform(batch, count, 2) * 12
        return torch.cat((middle - half, middle + half), -1)

    return Draw(
        scores=uniform(batch, len(points), CLASSES),
        boxes=corners(len(points)),
        points=points,
        labels=(uniform(batch, slots, 1) * CLASSES).floor(),
        truth=corners(slots),
        valid=(torch.arange(slots)[None, :, None] < torch.tensor(counts)[:, None, None]).double(),
    )
