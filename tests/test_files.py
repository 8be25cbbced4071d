"""Paths, YAML and atomic writing."""

from __future__ import annotations

import errno
import json
import os
import weakref
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from utils import files
from utils.files import (
    append_line,
    atomic_write,
    find_file,
    increment_path,
    json_text,
    read_yaml,
    shorten,
    write_text_atomic,
    write_yaml,
)


def test_increment_path_counts_from_two(tmp_path: Path) -> None:
    names = [increment_path(tmp_path / "exp", mkdir=True).name for _ in range(3)]
    assert names == ["exp", "exp2", "exp3"]
    assert increment_path(tmp_path / "exp", exist_ok=True, mkdir=True).name == "exp"
    assert not increment_path(tmp_path / "other").exists()


def test_increment_path_keeps_suffix_of_files_and_dots_of_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "v1.5").mkdir()
    assert increment_path(tmp_path / "a.txt").name == "a2.txt"
    assert increment_path(tmp_path / "v1.5").name == "v1.52"


def test_folder_in_the_way_of_a_file_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "exp").touch()
    with pytest.raises(FileExistsError, match="exp is a file"):
        increment_path(tmp_path / "exp", exist_ok=True, mkdir=True)


def test_atomic_write_replaces_only_when_the_block_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text_atomic(path, "old")
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [item.name for item in path.parent.iterdir()] == ["file.txt"]
    write_text_atomic(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "full"), "No space left on device"),
        (OSError(errno.ENOSPC, "full", "some/source"), "No space left on device"),
        (OSError(errno.EIO, "broken"), os.strerror(errno.EIO)),
    ],
)
def test_failed_writing_names_the_file_and_the_room_without_our_own_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, reason: str
) -> None:
    """The temporary file is gone before the room is measured, and so is the open handle that would keep its room."""
    kept: list[weakref.ref] = []

    def measure(folder: Path) -> SimpleNamespace:
        assert list(folder.iterdir()) == [] and kept[0]() is None
        return SimpleNamespace(free=12_345_678)

    def fill(temporary: Path) -> None:
        handle = open(temporary, "wb")  # noqa: SIM115 - as torch leaves its own
        kept.append(weakref.ref(handle))
        raise error

    monkeypatch.setattr(files.shutil, "disk_usage", measure)
    message = f"opt.yaml could not be written: {reason} .12 MB are free"
    with pytest.raises(OSError, match=message) as caught, atomic_write(tmp_path / "opt.yaml") as temporary:
        fill(temporary)
    assert caught.value.errno == error.errno


def test_errors_that_say_where_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent.txt"), atomic_write(tmp_path / "file.txt"):
        (tmp_path / "absent.txt").read_text()
    with pytest.raises(OSError, match="^no picture$"), atomic_write(tmp_path / "file.txt"):
        raise OSError("no picture")


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond 100 bytes: a write stops in the middle, as on a full disk."""
    resource = pytest.importorskip("resource", reason="this system has no limits of file sizes")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_is_added_whole_or_not_at_all(tmp_path: Path, small_disk: None) -> None:
    path = tmp_path / "table.csv"
    append_line(path, "é" * 40)
    with pytest.raises(OSError, match=r"table\.csv could not be written.*MB are free"):
        append_line(path, "b" * 40)
    append_line(path, "c" * 10)
    assert path.read_text(encoding="utf-8") == "é" * 40 + "\n" + "c" * 10 + "\n"
    with pytest.raises(OSError, match="could not be written"):
        append_line(tmp_path, "a folder")


def test_json_of_values_that_json_has_no_word_for() -> None:
    content = {"a": float("inf"), "b": [float("nan"), 1.5], 3: (np.float32("inf"), np.int64(7)), "d": date(2024, 5, 1)}
    assert json.loads(json_text(content)) == {"a": None, "b": [None, 1.5], "3": [None, 7], "d": "2024-05-01"}


def test_names_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9") + " \\ \U0001f600 \u4e2d"
    text = json_text({name: [name]})
    assert json.loads(text.encode("utf-8")) == {name: [name]}
    path = tmp_path / os.fsdecode(b"caf\xe9.json")
    write_text_atomic(path, json.dumps({name: 1}, ensure_ascii=False))
    assert json.loads(path.read_text(encoding="utf-8")) == {name: 1}
    write_yaml(tmp_path / "a.yaml", {"name": name})
    assert read_yaml(tmp_path / "a.yaml") == {"name": name}


@pytest.mark.parametrize("letter", ["n", "\u00e9", "\u4e2d", "\U0001f600", "byte"])
def test_names_are_cut_to_the_bytes_there_is_room_for(letter: str) -> None:
    letter = os.fsdecode(b"\xe9") if letter == "byte" else letter
    short, one, other = letter * 20, letter * 300, letter * 299 + "x"
    assert shorten(short, 200) == short
    cut = [shorten(name, 200) for name in (one, other)]
    assert cut[0] != cut[1] and all(len(os.fsencode(name)) <= 200 for name in cut)


def test_find_file_takes_paths_bare_names_and_names_what_it_searched(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.yaml").touch()
    assert find_file(tmp_path / "a" / "one.yaml") == tmp_path / "a" / "one.yaml"
    assert find_file("one.yaml", roots=[tmp_path]) == tmp_path / "a" / "one.yaml"
    assert find_file("elsewhere/one.yaml", roots=[tmp_path]) == tmp_path / "a" / "one.yaml"
    assert find_file("hyp.scratch-high.yaml", roots=("hyp", "data")).parent.name == "hyp"
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        find_file("two.yaml", roots=[tmp_path])
    (tmp_path / "one.yaml").touch()
    with pytest.raises(ValueError, match="ambiguous"):
        find_file("one.yaml", roots=[tmp_path])
    with pytest.raises(ValueError, match=r"\.yaml"):
        find_file("one.txt", suffixes=(".yaml", ".yml"))


def test_yaml_round_trip_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "names.yaml"
    write_yaml(path, {"b": 1, "a": "螺栓"})
    assert list(read_yaml(path)) == ["b", "a"]
    assert "螺栓" in path.read_text(encoding="utf-8")
    path.write_bytes(b"\xef\xbb\xbfnc: 3\r\n")
    assert read_yaml(path) == {"nc": 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "found list"),
        (b"a: [1, 2\n", "not valid YAML"),
        (b"\xff\xfea\x00", "not UTF-8"),
        (b"", "NoneType"),
    ],
)
def test_broken_yaml_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_yaml(path)
    assert "broken.yaml" in str(caught.value)


def test_yaml_tags_are_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(f"a: !!python/object/apply:os.system ['touch {tmp_path / 'owned'}']\n")
    with pytest.raises(ValueError, match="evil.yaml"):
        read_yaml(path)
    assert not (tmp_path / "owned").exists()


def test_yaml_keys_that_stand_twice_are_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "hyp.yaml"
    path.write_text("lr0: 0.01\nlrf: 0.1\nlr0: 0.02\n")
    with pytest.raises(ValueError, match=r"hyp\.yaml: the key 'lr0' stands on line 1 and again on line 3"):
        read_yaml(path)


def test_a_yaml_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.yaml, a YAML file, could not be read: No such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(IsADirectoryError, match="a YAML file, could not be read: Is a directory"):
        read_yaml(tmp_path)


def test_a_folder_in_place_of_a_file_is_no_lack_of_room(tmp_path: Path) -> None:
    (tmp_path / "last.pt").mkdir()
    with pytest.raises(OSError, match=r"last\.pt could not be written: Is a directory.*Look at what stands there"):
        write_text_atomic(tmp_path / "last.pt", "new")
    assert [item.name for item in tmp_path.iterdir()] == ["last.pt"]


def test_a_folder_that_is_gone_is_told_without_its_room(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "table.csv"
    with pytest.raises(OSError, match=r"table\.csv could not be written: No such file or directory; "):
        append_line(path, "row")
