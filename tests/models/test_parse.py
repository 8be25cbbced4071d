"""Reading of model YAMLs: widths, repeats, words, and refusals that name the row."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models.blocks import Conv, RepConvN
from models.graph import CONFIG_DIR, DetectionModel
from models.parse import parse_activation, parse_model, read_rows, stride_factor
from utils.files import read_yaml

TINY = {
    "nc": 2,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": 3,
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "ADown", [16]],
        [-1, 1, "AConv", [16]],
        [-1, 1, "AConv", [24]],
    ],
    "head": [[[2, 3, 4], 1, "DDetect", ["nc"]]],
}


def tiny(**changes: object) -> dict:
    return {**copy.deepcopy(TINY), **changes}


def with_row(index: int, row: list) -> dict:
    cfg = tiny()
    cfg["backbone"][index] = row
    return cfg


def test_row_attributes():
    layers, saved = parse_model(tiny(), 3)
    assert saved == [2, 3, 4]
    assert [(row.i, row.f) for row in layers] == [(0, -1), (1, -1), (2, -1), (3, -1), (4, -1), (5, [2, 3, 4])]
    assert layers[0].type == "models.common.Conv" and layers[5].type == "models.yolo.DDetect"
    assert layers[0].np == 8 * 3 * 9 + 16


def test_image_channels_as_number_or_list():
    for channels in (1, [1]):
        layers, _ = parse_model(tiny(), channels)
        assert layers[0].conv.in_channels == 1


def test_only_the_first_argument_is_scaled_and_rounded_up():
    cfg = with_row(2, [-1, 1, "RepNCSPELAN4", [90, 90, 50, 1]])
    block = parse_model(cfg, 3)[0][2]
    assert block.cv4.conv.out_channels == 96
    assert block.cv1.conv.out_channels == 90 and block.cv2[1].conv.out_channels == 50
    block = parse_model({**cfg, "width_multiple": 0.5}, 3)[0][2]
    assert block.cv4.conv.out_channels == 48 and block.cv1.conv.out_channels == 90


def test_the_width_of_an_old_output_layer_is_not_scaled():
    layers, _ = parse_model(with_row(3, [-1, 1, "Conv", [21, 3, 2]]), 3)  # 3 * (2 + 5)
    assert layers[3].conv.out_channels == 21


@pytest.mark.parametrize(("depth", "expected"), [(1.0, 4), (0.5, 2), (0.1, 1)])
def test_repeats_are_scaled(depth, expected):
    cfg = tiny(depth_multiple=depth)
    cfg["backbone"][:2] = [[-1, 1, "Conv", [8, 3, 4]], [-1, 4, "Conv", [8, 3]]]
    row = parse_model(cfg, 3)[0][1]
    assert (len(row) if isinstance(row, nn.Sequential) else 1) == expected
    assert row.type == "models.common.Conv"


def test_half_width_gelan_c():
    cfg = read_yaml(CONFIG_DIR / "gelan-c.yaml")
    cfg["width_multiple"] = 0.5
    model = DetectionModel(cfg)
    assert sum(parameter.numel() for parameter in model.parameters()) == 16_753_248


def test_other_width_is_refused_where_routes_would_not_fit():
    cfg = read_yaml(CONFIG_DIR / "yolov9-c.yaml")
    cfg["width_multiple"] = 0.5
    with pytest.raises(ValueError, match="row 30.*width_multiple 1.0"):
        DetectionModel(cfg)


def test_negative_offsets_are_stored_as_rows():
    _, saved = parse_model(tiny(head=[[[-4, -3, -2], 1, "DDetect", ["nc"]]]), 3)
    assert saved == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("nn.ReLU()", nn.ReLU),
        ("nn.LeakyReLU(0.1)", nn.LeakyReLU),
        ("torch.nn.SiLU(inplace=True)", nn.SiLU),
        ("nn.Mish", nn.Mish),
    ],
)
def test_activations_by_name(text, kind):
    assert type(parse_activation(text)) is kind


@pytest.mark.parametrize(
    "text", ["nn.Linear(3, 4)", "__import__('os')", "nn.ReLU(open('x'))", "nn.ReLU(1, 2, 3)", "", "3"]
)
def test_anything_else_is_no_activation(text):
    with pytest.raises(ValueError, match="activation"):
        parse_activation(text)


def test_activation_stays_inside_its_model():
    relu = DetectionModel(tiny(activation="nn.ReLU()"))
    plain = DetectionModel(tiny())
    blocks = [block for block in relu.modules() if isinstance(block, (Conv, RepConvN))]
    assert blocks and all(isinstance(block.act, (nn.ReLU, nn.Identity)) for block in blocks)
    assert not any(isinstance(module, nn.ReLU) for module in plain.modules())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([-1, 1, "os.system", ["ls"]], "row 3: unknown module 'os.system'"),
        ([-1, 1, "Detect", ["nc", "anchors"]], "row 3: head 'Detect' is not supported"),
        ([-1, 1, "AConv", ["__import__('os')"]], "row 3: cannot use argument"),
        ([-1, 1, "AConv", []], "row 3: AConv needs its output channels"),
        ([-1, 1, "AConv", [16, 3, 4, 5]], "row 3: cannot build AConv"),
        ([7, 1, "AConv", [16]], "row 3: 'from' 7 must point at an earlier row"),
        ([-9, 1, "AConv", [16]], "row 3: 'from' -9"),
        ([[], 1, "Concat", [1]], "row 3: 'from' and 'number'"),
        ([-1, "3", "AConv", [16]], "row 3: 'from' and 'number'"),
        ([-1, 1, "AConv"], "row 3: expected"),
        ("AConv", "row 3: expected"),
        ([-1, 1, 5, [16]], "row 3: 'module' must be a name"),
        ([[0, 2], 1, "Concat", [1]], "row 3: Concat of rows"),
        ([[-1, -2], 1, "CBFuse", [[0]]], "row 3: CBFuse"),
    ],
)
def test_faulty_rows_are_named(row, message):
    with pytest.raises(ValueError, match="model YAML") as caught:
        parse_model(with_row(3, row), 3)
    assert message in str(caught.value)


def test_cblinear_feeds_cbfuse_only():
    cfg = with_row(3, [-1, 1, "CBLinear", [[16]]])
    with pytest.raises(ValueError, match="row 4: AConv cannot read row 3, a CBLinear"):
        parse_model(cfg, 3)


@pytest.mark.parametrize("key", ["backbone", "head"])
def test_missing_parts_are_named(key):
    cfg = tiny()
    del cfg[key]
    with pytest.raises(ValueError, match=key):
        read_rows(cfg)


def test_branches_must_agree_in_stride():
    cfg = tiny(head=[[[2, 3, 4, 3, 2, 4], 1, "DualDDetect", ["nc"]]])
    with pytest.raises(ValueError, match="differ in stride"):
        parse_model(cfg, 3)


def test_strides_equal_a_real_pass():
    model = DetectionModel(tiny()).train()
    maps = model(torch.zeros(2, 3, 96, 96))
    assert model.stride.tolist() == [96 / level.shape[2] for level in maps]
    assert stride_factor(nn.Upsample(None, 2, "nearest")) == 0.5
