"""When several small batches, accumulated, make the step of one large batch.

The loss of a batch of b images is ``b * (sum of the terms) / max(S, 1)`` with S the sum of the assigned scores of that
batch. For a batch cut into K parts of equal size, each with a sum S_k, the gradients g_k therefore relate as

    gradient of the large batch = sum over k of  K * max(S_k, 1) / max(S, 1) * g_k

which is their plain sum exactly if all S_k are equal (and at least 1). Batch norm is left out of the networks here,
because it sees each part by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from models.graph import DetectionModel
from models.heads import head_branches
from tests.reference.fill import fill_state_dict
from tests.reference.tiny import TINY_DUAL
from utils.train.loss import DetectionLoss
from utils.train.optim import smart_optimizer

PARTS, IMAGES, SIDE = 4, 2, 64  # parts of a large batch, images in each, pixels
OBJECTS = 6  # per image


@pytest.fixture(scope="module")
def network() -> DetectionModel:
    """The tiny network without batch norm; its weights find overlaps enough for sums of scores above 1."""
    model = DetectionModel(copy.deepcopy(TINY_DUAL), nc=3)
    fill_state_dict(model.state_dict())
    for module in model.modules():
        if isinstance(getattr(module, "bn", None), nn.BatchNorm2d):
            module.bn = nn.Identity()
    return model.train()


def batch(seed: int, images: int = IMAGES) -> tuple[Tensor, Tensor]:
    """Return random pictures (B, 3, H, W) and rows (T, 6) of large boxes, which many anchors lie in."""
    generator = torch.Generator().manual_seed(seed)
    count = images * OBJECTS
    index = torch.arange(images).repeat_interleave(OBJECTS)[:, None]
    classes = torch.randint(3, (count, 1), generator=generator)
    centres = 0.3 + 0.4 * torch.rand(count, 2, generator=generator)
    sizes = 0.2 + 0.4 * torch.rand(count, 2, generator=generator)
    return torch.rand(images, 3, SIDE, SIDE, generator=generator), torch.cat((index, classes, centres, sizes), 1)


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Make one batch of several; the images of part k come after those of the parts before."""
    rows = []
    for number, (_, targets) in enumerate(parts):
        shifted = targets.clone()
        shifted[:, 0] += number * IMAGES
        rows.append(shifted)
    return torch.cat([images for images, _ in parts]), torch.cat(rows)


class RecordingLoss(DetectionLoss):
    """The real loss that also notes the normaliser max(S, 1) of every head."""

    def __init__(self) -> None:
        super().__init__(strides=(8, 16, 32), num_classes=3)
        self.normalisers: list[float] = []
        assign = self.assigner.assign

        def noting(*args: object) -> object:
            found = assign(*args)
            self.normalisers.append(max(float(found.score.sum()), 1.0))
            return found

        self.assigner.assign = noting


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def assert_close(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-4) -> None:
    scale = max(float(tensor.abs().max()) for tensor in expected)
    assert scale > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-5 * scale)


def parts_of(seeds: Iterator[int] | range) -> list[tuple[Tensor, Tensor]]:
    return [batch(seed) for seed in seeds]


def test_parts_of_one_make_up_add_up_to_the_large_batch(network: DetectionModel) -> None:
    """Each part holds the same pictures in another order: equal sums of scores in both heads."""
    images, targets = batch(0)
    turned = targets.clone()
    turned[:, 0] = IMAGES - 1 - turned[:, 0]
    parts = [(images, targets), (images.flip(0), turned)] * (PARTS // 2)
    loss = RecordingLoss()
    totals = [torch.zeros_like(p) for p in network.parameters() if p.requires_grad]
    for some, rows in parts:
        for total, gradient in zip(totals, gradients(network, loss(network(some), rows)[0]), strict=True):
            total += gradient
    assert min(loss.normalisers) > 1, "the floor of the normaliser would spoil the comparison"
    everything, rows = joined(parts)
    assert_close(totals, gradients(network, loss(network(everything), rows)[0]))


def weighted_sum(network: DetectionModel, loss: RecordingLoss, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Add the gradients of ``parts`` by the rule above; the normaliser of the large batch was noted first."""
    (whole,), totals = loss.normalisers, None
    for images, rows in parts:
        found = gradients(network, loss(head_branches(network(images))[-1], rows)[0])
        weight = PARTS * loss.normalisers[-1] / whole
        totals = totals or [torch.zeros_like(gradient) for gradient in found]
        for total, gradient in zip(totals, found, strict=True):
            total += weight * gradient
    return totals


def test_different_parts_add_up_when_weighted_by_their_scores(network: DetectionModel) -> None:
    parts = parts_of(range(1, 1 + PARTS))
    parts[0] = (parts[0][0], parts[0][1][:OBJECTS])  # the second image of one part is background
    loss = RecordingLoss()
    images, rows = joined(parts)
    expected = gradients(network, loss(head_branches(network(images))[-1], rows)[0])
    assert_close(weighted_sum(network, loss, parts), expected)
    small = loss.normalisers[1:]
    assert max(small) > 1.2 * min(small), "the parts should differ for the test to mean something"


def test_unweighted_parts_point_almost_the_same_way(network: DetectionModel) -> None:
    """What training does: the direction is right to within a few degrees, the length to within a tenth."""
    parts = parts_of(range(11, 11 + PARTS))
    loss = RecordingLoss()
    images, rows = joined(parts)
    large = torch.cat([g.flatten() for g in gradients(network, loss(network(images), rows)[0])])
    small = torch.zeros_like(large)
    for some, its_rows in parts:
        small += torch.cat([g.flatten() for g in gradients(network, loss(network(some), its_rows)[0])])
    assert float(torch.cosine_similarity(large, small, dim=0)) > 0.99
    assert 0.9 < float(small.norm() / large.norm()) < 1.1


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_weights_after_the_step_agree(network: DetectionModel, name: str) -> None:
    """One optimizer step from accumulated ``backward`` calls, as the training loop makes them."""
    images, targets = batch(3)
    parts = [(images, targets)] * PARTS
    loss = DetectionLoss(strides=(8, 16, 32), num_classes=3)
    accumulated, at_once = copy.deepcopy(network), copy.deepcopy(network)
    for some, rows in parts:
        loss(accumulated(some), rows)[0].backward()
    everything, rows = joined(parts)
    loss(at_once(everything), rows)[0].backward()
    for model in (accumulated, at_once):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        smart_optimizer(model, name, lr=1e-3).step()
    for before, one, other in zip(network.parameters(), accumulated.parameters(), at_once.parameters(), strict=True):
        moved = float((other - before).detach().abs().max())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=max(0.02 * moved, 1e-9))
