"""Layer table, sizes in both forms, profile and feature maps; none of them may change the model."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from models.flops import flops
from models.graph import DetectionModel
from models.heads import lead_prediction
from models.summary import inference_size, model_size
from tests.models.reference import random_images
from utils.log import LOGGER


@pytest.fixture
def lines() -> list[str]:
    """Collect what is logged during a test."""
    collected: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            collected.append(record.getMessage())

    handler = Collector()
    LOGGER.addHandler(handler)
    yield collected
    LOGGER.removeHandler(handler)


def test_summary_shows_both_forms(lines):
    DetectionModel("yolov9-t.yaml").info()
    assert "yolov9-t summary: 1219 layers, 3717680 parameters, 3717648 gradients, 16.5 GFLOPs" in lines
    assert "yolov9-t for inference (lead branch only, fused): 489 layers, 2407632 parameters, 9.8 GFLOPs" in lines
    table = [line for line in lines if "models." in line or "torch.nn" in line]
    assert len(table) == 30
    assert table[4].split()[:5] == ["4", "-1", "1", "65216", "models.common.RepNCSPELAN4"]


def test_folded_single_model_has_one_form(lines):
    DetectionModel("gelan-t.yaml").eval().fuse().info(verbose=False)
    (line,) = lines
    assert line.startswith("gelan-t summary: 489 layers, 2407632 parameters, 0 gradients, 9.8 GFLOPs")


def test_flops_scale_with_the_area():
    model = DetectionModel("gelan-t.yaml")
    assert flops(model, 320) == pytest.approx(flops(model) / 4)
    assert flops(model, (320, 640)) == pytest.approx(flops(model) / 2)


def test_counting_changes_nothing():
    model = DetectionModel("yolov9-t.yaml", nc=2).train()
    model.model[0].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    model_size(model)
    inference_size(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training and model.head.training and not model.model[0].training and not model.model[0].bn.training
    assert not any(module._forward_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_profile_logs_every_row_and_returns_the_output(lines):
    model = DetectionModel("gelan-t.yaml", nc=2).eval()
    images = random_images(3, (1, 3, 64, 64))
    with torch.no_grad():
        profiled = lead_prediction(model(images, profile=True))
        assert torch.equal(profiled, lead_prediction(model(images)))
    assert len(lines) == 1 + 23 + 1
    assert float(lines[-1].split()[1]) == pytest.approx(flops(model, 64) / 1e9, abs=0.02)


def test_feature_maps_are_written(tmp_path):
    model = DetectionModel("yolov9-m.yaml", nc=2).eval()
    with torch.no_grad():
        model(random_images(3, (1, 3, 64, 64)), visualize=tmp_path / "maps")
    stored = np.load(tmp_path / "maps" / "stage1_Conv_features.npy")
    assert stored.shape == (32, 32, 32)
    assert (tmp_path / "maps" / "stage1_Conv_features.png").stat().st_size > 0
    assert not list((tmp_path / "maps").glob("*CBLinear*")) and not list((tmp_path / "maps").glob("*DDetect*"))
