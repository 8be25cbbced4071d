"""Pictures that training and validation share are found, counted and named, with bounded work."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.drawing import encode, label_text, write_set
from utils.data import overlap
from utils.data.dataset import LoadImagesAndLabels
from utils.data.overlap import find_overlap
from utils.data.report import write_data_report
from utils.data.scan import ScanResult, scan_dataset

NUMBER = 6


def picture(seed: int, size: tuple[int, int] = (40, 60)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)


def make(root: Path, split: str, seeds: range, suffix: str = ".bmp", size: tuple[int, int] = (40, 60)) -> Path:
    """Pictures of equal size in bytes: only their content tells them apart."""
    files = {f"{split}{i}{suffix}": (encode(picture(i, size), suffix), label_text()) for i in seeds}
    return write_set(root, files, split)


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    return make(tmp_path, "train", range(NUMBER)), make(tmp_path, "val", range(100, 100 + NUMBER))


@pytest.mark.parametrize("how", [shutil.copyfile, os.link, os.symlink])
def test_copies_and_links_are_found(sets: tuple[Path, Path], how: Callable[[Path, Path], object]) -> None:
    train, val = sets
    how(train / "train2.bmp", val / "other name.bmp")
    found = find_overlap(scan_dataset(train), scan_dataset(val))
    assert found.same_file == []
    assert found.same_content == [(str(val / "other name.bmp"), str(train / "train2.bmp"))]
    assert found.candidates == found.compared == NUMBER + 1
    assert f"1 of {NUMBER + 1} validation pictures" in found.warning()
    assert "other name.bmp" in found.warning() and "train2.bmp" in found.warning()


def test_the_same_file_in_both(sets: tuple[Path, Path]) -> None:
    train, val = sets
    found = find_overlap(scan_dataset(train), scan_dataset([val, train]))
    assert found.same_file == [str(train / f"train{i}.bmp") for i in range(NUMBER)]
    assert found.same_content == []
    assert f"{NUMBER} of {2 * NUMBER} validation pictures" in found.warning()
    assert find_overlap(scan_dataset(train), scan_dataset(train)).candidates == 0  # nothing is read for these


def test_nothing_in_common(sets: tuple[Path, Path]) -> None:
    found = find_overlap(*map(scan_dataset, sets))
    assert (found.same_file, found.same_content, found.warning()) == ([], [], "")


@pytest.mark.parametrize("place", [0, 0.3, 0.5, 0.7, 1])
@pytest.mark.parametrize("size", [(40, 60), (700, 300)])
def test_pictures_that_differ_in_one_place(tmp_path: Path, size: tuple[int, int], place: float) -> None:
    """Small files are compared as a whole; of large ones both ends and the middle are."""
    one, other = picture(0, size), picture(0, size)
    other[round(place * (size[0] - 1))] ^= 255
    images = [write_set(tmp_path, {f"{s}.bmp": (encode(im, ".bmp"), None)}, s) for s, im in (("a", one), ("b", other))]
    found = find_overlap(*map(scan_dataset, images))
    assert found.candidates == 1
    assert bool(found.same_content) == (size[0] == 700 and place in (0.3, 0.7))


def test_work_is_bounded_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, val = make(tmp_path, "train", range(20), ".jpg"), make(tmp_path, "val", range(20), ".jpg")
    read = []
    monkeypatch.setattr(overlap, "_digest", lambda path, real=overlap._digest: (read.append(path), real(path))[1])
    monkeypatch.setattr(overlap, "MAX_READ_FILES", 11)
    found = find_overlap(scan_dataset(train), scan_dataset(val))
    assert len(read) == len(set(read)) <= 11
    assert found.candidates == 20
    assert 3 <= found.compared == len(found.same_content) <= 5
    assert "at least" in found.warning() and "of 20 that may be copies only a part" in found.warning()


def test_sets_whose_files_are_all_of_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every picture may be a copy of every other one: a part of both sets is compared, and copies are still found."""
    train, val = make(tmp_path, "train", range(40)), make(tmp_path, "val", range(40))
    read = []
    monkeypatch.setattr(overlap, "_digest", lambda path, real=overlap._digest: (read.append(path), real(path))[1])
    monkeypatch.setattr(overlap, "MAX_READ_FILES", 50)
    found = find_overlap(scan_dataset(train), scan_dataset(val))
    assert len(read) == len(set(read)) <= 50
    assert 3 <= len(found.same_content) <= 25
    assert all(Path(one).name.replace("val", "train") == Path(two).name for one, two in found.same_content)
    assert (found.candidates, found.compared) == (40, 0)  # none of them with all that it may be a copy of
    assert "at least" in found.warning()


def test_files_that_have_gone_are_no_copies(sets: tuple[Path, Path]) -> None:
    scans: list[ScanResult] = [scan_dataset(folder) for folder in sets]
    for folder in sets:
        for path in folder.iterdir():
            path.unlink()
    assert find_overlap(*scans).same_content == []


def test_pictures_that_do_not_take_part_do_not_count(tmp_path: Path) -> None:
    train, val = make(tmp_path, "train", range(2)), make(tmp_path, "val", range(1))
    (tmp_path / "labels" / "train" / "train0.txt").write_text("")
    data = LoadImagesAndLabels(train, 64, min_items=1)
    assert find_overlap(scan_dataset(train), scan_dataset(val)).same_content
    assert not find_overlap(data.report, scan_dataset(val)).same_content


@pytest.mark.parametrize("start", ["first", "second"])
def test_the_report_tells(sets: tuple[Path, Path], tmp_path: Path, messages: list[str], start: str) -> None:
    """Also where the outcome of the scan comes from the label cache."""
    train, val = sets
    shutil.copyfile(train / "train0.bmp", val / "copy.bmp")
    if start == "second":
        scan_dataset(train), scan_dataset(val)
    scans = {"train": scan_dataset(train), "val": scan_dataset(val)}
    path = write_data_report(scans, {0: "a", 1: "b", 2: "c"}, 64, tmp_path / "run")
    assert sum("training pictures too" in message for message in messages) == 1
    content = json.loads(path.read_text(encoding="utf-8"))["overlap"]
    assert content["same_content"] == [[str(val / "copy.bmp"), str(train / "train0.bmp")]]
    messages.clear()
    write_data_report({"val": scans["val"]}, {0: "a", 1: "b", 2: "c"}, 64, tmp_path / "run")
    assert not any("training pictures too" in message for message in messages)
