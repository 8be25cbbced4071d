"""Stand-ins for loaders and models, so that the validation loop is tested without data and without a network."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn


class FakeLoader(list):
    """Batches with the dataset attribute the loop asks for."""

    def __init__(self, batches: list, im_files: list[str] | None = None) -> None:
        super().__init__(batches)
        self.dataset = SimpleNamespace(im_files=im_files or [path for batch in batches for path in batch[2]])


class FakeModel(nn.Module):
    """Answers each batch with the next of the prepared predictions; counts what it was asked."""

    def __init__(self, predictions: list[Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.predictions = predictions
        self.calls: list[dict] = []

    def forward(self, images: Tensor, augment: bool = False) -> tuple[Tensor, list]:
        assert not self.training
        assert images.dtype == torch.float32 and images.max() <= 1
        self.calls.append({"shape": tuple(images.shape), "augment": augment})
        return self.predictions[len(self.calls) - 1], [["maps"]]


def prediction(boxes: list[list[tuple[float, ...]]], nc: int) -> Tensor:
    """Return (B, 4 + nc, A) from per image (x, y, w, h, class, confidence); images may differ in length."""
    longest = max(len(image) for image in boxes) or 1
    output = torch.zeros(len(boxes), 4 + nc, longest)
    for index, image in enumerate(boxes):
        for anchor, (x, y, w, h, number, confidence) in enumerate(image):
            output[index, :4, anchor] = torch.tensor([x, y, w, h])
            output[index, 4 + int(number), anchor] = confidence
    return output


def shape_entry(
    original: tuple[int, int], gain: tuple[float, float] = (1.0, 1.0), pad: tuple[float, float] = (0.0, 0.0)
) -> tuple:
    """Return the loader's record of a letterbox: (height, width), ((gain y, gain x), (pad x, pad y))."""
    return (original, (gain, pad))
