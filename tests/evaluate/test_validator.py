"""The validation loop on stand-ins: geometry, counting, losses, outputs, and runs in which nothing can be measured."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

from tests.evaluate.fakes import FakeLoader, FakeModel, prediction, shape_entry
from utils.evaluate.coco import COCO_CATEGORIES
from utils.evaluate.scene import Scene
from utils.evaluate.validator import Validator

NAMES = {0: "cat", 1: "dog", 2: "bird"}


def validator(loader, **keywords):
    return Validator(loader, **{"names": NAMES, "device": torch.device("cpu"), **keywords})


def two_images():
    """Return a batch of two 64 x 96 images, the second letterboxed from 100 x 200, and predictions that fit."""
    images = torch.full((2, 3, 64, 96), 128, dtype=torch.uint8)
    targets = torch.tensor([[0, 0, 0.25, 0.5, 0.25, 0.5], [0, 1, 0.75, 0.5, 0.25, 0.25], [1, 2, 0.5, 0.5, 0.5, 0.5]])
    shapes = (shape_entry((64, 96)), shape_entry((100, 200), (0.48, 0.48), (0.0, 8.0)))
    loader = FakeLoader([(images, targets, ("data/images/a.jpg", "data/images/7.jpg"), shapes)])
    boxes = [
        [(24, 32, 24, 32, 0, 0.9), (72, 32, 24, 16, 1, 0.8), (72, 32, 24, 16, 0, 0.7)],
        [(48, 32, 48, 32, 2, 0.6)],
    ]
    return loader, FakeModel([prediction(boxes, 3)])


def test_figures_of_a_batch(log):
    loader, model = two_images()
    result = validator(loader, verbose=True).run(model)
    assert (result.images, result.instances) == (2, 3)
    assert result.per_class["classes"].tolist() == [0, 1, 2]
    assert result.per_class["ap50"] == pytest.approx([0.995] * 3, abs=1e-3)
    assert result.map == pytest.approx(0.995, abs=1e-3)
    assert result.losses == (0.0, 0.0, 0.0)
    assert result.summary()[:4] == (result.precision, result.recall, result.map50, result.map)
    lines = log.text.splitlines()
    header = next(line for line in lines if "Class" in line)
    assert header.split()[-7:] == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert f"{'all':>22s}{2:>11d}{3:>11d}" in log.text
    assert f"{'dog':>22s}{2:>11d}{1:>11d}" in log.text


def test_long_names_of_classes_keep_the_columns_of_the_table(log):
    names = {0: "short", 1: "a name that is much longer than its column", 2: "exactly 22 characters!"}
    targets = torch.tensor([[0, number, 0.5, 0.5, 0.2, 0.2] for number in names], dtype=torch.float32)
    batch = (torch.zeros(1, 3, 96, 96, dtype=torch.uint8), targets, ("a.jpg",), (shape_entry((96, 96)),))
    found = [(48, 48, 20, 20, number, 0.9) for number in names]
    Validator(FakeLoader([batch]), names=names, device="cpu", verbose=True).run(FakeModel([prediction([found], 3)]))
    rows = [record.message for record in log.records if record.levelname == "INFO"][2:5]
    assert [row[:22].strip() for row in rows] == ["short", "a name that is much l…", names[2]]
    assert [len(row) for row in rows] == [22 + 6 * 11] * 3


def test_boxes_come_back_to_original_pixels():
    loader, _ = two_images()
    images, targets, _, shapes = loader[0]
    scene = Scene.build([torch.tensor([[24.0, 16, 72, 48, 0.6, 2]])] * 2, targets, shapes, images.shape[2:])
    (first, labels), (second, other) = scene.images()
    assert first[0, :4].tolist() == [24, 16, 72, 48]
    expected = [24 / 0.48, (16 - 8) / 0.48, 72 / 0.48, (48 - 8) / 0.48]
    assert second[0, :4].tolist() == pytest.approx(expected)
    assert other[0].tolist() == pytest.approx([2, *expected])
    assert labels[0].tolist() == pytest.approx([0, 12, 16, 36, 48])


def test_boxes_are_clipped_to_the_image():
    loader, _ = two_images()
    images, targets, _, shapes = loader[0]
    found = [torch.zeros(0, 6), torch.tensor([[-5.0, -5, 500, 500, 0.6, 2]])]
    scene = Scene.build(found, targets, shapes, images.shape[2:])
    assert scene.detections[0, :4].tolist() == [0, 0, 200, 100]


def test_losses_are_means_over_the_batches():
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    targets = torch.tensor([[0, 1, 0.5, 0.5, 0.5, 0.5]])
    loader = FakeLoader([(images, targets, ("a.jpg",), (shape_entry((32, 32)),))] * 2)
    items = iter([torch.tensor([1.0, 2, 3]), torch.tensor([3.0, 2, 1])])
    seen = []

    def loss(output, truth):
        seen.append((output[1], truth.shape))
        return torch.zeros(()), next(items)

    result = validator(loader, loss_fn=loss).run(FakeModel([prediction([[(16, 16, 16, 16, 1, 0.9)]], 3)] * 2))
    assert result.losses == (2.0, 2.0, 2.0)
    assert seen == [([["maps"]], (1, 6))] * 2


def test_model_keeps_its_mode_and_its_weights():
    loader, model = two_images()
    model.train()
    validator(loader, half=True).run(model)
    assert model.training
    assert model.weight.dtype == torch.float32 and not model.weight.is_inference()


def test_half_is_refused_on_the_cpu_with_a_message(log):
    loader, model = two_images()
    assert validator(loader, half=True).run(model).map > 0.9
    assert "needs a CUDA device" in log.text


def test_single_class_merges_classes():
    loader, model = two_images()
    result = validator(loader, single_cls=True).run(model)
    assert result.per_class["classes"].tolist() == [0]
    assert result.map == pytest.approx(0.995, abs=1e-3)


def test_max_det_and_confidence_limit_what_counts():
    loader, _ = two_images()
    boxes = [[(24, 32, 24, 32, 0, 0.9), (72, 32, 24, 16, 1, 0.05)], [(48, 32, 48, 32, 2, 0.6)]]
    result = validator(loader, conf_thres=0.1).run(FakeModel([prediction(boxes, 3)]))
    assert result.per_class["ap50"].tolist() == pytest.approx([0.995, 0, 0.995], abs=1e-3)
    result = validator(loader, max_det=1).run(FakeModel([prediction(boxes, 3)]))
    assert result.per_class["ap50"].tolist() == pytest.approx([0.995, 0, 0.995], abs=1e-3)


def test_augmentation_is_passed_on():
    loader, model = two_images()
    validator(loader, augment=True).run(model)
    assert model.calls[0]["augment"] is True


def test_classes_without_labels_carry_the_mean():
    loader, model = two_images()
    loader[0][1][:, 1] = 0
    maps = validator(loader).run(model).maps
    assert maps.shape == (3,) and maps[1] == maps[2] == maps.mean()


@pytest.mark.gpu
def test_half_on_cuda_gives_the_same_figures():
    loader, model = two_images()
    model.predictions = [part.cuda() for part in model.predictions]
    result = validator(loader, half=True, device=torch.device("cuda"), loss_fn=None).run(model.cuda())
    assert result.map == pytest.approx(0.995, abs=1e-3)
    assert model.weight.dtype == torch.float32


# --- nothing to measure -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plots", [False, True])
@pytest.mark.parametrize(("boxes", "objects"), [([[], []], 0), ([[], []], 3), ([[(24, 32, 24, 32, 0, 0.9)], []], 0)])
def test_nothing_found_or_nothing_labelled(tmp_path, log, boxes, objects, plots):
    loader, _ = two_images()
    images, targets, paths, shapes = loader[0]
    loader[0] = (images, targets[:objects], paths, shapes)
    outputs = {"plots": plots, "save_dir": tmp_path, "save_txt": True, "save_json": True, "verbose": True}
    result = validator(loader, **outputs).run(FakeModel([prediction(boxes, 3)]))
    assert result.summary() == (0,) * 7
    assert (result.images, result.instances) == (2, objects)
    assert ("no labels in this split" in log.text) == (objects == 0)


def test_an_empty_loader():
    result = validator(FakeLoader([])).run(FakeModel([]))
    assert (result.images, result.speed_ms, result.maps.tolist()) == (0, (0.0, 0.0, 0.0), [0.0] * 3)


# --- outputs ------------------------------------------------------------------------------------------------------


def test_outputs_need_a_folder():
    with pytest.raises(ValueError, match="save_dir"):
        validator(FakeLoader([]), plots=True)


def test_label_files(tmp_path):
    loader, model = two_images()
    noted = {}
    outputs = {"save_dir": tmp_path, "save_txt": True, "save_conf": True, "on_label_file": noted.__setitem__}
    validator(loader, **outputs).run(model)
    assert noted == {path: path.read_bytes() for path in (tmp_path / "labels").iterdir()}
    assert sorted(file.name for file in (tmp_path / "labels").iterdir()) == ["7.txt", "a.txt"]
    rows = [line.split() for line in (tmp_path / "labels" / "a.txt").read_text().splitlines()]
    assert [row[0] for row in rows] == ["0", "1", "0"]
    assert [float(value) for value in rows[0][1:]] == pytest.approx([0.25, 0.5, 0.25, 0.5, 0.9])
    seven = [float(value) for value in (tmp_path / "labels" / "7.txt").read_text().split()]
    assert seven == pytest.approx([2, 0.5, 0.5, 0.5, 32 / 48, 0.6], abs=1e-5)


def test_hybrid_label_files_hold_labels_and_what_they_leave_room_for(tmp_path):
    loader, model = two_images()
    result = validator(loader, save_dir=tmp_path, save_hybrid=True, save_conf=True).run(model)
    rows = [line.split() for line in (tmp_path / "labels" / "a.txt").read_text().splitlines()]
    assert [(row[0], row[5]) for row in rows] == [("0", "1"), ("1", "1"), ("0", "0.7")]
    assert result.map == pytest.approx(0.995, abs=1e-3)  # judged without the labels


def test_labels_of_the_data_set_are_never_replaced(tmp_path):
    labels = tmp_path / "labels"
    labels.mkdir()
    (labels / "a.txt").write_text("0 0.5 0.5 1 1\n")
    loader = FakeLoader([], [str(tmp_path / "images" / "a.jpg")])
    with pytest.raises(ValueError, match="labels of the data set"):
        validator(loader, save_dir=tmp_path, save_txt=True).run(FakeModel([]))
    assert (labels / "a.txt").read_text() == "0 0.5 0.5 1 1\n"


def test_outputs_that_cannot_be_written_leave_the_figures(tmp_path, monkeypatch, log):
    def fail(*_):
        raise OSError(28, "No space left on device")

    for place in ("utils.evaluate.outputs._write_new", "utils.evaluate.coco.write_text_atomic"):
        monkeypatch.setattr(place, fail)
    monkeypatch.setattr("utils.evaluate.confusion.write_text_atomic", fail)
    loader, model = two_images()
    result = validator(loader, save_dir=tmp_path, save_txt=True, save_json=True, plots=True).run(model)
    assert result.map > 0.9 and f"{'all':>22s}{2:>11d}" in log.text
    assert len(result.unwritten) == 3 and all("No space left" in line for line in result.unwritten)
    assert "labels/a.txt could not be written" in " ".join(result.unwritten)


def test_json(tmp_path):
    pytest.importorskip("pycocotools")
    loader, model = two_images()
    result = validator(loader, save_dir=tmp_path, save_json=True, json_name="best_predictions.json").run(model)
    rows = json.loads((tmp_path / "best_predictions.json").read_text())
    assert rows[-1] == {"image_id": 7, "category_id": 2, "bbox": [50.0, 16.667, 100.0, 66.667], "score": 0.6}
    assert {row["image_id"] for row in rows} == {"a", 7}
    assert result.coco is not None and result.coco.ap50 == pytest.approx(1)


def test_json_numbers_coco_classes_as_coco_does(tmp_path):
    loader, model = two_images()
    validator(loader, save_dir=tmp_path, save_json=True, is_coco=True).run(model)
    rows = json.loads((tmp_path / "predictions.json").read_text())
    assert [row["category_id"] for row in rows] == [1, 2, 1, 3]
    assert len(COCO_CATEGORIES) == 80 and COCO_CATEGORIES[11] == 13 and COCO_CATEGORIES[-1] == 90


def test_official_annotations_replace_the_figures(tmp_path):
    pytest.importorskip("pycocotools")
    loader, model = two_images()
    loader[0] = (*loader[0][:2], ("1.jpg", "2.jpg"), loader[0][3])
    loader.dataset.im_files = ["1.jpg", "2.jpg"]
    truth = [(1, 1, [12, 16, 24, 32]), (1, 2, [60, 24, 24, 16]), (2, 3, [0, 0, 20, 20])]
    annotations = {
        "images": [{"id": 1}, {"id": 2}],
        "categories": [{"id": number} for number in (1, 2, 3)],
        "annotations": [
            {"id": index + 1, "image_id": image, "category_id": category, "bbox": box, "area": 400, "iscrowd": 0}
            for index, (image, category, box) in enumerate(truth)
        ],
    }
    (tmp_path / "truth.json").write_text(json.dumps(annotations))
    outputs = {"save_dir": tmp_path, "save_json": True, "is_coco": True}
    result = validator(loader, coco_annotations=tmp_path / "truth.json", **outputs).run(model)
    assert result.map50 == pytest.approx(2 / 3, abs=1e-3) and result.map50 == result.coco.ap50


def test_plots_and_counts(tmp_path):
    loader, model = two_images()
    result = validator(loader, save_dir=tmp_path, plots=True).run(model)
    names = {"val_batch0_labels.jpg", "val_batch0_pred.jpg", "confusion_matrix.png", "confusion_matrix.csv"}
    names |= {f"{curve}_curve.png" for curve in ("PR", "F1", "P", "R")}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert result.confusion.tolist() == [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    with open(tmp_path / "confusion_matrix.csv", newline="") as handle:
        assert np.array([row[1:] for row in list(csv.reader(handle))[1:]], float).tolist() == result.confusion.tolist()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_number_type_of_the_training_can_be_used(dtype: torch.dtype | None) -> None:
    validator = Validator([], names={0: "a"}, device=torch.device("cpu"), dtype=dtype)
    assert validator.dtype == dtype
