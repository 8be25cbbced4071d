"""A recorded set of 60 images: our figures against upstream's, and pycocotools through our json against its own."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

from utils.boxes import xywh2xyxy
from utils.evaluate.coco import CocoRecorder
from utils.evaluate.confusion import ConfusionMatrix
from utils.evaluate.matching import iou_thresholds, process_batch
from utils.evaluate.metrics import ap_per_class


def rows_of(file, size, columns):
    """Return the rows of a label file (n, ``columns``) with boxes as corners in pixels, confidence before class."""
    rows = (
        np.loadtxt(file, dtype=np.float32, ndmin=2) if file.exists() and file.stat().st_size else np.zeros((0, columns))
    )
    rows = torch.from_numpy(rows.astype(np.float32))
    boxes = xywh2xyxy(rows[:, 1:5] * torch.tensor([*size, *size], dtype=torch.float32))
    return torch.cat((boxes, rows[:, 5:6], rows[:, :1]), 1) if columns == 6 else torch.cat((rows[:, :1], boxes), 1)


@pytest.fixture(scope="module")
def eval_set(golden):
    """Return expected figures, and (number, (height, width), detections, labels) per image."""
    folder = golden("ops/eval_set")
    images = []
    with open(folder / "images.csv", newline="") as handle:
        for row in csv.DictReader(handle):
            size = int(row["width"]), int(row["height"])
            detections = rows_of(folder / "predictions" / f"{row['stem']}.txt", size, 6)
            labels = rows_of(folder / "labels" / f"{row['stem']}.txt", size, 5)
            images.append((int(row["stem"]), size[::-1], detections, labels))
    return json.loads((folder / "expected.json").read_text()), images


def test_figures_equal_upstreams(eval_set):
    expected, images = eval_set
    expected = expected["upstream"]
    correct = torch.cat([process_batch(found, labels, iou_thresholds()) for *_, found, labels in images])
    found = torch.cat([detections for *_, detections, _ in images]).numpy()
    true = torch.cat([labels for *_, labels in images])[:, 0].numpy()
    assert correct.sum(0).tolist() == expected["correct_by_threshold"]
    hits, alarms, p, r, f1, ap, classes = ap_per_class(correct.numpy(), found[:, 4], found[:, 5], true)
    summary = (p.mean(), r.mean(), ap[:, 0].mean(), ap.mean())
    assert summary == pytest.approx([expected[key] for key in ("P", "R", "mAP50", "mAP50_95")], abs=1e-9)
    for row, part in enumerate(expected["per_class"]):
        assert (classes[row], hits[row], alarms[row]) == (part["cls"], part["TP"], part["FP"])
        assert (p[row], r[row], f1[row]) == pytest.approx((part["P"], part["R"], part["F1"]), abs=1e-9)
        assert ap[row] == pytest.approx(part["AP_by_threshold"], abs=1e-9)


def test_confusion_matrix_equals_upstreams_but_for_false_alarms(eval_set):
    expected, images = eval_set
    matrix = ConfusionMatrix(nc=5)
    for *_, detections, labels in images:
        matrix.process_batch(detections, labels)
    theirs = np.array(expected["upstream"]["confusion_matrix"])
    np.testing.assert_array_equal(matrix.matrix[:, :5], theirs[:, :5])
    assert (matrix.matrix[:, 5] >= theirs[:, 5]).all()
    confident = sum(int((detections[:, 4] > 0.25).sum()) for *_, detections, _ in images)
    assert matrix.matrix[:5].sum() == confident


def test_json_judged_by_pycocotools(eval_set, golden, tmp_path):
    pytest.importorskip("pycocotools")
    expected, images = eval_set
    recorder = CocoRecorder()
    for number, shape, detections, labels in images:
        recorder.add(number, shape, detections, labels)
    recorder.write(tmp_path / "predictions.json")
    assert len(json.loads((tmp_path / "predictions.json").read_text())) == expected["predictions"]
    figures = recorder.judge()
    names = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "AP_small", "ap_medium": "AP_medium"}
    names |= {"ap_large": "AP_large", "ar1": "AR1", "ar10": "AR10", "ar100": "AR100", "ar_small": "AR_small"}
    for ours, theirs in names.items():
        assert getattr(figures, ours) == pytest.approx(expected["coco"][theirs], abs=1e-4), ours


def test_referee_refuses_what_does_not_fit(eval_set, tmp_path):
    pytest.importorskip("pycocotools")
    _, images = eval_set
    recorder = CocoRecorder()
    recorder.add("no number", images[0][1], images[0][2], images[0][3])
    truth = {"images": [{"id": 1}], "annotations": [], "categories": []}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    assert recorder.judge(tmp_path / "truth.json") is None
    assert CocoRecorder().judge() is None
