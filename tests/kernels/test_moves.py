"""Concatenation, enlargement and largest neighbours against torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from utils.kernels.moves import add_maps, concatenate, enlarge_nearest, fork, largest_neighbours

TOLERANCES = {torch.float64: 1e-15, torch.float32: 3e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = ((1, 2, 1, 1), (2, 17, 5, 7), (1, 3, 2, 9), (2, 64, 3, 18), (1, 130, 7, 3))


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def drawn(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of few levels, so that neighbours are often equal."""
    return channels_last((torch.randn(tuple(shape)) * 4).round().div(4).to(device, dtype))


def check(fused: Callable, plain: Callable, inputs: Sequence[Tensor], name: str, *, sliced: bool = False) -> None:
    """Values are equal, gradients within rounding; the gradient may be a slice of a wider map."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    true = [x.detach().cpu().double().requires_grad_() for x in inputs]
    y, expected = fused(*inputs), plain(*true)
    assert type(y.grad_fn).__name__ == name and y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y.detach().cpu().double(), expected.detach())
    batch, channels, height, width = y.shape
    dy = channels_last(torch.randn(batch, channels + 8, height, width).to(y))
    dy = dy[:, 3 : 3 + channels] if sliced else channels_last(dy[:, :channels])
    found = torch.autograd.grad(y, inputs, dy)
    for gradient, wanted in zip(found, torch.autograd.grad(expected, true, dy.cpu().double()), strict=True):
        distance = float((gradient.cpu().double() - wanted).abs().max())
        assert distance <= TOLERANCES[y.dtype] * max(float(wanted.abs().max()), 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_concatenation(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    wider = (shape[0], shape[1] + 5, *shape[2:])
    inputs = [drawn(shape, dtype, device), drawn(wider, dtype, device)[:, 2:-1], drawn(shape, dtype, device)]
    check(lambda *maps: concatenate(maps), lambda *maps: torch.cat(maps, 1), inputs, "_ConcatenateBackward")


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("shape", "scale"), [*((shape, 2) for shape in SHAPES), ((2, 20, 3, 2), 3), ((1, 8, 2, 3), 4)])
def test_enlargement(
    shape: tuple[int, ...], scale: int, dtype: torch.dtype, sliced: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    check(
        lambda x: enlarge_nearest(x, scale),
        lambda x: F.interpolate(x, scale_factor=scale, mode="nearest"),
        [drawn(shape, dtype, device)],
        "_EnlargeBackward",
        sliced=sliced,
    )


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("shape", "kernel"), [*((shape, 5) for shape in SHAPES), ((2, 20, 6, 5), 3)])
def test_largest_neighbours(
    shape: tuple[int, ...], kernel: int, dtype: torch.dtype, sliced: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    wider = (shape[0], shape[1] + 3, *shape[2:])
    x = drawn(wider, dtype, device)[:, 1:-2] if sliced else drawn(shape, dtype, device)
    check(
        lambda x: largest_neighbours(x, kernel),
        lambda x: F.max_pool2d(x, kernel, 1, kernel // 2),
        [x],
        "_LargestBackward",
        sliced=sliced,
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forks_add_the_gradients_of_both_readers(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = drawn(shape, dtype, device).requires_grad_()
    wider = drawn((shape[0], shape[1] + 5, *shape[2:]), dtype, device)
    first, second = fork(x)
    assert type(first.grad_fn).__name__ == "_ForkBackward"
    for one, other in ((wider[:, 2:-3], drawn(shape, dtype, device)), (wider[:, 1:-4], wider[:, 5:])):
        (found,) = torch.autograd.grad((first, second), x, (one, other), retain_graph=True)
        assert torch.equal(found, one + other) and found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(add_maps(one, other), one + other)


def test_values_that_are_no_numbers_win_as_in_torch(device: torch.device) -> None:
    x = drawn((1, 4, 6, 6), torch.float32, device)
    x[0, 0, 2, 2] = x[0, 1, 3, 4] = x[0, 1, 3, 2] = float("nan")
    x[0, 2] = float("-inf")
    x[0, 3, 1, 1] = float("inf")
    x.requires_grad_()
    plain = x.detach().cpu().clone().requires_grad_()
    y, expected = largest_neighbours(x, 5), F.max_pool2d(plain, 5, 1, 2)
    assert torch.equal(y.detach().cpu().nan_to_num(9), expected.detach().nan_to_num(9))
    dy = torch.arange(144.0).view(1, 4, 6, 6)
    y.backward(dy.to(y))
    expected.backward(dy)
    assert torch.equal(x.grad.cpu(), plain.grad)


@pytest.mark.parametrize("kind", ["layout", "types", "sizes"])
def test_the_plain_way_where_the_kernels_do_not_apply(kind: str, device: torch.device) -> None:
    x = drawn((2, 8, 4, 4), torch.float32, device)
    other = {"layout": x.contiguous(), "types": x.double(), "sizes": x[:, :, :2]}[kind]
    if kind == "sizes":
        with pytest.raises(RuntimeError, match=r"[Ss]izes of tensors"):
            concatenate((x, other))
        return
    assert torch.equal(concatenate((x, other)), torch.cat((x, other), 1))
    if kind == "layout":
        assert torch.equal(enlarge_nearest(other, 2), F.interpolate(other, scale_factor=2))
        assert torch.equal(largest_neighbours(other, 5), F.max_pool2d(other, 5, 1, 2))
    assert torch.equal(enlarge_nearest(x, 5), F.interpolate(x, scale_factor=5))
