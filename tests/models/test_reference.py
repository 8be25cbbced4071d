"""Every shipped model against recorded figures: keys, sizes, initial biases, outputs in all modes, folded outputs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.flops import flops
from models.graph import CONFIG_DIR, DetectionModel
from models.heads import head_branches, lead_prediction
from tests.models.reference import (
    ALL_MODELS,
    BOX_TOLERANCE_PX,
    FIGURES,
    SCORE_TOLERANCE,
    SMALL_MODELS,
    assert_matches,
    digest,
    random_images,
)
from tests.reference.fill import fill_in_key_order, fill_state_dict

# Rounding alone moves the training outputs of these by percents: a float64 run is as far from the record as ours.
ROUGH_MODELS = ("yolov9-e", "gelan-e", "yolov9", "gelan")

each_model = pytest.mark.parametrize("name", ALL_MODELS)
each_model_slowly = pytest.mark.parametrize(
    "name", [name if name in SMALL_MODELS else pytest.param(name, marks=pytest.mark.slow) for name in ALL_MODELS]
)
Golden = Callable[[str], Path]


@cache
def recorded_models(path: Path) -> dict[str, dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["cfgs"]


def recorded(golden: Golden, name: str) -> dict:
    return recorded_models(golden("models/models.json.gz"))[name]


def filled_model(name: str) -> DetectionModel:
    model = DetectionModel(f"{name}.yaml")
    fill_state_dict(model.state_dict())
    return model.eval()


def predictions(output: object) -> list[Tensor]:
    first = output[0]
    return first if isinstance(first, list) else [first]


def test_no_yaml_without_figures():
    assert {file.stem for file in CONFIG_DIR.glob("*.yaml")} == set(ALL_MODELS)


@each_model
def test_keys_shapes_and_order(name):
    figures = FIGURES[name]
    model = DetectionModel(f"{name}.yaml")
    state = model.state_dict()
    assert len(state) == figures["keys"]
    assert digest(state.items()) == figures["state"]
    assert digest(model.named_parameters()) == figures["parameters"]
    assert model.save == figures["save"]
    assert [row.np for row in model.model] == figures["row_params"]
    assert type(model.head).__name__ == figures["head"]
    assert model.stride.tolist() == [8.0, 16.0, 32.0]


@each_model
def test_sizes_of_both_forms(name):
    figures = FIGURES[name]
    model = DetectionModel(f"{name}.yaml")
    assert sum(parameter.numel() for parameter in model.parameters()) == figures["params"]
    assert len(list(model.modules())) == figures["layers"]
    assert flops(model) / 1e9 == pytest.approx(figures["gflops"], abs=1e-4)
    model.fuse()
    state = model.state_dict()
    assert len(state) == figures["keys_fused"]
    assert digest(state.items()) == figures["state_fused"]
    assert sum(parameter.numel() for parameter in model.parameters()) == figures["params_fused"]
    assert len(list(model.modules())) == figures["layers_fused"]
    assert flops(model) / 1e9 == pytest.approx(figures["gflops_fused"], abs=1e-4)


@each_model_slowly
def test_sampled_predictions(name):
    model = DetectionModel(f"{name}.yaml").eval()
    fill_in_key_order(model.state_dict())
    image = torch.from_numpy(np.random.RandomState(1).rand(1, 3, 64, 96).astype(np.float32))
    with torch.no_grad():
        found = predictions(model(image))
    assert len(found) == len(FIGURES[name]["predictions"])
    for prediction, expected in zip(found, FIGURES[name]["predictions"], strict=True):
        assert list(prediction.shape) == expected["shape"]
        assert float(prediction.double().sum()) == pytest.approx(expected["sum"], abs=0.05)
        flat = prediction.flatten()
        positions = (np.arange(12) * 7919 + 13) % flat.numel()
        values = flat[torch.from_numpy(positions)].tolist()
        is_box = positions // prediction.shape[2] < 4
        allowed = np.where(is_box, BOX_TOLERANCE_PX, SCORE_TOLERANCE)
        assert (np.abs(np.array(values) - expected["samples"]) <= allowed).all()


@each_model
def test_state_list_is_the_recorded_one(name, golden):
    expected = recorded(golden, name)
    model = DetectionModel(f"{name}.yaml")
    state = model.state_dict()
    found = [[key, list(value.shape), str(value.dtype).removeprefix("torch.")] for key, value in state.items()]
    assert found == expected["state"]
    assert [key for key, _ in model.named_parameters()] == expected["parameters"]
    assert [key for key, value in model.named_parameters() if not value.requires_grad] == expected[
        "requires_grad_false"
    ]


@each_model
def test_initial_biases(name, golden):
    head = DetectionModel(f"{name}.yaml").head
    for key, (low, high) in recorded(golden, name)["bias_init"].items():
        bias = head.get_parameter(key)
        assert (bias.min().item(), bias.max().item()) == pytest.approx((low, high), abs=1e-6)


@each_model_slowly
def test_eval_and_folded_outputs(name, golden):
    expected = recorded(golden, name)
    # Rounding is amplified differently by each model; three times the recorded amplification covers other machines.
    box_slack = max(3 * expected["fused"]["maxdiff_box"], BOX_TOLERANCE_PX)
    score_slack = max(3 * expected["fused"]["maxdiff_cls"], SCORE_TOLERANCE)
    model = filled_model(name)
    images = random_images(1, (1, 3, 256, 320))
    with torch.no_grad():
        output = model(images)
        folded_output = model.fuse()(images)
    for key, result in (("eval", output), ("fused", folded_output)):
        for branch, prediction in zip(("lead", "aux"), reversed(predictions(result)), strict=False):
            figures = (expected["fused"] if key == "fused" else expected["eval"])[branch]
            # The recorded amplification is the lead's; the auxiliary branches have wider logits.
            factor = 1 if branch == "lead" else 10
            assert_matches(prediction[:, :4], figures["box"], factor * box_slack)
            assert_matches(prediction[:, 4:], figures["cls"], factor * score_slack)
    difference = (lead_prediction(output) - lead_prediction(folded_output)).abs()
    assert float(difference[:, :4].max()) <= box_slack
    assert float(difference[:, 4:].max()) <= score_slack
    assert [[key, list(value.shape)] for key, value in model.state_dict().items()] == expected["fused"]["state"]


@each_model_slowly
def test_raw_maps_in_both_modes(name, golden):
    expected = recorded(golden, name)
    model = filled_model(name)
    images = random_images(1, (1, 3, 256, 320))
    with torch.no_grad():
        evaluated = head_branches(model(images))
        trained = head_branches(model.train()(images))
    slack = 2e-3, 5e-2 if name in ROUGH_MODELS else 2e-3
    for found, figures, share in zip(
        (evaluated, trained), (expected["eval_raw"], expected["train_raw"]), slack, strict=True
    ):
        assert len(found) == len(figures)
        for maps, levels in zip(found, figures, strict=True):
            for level, recorded_level in zip(maps, levels, strict=True):
                assert_matches(level, recorded_level, share * recorded_level["absmax"])


@each_model_slowly
def test_statistics_of_every_row(name, golden):
    expected = recorded(golden, name)["layer_stats"]
    model = filled_model(name)
    seen: dict[str, list[Tensor]] = {}

    def remember(layer: torch.nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        seen[str(layer.i)] = [tensor.clone() for tensor in tensors]  # later rows may activate in place

    for row in model.model[:-1]:
        row.register_forward_hook(remember)
    with torch.no_grad():
        model(random_images(1, (1, 3, 256, 320)))
    for index, tensors in seen.items():
        assert model.model[int(index)].type.rsplit(".", 1)[-1] == expected[index]["type"]
        for tensor, (shape, mean, deviation, largest) in zip(tensors, expected[index]["out"], strict=True):
            assert list(tensor.shape) == shape
            slack = 1e-4 * largest
            assert float(tensor.double().mean()) == pytest.approx(mean, abs=slack)
            assert float(tensor.double().std()) == pytest.approx(deviation, abs=slack)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_complete_predictions(name, golden):
    model = filled_model(name)
    images = random_images(1, (1, 3, 256, 320))
    with np.load(golden(f"models/forward_{name}.npz")) as stored, torch.no_grad():
        output = model(images)
        arrays = {"lead": lead_prediction(output), "aux": predictions(output)[0]}
        arrays["lead_fused"] = lead_prediction(model.fuse()(images))
        for key in stored.files:
            found = arrays[key].numpy()
            np.testing.assert_allclose(found[:, :4], stored[key][:, :4], rtol=0, atol=0.03)
            np.testing.assert_allclose(found[:, 4:], stored[key][:, 4:], rtol=0, atol=2e-4)
