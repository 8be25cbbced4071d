"""Tables of detections: three formats of the same rows, complete at any moment, readable whatever the names."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from utils.deploy.tables import COLUMNS, RESULTS_HEADER, Row, Tables, read_results

resource = pytest.importorskip("resource", reason="limits of file sizes are not known here")

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


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes, as on a disk that is full then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", range(1, 330, 23))
def test_a_full_disk_is_told_and_leaves_whole_frames(tmp_path: Path, room: int) -> None:
    """Whichever table meets the end first, and wherever in a row: all three are valid and hold the same frames."""
    tables = Tables(tmp_path, save_csv=True, save_json=True)
    tables.add([FIRST])
    for _ in range(2):  # the second try meets what the first one left
        limit = largest_file(max(map(size_of, tmp_path.iterdir())) + room)
        with limit, pytest.raises(OSError, match=r"could not be written: File too large; make room") as told:
            for _ in range(9):
                tables.add([SECOND, SECOND])
        assert "detections.json" in str(told.value)  # its rows are the longest
        counts = counts_of(tmp_path)
        assert len(set(counts)) == 1 and counts[0] % 2 == 1, counts
    tables.add([FIRST])  # there is room again
    tables.close()
    assert counts_of(tmp_path) == [counts[0] + 1] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_table_that_fails_takes_back_the_rows_of_the_others(tmp_path: Path, failing: int) -> None:
    tables = Tables(tmp_path, save_csv=True, save_json=True)
    tables.add([FIRST])

    class Half:
        """Writes half of what it gets, then refuses."""

        def __init__(self, handle: BinaryIO) -> None:
            self.handle = handle

        def write(self, data: bytes) -> int:
            self.handle.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> object:
            return getattr(self.handle, name)

    table = tables._tables[failing]
    whole = table._handle
    table._handle = Half(whole)
    whole_cut = table.cut

    def cut(end: int) -> None:
        table._handle = whole
        whole_cut(end)

    table.cut = cut
    with pytest.raises(OSError, match=f"^{tmp_path / table.name} could not be written: No space left on device; make"):
        tables.add([SECOND])
    assert counts_of(tmp_path) == [1, 1, 1]
    tables.add([SECOND])
    assert counts_of(tmp_path) == [2, 2, 2]
    tables.close()
    assert all(table._handle.closed for table in tables._tables)


def size_of(path: Path) -> int:
    return path.stat().st_size


def counts_of(folder: Path) -> list[int]:
    """Rows of the three tables, each of which has to be valid to its end."""
    assert (folder / "results.txt").read_bytes().endswith(b"\n")
    assert (folder / "detections.csv").read_bytes().endswith(b"\n")
    rows = list(read_results(folder / "results.txt"))
    with open(folder / "detections.csv", encoding="utf-8", newline="") as handle:
        table = [fields for fields in csv.reader(handle) if len(fields) == len(COLUMNS)][1:]
    return [len(rows), len(table), len(json.loads((folder / "detections.json").read_bytes()))]


@pytest.mark.parametrize("name", ["a.jpg", "#a\tb\n.jpg", 'say "a,b".jpg', "caf\udce9.jpg", "图 一.jpg"])
def test_rows_of_other_inputs_stay(tmp_path: Path, name: str) -> None:
    """A later run replaces rows of its own inputs only, in every table, whatever the names."""
    first, again = (Row(name, 0, 0, "red", confidence, (0, 0, 1, 1)) for confidence in (0.5, 0.75))
    other = Row("b.jpg", 3, 1, 'a "b", c', 0.25, (5, 6, 7, 8))
    for rows, replaced in (([first, other, first], ()), ([again], {name}), ([other], {"unheard of"}), ([], ())):
        tables = Tables(tmp_path, save_csv=True, save_json=True, replaced=replaced)
        tables.add(rows)
        tables.close()
    shown = ["b.jpg", "./#a b .jpg" if name.startswith("#") else name, "b.jpg"]
    kept = list(read_results(tmp_path / "results.txt"))
    assert [row.file for row in kept] == shown and [row.confidence for row in kept] == [0.25, 0.75, 0.25]
    with open(tmp_path / "detections.csv", encoding="utf-8", errors="surrogateescape", newline="") as handle:
        table = list(csv.reader(handle))
    assert tuple(table[0]) == COLUMNS and [fields[0] for fields in table[1:]] == ["b.jpg", name, "b.jpg"]
    assert table[1] == ["b.jpg", "3", "1", 'a "b", c', "0.25", "5", "6", "7", "8"] == table[3]
    objects = json.loads((tmp_path / "detections.json").read_bytes())
    assert [one["file"] for one in objects] == ["b.jpg", name, "b.jpg"] and objects[0] == objects[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["detections.csv", "detections.json", "results.txt"]


def test_a_table_in_another_form_is_refused_before_any_is_changed(tmp_path: Path) -> None:
    tables = Tables(tmp_path, save_csv=True, save_json=True)
    tables.add([FIRST, SECOND])
    tables.close()
    objects = json.loads((tmp_path / "detections.json").read_bytes())
    (tmp_path / "detections.json").write_text(json.dumps(objects, indent=1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"detections\.json line 2 is not as detection writes it; choose another"):
        Tables(tmp_path, save_csv=True, save_json=True, replaced={"v.mp4"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
