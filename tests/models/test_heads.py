"""Heads: widths, outputs in all modes, decoding, priors and their cache, unwrapping of outputs."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from models.heads import HEADS, DDetect, DualDDetect, TripleDDetect, head_branches, lead_prediction

CHANNELS = (16, 24, 32)
NUM_CLASSES = 3


def build(kind: type[nn.Module], nc: int = NUM_CLASSES) -> nn.Module:
    head = kind(nc, CHANNELS * len(kind.branch_names))
    head.stride = torch.tensor([8.0, 16.0, 32.0])
    head.bias_init()
    return head


def inputs_for(head: nn.Module, batch: int = 2, height: int = 64, width: int = 96) -> list[Tensor]:
    return [
        torch.randn(batch, channels, height // stride, width // stride)
        for _ in head.branch_names
        for channels, stride in zip(CHANNELS, (8, 16, 32), strict=True)
    ]


def decode_by_hand(maps: list[Tensor], strides: tuple[int, ...] = (8, 16, 32)) -> Tensor:
    """Decode one cell after the other; slow and plain."""
    bins = torch.arange(16.0)
    cells = []
    for level, stride in zip(maps, strides, strict=True):
        for row in range(level.shape[2]):
            for column in range(level.shape[3]):
                values = level[:, :, row, column]
                left, top, right, bottom = (
                    (values[:, side * 16 : side * 16 + 16].softmax(1) * bins).sum(1) for side in range(4)
                )
                x1, y1 = column + 0.5 - left, row + 0.5 - top
                x2, y2 = column + 0.5 + right, row + 0.5 + bottom
                box = torch.stack(((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1), 1) * stride
                cells.append(torch.cat((box, values[:, 64:].sigmoid()), 1))
    return torch.stack(cells, 2)


@pytest.mark.parametrize(
    ("first_channels", "nc", "expected"),
    [(64, 80, (64, 128)), (240, 80, (64, 240)), (512, 80, (128, 512)), (64, 2, (64, 64)), (300, 80, (76, 300))],
)
def test_hidden_widths(first_channels, nc, expected):
    assert DDetect(nc, (first_channels, 8, 8)).hidden_widths() == [expected]


@pytest.mark.parametrize("kind", HEADS.values())
def test_registration_order_and_last_layers(kind):
    head = build(kind)
    expected = [name for pair in kind.branch_names for name in pair] + list(kind.decoder_names)
    assert [name for name, _ in head.named_children()] == expected
    for boxes, classes, _ in head.branches:
        assert boxes[0][1].conv.groups == 4 and boxes[0][2].groups == 4
        assert classes[0][2].out_channels == NUM_CLASSES


@pytest.mark.parametrize("kind", HEADS.values())
def test_wrong_number_of_inputs_is_refused(kind):
    if len(kind.branch_names) > 1:
        with pytest.raises(ValueError, match="groups? of|group"):
            kind(3, (8, 8, 8, 8, 8))
    with pytest.raises(ValueError, match="0 inputs"):
        kind(3, ())


def test_bias_initialisation():
    head = build(DualDDetect, nc=80)
    for boxes, classes, _ in head.branches:
        for box, cls, stride in zip(boxes, classes, (8, 16, 32), strict=True):
            assert bool((box[-1].bias == 1).all())
            expected = math.log(5 / 80 / (640 / stride) ** 2)
            torch.testing.assert_close(cls[-1].bias, torch.full((80,), expected))


@pytest.mark.parametrize("kind", HEADS.values())
def test_training_output_and_its_branches(kind):
    head = build(kind).train()
    output = head(inputs_for(head))
    branches = head_branches(output)
    assert len(branches) == len(kind.branch_names)
    for maps in branches:
        assert [tuple(level.shape) for level in maps] == [(2, 67, 8, 12), (2, 67, 4, 6), (2, 67, 2, 3)]
    if kind is DDetect:
        assert output is not branches and all(isinstance(level, Tensor) for level in output)
    with pytest.raises(ValueError, match="eval"):
        lead_prediction(output)


@pytest.mark.parametrize("kind", HEADS.values())
def test_eval_output_equals_decoding_by_hand(kind):
    head = build(kind).eval()
    inputs = inputs_for(head)
    with torch.no_grad():
        output = head(inputs)
        head.export = True
        exported = head(inputs)
    lead = lead_prediction(output)
    assert lead.shape == (2, 7, 126)
    torch.testing.assert_close(lead, decode_by_hand(head_branches(output)[-1]), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lead_prediction(exported), lead)
    with pytest.raises(ValueError, match="no raw maps"):
        head_branches(exported)


def test_forms_of_the_outputs():
    inputs = inputs_for(build(TripleDDetect))
    single, dual, triple = (build(kind).eval() for kind in (DDetect, DualDDetect, TripleDDetect))
    y, maps = single(inputs[:3])
    assert isinstance(y, Tensor) and len(maps) == 3
    (aux, lead), (aux_maps, lead_maps) = dual(inputs[:6])
    assert aux.shape == lead.shape and len(aux_maps) == len(lead_maps) == 3
    y, maps = triple(inputs)
    assert isinstance(y, Tensor) and len(maps) == 3
    dual.export = True
    assert [type(value) for value in dual(inputs[:6])] == [Tensor, Tensor]


def test_lead_is_the_last_of_two():
    aux, lead = torch.zeros(1, 7, 5), torch.ones(1, 7, 5)
    maps = [[torch.zeros(1, 67, 1, 1)], [torch.ones(1, 67, 1, 1)]]
    for output in (lead, (lead, maps[1]), (lead, None), ([aux, lead], maps), [aux, lead], (aux, lead), [lead]):
        assert lead_prediction(output) is lead
    assert head_branches(([aux, lead], maps))[-1][0] is maps[1][0]
    with pytest.raises(ValueError, match="decoded prediction"):
        lead_prediction([])
    with pytest.raises(ValueError, match="dict"):
        lead_prediction({"a": 1})


def test_dynamic_priors_give_the_same_values():
    head = build(DDetect).eval()
    inputs = inputs_for(head)
    with torch.no_grad():
        cached, _ = head(inputs)
        head.dynamic = True
        computed, _ = head(inputs)
    torch.testing.assert_close(cached, computed, rtol=0, atol=0)


def test_priors_follow_the_input_size_not_the_batch():
    head = build(DDetect).eval()
    head(inputs_for(head, batch=1))
    kept = head.anchors
    head(inputs_for(head, batch=3))
    assert head.anchors is kept
    head(inputs_for(head, height=96, width=64))
    assert head.anchors is not kept
    assert head.anchors.shape == (2, 126) and head.strides.shape == (1, 126)


def test_priors_made_in_inference_mode_serve_a_pass_with_gradients():
    head = build(DDetect).eval()
    inputs = inputs_for(head)
    with torch.inference_mode():
        head(inputs)
    prediction, _ = head(inputs)
    prediction.sum().backward()
    assert not head.anchors.is_inference()


def test_priors_are_neither_saved_nor_copied():
    head = build(DDetect).eval()
    head(inputs_for(head))
    assert head.shape is not None
    assert not any("anchors" in key or "stride" in key for key in head.state_dict())
    for clone in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert clone.shape is None and clone.anchors.numel() == 0
        assert clone.stride.tolist() == [8.0, 16.0, 32.0]


def test_conversion_moves_the_strides_and_forgets_the_priors():
    head = build(DDetect).eval()
    head(inputs_for(head))
    head.double()
    assert head.stride.dtype == torch.float64 and head.shape is None
    prediction, _ = head([level.double() for level in inputs_for(head)])
    assert prediction.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduced_precision_is_decoded_in_float32(dtype):
    maps = [torch.randn(1, 67, size, size).to(dtype) for size in (4, 2, 1)]
    head = build(DDetect).eval().to(dtype)
    prediction = head.decode(maps, head.dfl)
    assert prediction.dtype == torch.float32
    expected = decode_by_hand([level.float() for level in maps])
    torch.testing.assert_close(prediction, expected, rtol=1e-5, atol=1e-4)


def test_autocast_does_not_reach_the_decoding():
    head = build(DDetect).eval()
    maps = [torch.randn(1, 67, size, size) for size in (4, 2, 1)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = head.decode(maps, head.dfl)
    torch.testing.assert_close(prediction, decode_by_hand(maps), rtol=1e-5, atol=1e-4)


def test_other_hidden_widths_from_tensor_shapes():
    head = build(DualDDetect)
    keys = list(head.state_dict())
    other = DualDDetect(NUM_CLASSES, CHANNELS * 2)
    assert not other.set_hidden_widths(head.hidden_widths())
    assert other.set_hidden_widths([(64, 16), (80, 20)])
    assert other.hidden_widths() == [(64, 16), (80, 20)]
    assert list(other.state_dict()) == keys
    shapes = {f"model.9.{key}": tuple(value.shape) for key, value in other.state_dict().items()}
    assert head.widths_from_shapes(shapes, "model.9.") == [(64, 16), (80, 20)]
