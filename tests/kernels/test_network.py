"""Whole networks train the same with fused kernels: with frozen rows, recomputed activations, mixed precision."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from models.blocks import use_fused_kernels
from models.graph import DetectionModel
from models.heads import head_branches
from tests.models.reference import random_images
from tests.reference.fill import fill_state_dict
from tests.reference.tiny import TINY_DUAL
from utils.kernels import norm, norm_parts, pool

FLOAT32_TOLERANCE = 2e-4
"""Largest difference of a gradient, as a share of the largest value of its tensor: rounding, through all layers."""
MIXED_TOLERANCES = {torch.float16: 0.03, torch.bfloat16: 0.2}
"""How far all gradients together may be off from float32, as a share of their norm; plain torch is no nearer."""


class Launches:
    """Counts fused operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.norms = self.averages = 0
        apply_norm, apply_average = norm._NormAct.apply, pool._Average.apply
        apply_parts, apply_joint = norm_parts._NormActParts.apply, norm_parts._NormAddActJoint.apply
        apply_beside = norm_parts._NormActBeside.apply

        def count_norm(*arguments: object) -> Tensor:
            self.norms += 1
            return apply_norm(*arguments)

        def count_parts(norms: tuple[nn.Module, ...], *arguments: object) -> tuple[Tensor, ...]:
            self.norms += len(norms)
            return apply_parts(norms, *arguments)

        def count_beside(norms: tuple[nn.Module, ...], *arguments: object) -> Tensor:
            self.norms += len(norms)
            return apply_beside(norms, *arguments)

        def count_joint(*arguments: object) -> Tensor:
            self.norms += 1
            return apply_joint(*arguments)

        def count_average(x: Tensor) -> Tensor:
            self.averages += 1
            return apply_average(x)

        monkeypatch.setattr(norm._NormAct, "apply", count_norm)
        monkeypatch.setattr(norm_parts._NormActParts, "apply", count_parts)
        monkeypatch.setattr(norm_parts._NormActBeside, "apply", count_beside)
        monkeypatch.setattr(norm_parts._NormAddActJoint, "apply", count_joint)
        monkeypatch.setattr(pool._Average, "apply", count_average)


def twins(cfg: object, device: torch.device) -> tuple[DetectionModel, DetectionModel]:
    """A plain and a fused network with the same weights, in training mode."""
    plain = DetectionModel(copy.deepcopy(cfg), nc=3)
    fill_state_dict(plain.state_dict())
    plain = plain.to(device, memory_format=torch.channels_last).train()
    fused = copy.deepcopy(plain)
    use_fused_kernels(fused)
    return plain, fused


def pictures(device: torch.device, batch: int = 2, side: int = 64, seed: int = 7) -> Tensor:
    return random_images(seed, (batch, 3, side, side)).to(device).contiguous(memory_format=torch.channels_last)


def step(model: DetectionModel, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """One forward and backward pass whose loss weighs all outputs differently; returns the loss."""
    with torch.autocast(images.device.type, dtype=dtype) if dtype else nullcontext():
        output = model(images)
    maps = [level for branch in head_branches(output) for level in branch]
    maps = [level if level.dtype == torch.float64 else level.float() for level in maps]
    loss = sum((index + 1) * (level.square().mean() + level.mean()) for index, level in enumerate(maps))
    loss.backward()
    return loss.detach()


def assert_same(plain: DetectionModel, fused: DetectionModel, tolerance: float) -> None:
    for (name, expected), found in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None), name
        if expected.grad is not None:
            difference = float((found.grad - expected.grad).abs().max())
            assert difference <= tolerance * float(expected.grad.abs().max()) + 1e-7, name
    for (name, expected), found in zip(plain.named_buffers(), fused.named_buffers(), strict=True):
        torch.testing.assert_close(found[1], expected, rtol=tolerance, atol=tolerance, msg=name)


def fusible(model: nn.Module) -> int:
    """Fused norms per pass: one per Conv, but one for both branches of a RepConvN."""
    names = [type(module).__name__ for module in model.modules()]
    return names.count("Conv") + names.count("DWConv") - names.count("RepConvN")


@pytest.mark.slow
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("parts", [0, 2])
def test_a_network_with_every_block(parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = twins(TINY_DUAL, device)
    launches = Launches(monkeypatch)
    fused.grad_checkpoint = parts
    if parts:
        fused.checkpoint_plan()
    images = pictures(device)
    torch.testing.assert_close(step(fused, images), step(plain, images), rtol=1e-4, atol=1e-4)
    assert launches.norms == fusible(fused) or (parts and launches.norms > fusible(fused))
    assert launches.averages >= 5
    assert_same(plain, fused, FLOAT32_TOLERANCE)
    batches = [int(m.num_batches_tracked) for m in fused.modules() if isinstance(m, nn.BatchNorm2d)]
    assert set(batches) == {1}


@pytest.mark.slow
@pytest.mark.usefixtures("exact_float32")
def test_frozen_rows(device: torch.device) -> None:
    plain, fused = twins(TINY_DUAL, device)
    for model in (plain, fused):
        model.model[:6].requires_grad_(False)
        for module in model.model[7].modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.requires_grad_(False)
    images = pictures(device)
    step(plain, images)
    step(fused, images)
    assert_same(plain, fused, FLOAT32_TOLERANCE)


def test_eval_mode_is_untouched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = (model.eval() for model in twins(TINY_DUAL, device))
    launches = Launches(monkeypatch)
    images = pictures(device)
    with torch.no_grad():
        assert torch.equal(plain(images)[0][-1], fused(images)[0][-1])
    assert not launches.norms and not launches.averages


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("cfg", ["yolov9-s.yaml", "gelan-c.yaml"])
def test_shipped_networks_are_as_near_to_float64_as_without_kernels(cfg: str) -> None:
    """Deep networks in training mode amplify rounding, by chance more or less: plain float32 is off by up to 2 %."""
    plain, fused = twins(cfg, torch.device("cuda"))
    exact, off = copy.deepcopy(plain).double(), {plain: 0.0, fused: 0.0}
    for seed in range(6):
        images = pictures(torch.device("cuda"), 4, 128, seed)
        for model in (exact, plain, fused):
            model.zero_grad()
            step(model, images.double() if model is exact else images)
        off = {model: max(worst, relative_error(exact, model)) for model, worst in off.items()}
    assert off[fused] < max(2 * off[plain], 2e-3), off.values()


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("dtype", MIXED_TOLERANCES, ids=str)
def test_mixed_precision_is_as_near_to_float32_as_without_kernels(dtype: torch.dtype) -> None:
    """Errors of a single batch vary by chance, in bfloat16 by a fifth: means over batches are compared."""
    plain, fused = twins("yolov9-s.yaml", torch.device("cuda"))
    exact = copy.deepcopy(plain)
    off = {plain: 0.0, fused: 0.0}
    seeds = range(6)
    for seed in seeds:
        images = pictures(torch.device("cuda"), 4, 256, seed)
        for model in (exact, plain, fused):
            model.zero_grad()
            step(model, images, None if model is exact else dtype)
        off = {model: total + relative_error(exact, model) / len(seeds) for model, total in off.items()}
    assert off[fused] < max(1.2 * off[plain], MIXED_TOLERANCES[dtype]), off.values()


@pytest.mark.gpu
def test_a_fused_step_can_be_captured_and_does_not_wait_for_the_device() -> None:
    _, model = twins("yolov9-t.yaml", torch.device("cuda"))
    images = pictures(torch.device("cuda"), 2, 128)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, images, torch.float16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(model, images, torch.float16)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    captured = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    step(model, images, torch.float16)
    eager = [p.grad for p in model.parameters() if p.grad is not None]
    difference = torch.cat([(a - b).flatten() for a, b in zip(captured, eager, strict=True)]).norm()
    assert float(difference) < 0.02 * float(torch.cat([b.flatten() for b in eager]).norm())


def relative_error(expected: nn.Module, found: nn.Module) -> float:
    """Distance of all gradients as a share of their norm."""
    gradients = [
        torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        for model in (expected, found)
    ]
    return float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
