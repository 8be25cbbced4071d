"""NMS inside an ONNX file: ONNX Runtime gives the detections that our NMS gives behind the plain prediction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from models.backend import DetectMultiBackend
from models.runners import END2END_OUTPUTS, as_prediction
from tests.reference.tiny import save_tiny_dual
from utils.deploy.end2end import NmsSettings, add_nms
from utils.deploy.exporter import export
from utils.nms import non_max_suppression
from utils.options import ExportOptions

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

CLASSES = 3


def nms_session(settings: NmsSettings, num_classes: int, anchors: int | None, opset: int) -> object:
    """A graph that is nothing but the appended part."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    shape = ["batch", 4 + num_classes, anchors or "anchors"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["images"], ["output0"])],
        "part",
        [helper.make_tensor_value_info("images", kind, shape)],
        [helper.make_tensor_value_info("output0", kind, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    add_nms(model, settings, num_classes, anchors)
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def random_prediction(seed: int, batch: int, anchors: int, num_classes: int = CLASSES) -> torch.Tensor:
    """Overlapping boxes, a few with equal scores in two classes."""
    generator = torch.Generator().manual_seed(seed)
    prediction = torch.rand(batch, 4 + num_classes, anchors, generator=generator)
    prediction[:, :2] *= 120
    prediction[:, 2:4] = prediction[:, 2:4] * 60 + 8
    prediction[:, 4:] **= 2
    prediction[:, 5, ::7] = prediction[:, 4, ::7]
    return prediction


def run(session: object, prediction: torch.Tensor) -> list[torch.Tensor]:
    assert [output.name for output in session.get_outputs()] == list(END2END_OUTPUTS)
    return [torch.from_numpy(value) for value in session.run(None, {"images": prediction.numpy()})]


@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize("anchors", [None, 200])
@pytest.mark.parametrize("batch", [1, 3])
def test_detections_are_those_of_our_nms(batch: int, anchors: int | None, opset: int) -> None:
    settings = NmsSettings(conf_thres=0.3, iou_thres=0.5, max_det=40)
    session = nms_session(settings, CLASSES, anchors, opset)
    for seed in range(5):
        prediction = random_prediction(seed, batch, 200)
        counts, boxes, scores, classes = run(session, prediction)
        assert counts.dtype == classes.dtype == torch.int32 and boxes.shape == (batch, 40, 4)
        expected = non_max_suppression(prediction, 0.3, 0.5, max_det=40)
        for image, wanted in enumerate(expected):
            count = int(counts[image, 0])
            assert count == len(wanted) > 10
            assert torch.allclose(boxes[image, :count], wanted[:, :4], atol=1e-3)
            assert torch.equal(scores[image, :count], wanted[:, 4])
            assert torch.equal(classes[image, :count], wanted[:, 5].int())
            assert not boxes[image, count:].any() and not scores[image, count:].any()
            assert not classes[image, count:].any()


def test_images_without_detections_and_with_few_anchors() -> None:
    session = nms_session(NmsSettings(conf_thres=0.5, iou_thres=0.5, max_det=50), CLASSES, 4, 17)
    prediction = random_prediction(0, 2, 4)
    prediction[0, 4:] = 0.1
    prediction[1, 4:] = torch.tensor([[0.9], [0.2], [0.3]])
    prediction[1, 0] = torch.arange(4) * 200.0
    counts, boxes, scores, _ = run(session, prediction)
    assert counts.flatten().tolist() == [0, 4]
    assert boxes.shape == (2, 50, 4) and not scores[0].any()


def test_confidence_is_a_strict_limit_and_one_class_works() -> None:
    session = nms_session(NmsSettings(conf_thres=0.5, iou_thres=0.5, max_det=5), 1, None, 17)
    prediction = torch.tensor([[[50.0, 150], [50, 50], [20, 20], [20, 20], [0.5, 0.75]]])
    counts, _, scores, classes = run(session, prediction)
    assert counts.item() == 1 and scores[0, 0] == 0.75 and classes[0, 0] == 0


def test_detections_survive_the_way_back() -> None:
    prediction = random_prediction(3, 2, 100)
    wanted = non_max_suppression(prediction, 0.3, 0.5, max_det=30)
    padded = [torch.cat((rows, torch.zeros(30 - len(rows), 6))) for rows in wanted]
    boxes, scores, classes = torch.stack(padded).split((4, 1, 1), 2)
    back = as_prediction(boxes, scores[..., 0], classes[..., 0].int(), num_classes=CLASSES)
    assert back.shape == (2, 4 + CLASSES, 30)
    for rows, again in zip(wanted, non_max_suppression(back, 0.3, 0.5, max_det=30), strict=True):
        assert torch.allclose(rows, again, atol=1e-3)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dual(tmp_path_factory.mktemp("weights") / "best.pt")


@pytest.mark.parametrize("options", [{}, {"dynamic": True, "simplify": True}, {"dynamic_hw": True}], ids=str)
def test_exported_file_gives_the_detections_of_the_weights(weights: Path, tmp_path: Path, options: dict) -> None:
    copied = tmp_path / "best.pt"
    copied.write_bytes(weights.read_bytes())
    thresholds = {"conf_thres": 0.4, "iou_thres": 0.6, "topk_all": 20}
    files, failures = export(
        ExportOptions(weights=[str(copied)], imgsz=[64, 96], include=["onnx"], end2end=True, **thresholds, **options)
    )
    assert not failures and [file.name for file in files] == ["best-end2end.onnx"]
    model = onnx.load(str(files[0]))
    assert {item.domain for item in model.opset_import} == {""}
    metadata = {item.key: item.value for item in model.metadata_props}
    assert json.loads(metadata["nms"]) == {"conf_thres": 0.4, "iou_thres": 0.6, "max_det": 20}
    assert metadata["stride"] == "32" and "washer" in metadata["names"]
    detector = DetectMultiBackend(files[0])
    assert detector.names[2] == "washer"
    images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    found = non_max_suppression(detector(images), 0.4, 0.6, max_det=20)
    expected = non_max_suppression(DetectMultiBackend(weights)(images), 0.4, 0.6, max_det=20)
    for wanted, given in zip(expected, found, strict=True):
        assert len(wanted) > 0
        assert np.allclose(given, wanted, atol=1e-2)


def test_old_operator_sets_are_refused(weights: Path) -> None:
    options = ExportOptions(weights=[str(weights)], imgsz=[64, 64], include=["onnx_end2end"], opset=12)
    assert "needs 13 or more" in export(options)[1][0]
