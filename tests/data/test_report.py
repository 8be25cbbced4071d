"""The data report: complete as JSON, short on the terminal, drawn as a contact sheet."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.data.drawing import BOXES, encode, label_text, paint, write_set
from utils.data import report as report_module
from utils.data.dataset import LoadImagesAndLabels
from utils.data.report import (
    box_pixels,
    choose_pictures,
    describe,
    draw_labels,
    hints,
    table_lines,
    write_contact_sheet,
    write_data_report,
)
from utils.data.scan import ScanResult, scan_dataset

NAMES = {0: "red", 1: "green", 2: "blue", 3: "黄"}


@pytest.fixture
def scan(tmp_path: Path) -> ScanResult:
    """A set with one of everything that the report names."""
    good = encode(paint(320, 160), ".jpg")
    images = write_set(
        tmp_path / "set",
        {
            "good.jpg": (good, label_text()),
            "good.png": (paint(320, 160), None),
            "none.jpg": (good, None),
            "empty.jpg": (good, ""),
            "cut.jpg": (good[: len(good) // 2], label_text()),
            "tiny.png": (paint(8, 8), label_text()),
            "small.png": (paint(9, 20), label_text()),
            "rows.jpg": (good, label_text() + "0 .5 .5 -.1 .1\n3.5 .5 .5 .1 .1\n4 .1\n" + label_text(BOXES[:1])),
            "over.jpg": (good, "1 .5 .5 1.2 .1\n1 .5 .5 .001 .1\n"),
            "Spelt.jpg": (good, None),
            "movie.heic": (b"x", None),
        },
    )
    (tmp_path / "set" / "labels" / "train" / "spelt.TXT").write_text(label_text(BOXES[:1]))
    return scan_dataset(images)


def test_everything_is_in_the_description(scan: ScanResult, tmp_path: Path) -> None:
    report = describe(scan, NAMES, 640)
    labels = tmp_path / "set" / "labels" / "train"
    assert (report["used"], report["objects"]) == (7, 12)
    assert report["background"] == {"empty_label_file": 1, "no_label_file": 1}
    assert report["first_missing_label"] == str(labels / "none.txt")
    left_out = report["left_out"]
    assert left_out["count"] == 3
    assert list(left_out["by_reason"].values()) == [2, 1]  # two pictures of different size are too small
    assert {Path(entry["file"]).name for entry in left_out["files"]} == {"cut.jpg", "tiny.png", "small.png"}
    refused = report["rows_refused"]
    assert refused["by_reason"] == {
        "negative size": 1,
        "class is no whole number": 1,
        "wrong number of columns": 1,
    }
    assert [(entry["file"], entry["line"]) for entry in refused["rows"]] == [
        (str(labels / "rows.txt"), line) for line in (4, 5, 6)
    ]
    assert report["rows_clipped"] == {"count": 1, "files": {str(labels / "over.txt"): 1}}
    assert report["duplicate_rows"] == {"count": 1, "files": {str(labels / "rows.txt"): 1}}
    assert report["shared_label_files"] == [str(labels / "good.txt")]
    assert report["respelt_label_files"] == [[str(labels / "Spelt.txt"), str(labels / "spelt.TXT")]]
    assert report["unknown_suffixes"] == {".heic": 1}
    assert [(e["id"], e["name"], e["objects"], e["pictures"]) for e in report["classes"]] == [
        (0, "red", 4, 4), (1, "green", 5, 4), (2, "blue", 3, 3), (3, "黄", 0, 0),
    ]  # fmt: skip
    assert report["picture_sizes"]["most_frequent"] == [{"width": 320, "height": 160, "pictures": 7}]
    assert report["objects_per_picture"] == {"least": 0, "median": 2.0, "most": 3}


def test_sizes_are_those_at_the_training_size(tmp_path: Path) -> None:
    rows = "0 .5 .5 .0999 .0999\n0 .5 .5 .1 .1\n0 .5 .5 .2999 .3\n0 .5 .5 .3 .3\n0 .5 .5 .5 .009\n"
    images = write_set(tmp_path, {"a.png": (paint(100, 100), rows), "b.png": (paint(50, 100), "1 .5 .5 .5 .25\n")})
    scan = scan_dataset(images)
    np.testing.assert_allclose(box_pixels(scan, 320)[-1], (80, 80), rtol=1e-6)
    sizes = describe(scan, NAMES, 320)["object_sizes"]
    assert (sizes["small"], sizes["medium"], sizes["large"]) == (2, 3, 1)
    assert sizes["thinner_than_3_px"] == 1
    assert sizes["side_quantiles_px"]["1"] == pytest.approx(96, abs=0.1)


def test_one_class(scan: ScanResult) -> None:
    classes = describe(scan, {0: "item"}, 640, single_cls=True)["classes"]
    assert [(entry["id"], entry["name"], entry["objects"]) for entry in classes] == [(0, "item", 12)]


def test_table_is_compact(scan: ScanResult) -> None:
    report = describe(scan, NAMES, 640)
    lines = table_lines({"train": report, "val": report}, 640)
    text = "\n".join(lines)
    assert len(lines) < 35
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["Data", "train", "val"]
    for words in (
        "pictures used",
        "background, no label file",
        "negative size",
        "rows clipped",
        "duplicate rows",
        "黄",
    ):
        assert words in text
    assert "1 green" in text and "5 (42%)" in text


def test_many_classes_are_cut(tmp_path: Path) -> None:
    names = {number: f"class {number}" for number in range(300)}
    rows = "".join(f"{number} .5 .5 .1 .{number + 100}\n" for number in range(100, 250))
    scan = scan_dataset(write_set(tmp_path, {"a.png": (paint(), rows)}))
    report = describe(scan, names, 640)
    assert len(report["classes"]) == 300
    assert len(table_lines({"train": report}, 640)) < 40
    assert "no object of class 0, 1, 2" in hints({"train": report})[0]
    assert hints({"train": report})[0].endswith("for them")


def test_pictures_left_out_by_min_items_are_told(tmp_path: Path, messages: list[str]) -> None:
    """Each number of the report counts what is trained on; what --min-items leaves out has a row of its own."""
    rows = [label_text(BOXES[:count]) for count in (0, 1, 2, 3)]
    images = write_set(tmp_path, {f"{i}.png": (paint(), text) for i, text in enumerate([*rows, None])})
    data = LoadImagesAndLabels(images, 64, min_items=2, prefix="train: ")
    report = describe(data.report, NAMES, 64)
    kinds = {"empty_label_file": 1, "no_label_file": 1}
    assert report["left_out_by_min_items"] == {"min_items": 2, "count": 3, "background": kinds}
    assert (report["used"], report["objects"]) == (len(data), len(data.labels.values)) == (2, 5)
    assert report["background"] == {"empty_label_file": 0, "no_label_file": 0}
    assert [entry["objects"] for entry in report["classes"]] == [2, 2, 1, 0]
    assert sum(entry["pictures"] for entry in report["picture_sizes"]["most_frequent"]) == 2
    plain = describe(scan_dataset(images), NAMES, 64)
    assert plain["left_out_by_min_items"] == {"min_items": 0, "count": 0, "background": dict.fromkeys(kinds, 0)}
    assert plain["background"] == kinds
    write_data_report({"train": data.report, "val": scan_dataset(images)}, NAMES, 64, tmp_path / "run")
    table = next(message for message in messages if message.startswith("Data"))
    left_out = ("--min-items 2 leaves out +3", "  background, empty label file +1", "  background, no label file +1")
    assert re.search("".join(rf"{row} +0\n" for row in left_out), table)
    assert re.search(r"pictures used +2 +5\n  background, empty label file +0 +1\n", table)
    assert "min-items" not in "\n".join(table_lines({"train": plain}, 64))


@pytest.mark.parametrize(("title", "key"), [("pictures left out", "left_out"), ("rows refused", "rows_refused")])
def test_reasons_add_up(scan: ScanResult, title: str, key: str) -> None:
    """However many reasons there are, the rows below a count sum up to it, in every column."""
    report = describe(scan, NAMES, 640)
    reasons = {f"reason {number}": number for number in range(1, 12)} | {"other": 3}
    many = report | {key: {"count": sum(reasons.values()), "by_reason": reasons}}
    few = report | {key: {"count": 5, "by_reason": {"reason 2": 4, "alone": 1}}}
    lines = table_lines({"train": many, "val": few}, 640)
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    below = list(itertools.takewhile(lambda line: line.startswith("  "), lines[start + 1 :]))
    columns = [[int(text) for text in line.split()[-2:]] for line in below]
    assert [sum(column) for column in zip(*columns, strict=True)] == [many[key]["count"], few[key]["count"]]
    assert sum(line.strip().startswith("other") for line in below) == 1
    assert len(below) == report_module.SHOWN_KINDS + 1


def test_hint_for_objects_that_vanish(tmp_path: Path) -> None:
    scan = scan_dataset(write_set(tmp_path, {"a.png": (paint(), "0 .5 .5 .01 .2\n")}))
    (line,) = [line for line in hints({"train": describe(scan, {0: "red"}, 64)}) if "thinner than 3 px" in line]
    assert "--img" in line and "--slice in detection and validation" in line


def test_empty_scan_has_a_report(tmp_path: Path) -> None:
    scan = scan_dataset(write_set(tmp_path, {"a.png": (paint(), None)}))
    report = describe(scan, NAMES, 640)
    assert report["objects"] == 0
    assert report["object_sizes"]["side_quantiles_px"] == {}
    assert table_lines({"val": report}, 640)


def test_files_are_written_and_nothing_else(scan: ScanResult, tmp_path: Path, messages: list[str]) -> None:
    folder = tmp_path / "run"
    path = write_data_report({"train": scan, "val": scan}, NAMES, 320, folder)
    assert sorted(file.name for file in folder.iterdir()) == ["data_report.json", "data_train.jpg", "data_val.jpg"]
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["imgsz"] == 320
    assert content["train"] == json.loads(json.dumps(describe(scan, NAMES, 320)))
    assert any("pictures used" in message for message in messages)


def test_a_folder_that_cannot_be_written_costs_one_line(scan: ScanResult, tmp_path: Path, messages: list[str]) -> None:
    (tmp_path / "run").write_text("a file in the way")
    write_data_report({"train": scan}, NAMES, 320, tmp_path / "run")
    assert sum("data report not written" in message for message in messages) == 1


def test_report_of_names_that_are_no_text(tmp_path: Path) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), "0 .5 .5 .1 .1\n0 .5\n")})
    odd = "\udcff"
    (images / "a.jpg").rename(images / f"{odd}.jpg")
    (tmp_path / "labels" / "train" / "a.txt").rename(tmp_path / "labels" / "train" / f"{odd}.txt")
    (images / f"x.{odd}").write_bytes(b"")
    path = write_data_report({"train": scan_dataset(images)}, NAMES, 64, tmp_path / "run")
    assert json.loads(path.read_text(encoding="utf-8"))["train"]["rows_refused"]["count"] == 1


def test_sheet_shows_every_class(tmp_path: Path) -> None:
    files = {f"{number:03d}.png": (paint(), "0 .5 .5 .2 .2\n") for number in range(30)}
    files |= {"rare1.png": (paint(), "1 .5 .5 .2 .2\n"), "rare2.png": (paint(), "2 .5 .5 .2 .2\n3 .5 .5 .1 .1\n")}
    scan = scan_dataset(write_set(tmp_path, files))
    chosen = choose_pictures(scan, 4)
    assert len(chosen) == len(set(chosen)) == 4
    shown = {int(cls) for index in chosen for cls in scan.labels[index][:, 0]}
    assert shown == {0, 1, 2, 3}
    assert len(choose_pictures(scan, 100)) == 32
    sheet = cv2.imread(str(write_contact_sheet(scan, NAMES, tmp_path / "sheet.jpg", cells=9, side=100)))
    assert sheet.shape[1] == 300
    assert 3 * 60 < sheet.shape[0] < 3 * 100


def test_labels_are_drawn_where_they_belong(tmp_path: Path) -> None:
    image = np.zeros((100, 200, 3), np.uint8)
    scan = scan_dataset(write_set(tmp_path, {"a.png": (image, "3 .5 .5 .4 .4\n0 .7 .2 .9 .2 .8 .4\n")}))
    drawn = draw_labels(scan, 0, NAMES, 200)
    colour = np.array(report_module._colour(3))
    for x, y in ((60, 50), (140, 50), (100, 30), (100, 70)):
        assert np.abs(drawn[y, x] - colour).max() < 30
    assert not drawn[50, 100].any()
    assert drawn[30, 150].any()  # the slanted side of the polygon
    assert not drawn[36, 144].any()  # a corner of its box


def test_broken_pictures_are_grey_in_the_sheet(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"a.png": (paint(), label_text())})
    scan = scan_dataset(images)
    (images / "a.png").write_bytes(b"")
    assert (draw_labels(scan, 0, NAMES, 64) == 114).all()
    assert any("cannot be drawn" in message for message in messages)
