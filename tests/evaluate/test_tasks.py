"""What ``val_dual.py`` does around the measuring: limits inside files, folders, studies; no network is run."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from models.runners import BuiltInNms
from utils.evaluate import plots, tasks
from utils.evaluate.sliced import Slicing
from utils.options import ValOptions
from utils.slicing import picture_windows

INSIDE = BuiltInNms(conf_thres=0.25, iou_thres=0.45, max_det=100)


def test_limits_inside_a_file_are_told_and_recorded(log):
    model = SimpleNamespace(built_in_nms=INSIDE)
    real = tasks._limits_inside(ValOptions(), model, "best.onnx")
    assert real == {"confidence": 0.25, "NMS IoU": 0.45, "boxes per image": 100, "NMS inside the file": True}
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert all(text in record.message for text in ("best.onnx", "0.25", "0.45", "100", "--conf-thres"))


def test_limits_inside_a_file_that_are_wider_change_nothing(log):
    model = SimpleNamespace(built_in_nms=dataclasses.replace(INSIDE, max_det=1000))
    real = tasks._limits_inside(ValOptions(conf_thres=0.3, iou_thres=0.4, max_det=50), model, "best.onnx")
    assert (real["confidence"], real["NMS IoU"], real["boxes per image"]) == (0.3, 0.4, 50)
    assert not log.records
    assert tasks._limits_inside(ValOptions(), SimpleNamespace(built_in_nms=None), "best.pt") == {}


WEIGHTS = [
    *("a/best.onnx", "b/best.onnx", "b/best.pt", "best.pt", "best", "b_best.pt", "b/b_best.onnx"),
    *(f"runs/train/{run}/weights/{name}.pt" for run in ("exp", "exp2", "b") for name in ("best", "last")),
]


def test_studies_of_files_of_one_name_have_names_of_their_own():
    names = tasks._study_names(WEIGHTS)
    assert len(set(names)) == len(WEIGHTS) and not any("/" in name for name in names)
    assert tasks._study_names(["yolov9-t.pt"]) == ["yolov9-t"]
    assert tasks._study_names(WEIGHTS[-6:-4]) == ["exp_best", "exp_last"]


def test_a_study_of_several_files_keeps_all_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "DPI", 30)
    monkeypatch.setattr(tasks, "STUDY_SIZES", (64, 96))
    monkeypatch.setattr(tasks, "_refuse_fixed_sizes", lambda _: None)
    drawn = []
    monkeypatch.setattr(tasks, "plot_study", lambda sizes, studies, path: drawn.append(studies))

    def measure(options, weights):
        value = options.imgsz + WEIGHTS.index(weights) / 100
        return SimpleNamespace(summary=lambda: (value,) * 7, speed_ms=(1.0, 2.0, 3.0))

    monkeypatch.setattr(tasks, "validate", measure)
    results = tasks.evaluate(ValOptions(data="my.yaml", task="study", weights=WEIGHTS))
    assert len(results) == 2 * len(WEIGHTS)
    tables = sorted(Path().glob("study_my_*.txt"))
    first = sorted(np.loadtxt(table)[0, 0] for table in tables)
    assert first == pytest.approx([64 + index / 100 for index in range(len(WEIGHTS))])
    assert zipfile.ZipFile("study.zip").namelist() == [str(table) for table in tables]
    assert [len(studies) for studies in drawn] == [len(WEIGHTS)]


def test_a_study_of_a_file_of_one_size_is_refused_before_anything_is_measured(monkeypatch):
    def load(_, weights, device):
        return SimpleNamespace(static_shape=(160, 160) if weights == "fixed.onnx" else None)

    monkeypatch.setattr(tasks, "_load", load)
    monkeypatch.setattr(tasks, "validate", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"fixed\.onnx is made for 160x160 only: .*--dynamic-hw"):
        tasks.evaluate(ValOptions(task="study", device="cpu", weights=["a.pt", "free.onnx", "fixed.onnx"]))


@pytest.mark.parametrize(("size", "overlap"), [(33, 0.9), (64, 0.2), (640, 0.0)])
def test_passes_are_counted_before_they_are_made(log, size, overlap):
    shapes = np.array([(160, 160), (100, 700), (640, 480), (33, 33), (20, 64)])  # width, height
    passes = Slicing(size=size, overlap=overlap, imgsz=64).passes(shapes)
    assert passes.tolist() == [len(picture_windows(height, width, size, overlap)) for width, height in shapes.tolist()]
    part = SimpleNamespace(shapes=shapes)
    dataset = SimpleNamespace(report=SimpleNamespace(taking_part=lambda: part))
    tasks._say_passes(Slicing(size=size, overlap=overlap, imgsz=64), dataset)
    (record,) = log.records
    assert f"{passes.sum():,} in all" in record.message
    assert (record.levelname == "WARNING") == (passes.mean() > tasks.MANY_PASSES)
    assert ("--slice-overlap" in record.message) == (record.levelname == "WARNING")
