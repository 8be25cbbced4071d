"""What only a CUDA device can show: captured training passes, folding and decoding there."""

from __future__ import annotations

import pytest
import torch

from models.graph import DetectionModel
from models.heads import head_branches, lead_prediction
from models.reparam import inference_form
from tests.models.reference import random_images
from tests.reference.fill import fill_state_dict

pytestmark = pytest.mark.gpu


def filled() -> DetectionModel:
    model = DetectionModel("yolov9-t.yaml", nc=5)
    fill_state_dict(model.state_dict())
    return model.cuda()


def test_training_pass_can_be_captured():
    model = filled().train()
    images = random_images(3, (2, 3, 128, 128)).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            model(images)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = head_branches(model(images))
    images.copy_(random_images(4, (2, 3, 128, 128)))
    graph.replay()
    found = [level.clone() for maps in captured for level in maps]
    with torch.no_grad():
        expected = [level for maps in head_branches(model(images)) for level in maps]
    for replayed, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=1e-2, atol=2e-2)


def test_training_pass_does_not_wait_for_the_device():
    model = filled().train()
    images = random_images(3, (2, 3, 128, 128)).cuda()
    model(images)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = head_branches(model(images))
        sum(level.square().mean() for maps in output for level in maps).backward()
        model.eval()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_inference_form_on_the_device_equals_the_cpu():
    model = filled().eval()
    images = random_images(3, (2, 3, 128, 160))
    deployed = inference_form(model)
    assert deployed.head.stride.is_cuda
    with torch.no_grad():
        found = lead_prediction(deployed(images.cuda())).cpu()
        expected = lead_prediction(inference_form(model.cpu())(images))
        half = lead_prediction(deployed.half()(images.cuda().half())).cpu()
    assert float((found - expected)[:, :4].abs().mean()) < 0.1
    assert half.dtype == torch.float32 and float((half - expected)[:, :4].abs().mean()) < 1.0


def test_cached_priors_need_no_transfer_on_the_second_pass():
    model = inference_form(filled())
    images = random_images(3, (1, 3, 64, 64)).cuda()
    with torch.no_grad():
        model(images)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(images)
        finally:
            torch.cuda.set_sync_debug_mode("default")
