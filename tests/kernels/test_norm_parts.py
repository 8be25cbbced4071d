"""Norm and activation of a map in parts, against the modules on slices in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.test_norm import TOLERANCES, assert_close, channels_last, make_norm
from utils.kernels.norm import batch_statistics
from utils.kernels.norm_parts import bn_act_parts, bn_add_act_joint

CASES = (
    ((2, 12, 5, 7), (6, 6), 1),
    ((2, 12, 5, 7), (6, 6), 2),
    ((1, 48, 9, 4), (16, 32), 1),
    ((3, 67, 4, 3), (3, 24, 40), 1),
    ((3, 67, 4, 3), (3, 24, 40), 3),
)


def true_parts(x: Tensor, norms: list[nn.BatchNorm2d], widths: tuple[int, ...]) -> list[Tensor]:
    """The parts from plain modules."""
    parts = list(x.split(widths, 1))
    if len(norms) == 1:
        return list(nn.functional.silu(norms[0](x)).split(widths, 1))
    return [nn.functional.silu(norm(part)) for norm, part in zip(norms, parts, strict=True)]


@pytest.mark.parametrize(("shape", "widths", "number"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_equal_slices_of_the_whole(
    device: torch.device, shape: tuple[int, ...], widths: tuple[int, ...], number: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = channels_last(torch.randn(shape).to(device, dtype)).requires_grad_()
    norms = [make_norm(shape[1] if number == 1 else width, dtype, device) for width in widths[:number]]
    true_norms = [copy.deepcopy(norm).cpu().double() for norm in norms]
    true_x = x.detach().cpu().double().requires_grad_()

    parts = bn_act_parts(x, norms, nn.SiLU(inplace=True), widths)
    expected = true_parts(true_x, true_norms, widths)
    assert all("NormActParts" in type(part.grad_fn).__name__ for part in parts)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in parts)
    # The gradient of the first part comes as a slice of a wider map, as behind a concatenation.
    wide = channels_last(torch.randn(shape[0], 2 * shape[1], *shape[2:]).to(device, dtype))
    gradients = [wide[:, 1 : 1 + widths[0]], *(torch.randn(part.shape).to(part) for part in parts[1:])]
    torch.autograd.backward(parts, gradients)
    torch.autograd.backward(expected, [gradient.cpu().double() for gradient in gradients])

    pairs = [*zip(parts, expected, strict=True), (x.grad, true_x.grad)]
    for norm, true in zip(norms, true_norms, strict=True):
        pairs += [(norm.weight.grad, true.weight.grad), (norm.bias.grad, true.bias.grad)]
        pairs += list(zip(norm.buffers(), true.buffers(), strict=True))
    for found, wanted in pairs:
        scale = wanted.detach().abs().max().clamp(min=1e-3)
        distance = (found.detach().cpu().double() - wanted.detach()).abs().max()
        assert distance <= 3 * TOLERANCES[dtype] * scale


@pytest.mark.parametrize("number", [1, 2])
def test_plain_modules_do_it_where_the_kernels_do_not_apply(number: int) -> None:
    x = torch.randn(2, 8, 3, 3)
    norms = [nn.BatchNorm2d(8 if number == 1 else 4).eval() for _ in range(number)]
    parts = bn_act_parts(x, norms, nn.SiLU(), (4, 4))
    for part, wanted in zip(parts, true_parts(x, norms, (4, 4)), strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.parametrize("shape", [(2, 34, 5, 7), (1, 64, 9, 4)])
def test_both_halves_of_one_map_share_a_launch(
    device: torch.device, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    launches: list[int] = []

    def count(maps: tuple[Tensor, ...], norms: tuple[nn.BatchNorm2d, ...]) -> Tensor:
        launches.append(len(maps))
        return batch_statistics(maps, norms)

    monkeypatch.setattr("utils.kernels.norm.batch_statistics", count)
    x = channels_last(torch.randn(shape, device=device)).requires_grad_()
    true_x = x.detach().cpu().double().requires_grad_()
    norms = [make_norm(shape[1] // 2, torch.float32, device) for _ in range(2)]
    norms[1].eps, norms[1].momentum = 0.2, 0.6
    true_norms = [copy.deepcopy(each).cpu().double() for each in norms]

    y = bn_add_act_joint(x, *norms, nn.SiLU())
    assert launches == [2]
    first, second = true_x.chunk(2, 1)
    true = nn.functional.silu(true_norms[0](first) + true_norms[1](second))
    dy = torch.randn(y.shape)
    y.backward(dy.to(device))
    true.backward(dy.double())
    pairs = [(y, true), (x.grad, true_x.grad)]
    for each, wanted in zip(norms, true_norms, strict=True):
        pairs += [(each.weight.grad, wanted.weight.grad), (each.bias.grad, wanted.bias.grad)]
        pairs += list(zip(each.buffers(), wanted.buffers(), strict=True))
    for found, wanted in pairs:
        assert_close("a half", found, wanted, 3 * TOLERANCES[torch.float32])
