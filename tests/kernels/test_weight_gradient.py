"""Convolutions with a weight gradient of our own against torch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from utils.kernels import weight_gradient as module
from utils.kernels.weight_gradient import Plan, convolve, suits, weight_gradient

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest difference from the float64 result as a share of its largest value, by type of the gradient."""
SHAPES = ((1, 5, 7), (2, 1, 1), (3, 1, 9), (2, 9, 1), (2, 12, 13), (1, 3, 67))
CHANNELS = ((16, 16), (32, 32), (32, 64), (48, 48), (48, 96), (64, 32), (16, 128))


def random_map(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)


def true_gradient(x: Tensor, dy: Tensor, stride: int = 1) -> Tensor:
    shape = (dy.shape[1], x.shape[1], 3, 3)
    return torch.nn.grad.conv2d_weight(x.detach().cpu().double(), shape, dy.cpu().double(), stride, 1)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    difference = (found.detach().cpu().double() - expected).abs().max()
    assert float(difference) <= tolerance * float(expected.abs().max())


def is_own(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_ConvolutionBackward"


@pytest.fixture(autouse=True)
def some_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs share the pixels of small maps, the last of them fewer."""
    monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    torch.manual_seed(0)


@pytest.mark.parametrize("channels", CHANNELS, ids=str)
def test_gradient_for_channels(channels: tuple[int, int], device: torch.device) -> None:
    x, dy = random_map(2, channels[0], 5, 13).to(device), random_map(2, channels[1], 5, 13).to(device)
    found = weight_gradient(x, dy, dtype=torch.float32)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert_close(found, true_gradient(x, dy), TOLERANCES[torch.float32])


@pytest.mark.parametrize("shares_shifts", [False, True])
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradient_for_sizes(
    shape: tuple[int, int, int], is_ahead: bool, shares_shifts: bool, device: torch.device
) -> None:
    batch, height, width = shape
    x, dy = (random_map(batch, 16, height, width).to(device) for _ in range(2))
    plan = Plan(shares_shifts, 16, 64, 64, is_ahead, 1, 4, 1)
    assert_close(
        weight_gradient(x, dy, dtype=torch.float32, plan=plan), true_gradient(x, dy), TOLERANCES[torch.float32]
    )


@pytest.mark.parametrize("is_ahead", [False, True])
def test_blocks_of_channels_of_which_the_last_is_cut(is_ahead: bool, device: torch.device) -> None:
    x, dy = random_map(1, 48, 3, 5).to(device), random_map(1, 48, 3, 5).to(device)
    for plan in (Plan(True, 16, 128, 128, is_ahead, 1, 4, 1), Plan(False, 16, 256, 32, is_ahead, 1, 4, 1)):
        found = weight_gradient(x, dy, dtype=torch.float32, plan=plan)
        assert_close(found, true_gradient(x, dy), TOLERANCES[torch.float32])


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("inputs", [3, 32])
def test_stride_two(inputs: int, is_ahead: bool, device: torch.device) -> None:
    x, dy = random_map(2, inputs, 10, 14).to(device), random_map(2, 32, 5, 7).to(device)
    found = weight_gradient(x, dy, 2, torch.float32, Plan(False, 16, 32, 32, is_ahead, 1, 4, 2))
    assert_close(found, true_gradient(x, dy, 2), TOLERANCES[torch.float32])
    assert_close(weight_gradient(x, dy, 2, torch.float32), true_gradient(x, dy, 2), TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_float_weight", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_forward_and_backward(stride: int, has_float_weight: bool, dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 as if its bits were integers")
    weight_type = torch.float32 if has_float_weight else dtype
    x = random_map(2, 32, 8, 6, dtype=dtype).to(device).requires_grad_()
    weight = torch.randn(32, 32, 3, 3).to(dtype).to(device, weight_type).requires_grad_()
    true_x, true_weight = (t.detach().cpu().double().requires_grad_() for t in (x, weight))
    y, true = convolve(x, weight, stride), F.conv2d(true_x, true_weight, None, stride, 1)
    dy = torch.randn(true.shape).to(y)
    y.backward(dy)
    true.backward(dy.cpu().double())
    assert is_own(y) and weight.grad.dtype == weight_type
    assert_close(y, true.detach(), TOLERANCES[dtype])
    assert_close(x.grad, true_x.grad, TOLERANCES[dtype])
    assert_close(weight.grad, true_weight.grad, TOLERANCES[weight_type])


def test_slices_of_wider_maps(device: torch.device) -> None:
    x, dy = random_map(2, 80, 5, 6).to(device)[:, 16:48], random_map(2, 48, 5, 6).to(device)[:, 16:48]
    assert suits(x, torch.empty(32, 32, 3, 3, dtype=x.dtype, device=device))
    assert_close(weight_gradient(x, dy, dtype=torch.float32), true_gradient(x, dy), TOLERANCES[torch.float32])


def test_values_outside_of_a_slice_do_not_count(device: torch.device) -> None:
    wide_x, wide_dy = (torch.full_like(random_map(2, 48, 5, 6), float("nan")).to(device) for _ in range(2))
    x, dy = wide_x[:, 16:32], wide_dy[:, 16:32]
    x.normal_()
    dy.normal_()
    assert_close(weight_gradient(x, dy, dtype=torch.float32), true_gradient(x, dy), TOLERANCES[torch.float32])


def test_gradients_of_other_layouts_are_copied(device: torch.device) -> None:
    x = random_map(2, 32, 5, 6).to(device)
    weight = torch.randn(32, 32, 3, 3).to(x).requires_grad_()
    convolve(x, weight).sum().backward()
    assert_close(weight.grad, true_gradient(x, torch.ones(2, 32, 5, 6)), TOLERANCES[torch.float16])


def test_only_what_is_asked_for_is_computed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_map(1, 32, 5, 6).to(device).requires_grad_()
    weight = torch.randn(32, 32, 3, 3).to(x.detach())
    monkeypatch.setattr(module, "weight_gradient", lambda *_: pytest.fail("the weight is frozen"))
    convolve(x, weight).sum().backward()
    assert x.grad is not None


def test_results_repeat_exactly(device: torch.device) -> None:
    x, dy = random_map(2, 32, 17, 19).to(device), random_map(2, 32, 17, 19).to(device)
    assert torch.equal(weight_gradient(x, dy), weight_gradient(x, dy))


@pytest.mark.parametrize(
    ("x_shape", "weight_shape", "stride"),
    [
        ((1, 40, 4, 4), (32, 40, 3, 3), 1),
        ((1, 32, 4, 4), (40, 32, 3, 3), 1),
        ((1, 16, 4, 4), (32, 16, 3, 3), 1),
        ((1, 64, 4, 4), (32, 64, 3, 3), 1),
        ((1, 32, 4, 4), (112, 32, 3, 3), 1),
        ((1, 32, 4, 4), (32, 32, 1, 1), 1),
        ((1, 32, 4, 4), (32, 32, 3, 3), 3),
        ((1, 32, 5, 4), (32, 32, 3, 3), 2),
        ((1, 3, 4, 4), (32, 3, 3, 3), 1),
        ((1, 48, 4, 4), (32, 32, 3, 3), 1),
    ],
)
def test_what_does_not_suit(
    x_shape: tuple[int, ...], weight_shape: tuple[int, ...], stride: int, device: torch.device
) -> None:
    assert not suits(random_map(*x_shape).to(device), torch.empty(weight_shape).to(device), stride)


def test_other_cases_take_the_plain_path(device: torch.device) -> None:
    weight = torch.randn(32, 32, 3, 3, device=device, requires_grad=True)
    for x, padding in ((random_map(1, 32, 4, 4, dtype=torch.float32), 1), (torch.randn(2, 32, 4, 4), 0)):
        y = convolve(x.to(device), weight, padding=padding)
        assert not is_own(y) and torch.equal(y, F.conv2d(x.to(device), weight, None, 1, padding))
    assert not suits(torch.randn(2, 32, 4, 4, device=device).half(), weight)
