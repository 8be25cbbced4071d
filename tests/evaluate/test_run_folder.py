"""What is read back from a run's folder, whole or damaged, and what is advised on it."""

from __future__ import annotations

import json
import math
import os
import shlex

import numpy as np
import pytest

from tests.evaluate.run_kit import epoch_columns, make_run
from utils.evaluate.advice import advise, best_row
from utils.evaluate.report import write_comparison, write_report
from utils.evaluate.run_folder import MAX_ROWS, command, read_columns, read_run
from utils.evaluate.warning_file import WarningRecorder, read_warnings
from utils.files import read_yaml
from utils.log import LOGGER
from utils.options import TrainOptions


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "exp")


def test_a_whole_folder(run):
    found = read_run(run)
    json.dumps(found, allow_nan=False)
    assert found["name"] == "exp" and found["epochs"] == 8
    assert found["results"]["metrics/recall"][0] is None, "an epoch without validation has no figures"
    assert found["best"] == 7
    assert found["train_s"] == pytest.approx(8 * 200 / 100)
    assert found["data"]["splits"]["train"]["background"] == 3
    assert {file["name"] for file in found["files"]} >= {"results.csv", "weights/best.pt", "evaluation.json"}
    assert found["evaluation"]["map"] is not None


def test_links_lead_from_the_page_to_the_files(run, tmp_path):
    page = tmp_path / "page"
    page.mkdir()
    for entry in read_run(run, page)["files"]:
        assert (page / entry["link"]).resolve() == (run / entry["name"]).resolve()


@pytest.mark.parametrize("name", ["results.csv", "monitor.csv", "data_report.json", "evaluation.json", "opt.yaml"])
@pytest.mark.parametrize("content", [None, "", "\0\1 nonsense {", '{"a": 1', "[]"])
def test_absent_and_damaged_files_are_left_out(tmp_path, name, content):
    folder = make_run(tmp_path / "exp", epochs=2)
    path = folder / name
    path.unlink() if content is None else path.write_text(content)
    json.dumps(read_run(folder), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("opt.yaml", "clip_grad: 10.0", "clip_grad: .inf"),
        ("opt.yaml", "epochs: 2", "epochs: .inf"),
        ("opt.yaml", "entity: ''", "entity: 2024-05-01"),
        ("opt.yaml", "entity: ''", "entity: {a: [.nan]}"),
        ("opt.yaml", "lr0: 0.01", "lr0: .nan"),
        ("opt.yaml", "lr0: 0.01", "2024-05-01: 2024-05-01"),
        ("evaluation.json", '"map50":', '"map50": Infinity, "other":'),
        ("data_report.json", '"used": 200', '"used": NaN'),
        ("data_report.json", '"used": 200', '"used": "many"'),
        ("data_report.json", '"empty_label_file": 2', '"empty_label_file": "some"'),
    ],
)
def test_values_that_json_cannot_hold_leave_the_report_standing(tmp_path, name, old, new):
    folder = make_run(tmp_path / "exp", epochs=2)
    path = folder / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    page = write_report(folder).read_text(encoding="utf-8")
    data = page.split('id="data">')[1].split("</script>")[0]

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    (run,) = json.loads(data, parse_constant=refuse)["runs"]
    if "clip_grad" in new:
        assert run["options"]["clip_grad"] == "inf" and "--clip-grad inf" in run["command"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.csv", "a,b\n1,2\n"),
        ("monitor.csv", b"\xff\xfe"),
        ("data_report.json", "[]"),
        ("evaluation.json", '{"a": 1'),
        ("opt.yaml", ": : :"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content):
    folder = make_run(tmp_path / "exp", epochs=2)
    assert read_run(folder)["unread"] == []
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (line,) = read_run(folder)["unread"]
    assert line.startswith(f"{name} could not be read")
    (folder / name).unlink()
    assert read_run(folder)["unread"] == [], "what was never written is no damage"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("warnings.json", "[1]"),
        ("warnings.json", "\0\1\2"),
        ("warnings.json", '[{"text": "a", "count": Infinity, "first": ""}]'),
        ("warnings.json", '{"text": 1}'),
        ("results.csv", "epoch,a\n0,1\n"),
        ("data_report.json", {"train": {"classes": 5}}),
        ("data_report.json", {"train": {"classes": [1]}}),
        ("data_report.json", {"val": {"background": [1]}}),
        ("evaluation.json", {"classes": {"a": 1}}),
        ("evaluation.json", {"classes": 0}),
        ("evaluation.json", {"classes": [{"class": "0"}]}),
        ("evaluation.json", {"curves": None}),
        ("evaluation.json", {"curves": {"axis": [1]}}),
        ("evaluation.json", {"worst": []}),
        ("evaluation.json", {"worst": {"missed": "all"}}),
        ("evaluation.json", {"worst": {"missed": [{"file": 3}]}}),
        ("evaluation.json", {"confusion": {"size": 5, "cells": 7}}),
        ("evaluation.json", {"sizes": {"labels": "many"}}),
        ("evaluation.json", {"coco": [0.1]}),
        ("evaluation.json", {"settings": "all"}),
        ("evaluation.json", {"map": "high"}),
    ],
)
def test_parts_of_a_wrong_form_are_named_and_the_rest_is_shown(tmp_path, name, change):
    folder = make_run(tmp_path / "exp", epochs=2)
    path, whole = folder / name, read_run(folder)
    assert whole["unread"] == []
    is_part = isinstance(change, dict)
    content = {**json.loads(path.read_text(encoding="utf-8")), **change} if is_part else None
    path.write_text(json.dumps(content) if is_part else change, encoding="utf-8")
    found = read_run(folder)
    (line,) = found["unread"]
    assert line.startswith(name)
    assert found["monitor"] == whole["monitor"]
    if name == "evaluation.json":
        (part,) = change
        assert part in line and part not in found["evaluation"]
        assert found["evaluation"]["images"] == whole["evaluation"]["images"]


def test_a_table_of_other_columns_has_no_best_epoch(tmp_path):
    folder = make_run(tmp_path / "exp", epochs=4)
    lines = (folder / "results.csv").read_text().splitlines()
    table = [line.split(",") for line in lines]
    at = table[0].index("metrics/mAP_0.5")
    (folder / "results.csv").write_text("\n".join(",".join(row[:at] + row[at + 1 :]) for row in table) + "\n")
    found = read_run(folder)
    assert found["best"] is None and "train/box_loss" in found["results"]
    (line,) = found["unread"]
    assert line.startswith("results.csv has no column metrics/mAP_0.5:")


def test_names_that_are_no_text_reach_the_report(tmp_path, log):
    """Bytes of another encoding in the names of folders and pictures, and in warnings."""
    odd = os.fsdecode(b"caf\xe9")
    folder = make_run(tmp_path / odd / "exp", epochs=2)
    recorder = WarningRecorder()
    try:
        recorder.write_to(folder)
        LOGGER.warning(f"{odd}.jpg is grey")
    finally:
        recorder.close()
    assert [entry["text"] for entry in read_warnings(folder)] == [f"{odd}.jpg is grey"]
    log.clear()  # what was said may hold what no file of a test's results can
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    files = [example["file"] for examples in evaluation["worst"].values() for example in examples]
    assert files and all(odd in file for file in files)
    found = read_run(folder, tmp_path)
    assert "caf%E9/exp/results.csv" in [file["link"] for file in found["files"]]
    page = write_report(folder).read_text(encoding="utf-8")
    (run,) = json.loads(page.split('id="data">')[1].split("</script>")[0])["runs"]
    assert run["folder"] == str(folder) and run["unread"] == []
    write_comparison([folder, folder / ".." / "exp"], tmp_path / f"{odd}.html")
    assert (tmp_path / f"{odd}.html").is_file()
    log.clear()


def test_a_validation_is_told_from_a_training(tmp_path):
    folder = make_run(tmp_path / "exp", epochs=2)
    assert read_run(folder)["kind"] == "Training"
    for name in ("opt.yaml", "results.csv"):
        (folder / name).unlink()
    assert read_run(folder)["kind"] == "Validation"


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run's folder"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="runs/train/exp"):
        read_run(tmp_path / "absent")


def test_long_tables_are_thinned_with_first_and_last_row(tmp_path):
    path = tmp_path / "monitor.csv"
    path.write_text("step, a\n" + "".join(f"{step},{step / 2}\n" for step in range(100_001)) + "5,\n")
    columns = read_columns(path)
    assert MAX_ROWS / 2 < len(columns["step"]) <= MAX_ROWS + 1
    assert columns["step"][0] == 0 and columns["step"][-1] == 5 and math.isnan(columns["a"][-1])


def test_the_command_repeats_the_run(run):
    given = TrainOptions(cfg="a b.yaml", epochs=7, amp=False, freeze=[3, 4], cos_restarts=[5.0], multi_scale=True)
    words = shlex.split(command(given.to_dict(), run))
    assert words[:2] == ["python", "train_dual.py"]
    again = TrainOptions.from_cli(words[2:]).to_dict()
    assert again.pop("hyp") == str(run / "hyp.yaml")
    assert again == {name: value for name, value in given.to_dict().items() if name != "hyp"}
    assert "--weights ''" in command(read_yaml(run / "opt.yaml"), run)


# --- advice -----------------------------------------------------------------------------------------------------------


def columns(**changes):
    table = {name: values.copy() for name, values in epoch_columns(21).items()}
    for values in table.values():
        values[::2] = values[1::2].tolist() + [values[-2]]  # every epoch validated
    table["epoch"] = np.arange(21.0)
    return {name: values.tolist() for name, values in {**table, **changes}.items()}


def test_nothing_is_advised_on_a_good_run_that_goes_on():
    assert advise(columns(), {}, epochs=100) == []


def test_advice_on_accuracy_that_stays_at_zero():
    zero = np.zeros(21)
    (line,) = advise(columns(**{"metrics/mAP_0.5": zero, "metrics/mAP_0.5:0.95": zero}), {}, epochs=100)
    assert "still 0" in line and "train_batch0.jpg" in line


def test_advice_on_a_validation_loss_that_rises():
    rising = abs(np.arange(21.0) - 5) + 3
    lines = advise(columns(**{"val/box_loss": rising}), {}, epochs=100)
    assert len(lines) == 1 and "lowest in epoch" in lines[0] and "mosaic" in lines[0]


def test_advice_on_a_run_that_ended_while_rising():
    (line,) = advise(columns(), {}, epochs=21, last="runs/exp/weights/last.pt")
    assert "--resume runs/exp/weights/last.pt --epochs 42" in line


def test_advice_on_sizes_classes_and_rare_labels():
    evaluation = {
        "coco": {"ap_small": 0.1, "ap_medium": 0.5},
        "sizes": {"labels": [100, 60, 30, 10]},
        "classes": [{"class": 0, "name": "cat", "labels": 90}, {"class": 1, "name": "dog", "labels": 10}],
        "confusion": {"size": 3, "cells": [[0, 0, 60], [1, 0, 20], [2, 0, 10], [0, 1, 1], [1, 2, 50]]},
    }
    small, mixed, rare = advise({}, evaluation, epochs=10)
    assert "--img" in small and "60 of 100" in small
    assert mixed.startswith("20 of 90 'cat' were taken for 'dog'")
    assert "dog" in rare and "1 class" in rare


def test_advice_on_a_validation_that_could_not_measure_or_found_nothing():
    (line,) = advise({}, {"images": 8, "instances": 0, "map50": 0.0}, epochs=0)
    assert "none of the 8" in line and "'labels'" in line
    (line,) = advise({}, {"images": 8, "instances": 5, "map50": 0.0}, epochs=0)
    assert "class order" in line and "--img" in line
    assert advise({}, {"images": 8, "instances": 5, "map50": 0.4}, epochs=0) == []
    assert advise({}, {}, epochs=0) == []


def test_sizes_are_not_compared_where_nothing_is_found():
    assert advise({}, {"coco": {"ap_small": 0.0, "ap_medium": 0.0}, "sizes": {"labels": [9, 9, 0, 0]}}, epochs=9) == []


def test_best_row_is_that_of_the_best_fitness():
    table = epoch_columns(6)
    table["metrics/mAP_0.5:0.95"][3] = 0.9
    assert best_row({name: values.tolist() for name, values in table.items()}) == 3
    assert best_row({}) is None and best_row({"epoch": [0.0]}) is None


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_warnings_are_kept_counted_and_survive_a_resume(tmp_path):
    recorder = WarningRecorder()
    try:
        LOGGER.warning("before there is a folder")
        LOGGER.info("no warning")
        recorder.write_to(tmp_path)
        LOGGER.warning("twice")
        LOGGER.warning("twice")
    finally:
        recorder.close()
    LOGGER.warning("after the end")
    assert [(entry["text"], entry["count"]) for entry in read_warnings(tmp_path)] == [
        ("before there is a folder", 1),
        ("twice", 2),
    ]
    again = WarningRecorder()
    try:
        LOGGER.warning("twice")
        again.write_to(tmp_path, keep=True)
    finally:
        again.close()
    assert {entry["text"]: entry["count"] for entry in read_warnings(tmp_path)} == {
        "before there is a folder": 1,
        "twice": 3,
    }


def test_a_recorder_that_was_left_open_ends_with_the_next_run(tmp_path):
    left = WarningRecorder()
    left.write_to(tmp_path)
    WarningRecorder().close()
    LOGGER.warning("of nobody")
    assert read_warnings(tmp_path) == []


def test_warnings_of_an_older_run_in_the_folder_are_dropped(tmp_path):
    (tmp_path / "warnings.json").write_text('[{"text": "old", "count": 1, "first": ""}]')
    recorder = WarningRecorder()
    recorder.write_to(tmp_path)
    recorder.close()
    assert read_warnings(tmp_path) == []
    (tmp_path / "warnings.json").write_text("{")
    assert read_warnings(tmp_path) == []
