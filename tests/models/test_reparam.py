"""From training form to inference form: exact conversion, folding, sizes."""

from __future__ import annotations

import copy
import gzip
import json

import pytest
import torch
from torch import nn

from models.blocks import Conv, RepConvN
from models.flops import flops
from models.graph import DetectionModel
from models.heads import DDetect, lead_prediction
from models.parse import set_network_constants
from models.reparam import (
    fuse_conv_bn,
    fuse_repconvn,
    inference_form,
    keep_lead_branch,
    plan_single_head,
    single_head_skeleton,
    to_single_head,
)
from tests.models.reference import FIGURES, PAIRS, assert_matches, digest, random_images
from tests.reference.fill import fill_in_key_order, fill_state_dict

each_pair = pytest.mark.parametrize(
    ("dual", "single"),
    [pair if pair[0][-1] in "ts" else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS.items()],
)


def prediction_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return lead_prediction(model(images))


@pytest.mark.parametrize("dual", PAIRS)
def test_conversion_gives_the_shipped_single_model(dual):
    model = DetectionModel(f"{dual}.yaml")
    single = single_head_skeleton(model)
    figures = FIGURES[PAIRS[dual]]
    assert type(single.head) is DDetect
    assert digest(single.state_dict().items()) == figures["state"]
    assert single.save == figures["save"]
    shipped = DetectionModel(f"{PAIRS[dual]}.yaml")
    for key in ("nc", "depth_multiple", "width_multiple", "anchors", "activation", "ch"):
        assert single.yaml.get(key) == shipped.yaml.get(key)
    assert single.yaml["backbone"] + single.yaml["head"] == shipped.yaml["backbone"] + shipped.yaml["head"]


@pytest.mark.parametrize("name", ["yolov9-c", "yolov9-e"])
def test_inference_form_has_the_published_size(name):
    published = {"yolov9-c": (25.3, 102.1), "yolov9-e": (57.3, 189.0)}[name]
    skeleton = single_head_skeleton(DetectionModel(f"{name}.yaml")).eval().fuse()
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    assert parameters == FIGURES[PAIRS[name]]["params_fused"]
    assert parameters / 1e6 == pytest.approx(published[0], abs=0.05)
    assert flops(skeleton) / 1e9 == pytest.approx(published[1], abs=0.05)


@each_pair
def test_converted_model_equals_the_lead_branch_bit_for_bit(dual, single):
    model = DetectionModel(f"{dual}.yaml").eval()
    fill_in_key_order(model.state_dict(), seed=7)
    converted = to_single_head(model)
    for seed, shape in ((1, (1, 3, 64, 96)), (2, (2, 3, 128, 128))):
        images = random_images(seed, shape)
        assert torch.equal(prediction_of(model, images), prediction_of(converted, images))
    folded = converted.fuse()
    difference = (prediction_of(model, images) - prediction_of(folded, images)).abs()
    assert float(difference[:, :4].max()) <= 1e-3 and float(difference[:, 4:].max()) <= 1e-5
    assert digest(folded.state_dict().items()) == FIGURES[single]["state_fused"]


@each_pair
def test_recorded_key_table_and_output(dual, single, golden):
    with gzip.open(golden("models/reparam.json.gz"), "rt", encoding="utf-8") as file:
        recorded = json.load(file)["sizes"].get(f"{dual}>{single}")
    if recorded is None:
        pytest.skip("no recorded conversion of this size")
    model = DetectionModel(f"{dual}.yaml").eval()
    fill_state_dict(model.state_dict())
    plan = plan_single_head(model)
    converted = to_single_head(model)
    assert {key: plan.source_key(key) for key in converted.state_dict()} == recorded["keys"]
    found = prediction_of(converted, random_images(1, (1, 3, 128, 160)))
    assert_matches(found[:, :4], recorded["out"]["box"], 1.0)
    assert_matches(found[:, 4:], recorded["out"]["cls"], 5e-3)


@pytest.mark.parametrize("name", [*PAIRS, "yolov9-cf"])
def test_reducing_in_place_gives_what_is_built_anew(name):
    with torch.device("meta"):
        model = DetectionModel(f"{name}.yaml", nc=4)
        model.head.set_hidden_widths([(64, 24)] * len(model.head.branch_names))
        model.finish_blocks()
    expected = single_head_skeleton(model)
    found = keep_lead_branch(model)
    assert found is model and repr(found) == repr(expected)
    assert digest(found.state_dict().items()) == digest(expected.state_dict().items())
    assert (found.save, found.yaml) == (expected.save, expected.yaml)
    assert torch.equal(found.stride, expected.stride) and torch.equal(found.head.stride, expected.head.stride)
    for own, other in zip(found.model, expected.model, strict=True):
        assert (own.i, own.f, own.type) == (other.i, other.f, other.type)
        assert own.np == sum(parameter.numel() for parameter in own.parameters())
    for own, other in zip(found.modules(), expected.modules(), strict=True):
        if isinstance(own, nn.BatchNorm2d):
            assert (own.eps, own.momentum) == (other.eps, other.momentum)


def test_inference_form_in_place_is_that_of_the_copy():
    model = DetectionModel("yolov9-t.yaml", nc=2)
    fill_in_key_order(model.state_dict(), seed=3)
    images = random_images(1, (1, 3, 64, 64))
    before = copy.deepcopy(model.state_dict())
    expected = prediction_of(inference_form(model), images)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    reduced = inference_form(model, in_place=True)
    assert reduced is model and torch.equal(prediction_of(reduced, images), expected)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_triple_head_keeps_its_last_branch():
    model = DetectionModel("yolov9-cf.yaml", nc=2)
    plan = plan_single_head(model)
    assert plan.head_names == {"cv2": "cv6", "cv3": "cv7", "dfl": "dfl3"}
    assert plan.yaml["head"][-1] == [[15, 18, 21], 1, "DDetect", ["nc"]]


def test_conversion_carries_everything_and_leaves_the_source_alone():
    model = DetectionModel("yolov9-t.yaml", nc=2).train()
    model.names, model.nc, model.hyp = {0: "bolt", 1: "nut"}, 2, {"lr0": 0.01}
    model.model[0].conv.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    single = to_single_head(model)
    assert single.names == model.names and single.names is not model.names
    assert (single.nc, single.hyp, single.training) == (2, {"lr0": 0.01}, True)
    assert not single.model[0].conv.weight.requires_grad and single.model[1].conv.weight.requires_grad
    assert not single.head.dfl.conv.weight.requires_grad
    with torch.no_grad():
        single.model[1].conv.weight.zero_()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(value.is_meta for value in single.state_dict().values())


def test_converted_half_model_stays_half_and_can_be_moved():
    single = to_single_head(DetectionModel("yolov9-t.yaml", nc=2).half())
    assert {value.dtype for value in single.state_dict().values()} == {torch.float16, torch.int64}
    assert single.float().head.stride.dtype == torch.float32


def test_single_model_is_copied():
    model = DetectionModel("gelan-t.yaml", nc=2).eval()
    single = to_single_head(model)
    assert single is not model
    images = random_images(5, (1, 3, 64, 64))
    assert torch.equal(prediction_of(single, images), prediction_of(model, images))


def test_conversion_after_folding():
    model = DetectionModel("yolov9-t.yaml", nc=2).eval()
    fill_state_dict(model.state_dict())
    expected = inference_form(model)
    images = random_images(5, (1, 3, 64, 64))
    assert torch.equal(prediction_of(to_single_head(model.fuse()), images), prediction_of(expected, images))


def test_other_head_widths_survive_the_conversion():
    model = DetectionModel("yolov9-t.yaml", nc=2).eval()
    model.head.set_hidden_widths([(64, 32), (64, 48)])
    model.finish_blocks()
    single = to_single_head(model)
    assert single.head.hidden_widths() == [(64, 48)]
    images = random_images(5, (1, 3, 64, 64))
    assert torch.equal(prediction_of(single, images), prediction_of(model, images))


def filled(block: nn.Module) -> nn.Module:
    set_network_constants(block)
    fill_state_dict(block.state_dict())
    return block.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_folding_a_convolution(dtype):
    block = filled(Conv(6, 8, 3, 2, g=2, act=False)).to(dtype)
    x = torch.randn(2, 6, 9, 9, dtype=dtype)
    folded = fuse_conv_bn(block.conv, block.bn)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(folded(x), block(x), rtol=tolerance, atol=tolerance)
    assert folded.weight.dtype == dtype and not folded.weight.requires_grad and not folded.bias.requires_grad


def test_folding_a_convolution_with_bias():
    conv, norm = nn.Conv2d(4, 4, 1, bias=True), nn.BatchNorm2d(4).eval()
    norm.running_mean.normal_()
    x = torch.randn(1, 4, 3, 3)
    torch.testing.assert_close(fuse_conv_bn(conv, norm)(x), norm(conv(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 2)])
def test_folding_both_branches(stride, groups):
    block = filled(RepConvN(4, 8, 3, stride, g=groups, act=False)).double()
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(fuse_repconvn(block)(x), block(x), rtol=1e-12, atol=1e-12)


def test_folding_twice_is_harmless_and_leaves_plain_keys():
    model = DetectionModel("gelan-t.yaml", nc=2).eval()
    images = random_images(5, (1, 3, 64, 64))
    assert model.fuse() is model
    once = prediction_of(model, images)
    assert torch.equal(prediction_of(model.fuse(), images), once)
    assert {key.rsplit(".", 1)[1] for key in model.state_dict()} == {"weight", "bias"}
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_folded_half_model_is_rounded_once():
    model = filled(Conv(6, 8, 3, act=False)).half()
    folded = fuse_conv_bn(model.conv, model.bn)
    assert folded.weight.dtype == torch.float16
    exact = fuse_conv_bn(copy.deepcopy(model).double().conv, copy.deepcopy(model).double().bn)
    assert torch.equal(folded.weight, exact.weight.half())
