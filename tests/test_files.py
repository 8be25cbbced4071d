"""Paths, YAML and atomic writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.files import atomic_write, find_file, increment_path, read_yaml, write_text_atomic, write_yaml


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
