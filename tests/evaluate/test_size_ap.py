"""AP by object size against pycocotools: recorded figures, invented scenes with every difficulty, real data sets."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from tests.evaluate.referee import judge
from utils.data.loader import create_dataloader
from utils.data.spec import load_data_spec
from utils.evaluate import result as result_module
from utils.evaluate import size_ap
from utils.evaluate.matching import iou_thresholds, match_batch
from utils.evaluate.size_ap import COLUMNS, Instances, size_figures
from utils.evaluate.validator import Validator
from utils.files import read_yaml, write_yaml


def find_pairs(detections: Instances, labels: Instances, images: int) -> np.ndarray:
    """Return pairs as the validator finds them: by float32 boxes of whole batches."""
    rows = np.concatenate((detections.boxes, detections.confidence[:, None], detections.number[:, None]), 1)
    truth = np.concatenate((labels.number[:, None], labels.boxes), 1)
    counts = (np.bincount(part.image, minlength=images).tolist() for part in (detections, labels))
    found, wanted = counts
    rows, truth = (torch.tensor(part, dtype=torch.float32) for part in (rows, truth))
    return match_batch(rows, found, truth, wanted, iou_thresholds()).pairs.numpy()


def ours(detections: Instances, labels: Instances, images: int):
    return size_figures(detections, labels, find_pairs(detections, labels, images))


def scene(seed: int, images: int = 12, classes: int = 3, crowd: int = 10) -> tuple[Instances, Instances]:
    """Return detections and labels with boxes on the limits of sizes, crowds, equal confidences and false alarms."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, crowd, images)
    image = np.repeat(np.arange(images), counts)
    sides = np.exp(rng.uniform(np.log(6), np.log(220), (len(image), 2))).round(int(rng.integers(0, 3)))
    sides[rng.random(len(sides)) < 0.15] = 32  # exactly on a limit: such a box is small and medium
    sides[rng.random(len(sides)) < 0.1] = 96
    corner = rng.uniform(0, 400, (len(image), 2)).round(1)
    number = rng.integers(0, classes, len(image))
    labels = Instances(image, number, np.concatenate((corner, corner + sides), 1))
    copies = rng.integers(0, 6, len(image))
    source = np.repeat(np.arange(len(image)), copies)
    boxes = labels.boxes[source] + rng.normal(0, 0.12, (len(source), 4)) * np.tile(sides[source], 2)
    alarms = int(rng.integers(1, 60))
    low = rng.uniform(0, 400, (alarms, 2))
    boxes = np.concatenate((boxes, np.concatenate((low, low + rng.uniform(5, 200, (alarms, 2))), 1)))
    owner = np.concatenate((image[source], rng.integers(0, images, alarms)))
    guess = np.concatenate((number[source], rng.integers(0, classes + 1, alarms)))  # one class has no label
    confidence = rng.random(len(owner)).round(2)
    order = np.lexsort((-confidence, owner))
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 0.5)
    return Instances(owner[order], guess[order], boxes[order].round(3), confidence[order]), labels


def assert_equal(detections: Instances, labels: Instances, images: int) -> None:
    expected, per_class = judge(detections, labels, images)
    found = ours(detections, labels, images)
    for name, value in asdict(expected).items():
        assert getattr(found.total, name) == pytest.approx(value, abs=1e-9), name
    np.testing.assert_allclose(found.ap, per_class, atol=1e-9)


def test_figures_equal_the_recorded_ones_of_pycocotools(golden):
    folder = golden("ops/eval_set")
    truth, rows = (json.loads((folder / name).read_text()) for name in ("instances.json", "predictions.json"))
    expected = json.loads((folder / "expected.json").read_text())["coco"]

    def instances(entries, scores=None):
        entries = sorted(entries, key=lambda entry: entry["image_id"])
        boxes = np.array([entry["bbox"] for entry in entries])
        boxes[:, 2:] += boxes[:, :2]
        image, number = (np.array([entry[key] for entry in entries]) for key in ("image_id", "category_id"))
        return Instances(image, number - 1, boxes, scores and np.array([entry["score"] for entry in entries]))

    found = ours(instances(rows, True), instances(truth["annotations"]), len(truth["images"]) + 1)
    names = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "AP_small", "ap_medium": "AP_medium"}
    names |= {"ap_large": "AP_large", "ar1": "AR1", "ar10": "AR10", "ar100": "AR100", "ar_small": "AR_small"}
    names |= {"ar_medium": "AR_medium", "ar_large": "AR_large"}
    for mine, theirs in names.items():
        assert getattr(found.total, mine) == pytest.approx(expected[theirs], abs=1e-4), theirs
    assert found.ap[:, 0] == pytest.approx([row["AP"] for row in expected["per_class"]], abs=1e-4)
    assert list(found.columns()) == [f"coco/{name}" for name in COLUMNS]


@pytest.mark.parametrize("seed", range(8))
def test_invented_scenes(seed):
    pytest.importorskip("pycocotools")
    assert_equal(*scene(seed), 12)


def test_crowds_of_more_than_a_hundred_detections_of_a_class():
    pytest.importorskip("pycocotools")
    detections, labels = scene(3, images=3, classes=1, crowd=90)
    assert np.bincount(detections.image).max() > 120
    assert_equal(detections, labels, 3)


def test_order_of_rows_and_number_that_choose_at_once_do_not_matter(monkeypatch):
    """Detections of an image may come in any order as long as their confidences differ."""
    detections, labels = scene(5, crowd=20)
    rng = np.random.default_rng(0)
    detections = replace(detections, confidence=rng.permutation(len(detections.image)) / len(detections.image))
    expected, pairs = ours(detections, labels, 12), find_pairs(detections, labels, 12)
    order = np.lexsort((-detections.confidence, detections.image))
    row_of = np.argsort(order)
    parts = (detections.image, detections.number, detections.boxes, detections.confidence)
    falling = Instances(*(part[order] for part in parts))
    shuffled = rng.permutation(np.stack((row_of[pairs[:, 0]], pairs[:, 1]), 1))
    for size in (size_ap.PART, 1, 7):
        monkeypatch.setattr(size_ap, "PART", size)
        found = size_figures(falling, labels, shuffled)
        assert found.total == expected.total
        np.testing.assert_array_equal(found.ap, expected.ap)


def test_only_those_that_want_the_same_label_wait_for_each_other():
    """Candidate 0 wants labels 0 and 1, 1 wants 1 and 2, 2 wants 2, 3 wants 3; the best of them is number 1."""
    row, label = np.array([0, 0, 1, 1, 2, 3]), np.array([0, 1, 1, 2, 2, 3])
    assert size_ap._turns(row, label, np.array([1, 0, 2, 3])).tolist() == [1, 0, 1, 0]
    assert size_ap._turns(row, label, np.array([0, 1, 2, 3])).tolist() == [0, 1, 2, 0]


def test_a_pair_that_is_listed_twice_counts_once():
    one = np.array([0])
    box = np.array([[0, 0, 40, 40.0]])
    detections = Instances(one, one, box, np.array([0.9]))
    labels = Instances(one, one, box, np.array([0.9]))
    once, twice = (size_figures(detections, labels, np.array([[0, 0]] * number)) for number in (1, 2))
    assert once.total.ap == twice.total.ap == 1.0


def test_second_best_label_is_taken_unlike_in_upstreams_figures():
    """Both detections overlap both labels; the first takes the label the second likes best."""
    boxes = np.array([[0.0, 0, 10, 10], [0, 0, 10, 11]])
    detections = Instances(np.zeros(2, int), np.zeros(2, int), boxes, np.array([0.9, 0.8]))
    labels = Instances(np.zeros(2, int), np.zeros(2, int), np.array([[0.0, 0, 10, 10.2], [0, 0, 10, 14]]))
    assert ours(detections, labels, 1).total.ap50 == pytest.approx(1)


def test_of_labels_that_fit_equally_well_the_last_one_is_taken():
    """The first detection overlaps both labels alike, the second one only the first label."""
    boxes = np.array([[10.0, 0, 30, 10], [3, 0, 23, 10]])
    detections = Instances(np.zeros(2, int), np.zeros(2, int), boxes, np.array([0.9, 0.8]))
    labels = Instances(np.zeros(2, int), np.zeros(2, int), np.array([[5.0, 0, 25, 10], [15, 0, 35, 10]]))
    assert ours(detections, labels, 1).total.ap50 == pytest.approx(1)


def test_sizes_that_do_not_occur_are_unknown():
    boxes = np.array([[0.0, 0, 10, 10]])
    labels = Instances(np.zeros(1, int), np.zeros(1, int), boxes)
    found = ours(Instances(labels.image, labels.number, boxes, np.ones(1)), labels, 1)
    assert found.total.ap_large == -1 and np.isnan(found.columns()["coco/AP_large"])
    assert found.columns()["coco/AP_small"] == pytest.approx(1)
    assert found.labels.tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize("count", [0, 2])
def test_without_labels_or_detections(count):
    none = Instances(np.zeros(0, int), np.zeros(0, int), np.zeros((0, 4)), np.zeros(0))
    boxes = np.tile([0.0, 0, 40, 40], (count, 1))
    some = Instances(np.zeros(count, int), np.zeros(count, int), boxes, np.linspace(1, 0.5, count))
    found = ours(some, none, 1)
    assert set(asdict(found.total).values()) == {-1.0} and found.ap.shape == (0, 4)
    missed = ours(none, some, 1)
    assert missed.total.ap == (0 if count else -1) and missed.total.ar100 == missed.total.ap


# --- real data sets, through the loader and the validator -------------------------------------------------------------


class Replay(torch.nn.Module):
    """Answers with the labels of each batch, moved, doubled, confused and mixed with false alarms."""

    def __init__(self, loader, nc: int) -> None:
        super().__init__()
        self.random, self.nc = np.random.default_rng(0), nc
        self.batches = [(images.shape, targets.numpy()) for images, targets, *_ in loader]
        self.turn = -1

    def forward(self, images: torch.Tensor, augment: bool = False) -> torch.Tensor:
        self.turn += 1
        shape, targets = self.batches[self.turn]
        assert shape == images.shape
        boxes = [self._rows(targets[targets[:, 0] == number], shape) for number in range(len(images))]
        output = torch.zeros(len(images), 4 + self.nc, max(map(len, boxes)))
        for number, rows in enumerate(boxes):
            output[number, :4, : len(rows)] = torch.tensor(rows[:, :4].T)
            output[number, 4 + rows[:, 5].astype(int), np.arange(len(rows))] = torch.tensor(rows[:, 4]).float()
        return output

    def _rows(self, labels: np.ndarray, shape: torch.Size) -> np.ndarray:
        """Return x, y, w, h in pixels, confidence, class."""
        random = self.random
        labels = labels[np.repeat(np.arange(len(labels)), random.integers(0, 5, len(labels)))]
        size = np.array([shape[3], shape[2]] * 2)
        boxes = labels[:, 2:] * size
        boxes = boxes + random.normal(0, 0.08, boxes.shape) * np.tile(boxes[:, 2:], 2)
        number = np.where(random.random(len(labels)) < 0.1, random.integers(0, self.nc, len(labels)), labels[:, 1])
        alarms = random.uniform(0.05, 0.3, (5, 4)) * size + np.array([size[0] / 3, size[1] / 3, 0, 0])
        boxes = np.concatenate((boxes, alarms))
        number = np.concatenate((number, random.integers(0, self.nc, 5)))
        return np.concatenate((boxes, random.uniform(0.01, 1, (len(boxes), 1)), number[:, None]), 1)


def raw_labels(dataset) -> Instances:
    """Return the labels as a user would give them to the referee: from the files, without any scaling."""
    counts, rows = [len(part) for part in dataset.labels], np.concatenate([np.asarray(part) for part in dataset.labels])
    size = np.repeat(np.asarray(dataset.shapes, np.float64), counts, axis=0)  # width, height
    centre, sides = rows[:, 1:3] * size, rows[:, 3:5] * size
    boxes = np.concatenate((centre - sides / 2, centre + sides / 2), 1)
    boxes = np.minimum(boxes.clip(0), np.tile(size, 2))
    return Instances(np.repeat(np.arange(len(counts)), counts), rows[:, 0].astype(int), boxes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coco_open", "hituav"])
def test_validation_of_real_pictures_agrees_with_pycocotools(shared_dir, tmp_path, monkeypatch, name):
    pytest.importorskip("pycocotools")
    folder = shared_dir / "datasets" / name
    content = read_yaml(folder / f"{name}.yaml")
    write_yaml(tmp_path / "data.yaml", {**content, "path": str(folder)})  # theirs counts from a folder beside it
    spec = load_data_spec(tmp_path / "data.yaml")
    loader, dataset = create_dataloader(
        spec.val, 320, 16, 32, rect=True, pad=0.5, workers=0, nc=spec.nc, names=spec.names
    )
    kept = []
    monkeypatch.setattr(result_module, "size_figures", lambda *parts: kept.append(parts) or size_figures(*parts))
    outputs = {"save_dir": tmp_path, "save_json": True}
    found = Validator(loader, names=spec.names, device="cpu", **outputs).run(Replay(loader, spec.nc))
    ((detections, labels, _),) = kept
    raw = raw_labels(dataset)
    np.testing.assert_array_equal(labels.number, raw.number)
    np.testing.assert_allclose(labels.boxes, raw.boxes, atol=1e-3)
    expected, per_class = judge(detections, raw, len(dataset))
    assert 0.1 < expected.ap < 0.9 and expected.ap_small > 0.05
    for title, value in asdict(expected).items():
        assert getattr(found.sizes.total, title) == pytest.approx(value, abs=1e-4), title
        assert getattr(found.coco, title) == pytest.approx(value, abs=1e-4), f"{title}, through the json"
    np.testing.assert_allclose(found.sizes.ap, per_class, atol=1e-4)
