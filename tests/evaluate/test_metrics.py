"""Matching, average precision and fitness: recorded numbers, a slow oracle, and properties."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluate.oracle import area_by_definition, match_by_definition
from utils.boxes import box_iou
from utils.evaluate import matching
from utils.evaluate.matching import iou_thresholds, match_batch, process_batch
from utils.evaluate.metrics import ap_per_class, compute_ap, fitness, smooth


def cases(path, prefix):
    """Yield name, settings and arrays of each recorded case whose name begins with ``prefix``."""
    with np.load(path) as archive:
        for name, settings_ in json.loads(str(archive["meta"])).items():
            if name.startswith(prefix):
                arrays = {key[len(name) + 1 :]: archive[key] for key in archive.files if key.startswith(name + ".")}
                yield name, settings_, arrays


# --- recorded numbers ---------------------------------------------------------------------------------------------


def test_ap_per_class_equals_the_recorded_runs(golden):
    for name, _, arrays in cases(golden("ops/metrics.npz"), "ap_"):
        found = ap_per_class(arrays["tp"], arrays["conf"], arrays["pred_cls"], arrays["target_cls"])
        for key, value in zip(("tp", "fp", "p", "r", "f1", "ap", "classes"), found, strict=True):
            expected = arrays[f"out_{key}"]
            assert value.shape == expected.shape, (name, key)
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-15, err_msg=f"{name} {key}")


def test_curve_functions_equal_the_recorded_runs(golden):
    path = golden("ops/metrics.npz")
    for name, _, arrays in cases(path, "compute_ap"):
        for value, key in zip(compute_ap(arrays["recall"], arrays["precision"]), ("ap", "mpre", "mrec"), strict=True):
            np.testing.assert_allclose(value, arrays[key], rtol=1e-9, err_msg=name)
    for name, setting, arrays in cases(path, "smooth"):
        np.testing.assert_allclose(smooth(arrays["input"], setting["f"]), arrays["output"], rtol=1e-9, err_msg=name)
    for name, _, arrays in cases(path, "fitness"):
        np.testing.assert_allclose(fitness(arrays["input"]), arrays["output"], rtol=1e-9, err_msg=name)


def test_matching_equals_the_recorded_runs(golden):
    for name, _, arrays in cases(golden("ops/metrics.npz"), "match_"):
        detections, labels, iouv = (torch.from_numpy(arrays[key]) for key in ("detections", "labels", "iouv"))
        np.testing.assert_array_equal(process_batch(detections, labels, iouv).numpy(), arrays["correct"], err_msg=name)


def test_matching_of_four_detections_with_three_labels():
    detections = torch.tensor(
        [[0, 0, 10, 10, 0.9, 0], [1, 1, 11, 11, 0.8, 0], [20, 20, 30, 30, 0.7, 1], [20, 20, 30, 31, 0.6, 0]]
    )
    labels = torch.tensor([[0.0, 0, 0, 10, 10], [0, 2, 2, 12, 12], [1, 20, 20, 30, 30]])
    assert process_batch(detections, labels, iou_thresholds()).sum(1).tolist() == [10, 4, 10, 0]


def test_figures_of_eight_detections():
    leading = np.array([8, 3, 0, 10, 0, 5, 1, 0])
    conf = np.array([0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.3])
    correct = np.arange(10) < leading[:, None]
    predicted, true = np.array([0, 0, 0, 1, 1, 0, 1, 2]), np.array([0, 0, 0, 1, 1, 1, 3])
    hits, alarms, precision, recall, _, ap, classes = ap_per_class(correct, conf, predicted, true)
    assert classes.tolist() == [0, 1, 3]
    assert hits.tolist() == [3, 2, 0]
    assert alarms.tolist() == [1, 1, 0]
    np.testing.assert_allclose(precision, [0.75, 2 / 3, 0], atol=5e-6)
    np.testing.assert_allclose(recall, [1, 2 / 3, 0], atol=5e-6)
    np.testing.assert_allclose(ap[0], [0.9125] * 3 + [0.58415] * 2 + [0.41791] * 3 + [0] * 2, atol=5e-6)
    np.testing.assert_allclose(ap[1], [0.6672] + [0.44555] * 9, atol=5e-6)
    assert not ap[2].any()


def test_area_and_fitness_by_hand():
    assert compute_ap(np.array([0.2, 0.4, 0.4, 0.6]), np.array([1, 1, 2 / 3, 0.75]))[0] == pytest.approx(0.69875)
    assert fitness(np.array([[0.5, 0.6, 0.7, 0.4, 9, 9, 9]])).tolist() == pytest.approx([0.43])


# --- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predictions", [0, 3])
def test_without_labels_nothing_is_reported(predictions):
    found = ap_per_class(np.zeros((predictions, 10), bool), np.ones(predictions), np.zeros(predictions), np.zeros(0))
    assert [len(part) for part in found] == [0] * 7
    assert found[5].shape == (0, 10)


def test_without_a_hit_everything_is_zero():
    found = ap_per_class(np.zeros((2, 10), bool), np.array([0.9, 0.4]), np.zeros(2), np.array([0.0, 1.0]))
    assert not any(part.any() for part in found[:6])


def test_a_perfect_detector_reaches_the_recorded_ceiling():
    found = ap_per_class(np.ones((4, 10), bool), np.array([0.9, 0.8, 0.7, 0.6]), np.zeros(4), np.zeros(4))
    assert found[2].item() == 1 and found[3].item() == pytest.approx(1)
    assert found[5].min() == pytest.approx(0.995)  # the curve is closed at (1, 0), hence never exactly 1


# --- oracle and properties ----------------------------------------------------------------------------------------


def random_scene(seed, objects, count, classes=2):
    """Return labels (objects, 5) and detections (count, 6) that overlap a lot."""
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 30, (objects + count, 2))
    boxes = np.concatenate((corner, corner + rng.uniform(10, 25, (objects + count, 2))), 1)
    number = rng.integers(0, classes, (objects + count, 1))
    confidence = np.sort(rng.uniform(0, 1, (count, 1)), 0)[::-1]
    labels = np.concatenate((number[:objects], boxes[:objects]), 1)
    detections = np.concatenate((boxes[objects:], confidence, number[objects:]), 1)
    return torch.tensor(labels, dtype=torch.float32), torch.tensor(detections, dtype=torch.float32)


@pytest.mark.parametrize("seed", range(12))
def test_matching_equals_the_definition(seed):
    labels, detections = random_scene(seed, objects=1 + seed, count=20 - seed)
    thresholds = iou_thresholds()
    found = process_batch(detections, labels, thresholds)
    assert found.tolist() == match_by_definition(detections.tolist(), labels.tolist(), thresholds.tolist())


@pytest.mark.parametrize("thresholds", [(0.5, 0.75), (0.05, 0.3, 0.6), (0.9,)])
def test_any_thresholds_and_labels_that_fit_equally_well(thresholds):
    """Thresholds may lie below the overlap from which pairs are listed; of equal labels the last one is bid for."""
    thresholds = torch.tensor(thresholds)
    for seed in range(6):
        labels, detections = random_scene(seed, objects=4, count=25)
        labels = torch.cat((labels, labels.flip(0)))
        found = process_batch(detections, labels, thresholds)
        assert found.tolist() == match_by_definition(detections.tolist(), labels.tolist(), thresholds.tolist())


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), objects=st.integers(0, 9), count=st.integers(0, 15), classes=st.integers(1, 3))
def test_matching_invariants(seed, objects, count, classes):
    labels, detections = random_scene(seed, objects, count, classes)
    correct = process_batch(detections, labels, iou_thresholds())
    assert correct.shape == (count, 10)
    per_class = torch.bincount(labels[:, 0].long(), minlength=classes)
    for number in range(classes):
        assert (correct[detections[:, 5] == number].sum(0) <= per_class[number]).all()


def test_a_batch_is_matched_like_its_images(monkeypatch):
    scenes = [random_scene(*sizes) for sizes in ((1, 4, 9), (2, 0, 5), (3, 6, 0), (4, 2, 7))]
    found, wanted = [len(part) for _, part in scenes], [len(truth) for truth, _ in scenes]
    detections, labels = torch.cat([part for _, part in scenes]), torch.cat([truth for truth, _ in scenes])
    expected = torch.cat([process_batch(part, objects, iou_thresholds()) for objects, part in scenes])
    overlaps = [box_iou(part[:, :4], truth[:, 1:]) for truth, part in scenes]
    starts = np.cumsum([0, *wanted])
    for limit in (matching.MAX_PAIRS, 1):  # the second one forces image by image
        monkeypatch.setattr(matching, "MAX_PAIRS", limit)
        match = match_batch(detections, found, labels, wanted, iou_thresholds())
        assert torch.equal(match.correct, expected)
        pairs = {tuple(pair) for pair in match.pairs.tolist()}
        assert pairs == {
            (sum(found[:image]) + row, int(starts[image]) + label)
            for image, table in enumerate(overlaps)
            for row, label in (table >= matching.PAIR_OVERLAP).nonzero().tolist()
            if scenes[image][0][label, 0] == scenes[image][1][row, 5]
        }
        nearest = torch.cat([table.amax(1) if table.numel() else torch.zeros(len(table)) for table in overlaps])
        torch.testing.assert_close(match.nearest, nearest)
        for image, table in enumerate(overlaps):
            rows = slice(sum(found[:image]), sum(found[: image + 1]))
            if table.numel():
                chosen = match.nearest_label[rows] - int(starts[image])
                assert torch.equal(chosen[table.amax(1) > 0], table.argmax(1)[table.amax(1) > 0])


def test_without_thresholds_nothing_is_judged():
    row = torch.tensor([[0.0, 0, 10, 10, 0.9, 0]])
    match = match_batch(row, [1], torch.tensor([[0.0, 0, 0, 10, 10]]), [1], torch.zeros(0))
    assert match.correct.shape == (1, 0)


@pytest.mark.gpu
def test_card_and_processor_agree():
    labels, detections = random_scene(1, objects=20, count=60)
    expected = match_batch(detections, [40, 20], labels, [5, 15], iou_thresholds())
    found = match_batch(detections.cuda(), [40, 20], labels.cuda(), [5, 15], iou_thresholds("cuda")).cpu()
    assert torch.equal(found.correct, expected.correct)
    assert torch.equal(found.pairs, expected.pairs)
    torch.testing.assert_close(found.nearest, expected.nearest)


def test_a_batch_without_images_or_rows():
    none = torch.zeros(0, 6), torch.zeros(0, 5)
    for counts in ([], [0, 0]):
        match = match_batch(none[0], counts, none[1], counts, iou_thresholds())
        assert match.correct.shape == (0, 10) and match.pairs.shape == (0, 2)


@settings(max_examples=40)
@given(hits=st.lists(st.booleans(), min_size=1, max_size=30), extra=st.integers(0, 5))
def test_area_equals_the_definition(hits, extra):
    total = sum(hits) + extra or 1
    found = np.cumsum(hits)
    recall, precision = found / total, found / np.arange(1, len(hits) + 1)
    area = compute_ap(recall, precision)[0]
    assert area == pytest.approx(area_by_definition(recall.tolist(), precision.tolist()), abs=1e-12)
    assert 0 <= area <= 1


@settings(max_examples=25)
@given(seed=st.integers(0, 1000))
def test_order_of_the_rows_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    count = 40
    correct = rng.random((count, 10)) < 0.5
    conf, predicted, true = rng.permutation(count) / count, rng.integers(0, 3, count), rng.integers(0, 3, 30)
    order = rng.permutation(count)
    first = ap_per_class(correct, conf, predicted, true)
    second = ap_per_class(correct[order], conf[order], predicted[order], rng.permutation(true))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
