"""Confusion matrix: recorded counts, counting by hand, and what is always counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluate.test_metrics import cases, random_scene
from utils.evaluate.confusion import ConfusionMatrix


def test_counts_equal_the_recorded_runs_but_for_the_forgotten_false_alarms(golden):
    for name, setting, arrays in cases(golden("ops/metrics.npz"), "confusion"):
        matrix = ConfusionMatrix(setting["nc"], setting.get("conf", 0.25), setting.get("iou_thres", 0.45))
        for index in range(len(setting["images"])):
            labels, detections = (torch.from_numpy(arrays[f"{part}_{index}"]) for part in ("labels", "detections"))
            before = matrix.matrix[:-1].sum()
            matrix.process_batch(detections, labels)
            counted = matrix.matrix[:-1].sum() - before
            assert counted == (detections[:, 4] > matrix.conf).sum(), "every prediction is counted once"
        np.testing.assert_array_equal(matrix.matrix[:, :-1], arrays["matrix"][:, :-1], err_msg=name)
        assert (matrix.matrix[:, -1] >= arrays["matrix"][:, -1]).all(), name


LABELS = torch.tensor([[0.0, 0, 0, 10, 10], [1, 20, 20, 30, 30], [1, 50, 50, 60, 60]])
DETECTIONS = torch.tensor(
    [
        [0, 0, 10, 10, 0.9, 0],  # right
        [20, 20, 30, 30, 0.8, 0],  # right place, wrong class
        [0, 0, 10, 9, 0.7, 0],  # second box on a taken label: a false alarm
        [80, 80, 90, 90, 0.6, 1],  # nothing there
        [50, 50, 60, 60, 0.25, 1],  # not above the confidence: the label is missed
    ]
)


def test_counts_by_hand():
    matrix = ConfusionMatrix(nc=2)
    matrix.process_batch(DETECTIONS, LABELS)
    assert matrix.matrix.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 0]]
    hits, alarms = matrix.tp_fp()
    assert hits.tolist() == [1, 0] and alarms.tolist() == [2, 1]


def test_images_without_labels_or_without_a_pair_count():
    matrix = ConfusionMatrix(nc=2)
    matrix.process_batch(DETECTIONS, LABELS[:0])
    assert matrix.matrix.tolist() == [[0, 0, 3], [0, 0, 1], [0, 0, 0]]
    matrix.process_batch(DETECTIONS[3:4], LABELS[:1])
    assert matrix.matrix.tolist() == [[0, 0, 3], [0, 0, 2], [1, 0, 0]]


@pytest.mark.parametrize("detections", [None, DETECTIONS[:0]])
def test_images_without_detections_count_as_missed(detections):
    matrix = ConfusionMatrix(nc=2)
    matrix.process_batch(detections, LABELS)
    assert matrix.matrix[2].tolist() == [1, 2, 0]


def test_of_two_equal_boxes_the_more_confident_is_the_hit():
    matrix = ConfusionMatrix(nc=2)
    matrix.process_batch(torch.tensor([[0, 0, 10, 10, 0.9, 0], [0, 0, 10, 10, 0.5, 1]]), LABELS[:1])
    assert matrix.matrix.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_classes_outside_the_matrix_are_left_out():
    matrix = ConfusionMatrix(nc=1)
    matrix.process_batch(DETECTIONS, LABELS)
    assert matrix.ignored == 3
    assert matrix.matrix.tolist() == [[1, 2], [0, 0]]


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), objects=st.integers(0, 8), count=st.integers(0, 12))
def test_every_label_and_every_confident_prediction_is_counted_once(seed, objects, count):
    labels, detections = random_scene(seed, objects, count)
    matrix = ConfusionMatrix(nc=2)
    matrix.process_batch(detections, labels)
    confident = detections[detections[:, 4] > 0.25]
    assert matrix.matrix[:, :2].sum(0).tolist() == torch.bincount(labels[:, 0].long(), minlength=2).tolist()
    assert matrix.matrix[:2].sum(1).tolist() == torch.bincount(confident[:, 5].long(), minlength=2).tolist()


def test_counts_are_written_as_a_table(tmp_path):
    matrix = ConfusionMatrix(nc=2)
    matrix.process_batch(DETECTIONS, LABELS)
    matrix.save_counts(tmp_path / "confusion_matrix.csv", {0: "cat, wild", 1: "犬"})
    lines = (tmp_path / "confusion_matrix.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == 'predicted \\ true,"cat, wild",犬,background'
    assert lines[1] == '"cat, wild",1,1,1' and lines[-1] == "background,0,1,0"
