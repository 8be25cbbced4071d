"""The data-set YAML: where paths are looked for, forms of names, errors that stop a run before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.data.spec import load_data_spec, parse_names


def make(folder: Path, text: str, name: str = "data.yaml", folders: tuple[str, ...] = ("train", "val")) -> Path:
    """Write a YAML and the folders images/NAME beside it."""
    for part in folders:
        (folder / "images" / part).mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


BODY = "path: .\ntrain: images/train\nval: images/val\n"


def test_paths_are_taken_from_the_yaml_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "images" / "train").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    spec = load_data_spec(make(tmp_path, BODY + "names: [a, b]\n"))
    assert spec.train == [tmp_path / "images" / "train"]
    assert spec.val == [tmp_path / "images" / "val"]
    assert spec.test == []
    assert spec.nc == 2
    assert spec.names == {0: "a", 1: "b"}


def test_working_directory_comes_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "set"
    make(data, "", name="unused.yaml")
    path = make(tmp_path / "yaml", "path: set\ntrain: images/train\nval: images/val\nnames: [a]\n", folders=())
    monkeypatch.chdir(tmp_path)
    assert load_data_spec(path).train == [data / "images" / "train"]


def test_one_level_too_high_as_some_exports_write(tmp_path: Path) -> None:
    make(tmp_path, "", name="unused.yaml")
    path = make(tmp_path, "train: ../images/train\nval: ../images/val\ntest: ../images/test\nnc: 1\nnames: ['a']\n")
    spec = load_data_spec(path)
    assert spec.train == [tmp_path / "images" / "train"]
    assert spec.test == []
    with pytest.raises(FileNotFoundError, match="tried .*images/test"):
        spec.split("test")


def test_lists_of_folders(tmp_path: Path) -> None:
    spec = load_data_spec(make(tmp_path, "train: [images/train, images/val]\nval: images/val\nnames: [a]\n"))
    assert [path.name for path in spec.train] == ["train", "val"]
    with pytest.raises(FileNotFoundError, match="no entry 'test:'"):
        spec.split("test")
    with pytest.raises(ValueError, match="split 'all'"):
        spec.split("all")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("[no, yes, 007, 1.50]", ["no", "yes", "007", "1.50"]),
        ("{0: on, 1: null, 2: 红}", ["on", "null", "红"]),
        ("{'1': b, '0': a}", ["a", "b"]),
        ("[a, a]", ["a", "a"]),
    ],
)
def test_names_stay_what_was_written(tmp_path: Path, names: str, wanted: list[str]) -> None:
    spec = load_data_spec(make(tmp_path, f"{BODY}names: {names}\n"))
    assert list(spec.names.values()) == wanted
    assert list(spec.names) == list(range(len(wanted)))


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("nc: 3\nnames: [a, b, c, d]", "nc is 3.*4 names"),
        ("nc: many\nnames: [a]", "nc must be a whole number"),
        ("names: {0: a, 2: b}", "no class 1"),
        ("names: {a: 0}", "keys must be integers"),
        ("names: {0: a, '00': b}", "'names: 00' stands on line 4 and again"),
        ("names: red", "names must be a list or a dictionary"),
        ("names: [a, [b]]", "class 1 must be a text"),
        ("nc: 2", "entry 'names:' is missing"),
        ("names: [a", "no valid YAML"),
    ],
)
def test_errors_stop_at_once(tmp_path: Path, rest: str, words: str) -> None:
    path = make(tmp_path, f"{BODY}{rest}\n")
    with pytest.raises(ValueError, match=words) as caught:
        load_data_spec(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("key", ["train", "val", "names"])
@pytest.mark.parametrize("value", ["[]", "''", "", "{}", "['']", "~", "null"])
def test_entries_that_are_there_and_empty(tmp_path: Path, key: str, value: str) -> None:
    """An entry without content is not called missing: the user sees it in the file."""
    entries = {"train": "images/train", "val": "images/val", "names": "[a]", key: value}
    path = make(tmp_path, "".join(f"{name}: {text}\n" for name, text in entries.items()))
    if (key, value) == ("names", "['']"):
        assert load_data_spec(path).names == {0: ""}
        return
    with pytest.raises(ValueError, match="is empty") as caught:
        load_data_spec(path)
    assert f"{key}:" in str(caught.value)
    assert "missing" not in str(caught.value)


@pytest.mark.parametrize(
    "pattern", ["images/*/a.jpg", "images/train/*.jpg", "images/t?ain", "images/[tv]*", "**/x.png"]
)
def test_patterns_are_called_patterns(tmp_path: Path, pattern: str) -> None:
    for split in ("train", "test"):
        entries = {"train": "images/train", "val": "images/val", split: f"'{pattern}'"}
        text = "".join(f"{name}: {value}\n" for name, value in entries.items()) + "names: [a]\n"
        with pytest.raises(FileNotFoundError) as caught:
            load_data_spec(make(tmp_path, text)).split(split)
        assert "pattern" in str(caught.value) and "folder" in str(caught.value)
        assert pattern in str(caught.value)


def test_a_folder_whose_name_looks_like_a_pattern_is_a_folder(tmp_path: Path) -> None:
    path = make(tmp_path, "train: 'images/set [1]'\nval: images/val*\nnames: [a]\n", folders=("set [1]", "val*"))
    assert load_data_spec(path).train == [tmp_path / "images" / "set [1]"]
    text = "train: images/nowhere\nval: images/val*\nnames: [a]\n"
    with pytest.raises(FileNotFoundError) as caught:
        load_data_spec(make(tmp_path, text))
    assert "pattern" not in str(caught.value)


def test_missing_folder_is_shown_with_the_places_tried(tmp_path: Path) -> None:
    path = make(tmp_path, BODY.replace("images/val", "images/nowhere") + "names: [a]\n")
    with pytest.raises(FileNotFoundError) as caught:
        load_data_spec(path)
    assert str(path) in str(caught.value)
    assert str(tmp_path / "images" / "nowhere") in str(caught.value)


@pytest.mark.parametrize(
    ("root", "entry", "wanted"),
    [
        ("", "../set/images/train", "set/images/train"),  # the name 'images' stays, labels follow from it
        ("../set/.", "images/train", "set/images/train"),
        ("images/..", "part", "disk/part"),  # images leads to disk/pictures
        ("", "images/../part", "disk/part"),
        ("", "../images/train", "set/images/train"),  # one level too high, as exports write it
    ],
)
def test_links_and_two_dots_keep_their_meaning(tmp_path: Path, root: str, entry: str, wanted: str) -> None:
    for name in ("disk/pictures/train", "disk/part", "set"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "set" / "images").symlink_to(tmp_path / "disk" / "pictures", target_is_directory=True)
    path = tmp_path / "set" / "data.yaml"
    path.write_text(f"path: {root}\ntrain: {entry}\nval: [{entry}]\nnames: [a]\n", encoding="utf-8")
    spec = load_data_spec(path)
    assert spec.train == spec.val == [tmp_path / wanted]


def test_byte_order_mark_and_wrong_encoding(tmp_path: Path) -> None:
    path = make(tmp_path, "\ufeff" + BODY + "names: [ä]\n")
    assert load_data_spec(path).names == {0: "ä"}
    path.write_bytes((BODY + "names: [ä]\n").encode("latin-1"))
    with pytest.raises(ValueError, match="UTF-8"):
        load_data_spec(path)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("names: [a]\ntrain: images/val\n", "'train' stands on line 1 and again on line 4"),
        ("names: [a]\nnames: [a, b]\n", "'names' stands on line 3 and again on line 4"),
        ("names: {0: a, 1: b}\nnc: 2\nnc: 2\n", "'nc' stands on line 4 and again on line 5"),
        ("names:\n  0: a\n  1: b\n  01: c\n", "'names: 01' stands on line 5 and again on line 6"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path, rest: str, words: str) -> None:
    path = make(tmp_path, "train: images/train\nval: images/val\n" + rest)
    with pytest.raises(ValueError, match="delete one of them") as caught:
        load_data_spec(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_content_must_be_a_mapping(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="key: value"):
        load_data_spec(make(tmp_path, "- a\n- b\n"))


def test_names_function_takes_plain_numbers() -> None:
    assert parse_names({0: 5, 1: "b"}) == {0: "5", 1: "b"}
