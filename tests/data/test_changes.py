"""A data set that changes between two starts of one run is told in one line per split."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.drawing import BOXES, label_text, paint, write_set
from utils.data.changes import fingerprint
from utils.data.report import REPORT_NAME, write_data_report
from utils.data.scan import scan_dataset

NAMES = {0: "a", 1: "b", 2: "c"}


def make(root: Path) -> Path:
    return write_set(root, {f"{i}.png": (paint(), label_text()) for i in range(4)})


def start(images: Path, folder: Path, *, is_resumed: bool) -> None:
    scans = {"train": scan_dataset(images), "val": scan_dataset(images)}
    write_data_report(scans, NAMES, 64, folder, use_sheets=False, is_resumed=is_resumed)


def labels_of(images: Path, number: int) -> Path:
    return images.parents[1] / "labels" / "train" / f"{number}.txt"


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "removed": (lambda images: (images / "1.png").unlink(), ["3 pictures instead of 4", "9 objects instead of 12"]),
    "added": (lambda images: write_set(images.parents[1], {"new.png": (paint(), None)}), ["5 pictures instead of 4"]),
    "renamed": (lambda images: (images / "1.png").rename(images / "x.png"), ["9 objects instead of 12"]),
    "renamed with its label": (
        lambda images: (
            (images / "1.png").rename(images / "x.png"),
            labels_of(images, 1).rename(labels_of(images, "x")),
        ),
        ["other pictures"],
    ),
    "label edited": (lambda images: labels_of(images, 1).write_text(label_text(BOXES[::-1])), ["other labels"]),
    "label removed": (lambda images: labels_of(images, 1).unlink(), ["9 objects instead of 12"]),
    "other content": (lambda images: write_set(images.parents[1], {"1.png": (paint(97), label_text())}), ["pictures"]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_between_two_starts_is_told(tmp_path: Path, messages: list[str], kind: str) -> None:
    change, words = CHANGES[kind]
    images = make(tmp_path / "set")
    start(images, tmp_path / "run", is_resumed=False)
    change(images)
    messages.clear()
    start(images, tmp_path / "run", is_resumed=True)
    lines = [message for message in messages if "changed since this run" in message]
    assert [line.split(":")[0] for line in lines] == ["train", "val"]
    assert all(word in line for line in lines for word in words)
    messages.clear()
    start(images, tmp_path / "run", is_resumed=True)  # the report is the new one now
    assert not any("changed since" in message for message in messages)


def test_nothing_is_said_where_nothing_changed(tmp_path: Path, messages: list[str]) -> None:
    images = make(tmp_path / "set")
    start(images, tmp_path / "run", is_resumed=False)
    os.utime(images / "1.png")
    (tmp_path / "set").rename(tmp_path / "moved")
    start(tmp_path / "moved" / "images" / "train", tmp_path / "run", is_resumed=True)
    assert not any("changed since" in message for message in messages)


def test_a_new_run_in_an_old_folder_is_not_compared(tmp_path: Path, messages: list[str]) -> None:
    images = make(tmp_path / "set")
    start(images, tmp_path / "run", is_resumed=False)
    (images / "1.png").unlink()
    start(images, tmp_path / "run", is_resumed=False)
    assert not any("changed since" in message for message in messages)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"train": 5}', '{"train": {"used": 1}, "val": {}}'])
def test_reports_that_say_nothing(tmp_path: Path, messages: list[str], text: str | None) -> None:
    images = make(tmp_path / "set")
    if text is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / REPORT_NAME).write_text(text, encoding="utf-8")
    start(images, tmp_path / "run", is_resumed=True)
    assert not any("changed since" in message for message in messages)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    images = make(tmp_path)
    before = fingerprint(scan_dataset(images))
    (images / "1.png").rename(images / os.fsdecode(b"\xff.png"))
    assert fingerprint(scan_dataset(images))["pictures"] != before["pictures"]
