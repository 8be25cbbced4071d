"""Fused means of 2x2 neighbours against the plain operation in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from utils.kernels.pool import OUT_ROWS, average_neighbours

TOLERANCES = {torch.float64: 1e-15, torch.float32: 3e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = ((1, 2, 2, 2), (2, 17, 5, 7), (1, 3, 2, 9), (2, 64, OUT_ROWS + 1, 18), (1, 130, 2 * OUT_ROWS + 4, 3))


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def is_fused(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_AverageBackward"


def check(x: Tensor, dy: Tensor) -> None:
    x = x.detach().requires_grad_()
    true_x = x.detach().cpu().double().requires_grad_()
    y, true = average_neighbours(x), F.avg_pool2d(true_x, 2, 1)
    y.backward(dy)
    true.backward(dy.cpu().double())
    assert is_fused(y) and y.is_contiguous(memory_format=torch.channels_last)
    for found, expected in ((y, true), (x.grad, true_x.grad)):
        difference = (found.detach().cpu().double() - expected.detach()).abs().max()
        assert float(difference) <= TOLERANCES[x.dtype] * float(expected.detach().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = channels_last(torch.randn(shape).to(device, dtype))
    check(x, torch.randn(*shape[:2], shape[2] - 1, shape[3] - 1).to(x))


def test_slices_of_channels(device: torch.device) -> None:
    torch.manual_seed(1)
    x, dy = (channels_last(torch.randn(2, 40, side, side, device=device))[:, 8:25] for side in (6, 5))
    check(x, dy)


def test_gradcheck(device: torch.device) -> None:
    x = channels_last(torch.randn(1, 3, 3, 4, dtype=torch.float64, device=device)).requires_grad_()
    assert torch.autograd.gradcheck(average_neighbours, (x,), fast_mode=True)


@pytest.mark.parametrize("shape", [(2, 8, 5, 5), (2, 1, 5, 5)])
def test_other_layouts_take_the_plain_path(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    y = average_neighbours(x)
    assert not is_fused(y) and torch.equal(y, F.avg_pool2d(x, 2, 1))


def test_too_small_maps_are_refused_as_ever(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"[Oo]utput size"):
        average_neighbours(channels_last(torch.randn(1, 8, 1, 4, device=device)))
