"""The model object: construction, moving, copying, tracing, loading, and what it leaves untouched."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models.graph import DetectionModel, Model, find_model_yaml
from models.heads import head_branches, lead_prediction
from models.reparam import inference_form
from tests.models.reference import FIGURES, digest, random_images
from tests.reference.fill import fill_state_dict

NAMES = ("yolov9-t", "gelan-t")


@pytest.fixture(params=NAMES)
def model(request) -> DetectionModel:
    built = DetectionModel(f"{request.param}.yaml", nc=5)
    fill_state_dict(built.state_dict())
    return built.eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return random_images(3, (2, 3, 64, 96))


def lead_of(model: DetectionModel, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return lead_prediction(model(images))


def test_attributes_of_a_fresh_model():
    model = Model("gelan-t.yaml", nc=3)
    assert model.yaml["nc"] == 3 and model.yaml["ch"] == 3 and model.yaml_file == "gelan-t.yaml"
    assert model.names == ["0", "1", "2"] and model.inplace is True
    assert not hasattr(model, "nc")
    assert model.stride.dtype == torch.float32
    assert model.head is model.model[-1]
    assert model.name == "gelan-t" and DetectionModel(model.yaml).name == "Model"
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.03)}
    assert all(int(norm.num_batches_tracked) == 0 and bool((norm.running_var == 1).all()) for norm in norms)


@pytest.mark.parametrize(
    "cfg", ["gelan-t.yaml", "gelan-t", Path("models/detect/gelan-t.yaml"), "somewhere/else/gelan-t.yaml"]
)
def test_yaml_by_name_or_path(cfg):
    assert find_model_yaml(cfg).name == "gelan-t.yaml"


def test_unknown_yaml_lists_the_shipped_ones():
    with pytest.raises(FileNotFoundError, match="yolov9-x.*yolov9-t.yaml"):
        DetectionModel("yolov9-x.yaml")


@pytest.mark.parametrize("nc", [0, -1, "many", True])
def test_impossible_class_counts_are_refused(nc):
    with pytest.raises(ValueError, match="class count"):
        DetectionModel("gelan-t.yaml", nc=nc)


def test_class_count_given_in_a_yaml_dict_is_not_written_back():
    model = DetectionModel("gelan-t.yaml")
    cfg = copy.deepcopy(model.yaml)
    changed = DetectionModel(cfg, nc=7)
    assert cfg["nc"] == 80 and changed.yaml["nc"] == 7
    assert changed.head.no == 71


def test_anchors_are_rounded_and_without_effect():
    model = DetectionModel("gelan-t.yaml", anchors=3.4)
    assert model.yaml["anchors"] == 3
    assert digest(model.state_dict().items()) == FIGURES["gelan-t"]["state"]


def test_last_row_must_be_a_head():
    cfg = copy.deepcopy(DetectionModel("gelan-t.yaml").yaml)
    cfg["head"] = cfg["head"][:-1]
    with pytest.raises(ValueError, match="last row"):
        DetectionModel(cfg)


def test_construction_draws_nothing_but_weights():
    torch.manual_seed(0)
    first = DetectionModel("gelan-t.yaml").state_dict()
    torch.manual_seed(0)
    second = DetectionModel("gelan-t.yaml").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_batch_equals_single_images(model, images):
    together = lead_of(model, images)
    apart = torch.cat([lead_of(model, image[None]) for image in images])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=2e-2)


def test_copies_and_pickles_give_the_same_bits(model, images):
    expected = lead_of(model, images)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert clone.head.shape is None
        assert torch.equal(lead_of(clone, images), expected)


def test_deep_copy_for_an_average_shares_nothing(model):
    clone = copy.deepcopy(model)
    own = {value.data_ptr() for value in model.state_dict().values()}
    assert not own & {value.data_ptr() for value in clone.state_dict().values()}


def test_half_and_back(model, images):
    expected = lead_of(model, images)
    model.half()
    assert model.head.stride.dtype == torch.float16 and model.stride.dtype == torch.float32
    with torch.no_grad():
        half = lead_prediction(model(images.half()))
    assert half.dtype == torch.float32
    assert float((half - expected)[:, :4].abs().mean()) < 0.5
    model.float()
    assert model.head.stride.dtype == torch.float32
    assert torch.isfinite(lead_of(model, images)).all()


def test_channels_last(model, images):
    expected = lead_of(model, images)
    model.to(memory_format=torch.channels_last)
    found = lead_of(model, images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-2)


def test_training_output_does_not_depend_on_the_eval_cache(model, images):
    model.train()
    before = head_branches(model(images))
    model.eval()
    lead_of(model, images)
    model.train()
    after = head_branches(model(images))
    assert all(
        torch.equal(a, b)
        for first, second in zip(before, after, strict=True)
        for a, b in zip(first, second, strict=True)
    )


def test_gradients_reach_every_trainable_parameter(model, images):
    model.train()
    sum(level.float().square().mean() for maps in head_branches(model(images)) for level in maps).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.slow
@pytest.mark.parametrize("has_cached_priors", [False, True])
def test_torchscript_trace_equals_eager(images, has_cached_priors):
    model = DetectionModel("yolov9-t.yaml", nc=5)
    fill_state_dict(model.state_dict())
    deployed = inference_form(model)
    deployed.head.export = True
    expected = lead_of(deployed, images)
    if not has_cached_priors:
        deployed.head.forget_priors()
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        traced = torch.jit.trace(deployed, images)
    torch.testing.assert_close(traced(images), expected, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(traced(images[:1]), expected[:1], rtol=1e-4, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["batch_free", "size_free"])
def test_onnx_equals_eager(tmp_path, images, is_dynamic):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = DetectionModel("yolov9-t.yaml", nc=5)
    fill_state_dict(model.state_dict())
    deployed = inference_form(model)
    deployed.head.export, deployed.head.dynamic = True, is_dynamic
    lead_of(deployed, images)
    axes = {"images": {0: "batch"}, "output0": {0: "batch"}}
    if is_dynamic:
        axes["images"] |= {2: "height", 3: "width"}
        axes["output0"] |= {2: "anchors"}
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            deployed,
            (images[:1],),
            str(path),
            opset_version=17,
            dynamo=False,
            input_names=["images"],
            output_names=["output0"],
            dynamic_axes=axes,
        )
    operators = {node.op_type for node in onnx.load(path).graph.node}
    if not is_dynamic:
        assert not operators & {"Slice", "Range", "Expand", "ConstantOfShape", "Cast"}
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (images, random_images(4, (1, 3, 96, 64)) if is_dynamic else images[:1]):
        (found,) = session.run(None, {"images": batch.numpy()})
        expected = lead_of(deployed, batch).numpy()
        np.testing.assert_allclose(found[:, :4], expected[:, :4], rtol=0, atol=2e-2)
        np.testing.assert_allclose(found[:, 4:], expected[:, 4:], rtol=0, atol=1e-4)


def test_matching_tensors_are_loaded_and_the_rest_explained():
    source = DetectionModel("gelan-t.yaml", nc=80)
    fill_state_dict(source.state_dict())
    target = DetectionModel("gelan-t.yaml", nc=5)
    state = {key: value.half() if value.is_floating_point() else value for key, value in source.state_dict().items()}
    del state["model.0.conv.weight"]
    state["model.99.extra"] = torch.zeros(1)
    transfer = target.load_matching(state, exclude=["model.1."])
    assert transfer.total == 1339
    assert transfer.transferred == transfer.total - sum(
        reason != "not in the model" for reason in transfer.reasons.values()
    )
    assert transfer.reasons["model.0.conv.weight"] == "not in the file"
    assert transfer.reasons["model.1.conv.weight"] == "excluded"
    assert transfer.reasons["model.99.extra"] == "not in the model"
    assert (
        "(80," in transfer.reasons["model.22.cv3.0.2.weight"] and "(5," in transfer.reasons["model.22.cv3.0.2.weight"]
    )
    assert str(transfer) == f"{transfer.transferred}/1339 tensors transferred"
    loaded = target.state_dict()["model.2.cv1.conv.weight"]
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded, source.state_dict()["model.2.cv1.conv.weight"], rtol=1e-3, atol=1e-3)


def test_head_widths_follow_a_weight_file():
    model = DetectionModel("gelan-t.yaml")
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert not model.match_head_widths(shapes)
    for level in range(3):
        shapes[f"model.22.cv3.{level}.0.conv.weight"] = (80, (64, 96, 128)[level], 3, 3)
    assert model.match_head_widths(shapes)
    # With an 80-wide class branch the smallest model has the size that was published for it.
    model.fuse()
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_001_840
    assert all(isinstance(module.act, nn.SiLU) for module in model.head.cv3.modules() if hasattr(module, "act"))


def test_a_rebuilt_branch_has_the_constants_of_the_model():
    model = DetectionModel("gelan.yaml", nc=5)
    head_widths = [(width, 64) for width, _ in model.head.hidden_widths()]
    shapes = {"model.22.cv2.0.0.conv.weight": (head_widths[0][0],), "model.22.cv3.0.0.conv.weight": (64,)}
    assert model.match_head_widths(shapes)
    blocks = [module for module in model.head.cv3.modules() if hasattr(module, "act")]
    assert blocks and all(isinstance(block.act, nn.ReLU) and block.bn.eps == 1e-3 for block in blocks)
