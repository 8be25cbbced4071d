"""What a validation may remove from a folder that is there already: only what an earlier one recorded as its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from utils.evaluate.own_files import FILE_NAME, TRAINING, OwnFiles, some, take_folder

NAMES = ("evaluation.json", "PR_curve.png")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def validated(folder: Path, labels: dict[str, str], names: tuple[str, ...] = NAMES) -> Path:
    """Let an earlier validation leave files in ``folder``; return it."""
    folder.mkdir(exist_ok=True)
    own = take_folder(folder, names, with_labels=bool(labels))
    for name in names:
        (folder / name).write_text("of the first run")
    for name, text in labels.items():
        write_label(own, name, text)
    own.save()
    return folder


def write_label(own: OwnFiles, name: str, text: str) -> None:
    path = own.folder / "labels" / name
    own.add(path, text.encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("with_labels", [False, True])
def test_what_an_earlier_validation_recorded_goes(tmp_path, with_labels):
    folder = validated(tmp_path / "exp", {"a.txt": "0\n", "day/b.txt": "1\n"}, (*NAMES, "a_predictions.json"))
    (folder / "notes.txt").write_text("mine")
    take_folder(folder, NAMES, with_labels=with_labels)
    assert set(contents(folder)) == {"notes.txt", FILE_NAME}
    assert not (folder / "labels").exists()
    assert json.loads((folder / FILE_NAME).read_text())["files"] == dict.fromkeys(NAMES)


@pytest.mark.parametrize(
    "name", ["labels/classes.txt", "labels/2007/u1.txt", "labels/data.csv", "labels", "evaluation.json"]
)
@pytest.mark.parametrize("is_validated", [False, True])
def test_foreign_files_in_the_way_are_neither_deleted_nor_replaced(tmp_path, name, is_validated):
    folder = tmp_path / "voc"
    if is_validated:
        validated(folder, {}, ("PR_curve.png",))
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("precious")
    before = contents(folder)
    with pytest.raises(ValueError, match="no earlier validation recorded") as told:
        take_folder(folder, NAMES, with_labels=True)
    assert all(text in str(told.value) for text in (name, "--name", "older version"))
    assert contents(folder) == before


def test_labels_corrected_by_hand_stay(tmp_path, log):
    folder = validated(tmp_path / "exp", {"a.txt": "0\n", "b.txt": "1\n"})
    (folder / "labels" / "b.txt").write_text("2\n")
    before = contents(folder)
    with pytest.raises(ValueError, match=r"labels/b\.txt.*changed"):
        take_folder(folder, NAMES, with_labels=True)
    assert contents(folder) == before, "what is refused removes nothing"
    take_folder(folder, NAMES, with_labels=False)
    assert contents(folder).keys() == {"labels/b.txt", FILE_NAME} and "labels/b.txt" in log.text
    take_folder(folder, NAMES, with_labels=False)
    assert (folder / "labels" / "b.txt").read_text() == "2\n", "it is the user's from now on"


def test_a_run_that_was_killed_is_replaced(tmp_path):
    take_folder(tmp_path, NAMES, with_labels=False)
    (tmp_path / NAMES[1]).write_text("the last that it wrote")
    take_folder(tmp_path, NAMES, with_labels=False)
    assert set(contents(tmp_path)) == {FILE_NAME}


@pytest.mark.parametrize("rest", ["", '{"files":{"labels/c.txt', "\0\n"])
def test_label_files_of_a_run_that_was_killed_are_its_own(tmp_path, rest):
    """Its end is never reached; the last line of its record may be half written, the last label file missing."""
    own = take_folder(tmp_path, NAMES, with_labels=True)
    for name in ("a.txt", "day/b.txt", "nüi.txt", "odd\udce9.txt"):
        write_label(own, name, f"0 {name.encode('utf-8', 'replace')}\n")
    own.add(tmp_path / "labels" / "never.txt", b"0\n")
    with open(tmp_path / FILE_NAME, "a") as handle:
        handle.write(rest)
    take_folder(tmp_path, NAMES, with_labels=True)
    assert set(contents(tmp_path)) == {FILE_NAME}


def test_labels_of_a_killed_run_that_were_changed_since_stay(tmp_path):
    own = take_folder(tmp_path, NAMES, with_labels=True)
    write_label(own, "a.txt", "0\n")
    write_label(own, "b.txt", "1\n")
    (tmp_path / "labels" / "b.txt").write_text("2\n")
    with pytest.raises(ValueError, match=r"labels/b\.txt.*changed"):
        take_folder(tmp_path, NAMES, with_labels=True)
    take_folder(tmp_path, NAMES, with_labels=False)
    assert contents(tmp_path).keys() == {"labels/b.txt", FILE_NAME}


def test_the_end_of_a_run_makes_its_record_one_line(tmp_path):
    folder = validated(tmp_path / "exp", {"a.txt": "0\n", "b.txt": "1\n"})
    (line,) = (folder / FILE_NAME).read_text().splitlines()
    assert json.loads(line)["files"].keys() == {*NAMES, "labels/a.txt", "labels/b.txt"}


def test_a_record_that_cannot_grow_says_so(tmp_path):
    own = take_folder(tmp_path, NAMES, with_labels=True)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(OSError, match=FILE_NAME):
        own.add(tmp_path / "labels" / "a.txt", b"0\n")


def test_long_lists_are_cut():
    assert some("abcde") == "a, b, c, d, e" and some(range(7)) == "0, 1, 2, 3, 4 and 2 more"


@pytest.mark.parametrize("record", ["", "\0", "[]", '{"files": 3}', '{"files": ["notes.txt"]}', '{"other": 1}'])
def test_a_damaged_record_makes_nothing_ours(tmp_path, record):
    for name in ("notes.txt", NAMES[0]):
        (tmp_path / name).write_text("mine")
    (tmp_path / FILE_NAME).write_text(record)
    with pytest.raises(ValueError, match=NAMES[0]):
        take_folder(tmp_path, NAMES, with_labels=False)
    (tmp_path / NAMES[0]).unlink()
    take_folder(tmp_path, NAMES, with_labels=False)
    assert (tmp_path / "notes.txt").exists()


def test_a_record_never_leads_out_of_its_folder(tmp_path):
    folder, outside = tmp_path / "exp", tmp_path / "outside.txt"
    folder.mkdir()
    outside.write_text("precious")
    (folder / FILE_NAME).write_text(json.dumps({"files": {"../outside.txt": None, str(outside): None, "": None}}))
    take_folder(folder, NAMES, with_labels=True)
    assert outside.exists()


def test_a_linked_folder_of_labels_is_left_alone(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("0 .5 .5 1 1\n")
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "labels").symlink_to(data)
    with pytest.raises(ValueError, match=r"labels/a\.txt"):
        take_folder(tmp_path / "exp", NAMES, with_labels=True)
    assert (data / "a.txt").exists()


@pytest.mark.parametrize("name", TRAINING)
def test_the_folder_of_a_training_is_refused(tmp_path, name):
    (tmp_path / name).write_text("epoch\n")
    with pytest.raises(ValueError, match="folder of a training"):
        take_folder(tmp_path, NAMES, with_labels=False)
    assert [path.name for path in tmp_path.iterdir()] == [name]
