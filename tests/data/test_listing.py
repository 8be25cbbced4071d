"""Folders and list files: every picture once, nothing silently lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from utils.data.listing import list_images


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names_of(files: list[str], root: Path) -> list[str]:
    return [os.path.relpath(file, root) for file in files]


def test_folder_recursive_sorted_and_by_suffix(tmp_path: Path) -> None:
    touch(tmp_path, "b.JPG", "a.png", "sub/c.tif", "set [1]/d.webp", "x.heic", "x.HEIC", "notes.txt", "noext")
    touch(tmp_path, "._a.png", "Thumbs.db", ".DS_Store", "__MACOSX/a.jpg")
    listing = list_images(tmp_path)
    assert names_of(listing.files, tmp_path) == ["a.png", "b.JPG", "set [1]/d.webp", "sub/c.tif"]
    assert dict(listing.unknown) == {".heic": 2, "": 1}


def test_list_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "set/images/a.jpg", "set/images/b.jpg", "cwd/images/z.jpg")
    lines = (
        "\ufeff# first",
        "./images/a.jpg  ",
        "",
        "images/b.jpg\t",
        "./images/a.jpg",
        "images/gone.jpg",
        "images/z.jpg",
    )
    path = tmp_path / "set" / "list.txt"
    path.write_bytes("\r\n".join(lines).encode())
    monkeypatch.chdir(tmp_path / "cwd")
    listing = list_images(path)
    wanted = ["cwd/images/z.jpg", "set/images/a.jpg", "set/images/b.jpg", "set/images/gone.jpg"]
    assert names_of(listing.files, tmp_path) == wanted
    assert listing.repeated == 1


def test_several_sources_and_single_pictures(tmp_path: Path) -> None:
    touch(tmp_path, "one/a.jpg", "two/b.jpg")
    listing = list_images([tmp_path / "one", tmp_path / "two" / "b.jpg", str(tmp_path / "one" / "a.jpg")])
    assert names_of(listing.files, tmp_path) == ["one/a.jpg", "two/b.jpg"]


def test_linked_folders_are_entered_once(tmp_path: Path) -> None:
    touch(tmp_path, "real/a.jpg", "outside/b.jpg")
    root = tmp_path / "real"
    (root / "again").symlink_to(root, target_is_directory=True)
    (root / "more").symlink_to(tmp_path / "outside", target_is_directory=True)
    (root / "dead.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert names_of(list_images(root).files, root) == ["a.jpg", "dead.jpg", "more/b.jpg"]


@pytest.mark.parametrize("lines", [["set"], ["./set/", "set2"]])
def test_a_list_that_names_folders_only_says_where_folders_belong(tmp_path: Path, lines: list[str]) -> None:
    touch(tmp_path, "set/a.jpg", "set2/b.jpg")
    (tmp_path / "list.txt").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"list\.txt.* folders.*train: \["):
        list_images(tmp_path / "list.txt")


def test_errors_name_the_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list_images(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no pictures in .*\.jpg"):
        list_images(tmp_path)
