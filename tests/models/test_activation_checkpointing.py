"""Checkpointed training passes give the gradients and the batch statistics of plain ones, and keep less."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from models.activation_checkpointing import SLACK, UntouchedStatistics, make_plan, measure_rows
from models.graph import DetectionModel
from models.heads import head_branches
from tests.models.reference import random_images
from tests.reference.fill import fill_state_dict
from tests.reference.tiny import TINY_DUAL

PARTS = (1.5, 2, 3, 4, 6, 8)


def tiny() -> DetectionModel:
    model = DetectionModel(copy.deepcopy(TINY_DUAL), nc=3)
    fill_state_dict(model.state_dict())
    return model.train()


def named(cfg: str) -> DetectionModel:
    torch.manual_seed(0)
    return DetectionModel(cfg, nc=3).train()


def images_for(model: DetectionModel, side: int = 64) -> Tensor:
    return random_images(7, (2, model.yaml["ch"], side, side))


def backward(model: DetectionModel, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """One training pass whose loss weighs all outputs differently; returns the loss."""
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(images)
    maps = [level.float() for branch in head_branches(output) for level in branch]
    loss = sum((index + 1) * (level.square().mean() + level.mean()) for index, level in enumerate(maps))
    loss.backward()
    return loss.detach()


def assert_same_step(plain: DetectionModel, checkpointed: DetectionModel, rtol: float = 1e-6) -> None:
    for (name, expected), found in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None), name
        if expected.grad is not None:
            scale = float(expected.grad.abs().max())
            torch.testing.assert_close(found.grad, expected.grad, rtol=rtol, atol=rtol * scale + 1e-12, msg=name)
    for (name, expected), found in zip(plain.named_buffers(), checkpointed.buffers(), strict=True):
        assert torch.equal(expected, found), name


@pytest.mark.parametrize("parts", PARTS)
def test_gradients_and_statistics_of_a_network_with_every_block(parts: int) -> None:
    plain, checkpointed = tiny(), tiny()
    checkpointed.grad_checkpoint = parts
    images = images_for(plain)
    for _ in range(2):
        assert torch.equal(backward(plain, images), backward(checkpointed, images))
    assert any(segment.is_checkpointed for segment in checkpointed.checkpoint_plan().segments)
    assert_same_step(plain, checkpointed)
    assert all(
        int(norm.num_batches_tracked) == 2 for norm in checkpointed.modules() if isinstance(norm, nn.BatchNorm2d)
    )


@pytest.mark.slow
@pytest.mark.parametrize("cfg", ["gelan-t.yaml", "yolov9-t.yaml"])
@pytest.mark.parametrize("parts", [2, 6])
def test_gradients_and_statistics_of_shipped_networks(cfg: str, parts: int) -> None:
    plain, checkpointed = named(cfg), named(cfg)
    checkpointed.grad_checkpoint = parts
    images = images_for(plain)
    assert torch.equal(backward(plain, images), backward(checkpointed, images))
    assert_same_step(plain, checkpointed)


def test_autocast_holds_in_the_second_computation() -> None:
    plain, checkpointed = tiny(), tiny()
    checkpointed.grad_checkpoint = 3
    images = images_for(plain)
    assert torch.equal(backward(plain, images, torch.bfloat16), backward(checkpointed, images, torch.bfloat16))
    assert_same_step(plain, checkpointed)


@pytest.mark.parametrize("frozen", [[0, 1, 2, 3, 4, 5], [2, 7]])
def test_frozen_rows(frozen: list[int]) -> None:
    models = tiny(), tiny()
    for model in models:
        for number in frozen:
            model.model[number].requires_grad_(False)
            for module in model.model[number].modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
    plain, checkpointed = models
    checkpointed.grad_checkpoint = 3
    images = images_for(plain)
    assert torch.equal(backward(plain, images), backward(checkpointed, images))
    assert_same_step(plain, checkpointed)


def test_leading_frozen_rows_keep_nothing_and_are_not_computed_twice() -> None:
    model = tiny()
    model.model[:6].requires_grad_(False)
    assert all(cost.inner == 0 for cost in measure_rows(model)[:5])
    model.grad_checkpoint = 4
    twice = [segment.start for segment in model.checkpoint_plan().segments if segment.is_checkpointed]
    assert twice and min(twice) >= 5


def kept_bytes(model: DetectionModel, images: Tensor) -> int:
    """Bytes of the feature maps that the graph of one training pass keeps outside of checkpoints."""
    storages: dict[int, torch.UntypedStorage] = {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), images)}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    return sum(storage.nbytes() for storage in storages.values())


def test_less_is_kept() -> None:
    model = tiny()
    images = images_for(model)
    plain = kept_bytes(model, images)
    model.grad_checkpoint = 2
    assert kept_bytes(model, images) < 0.65 * plain


@pytest.mark.slow
@pytest.mark.parametrize("cfg", ["gelan-t.yaml", "yolov9-t.yaml", "yolov9-s.yaml"])
def test_plans_keep_their_promise(cfg: str) -> None:
    costs = measure_rows(named(cfg))
    plans = [make_plan(costs, parts) for parts in (2, 3, 4)]
    for plan in plans[:2]:
        assert plan.memory <= SLACK / plan.parts
    assert all(more.recomputation > less.recomputation for less, more in zip(plans, plans[1:], strict=False))
    assert all(more.memory < less.memory for less, more in zip(plans, plans[1:], strict=False))
    assert plans[0].recomputation < 0.55
    for plan in plans:
        covered = [number for segment in plan.segments for number in range(segment.start, segment.stop)]
        assert covered == list(range(len(costs)))


def test_off_outside_of_training() -> None:
    model = tiny()
    images = images_for(model)
    model.grad_checkpoint = 2
    with torch.no_grad():
        model(images)
        model.eval()(images)
    model(images)
    assert model._checkpoint_plan is None


def test_measuring_changes_nothing() -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    measure_rows(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_copies_pickles_and_keys() -> None:
    model, untouched = tiny(), tiny()
    model.grad_checkpoint = 2
    images = images_for(model)
    backward(model, images)
    assert list(model.state_dict()) == list(untouched.state_dict())
    copied = copy.deepcopy(model)
    reread = pickle.loads(pickle.dumps(model))
    assert copied.grad_checkpoint == reread.grad_checkpoint == 2
    for other in (copied, reread):
        other.zero_grad()
        assert torch.equal(backward(other, images), backward(model, images))


def test_gradients_can_be_taken_twice() -> None:
    model = tiny()
    model.grad_checkpoint = 3
    weight = model.model[1].conv.weight
    maps = [level for branch in head_branches(model(images_for(model))) for level in branch]
    loss = sum(level.square().mean() for level in maps)
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_statistics_return_after_an_error() -> None:
    norm = nn.BatchNorm2d(4)
    mean = norm.running_mean
    with pytest.raises(RuntimeError, match="interrupted"), UntouchedStatistics([norm]):
        norm(torch.full((2, 4, 3, 3), torch.inf))
        raise RuntimeError("interrupted")
    assert norm.running_mean is mean and not mean.any()
    assert int(norm.num_batches_tracked) == 0


@pytest.mark.parametrize("parts", [1, -2, 0.5, math.inf, math.nan])
def test_senseless_numbers_are_refused(parts: float) -> None:
    model = tiny()
    model.grad_checkpoint = parts
    with pytest.raises(ValueError, match=f"grad_checkpoint is {parts}.*above 1"):
        model(images_for(model))


@pytest.mark.gpu
def test_mixed_precision_on_the_device_needs_less_memory() -> None:
    images = random_images(7, (8, 3, 256, 256)).cuda().contiguous(memory_format=torch.channels_last)
    gradients, peaks, statistics = [], [], []
    for parts in (0, 2):
        model = named("yolov9-t.yaml").cuda().to(memory_format=torch.channels_last)
        model.grad_checkpoint = parts
        if parts:
            model.checkpoint_plan()
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(images)
        sum(level.float().square().mean() for branch in head_branches(output) for level in branch).backward()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        statistics.append(torch.cat([buffer.flatten().float() for buffer in model.buffers()]))
    assert peaks[1] < 0.7 * peaks[0]
    assert float(torch.cosine_similarity(gradients[0], gradients[1], dim=0)) > 0.9999
    torch.testing.assert_close(statistics[0], statistics[1], rtol=1e-3, atol=1e-4)
