"""Paths in data files and lists that are not there: the message tells the usual slip in the way they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.drawing import label_text, paint, write_set
from utils.data.listing import entry_hint
from utils.data.scan import scan_dataset
from utils.data.spec import load_data_spec

SLIPS = {
    "${HOME}/x.jpg": "variables",
    "$DATA/x.jpg": "variables",
    "%USERPROFILE%/x.jpg": "variables",
    "images\\train\\x.jpg": "backslash",
    "C:\\data\\x.jpg": "backslash",
    "https://example.org/x.jpg": "address",
    "file:///data/x.jpg": "address",
    "s3://bucket/x.jpg": "address",
    '"images/train/x.jpg"': "quotation marks",
    "'images/train/x.jpg'": "quotation marks",
}
ROWS = {
    "images/train/x.jpg,0 .5 .5 .2 .2": "nothing else",
    "images/train/x.jpg 10,20,30,40,0": "nothing else",
    "images/train/x.jpg;1": "nothing else",
    "images/train/x.jpg # note": "nothing else",
}


def make(tmp_path: Path) -> Path:
    return write_set(tmp_path, {"a.jpg": (paint(), label_text())})


@pytest.mark.parametrize(("row", "word"), [*SLIPS.items(), *ROWS.items(), ("a.jpg\0b.jpg", "NUL")])
def test_rows_of_lists(tmp_path: Path, row: str, word: str, messages: list[str]) -> None:
    make(tmp_path)
    (tmp_path / "list.txt").write_bytes(f"images/train/a.jpg\n{row}\n".encode())
    result = scan_dataset(tmp_path / "list.txt", use_cache=False)
    assert len(result) == 1
    assert result.counts.left_out == 1
    assert word in str(result.problems[0])
    assert any(word in message for message in messages)


@pytest.mark.parametrize(("entry", "word"), SLIPS.items())
@pytest.mark.parametrize("key", ["train", "path"])
def test_entries_of_data_files(tmp_path: Path, entry: str, word: str, key: str) -> None:
    make(tmp_path)
    values = {"path": "''", "train": "images/train", key: "'" + entry.replace("'", "''") + "'"}
    (tmp_path / "data.yaml").write_text("".join(f"{k}: {v}\n" for k, v in values.items()) + "val: x\nnames: [a]\n")
    with pytest.raises(FileNotFoundError, match=word):
        load_data_spec(tmp_path / "data.yaml")


def test_a_home_folder_is_found_in_lists_as_in_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "list.txt").write_text("~/images/train/a.jpg\n")
    assert len(scan_dataset(tmp_path / "list.txt", use_cache=False)) == 1
    (tmp_path / "images" / "~").mkdir()
    (tmp_path / "images" / "~" / "a.jpg").write_bytes((tmp_path / "images" / "train" / "a.jpg").read_bytes())
    (tmp_path / "images" / "list.txt").write_text("~/a.jpg\n")  # what is there as it is written comes first
    assert scan_dataset(tmp_path / "images" / "list.txt", use_cache=False).im_files[0].endswith("images/~/a.jpg")


@pytest.mark.parametrize("name", ["images/train/x.jpg", "100%/x.jpg", "a$b.jpg", "it's.jpg", "x.jpg.png", "a, b.jpg"])
def test_plain_names_get_no_hint(name: str) -> None:
    assert entry_hint(name) == ""


def test_a_data_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("train: a\nval: b\nnames: " + "[" * 5000 + "]" * 5000 + "\n")
    with pytest.raises(ValueError, match="nested"):
        load_data_spec(tmp_path / "data.yaml")
