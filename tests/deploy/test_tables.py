"""Tables of detections: three formats of the same rows, complete at any moment, readable whatever the names."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from utils.deploy.tables import COLUMNS, RESULTS_HEADER, Row, Tables, read_results

FIRST = Row("a b.jpg", 0, 2, "blue", 0.912345678, (1, 2, 30, 40))
SECOND = Row("v.mp4", 17, 0, 'say "red", green', 0.5, (0, 0, 96, 64))


def test_three_tables_hold_the_same_rows(tmp_path: Path) -> None:
    tables = Tables(tmp_path, save_csv=True, save_json=True)
    tables.add([FIRST])
    tables.add([])
    tables.add([SECOND, SECOND])
    tables.close()
    lines = (tmp_path / "results.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == RESULTS_HEADER and lines[1] == "a b.jpg\t0\t2\tblue\t0.912346\t1\t2\t30\t40"
    with open(tmp_path / "detections.csv", encoding="utf-8", newline="") as handle:
        table = list(csv.reader(handle))
    assert table[0] == list(COLUMNS) and table[2] == [
        "v.mp4",
        "17",
        "0",
        'say "red", green',
        "0.5",
        "0",
        "0",
        "96",
        "64",
    ]
    objects = json.loads((tmp_path / "detections.json").read_text(encoding="utf-8"))
    assert objects[0] == {
        "file": "a b.jpg",
        "frame": 0,
        "class": 2,
        "name": "blue",
        "confidence": 0.912346,
        "box": [1, 2, 30, 40],
    }
    assert len(lines) == len(table) == len(objects) + 1 == 4
    assert [row.name for row in read_results(tmp_path / "results.txt")] == ["blue", *['say "red", green'] * 2]


def test_json_is_complete_at_any_moment(tmp_path: Path) -> None:
    tables = Tables(tmp_path, save_json=True)
    for count in range(4):
        tables._json.flush()
        assert len(json.loads((tmp_path / "detections.json").read_bytes())) == count
        tables.add([FIRST])
    tables.close()
    assert not (tmp_path / "detections.csv").exists()


@pytest.mark.parametrize("name", ["#a\tb\n.jpg", "图像 一.jpg", "caf\udce9.jpg", "a,b.jpg", "=1+1.jpg"])
def test_odd_names_break_no_table(tmp_path: Path, name: str) -> None:
    tables = Tables(tmp_path, save_csv=True, save_json=True)
    row = Row(name, 1, 3, name, 0.25, (0, 0, 1, 1))
    tables.add([row, row])
    tables.close()
    rows = list(read_results(tmp_path / "results.txt"))
    assert len(rows) == 2 and rows[0].frame == 1 and rows[0].box == (0, 0, 1, 1)
    assert [entry["file"] for entry in json.loads((tmp_path / "detections.json").read_bytes())] == [name, name]
    with open(tmp_path / "detections.csv", encoding="utf-8", errors="surrogateescape", newline="") as handle:
        assert [fields[0] for fields in csv.reader(handle)] == ["file", name, name]


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "results.txt").write_text(
        "# head\nfree text\na\t0\tx\tred\t0.5\t1\t2\t3\t4\na\t0\t1\tred\t0.5\t1\t2\t3\t4\n"
    )
    assert [row.number for row in read_results(tmp_path / "results.txt")] == [1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device here that is always full")
@pytest.mark.parametrize("name", ["results.txt", "detections.csv", "detections.json"])
def test_a_full_disk_is_told_with_the_file_and_closes_all(tmp_path: Path, name: str) -> None:
    """``/dev/full`` refuses every byte like a full disk; an error of that kind tells no file by itself."""
    (tmp_path / name).symlink_to("/dev/full")
    tables = Tables(tmp_path, save_csv=True, save_json=True)
    wanted = f"^{tmp_path / name} could not be written: No space left on device; make room"
    for call in (lambda: tables.add([FIRST]), tables.close):
        with pytest.raises(OSError, match=wanted):
            call()
    assert all(handle.closed for handle in tables._handles())
