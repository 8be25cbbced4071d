"""The reference without torch does what the program does, step by step and as a whole."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
import torch

from models.backend import DetectMultiBackend
from models.checkpoint import Checkpoint, save_checkpoint
from tests.reference.tiny import tiny_dual
from utils.boxes import scale_boxes
from utils.data.images import letterbox
from utils.deploy.exporter import export
from utils.nms import non_max_suppression
from utils.options import ExportOptions

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "onnx_numpy.py"
SIZES = [(64, 96), (96, 64), (33, 70), (480, 640), (641, 427), (10, 650), (128, 128), (7, 9)]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("onnx_numpy", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Coarse coloured noise, smooth enough to be like a photograph."""
    small = np.random.default_rng(seed).integers(0, 256, (max(2, height // 6), max(2, width // 6), 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", [(64, 96), (128, 128)])
def test_letterbox(example: ModuleType, size: tuple[int, int], target: tuple[int, int]) -> None:
    image = picture(*size)
    found, scale, left, top = example.letterbox(image, *target)
    expected, (ratio, _), _ = letterbox(image, target, auto=False)
    assert found.shape == expected.shape and scale == pytest.approx(ratio)
    assert np.abs(found.astype(int) - expected).max() <= 1
    rows = np.array([[3.0, 4, 50, 60, 0.9, 1], [-5, -5, 500, 500, 0.8, 0]], np.float32)
    back = example.to_picture(rows, scale, left, top, *size)
    wanted = scale_boxes(target, torch.from_numpy(rows[:, :4].copy()), size).round()
    assert np.abs(back[:, :4] - wanted.numpy()).max() == 0


@pytest.mark.parametrize("seed", range(5))
def test_decoding_and_nms(example: ModuleType, seed: int) -> None:
    prediction = torch.rand(1, 7, 300, generator=torch.Generator().manual_seed(seed))
    prediction[:, :2] *= 120
    prediction[:, 2:4] = prediction[:, 2:4] * 60 + 8
    for limit in (5, 300):
        found = example.suppress(example.decode(prediction[0].numpy(), 0.3), 0.45, limit)
        expected = non_max_suppression(prediction, 0.3, 0.45, max_det=limit)[0].numpy()
        assert found.shape == expected.shape and len(found) > 4
        assert np.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"dynamic_hw": True}, {"half": True, "input_name": "input"}, {"batch_size": 3}], ids=str
)
def test_whole_way(example: ModuleType, tmp_path: Path, options: dict) -> None:
    pytest.importorskip("onnxruntime")
    model = tiny_dual()
    names = {0: "bolt", 1: "螺母", 2: "washer"}
    save_checkpoint(tmp_path / "best.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, names=names))
    settings = {"imgsz": [96, 96], "include": ["onnx"], **options}
    (file,), _ = export(ExportOptions(weights=[str(tmp_path / "best.pt")], **settings))
    detector = example.Detector(file, 70)  # rounded up to the stride where the file leaves the size free
    assert detector.names == names
    image = picture(96, 80)
    found = detector(image, 0.5, 0.45)
    boxed = letterbox(image, (96, 96), auto=False)[0]
    images = torch.from_numpy(np.ascontiguousarray(boxed.transpose(2, 0, 1)[None])).float() / 255
    rows = non_max_suppression(DetectMultiBackend(file)(images), 0.5, 0.45)[0]
    rows[:, :4] = scale_boxes((96, 96), rows[:, :4], image.shape[:2]).round()
    assert len(found) == len(rows) > 3
    assert np.allclose(found, rows.numpy(), atol=1e-4)


def test_it_needs_no_torch_and_reads_what_opencv_reads(example: ModuleType, tmp_path: Path) -> None:
    image = picture(40, 60)
    cv2.imwrite(str(tmp_path / "a.png"), image[..., ::-1])
    assert np.array_equal(example.read_picture(tmp_path / "a.png"), image)
    with pytest.raises(ValueError, match="README.md"):
        example.read_picture(EXAMPLE.parents[1] / "README.md")
    code = (
        f"import runpy, sys; sys.argv = ['x', '--help']\ntry: runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    code += "finally: print([name for name in sys.modules if name.split('.')[0] in ('torch', 'models', 'utils')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]"


def test_file_with_nms_inside_is_refused(example: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = tiny_dual()
    save_checkpoint(tmp_path / "best.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3))
    options = ExportOptions(weights=[str(tmp_path / "best.pt")], imgsz=[64, 64], include=["onnx_end2end"])
    (file,), _ = export(options)
    with pytest.raises(ValueError, match="gives num_dets, boxes, scores, classes.*export without --end2end"):
        example.Detector(file)


def test_pictures_without_content_and_of_16_bits(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(ValueError, match="empty.jpg is no picture"):
        example.read_picture(tmp_path / "empty.jpg")
    pytest.importorskip("PIL")
    grey = picture(20, 30)[..., 0].astype(np.uint16) * 257
    cv2.imwrite(str(tmp_path / "deep.png"), grey)
    with_opencv = example.read_picture(tmp_path / "deep.png")
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert np.array_equal(example.read_picture(tmp_path / "deep.png"), with_opencv)
