"""Files with NMS inside: their thresholds are known, and settings that these leave without effect are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from models.backend import DetectMultiBackend
from models.runners import BuiltInNms
from tests.deploy.fakes import ColourBackend, picture, write_picture
from tests.reference.tiny import save_tiny_dual
from utils.deploy.detector import Detector
from utils.deploy.exporter import export
from utils.deploy.predictor import Predictor
from utils.options import DetectOptions, ExportOptions

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

INSIDE = BuiltInNms(conf_thres=0.4, iou_thres=0.6, max_det=20)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dual(tmp_path_factory.mktemp("weights") / "best.pt")


@pytest.fixture(scope="module")
def files(weights: Path) -> dict[str, Path]:
    """Exported files by kind, one of them with NMS inside."""
    thresholds = {"conf_thres": INSIDE.conf_thres, "iou_thres": INSIDE.iou_thres, "topk_all": INSIDE.max_det}
    include = ["onnx", "onnx_end2end", "torchscript"]
    written, failures = export(ExportOptions(weights=[str(weights)], imgsz=[64, 64], include=include, **thresholds))
    assert not failures
    kinds = {"best.onnx": "onnx", "best-end2end.onnx": "onnx_end2end", "best.torchscript": "torchscript"}
    return {kinds[file.name]: file for file in written} | {"pt": weights}


@pytest.mark.parametrize("kind", ["pt", "torchscript", "onnx", "onnx_end2end"])
def test_the_backend_knows_what_is_inside(files: dict[str, Path], kind: str) -> None:
    assert DetectMultiBackend(files[kind]).built_in_nms == (INSIDE if kind == "onnx_end2end" else None)


def with_metadata(path: Path, target: Path, nms: str | None) -> Path:
    model = onnx.load(str(path))
    kept = {item.key: item.value for item in model.metadata_props if item.key != "nms"}
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, kept | ({} if nms is None else {"nms": nms}))
    onnx.save(model, str(target))
    return target


def test_thresholds_that_are_not_told_are_a_warning(files: dict[str, Path], tmp_path: Path, lines: list[str]) -> None:
    path = with_metadata(files["onnx_end2end"], tmp_path / "foreign.onnx", None)
    assert DetectMultiBackend(path).built_in_nms is None
    assert any("foreign.onnx holds NMS and does not tell its thresholds" in line for line in lines)


@pytest.mark.parametrize("nms", ["", "no", "[]", "5", "null", '{"conf_thres": 0.1}', json.dumps(dict.fromkeys("abc"))])
def test_thresholds_that_make_no_sense_name_the_file(files: dict[str, Path], tmp_path: Path, nms: str) -> None:
    path = with_metadata(files["onnx_end2end"], tmp_path / "odd.onnx", nms)
    with pytest.raises(ValueError, match="odd.onnx states the NMS .*; export it again"):
        DetectMultiBackend(path)


def test_opencv_cannot_run_it_and_that_is_said(files: dict[str, Path]) -> None:
    """Its boxes were taken for predictions, which gave none or wrong ones without a word."""
    with pytest.raises(ValueError, match=r"NMS, which OpenCV cannot run|OpenCV cannot read"):
        DetectMultiBackend(files["onnx_end2end"], dnn=True)


class WithNms(ColourBackend):
    built_in_nms = INSIDE
    pt = False


@pytest.mark.parametrize(
    ("asked", "idle"),
    [
        ({"conf_thres": 0.001}, ["--conf-thres 0.001"]),
        ({"conf_thres": 0.4, "iou_thres": 0.7}, ["--iou-thres 0.7"]),
        ({"conf_thres": 0.25, "iou_thres": 0.9}, ["--conf-thres 0.25", "--iou-thres 0.9"]),
        ({"conf_thres": 0.4, "iou_thres": 0.6}, []),
        ({"conf_thres": 0.9, "iou_thres": 0.1}, []),  # less is left of what the file gives
    ],
)
@pytest.mark.parametrize("has_nms", [False, True])
def test_settings_without_effect_are_told(
    tmp_path: Path, lines: list[str], asked: dict[str, float], idle: list[str], has_nms: bool
) -> None:
    model = (WithNms if has_nms else ColourBackend)()
    Predictor(model, imgsz=96, **asked)(picture())
    source = str(write_picture(tmp_path / "a.png"))
    Detector(DetectOptions(source=source, project=str(tmp_path), imgsz=[96], **asked), model=model).run()
    told = [line for line in lines if line.startswith("no effect of")]
    assert len(told) == (2 if idle and has_nms else 0)
    for line in told:
        assert line.startswith(f"no effect of {' and '.join(idle)}: the file holds NMS")
        assert "confidences below 0.4 and overlaps above IoU 0.6" in line and "export.py --include onnx_end2end" in line


@pytest.mark.parametrize(("max_det", "is_told"), [(20, False), (21, True)])
def test_the_limit_of_detections_is_told(lines: list[str], max_det: int, is_told: bool) -> None:
    Predictor(WithNms(), imgsz=96, max_det=max_det, conf_thres=0.5)
    assert any("at most 20 detections" in line for line in lines) is is_told


@pytest.mark.parametrize("kind", ["torchscript", "onnx", "onnx_end2end"])
def test_half_of_an_exported_file_is_told(files: dict[str, Path], lines: list[str], kind: str) -> None:
    detector = Predictor(files[kind], imgsz=64, half=True, device="cpu")
    assert detector.engine.model.fp16 is False and detector.engine.model.device == torch.device("cpu")
    assert any(f"--half has no effect on {files[kind].name}: an exported file keeps" in line for line in lines)
