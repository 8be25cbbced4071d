"""One model, one number: at the end of training, from its file, in its deployed form, and as ONNX.

The labels are what the network finds itself, moved and thinned out: so it is far from perfect on them without having
been trained for long. One epoch with steps too small to matter then leads through the end of a real training.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from models.checkpoint import Checkpoint, build_model, load_checkpoint, save_checkpoint
from models.reparam import to_single_head
from tests.evaluate.test_val_dual import make_model, measure, relabelled
from utils.files import write_yaml
from utils.options import ExportOptions, TrainOptions
from utils.train.trainer import Trainer

pytestmark = pytest.mark.slow
SUMMARY = ("precision", "recall", "map50", "map")


@pytest.fixture(scope="module")
def training(shapes_dataset, tmp_path_factory):
    """Return the final validation of a training, the data YAML and the run's folder."""
    folder = tmp_path_factory.mktemp("agreement")
    start = folder / "start.pt"
    model = make_model("yolov9-t.yaml")
    save_checkpoint(
        start, Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, names=model.names, kind="stripped")
    )
    measure(shapes_dataset, start, folder / "runs", save_txt=True, max_det=6, exist_ok=True)
    labels = folder / "runs" / "exp" / "labels"
    for file in labels.glob("*.txt"):
        rows = np.loadtxt(file, ndmin=2)
        shift = np.random.default_rng(len(rows)).normal(0, 0.06, (len(rows), 2))
        rows[:, 1:3] += shift * rows[:, 3:5]
        np.savetxt(file, rows[::2], fmt="%d %.6f %.6f %.6f %.6f")
    data = relabelled(shapes_dataset, labels, folder / "set")
    write_yaml(folder / "still.yaml", {"lr0": 1e-9, "warmup_bias_lr": 0.0, "mosaic": 0.0, "mixup": 0.0})
    options = {"epochs": 1, "batch_size": 3, "imgsz": 128, "workers": 0, "device": "cpu", "noplots": True}
    trainer = Trainer(
        TrainOptions(
            data=str(data), weights=str(start), hyp=str(folder / "still.yaml"), project=str(folder / "train"), **options
        )
    )
    return trainer.fit(), data, folder / "train" / "exp"


def summary(result):
    return [getattr(result, name) for name in SUMMARY]


def test_the_same_number_everywhere(training, tmp_path):
    trained, data, run = training
    assert 0.1 < trained.map < 0.9, "neither nothing nor everything is found"
    best = run / "weights" / "best.pt"
    from_file = measure(data, best, tmp_path, name="file")
    assert summary(from_file) == pytest.approx(summary(trained), abs=1e-3)
    assert from_file.sizes.total.ap == pytest.approx(trained.sizes.total.ap, abs=1e-3)

    single = to_single_head(build_model(load_checkpoint(best)))
    file = tmp_path / "single.pt"
    save_checkpoint(
        file, Checkpoint(model=single.state_dict(), yaml=single.yaml, nc=3, names=single.names, kind="stripped")
    )
    assert summary(measure(data, file, tmp_path, name="single")) == pytest.approx(summary(trained), abs=1e-3)


def test_the_same_number_from_onnx(training, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from utils.deploy.exporter import export

    trained, data, run = training
    best = tmp_path / "best.pt"
    best.write_bytes((run / "weights" / "best.pt").read_bytes())
    export(ExportOptions(weights=[str(best)], include=["onnx"], imgsz=[128], batch_size=1, dynamic_hw=True))
    free = measure(data, best.with_suffix(".onnx"), tmp_path, name="free")
    assert summary(free) == pytest.approx(summary(trained), abs=1e-3)
    assert json.loads((tmp_path / "free" / "evaluation.json").read_text())["settings"]["rectangular"] is True

    export(ExportOptions(weights=[str(best)], include=["onnx"], imgsz=[128], batch_size=1))
    fixed = measure(data, best.with_suffix(".onnx"), tmp_path, name="fixed")
    square = measure(data, best, tmp_path, name="square", rect=False)
    assert summary(fixed) == pytest.approx(summary(square), abs=1e-3)
