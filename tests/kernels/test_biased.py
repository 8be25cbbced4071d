"""1x1 convolutions with a bias against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.test_moves import channels_last
from utils.kernels.biased import channel_totals, convolve_pointwise

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = ((1, 3, 1, 1), (2, 17, 5, 7), (2, 64, 33, 18), (1, 130, 7, 3), (3, 4, 70, 41))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sliced", [False, True])
def test_totals(shape: tuple[int, ...], dtype: torch.dtype, sliced: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    batch, channels, height, width = shape
    x = channels_last(torch.randn(batch, channels + 4, height, width).to(device, dtype))
    x = x[:, 1 : 1 + channels] if sliced else channels_last(x[:, :channels])
    found = channel_totals(x)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double().cpu(), x.cpu().double().sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("frozen", ["", "weight", "bias", "x"])
def test_gradients(dtype: torch.dtype, frozen: str, device: torch.device) -> None:
    torch.manual_seed(0)
    drawn = {"x": torch.randn(2, 24, 9, 5), "weight": torch.randn(17, 24, 1, 1) / 5, "bias": torch.randn(17)}
    inputs, true = {}, {}
    for name, value in drawn.items():
        value = channels_last(value) if value.dim() == 4 else value
        inputs[name] = value.to(device, dtype).requires_grad_(name != frozen)
        true[name] = inputs[name].detach().cpu().double().requires_grad_(name != frozen)
    y, expected = convolve_pointwise(*inputs.values()), F.conv2d(*true.values())
    assert ("_Pointwise" in type(y.grad_fn).__name__) == (frozen != "bias")
    dy = torch.randn_like(expected)
    y.backward(dy.to(y))
    expected.backward(dy.to(y.dtype).double())
    pairs = [
        (y.detach(), expected.detach()),
        *((inputs[name].grad, true[name].grad) for name in drawn if name != frozen),
    ]
    for found, wanted in pairs:
        scale = float(wanted.abs().max())
        assert float((found.double().cpu() - wanted).abs().max()) <= TOLERANCES[dtype] * scale
