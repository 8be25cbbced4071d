"""The evaluation file: complete, small, and honest about what could not be measured; the choice of worst images."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from tests.evaluate.fakes import FakeLoader, FakeModel, prediction, shape_entry
from tests.evaluate.run_kit import NAMES, validate_pictures
from utils.evaluate import record
from utils.evaluate.record import FILE_NAME, PICTURE_SIDE, write_evaluation
from utils.evaluate.result import worst_images
from utils.evaluate.scene import Findings, Scene
from utils.evaluate.validator import Validator


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return validate_pictures(tmp_path_factory.mktemp("pictures"))


def test_everything_is_there(result, tmp_path):
    path = write_evaluation(result, tmp_path, epoch=3)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert path == tmp_path / FILE_NAME and content["epoch"] == 3
    assert content["map"] == pytest.approx(result.map, abs=1e-5)
    assert content["coco"]["ap"] == pytest.approx(result.sizes.total.ap, abs=1e-5)
    assert [row["name"] for row in content["classes"]] == list(NAMES.values())
    labelled = dict(zip(result.curves.classes.tolist(), result.curves.labels.tolist(), strict=True))
    assert {row["class"]: row["labels"] for row in content["classes"]} == {
        number: labelled.get(number, 0) for number in NAMES
    }
    assert content["classes"][3]["ap"] is None, "a class without labels has no figure"
    matrix = np.zeros_like(result.confusion)
    for row, column, count in content["confusion"]["cells"]:
        matrix[row, column] = count
    np.testing.assert_array_equal(matrix, result.confusion)
    assert content["settings"]["confidence"] == 0.001 and content["settings"]["numbers"] == "float32"
    curves = content["curves"]
    assert len(curves["axis"]) == len(curves["f1"]["mean"]) == 101
    at = np.argmin(abs(np.array(curves["axis"]) - content["operating_confidence"]))
    assert curves["precision"]["mean"][at] == pytest.approx(content["precision"], abs=0.02)


def test_worst_images_are_drawn_with_labels_and_detections(result, tmp_path):
    content = json.loads(write_evaluation(result, tmp_path).read_text(encoding="utf-8"))
    worst = content["worst"]
    assert worst["missed"] and worst["false"]
    for kind, entries in worst.items():
        counts = [entry[kind] for entry in entries]
        assert counts == sorted(counts, reverse=True) and counts[-1] > 0
        for entry in entries:
            for picture in (entry["labels"], entry["detections"]):
                image = cv2.imdecode(np.frombuffer(base64.b64decode(picture), np.uint8), cv2.IMREAD_COLOR)
                assert image.shape == (PICTURE_SIDE, PICTURE_SIDE, 3)
    assert len(json.dumps(content)) < 1.5e6


def test_pictures_can_be_left_out(result, tmp_path):
    path = write_evaluation(result, tmp_path, use_pictures=False)
    assert json.loads(path.read_text(encoding="utf-8"))["worst"] == {} and path.stat().st_size < 30_000


def test_pictures_that_have_gone_are_named_without_being_drawn(tmp_path):
    result = validate_pictures(tmp_path)
    for picture in (tmp_path / "pictures").iterdir():
        picture.unlink()
    content = json.loads(write_evaluation(result, tmp_path).read_text(encoding="utf-8"))
    assert {entry["labels"] for entry in content["worst"]["missed"]} == {None}


def test_a_folder_that_cannot_be_written_ends_nothing(result, tmp_path, log):
    (tmp_path / "file").write_text("")
    assert write_evaluation(result, tmp_path / "file" / "run") is None
    assert "was not written" in log.text


def test_figures_that_are_not_finite_are_written_as_unknown(result, tmp_path):
    settings = {"conf_thres": float("inf"), "iou_thres": np.float32("nan"), "max_det": np.int64(3)}
    path = write_evaluation(replace(result, settings=settings), tmp_path, use_pictures=False)
    assert json.loads(path.read_text())["settings"] == {"conf_thres": None, "iou_thres": None, "max_det": 3}


def test_an_evaluation_of_nothing(tmp_path):
    result = Validator(FakeLoader([]), names={0: "a"}, device="cpu").run(FakeModel([]))
    content = json.loads(write_evaluation(result, tmp_path).read_text(encoding="utf-8"))
    assert content["coco"]["ap"] is None and content["curves"] == {} and content["worst"] == {"missed": [], "false": []}


def test_where_nothing_is_right_the_worst_images_show_what_detection_would(tmp_path):
    """No confidence is best then; at confidence 0 a picture would be covered with hundreds of boxes."""
    found = [(50 + shift, 50, 20, 20, 0, 0.01 + 0.09 * shift) for shift in range(10)]
    batch = (torch.zeros(1, 3, 96, 96, dtype=torch.uint8), torch.zeros(0, 6), ("a.jpg",), (shape_entry((96, 96)),))
    result = Validator(FakeLoader([batch]), names={0: "a"}, device="cpu", iou_thres=1).run(
        FakeModel([prediction([found], 1)])
    )
    assert result.point.confidence == 0
    (example,) = result.examples[1]
    assert example.false == len(example.boxes) == sum(box[5] > 0.25 for box in found)
    assert json.loads(write_evaluation(result, tmp_path).read_text(encoding="utf-8"))["worst_confidence"] == 0.25


def test_of_many_false_boxes_only_the_surest_are_drawn(result, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        record, "_drawn", lambda image, boxes, titles, is_good: drawn.append((len(boxes), titles)) or ""
    )
    example = result.examples[1][0]
    count = record.MOST_FALSE + 20
    many = replace(
        example,
        boxes=np.tile(example.label_boxes[:1] if len(example.label_boxes) else [[1, 1, 9, 9]], (count, 1)),
        confidence=np.linspace(0.9, 0.1, count),
        predicted=np.zeros(count),
        is_right=np.arange(count) == count - 1,  # the least sure one is right, and stays
    )
    record.draw_example(many, NAMES)
    number, titles = drawn[1]
    assert number == record.MOST_FALSE + 1
    assert titles[0] == "cat 0.90" and titles[-1] == "cat 0.10"


# --- which images are worst -------------------------------------------------------------------------------------------


def findings(*images):
    """Return what was seen of images given as (detections x1 y1 x2 y2 confidence class, labels class x1 y1 x2 y2)."""
    seen = Findings()
    for number, (detections, labels) in enumerate(images):
        detections = torch.tensor(detections, dtype=torch.float32).reshape(-1, 6)
        labels = torch.tensor(labels, dtype=torch.float64).reshape(-1, 5)
        scene = Scene(detections, [len(detections)], labels, [len(labels)], [(100, 100)])
        seen.add(scene, scene.match(torch.linspace(0.5, 0.95, 10)), [f"{number}.jpg"])
    return seen.joined()


BOX, OTHER, FAR = (10, 10, 30, 30), (50, 50, 70, 70), (80, 80, 95, 95)


def test_missed_and_false_are_counted_at_the_confidence():
    seen = findings(
        ([(*BOX, 0.9, 0)], [(0, *BOX)]),  # perfect
        ([(*BOX, 0.9, 0), (*FAR, 0.8, 0)], [(0, *BOX), (0, *OTHER)]),  # one missed, one false
        ([(*BOX, 0.9, 1)], [(0, *BOX)]),  # wrong class: missed and false
        ([(*BOX, 0.2, 0)], [(0, *BOX), (1, *OTHER), (1, *FAR)]),  # found, but not surely enough: three missed
        ([(*FAR, 0.9, 0), (*OTHER, 0.8, 0)], []),  # background with two false boxes
    )
    missed, false = worst_images(seen, 0.5)
    assert [(example.path, example.missed) for example in missed] == [("3.jpg", 3), ("1.jpg", 1), ("2.jpg", 1)]
    assert [(example.path, example.false) for example in false] == [("4.jpg", 2), ("1.jpg", 1), ("2.jpg", 1)]
    assert len(missed[0].boxes) == 0 and missed[1].is_found.tolist() == [True, False]
    assert missed[1].is_right.tolist() == [True, False]
    assert len(worst_images(seen, 0.5, count=1)[0]) == 1


def test_counts_boxes_and_colours_of_an_example_fit_together(tmp_path):
    result = validate_pictures(tmp_path, count=12)
    for example in (*result.examples[0], *result.examples[1]):
        assert example.is_found.sum() == example.is_right.sum() == len(example.true) - example.missed
        assert len(example.boxes) - example.is_right.sum() == example.false
