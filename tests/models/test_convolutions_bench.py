"""The benchmark of convolutions: it counts every one of them, and its ways compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench.convolutions import Convolution, Layer, dense_weight, layers_of, main, ways_of
from models.graph import DetectionModel

CASES = {
    "pair": Layer((Convolution(8, 12, 3, 1, 1), Convolution(8, 12, 1, 1, 1)), 7, 5, False, "apart"),
    "strided pair": Layer((Convolution(8, 12, 3, 2, 1), Convolution(8, 4, 3, 2, 1)), 9, 6, False, "apart"),
    "groups": Layer((Convolution(8, 12, 3, 1, 4),), 7, 5, False, "apart"),
    "groups of points": Layer((Convolution(8, 4, 1, 1, 2),), 7, 5, False, "apart"),
    "points": Layer((Convolution(8, 12, 1, 1, 1),), 7, 5, False, "apart"),
    "picture": Layer((Convolution(3, 8, 3, 2, 1),), 8, 8, True, "apart"),
}


def gradients_of(outputs: list[Tensor], of: list[Tensor]) -> list[Tensor]:
    joined = torch.cat(outputs, 1)
    return list(torch.autograd.grad(joined, of, torch.linspace(-1, 1, joined.numel()).double().view_as(joined)))


@pytest.mark.parametrize("name", CASES)
def test_ways_agree(name: str) -> None:
    layer = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(2, layer.convolutions[0].inputs, layer.height, layer.width).double().requires_grad_()
    weights = [
        torch.randn(c.outputs, c.inputs // c.groups, c.kernel, c.kernel).double().requires_grad_()
        for c in layer.convolutions
    ]
    ways = ways_of(layer)
    assert len(ways) > 1
    for way in ways.values():
        expected, found = ways["apart"](x, weights), way(x, weights)
        torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1))
        torch.testing.assert_close(gradients_of(found, [x, *weights]), gradients_of(expected, [x, *weights]))


def test_dense_weights_are_those_of_the_groups_and_zeros() -> None:
    weight = torch.arange(1.0, 9.0).view(4, 2, 1, 1)
    assert dense_weight(weight, 2).flatten(1).tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [0, 0, 5, 6], [0, 0, 7, 8]]


@pytest.mark.parametrize("cfg", ["yolov9-t.yaml", "yolov9-c.yaml", "gelan-s.yaml"])
def test_every_convolution_of_a_step_is_counted_once(cfg: str) -> None:
    model = DetectionModel(cfg)
    decoders = {id(module) for *_, decoder in model.head.branches for module in decoder.modules()}
    expected = sum(isinstance(module, nn.Conv2d) and id(module) not in decoders for module in model.modules())
    layers = layers_of(model, 64)
    assert sum(len(layer.convolutions) * count for layer, count in layers.items()) == expected
    assert any(layer.is_first for layer in layers)


def test_it_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main("--cfg yolov9-t.yaml --device cpu --type fp32 --batch 1 --img 32 --shown 3".split())
    shown = capsys.readouterr().out
    assert "3 layers:" in shown and "* apart" in shown and "joint" in shown
