"""Names of output files: short where stems are unique, never shared by two images."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from utils.evaluate.outputs import LabelWriter, OutputNames, merge_labels


def test_names():
    names = OutputNames(["set/day/a.jpg", "set/night/a.jpg", "set/night/b.jpg", "set/c.jpg", "set/c.png"])
    assert names["set/night/b.jpg"] == "b"
    assert names["set/day/a.jpg"] == "day/a" and names["set/night/a.jpg"] == "night/a"
    assert names["set/c.jpg"] == "c_jpg" and names["set/c.png"] == "c_png"
    assert names["elsewhere/d.jpg"] == "d"


@given(st.sets(st.tuples(st.sampled_from("xyz"), st.sampled_from("abc"), st.sampled_from(("jpg", "png"))), min_size=1))
def test_two_images_never_share_a_name(parts):
    paths = [f"root/{folder}/{stem}.{suffix}" for folder, stem, suffix in parts]
    names = OutputNames(paths)
    assert len({names[path] for path in paths}) == len(paths)


def test_a_folder_that_looks_like_a_data_set_is_left_alone(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "b.txt").write_text("0 0.5 0.5 1 1\n")
    with pytest.raises(ValueError, match="beside a folder 'images'"):
        LabelWriter(tmp_path / "labels", ["elsewhere/images/a.jpg"])
    assert (tmp_path / "labels" / "b.txt").exists()


def test_merged_labels_take_the_place_of_detections_of_their_class():
    detections = torch.tensor([[0, 0, 10, 10, 0.9, 1], [0, 0, 10, 10, 0.8, 0], [50, 50, 60, 60, 0.3, 1]])
    labels = torch.tensor([[1.0, 0, 0, 10, 11]])
    merged = merge_labels(detections, labels, 0.7)
    assert torch.equal(merged, torch.cat((torch.tensor([[0.0, 0, 10, 11, 1, 1]]), detections[1:])))
    assert torch.equal(merge_labels(detections, labels[:0], 0.7), detections)
    assert len(merge_labels(detections[:0], labels, 0.7)) == 1
