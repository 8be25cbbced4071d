"""Names of output files: short where stems are unique, never shared by two images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from utils.evaluate.outputs import LabelWriter, OutputNames, merge_labels

resource = pytest.importorskip("resource")  # not on Windows
LONG = "n" * 251


def test_names():
    names = OutputNames(["set/day/a.jpg", "set/night/a.jpg", "set/night/b.jpg", "set/c.jpg", "set/c.png"])
    assert names["set/night/b.jpg"] == "b"
    assert names["set/day/a.jpg"] == "day/a" and names["set/night/a.jpg"] == "night/a"
    assert names["set/c.jpg"] == "c_jpg" and names["set/c.png"] == "c_png"
    assert names["elsewhere/d.jpg"] == "d"


FOLDERS = ("x", "y", "x/a", "x_jpg", ".")
STEMS = ("a", "b", "a_jpg", "a_png", "a_jpg_2", "a_jpg_jpg", "x", LONG, f"{LONG[4:]}_jpg", os.fsdecode(b"caf\xe9"))
SUFFIXES = ("jpg", "png", "JPG")


@given(st.lists(st.tuples(*map(st.sampled_from, (FOLDERS, STEMS, SUFFIXES))), min_size=1, unique=True))
def test_two_images_never_share_a_name(parts):
    paths = [f"root/{folder}/{stem}.{suffix}" for folder, stem, suffix in parts]
    names = OutputNames(paths)
    found = [names[path] for path in paths]
    assert len({Path(name) for name in found}) == len(paths)
    assert all(len(os.fsencode(part)) <= 251 for name in found for part in name.split("/")), "room for .txt"
    for path, name in zip(paths, found, strict=True):
        is_alone = [stem for _, stem, _ in parts].count(Path(path).stem) == 1
        assert not is_alone or name == Path(path).stem, "a stem that only one image has is its name"


def test_a_name_that_is_made_gives_way_to_an_image_of_that_name():
    names = OutputNames(["a.jpg", "a.png", "a_jpg.png"])
    assert [names[path] for path in ("a.jpg", "a.png", "a_jpg.png")] == ["a_jpg_2", "a_png", "a_jpg"]


def test_a_path_given_twice_is_one_image():
    names = OutputNames(["set/a.jpg", "set/a.jpg", "set//a.jpg"])
    assert names["set/a.jpg"] == names["set//a.jpg"] == "a"


ROW = torch.tensor([[0.0, 0, 5, 5, 0.9, 1]])


def test_label_files_of_long_and_odd_names_are_written(tmp_path):
    paths = [f"set/{stem}.{suffix}" for stem in STEMS for suffix in SUFFIXES]
    writer = LabelWriter(tmp_path / "labels", paths)
    for path in paths:
        writer.write(path, ROW, (10, 10))
    assert not writer.failure and len(list((tmp_path / "labels").iterdir())) == writer.written == len(paths)


def test_no_label_file_is_ever_replaced(tmp_path):
    folder = tmp_path / "labels"
    folder.mkdir()
    (folder / "classes.txt").write_text("car\n")
    with pytest.raises(ValueError, match=r"labels/classes\.txt.*--name"):
        LabelWriter(folder, ["a.jpg"])
    (folder / "classes.txt").unlink()
    writer = LabelWriter(folder, ["a.jpg"])
    (folder / "a.txt").write_text("put there meanwhile\n")
    writer.write("a.jpg", ROW, (10, 10))
    assert (folder / "a.txt").read_text() == "put there meanwhile\n" and "a.txt" in writer.failure


def test_a_full_disk_costs_label_files_and_not_the_figures(tmp_path, monkeypatch):
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    announced = {}
    writer = LabelWriter(tmp_path / "labels", ["a.jpg", "b.jpg", "c.jpg"], on_writing=announced.__setitem__)
    writer.write("a.jpg", ROW, (10, 10))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, room[1]))  # bytes of a file; larger ones meet what a full disk is
    try:
        writer.write("b.jpg", ROW.repeat(9, 1), (10, 10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    writer.write("c.jpg", ROW, (10, 10))
    assert [path.name for path in (tmp_path / "labels").iterdir()] == ["a.txt"], "no half file, and none after it"
    assert writer.written == 1 and [path.name for path in announced] == ["a.txt", "b.txt"]
    assert "b.txt could not be written" in writer.failure and "Make room" in writer.failure


def test_a_label_file_that_cannot_be_announced_is_not_written(tmp_path):
    def refuse(path, data):
        assert not path.exists() and data
        raise OSError("the record is full")

    writer = LabelWriter(tmp_path / "labels", ["a.jpg"], on_writing=refuse)
    writer.write("a.jpg", ROW, (10, 10))
    assert writer.failure == "the record is full" and not writer.written and not list(writer.folder.iterdir())


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
