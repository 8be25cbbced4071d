"""Folders and list files: every picture once, nothing silently lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from utils.data.filesystem import plain_path
from utils.data.labels import label_paths
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


# ------------------------------------------------------------------------------------------------ '..' behind links


def linked_set(root: Path) -> Path:
    """A data set of which `link` leads into another disk's folder, and what lies where '..' could lead to."""
    touch(
        root, "disk/images/part/p.jpg", "disk/images/x.jpg", "disk/labels/x.txt", "set/images/x.jpg", "set/images/y.jpg"
    )
    (root / "set" / "images" / "link").symlink_to(root / "disk" / "images" / "part", target_is_directory=True)
    (root / "set" / "up").symlink_to("images/link", target_is_directory=True)  # a link to a link
    (root / "set" / "gone").symlink_to(root / "nowhere", target_is_directory=True)
    return root / "set"


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ("images/link/../x.jpg", "disk/images/x.jpg"),
        ("./images/link/../x.jpg", "disk/images/x.jpg"),
        ("up/../x.jpg", "disk/images/x.jpg"),
        ("images/link/../part/p.jpg", "disk/images/part/p.jpg"),
        ("images/link/../../images/x.jpg", "disk/images/x.jpg"),
        ("images/link/p.jpg", "set/images/link/p.jpg"),  # a link without '..' keeps the name it was given
        ("../set/images/link/p.jpg", "set/images/link/p.jpg"),
        ("images/../images/y.jpg", "set/images/y.jpg"),
        ("missing/../images/y.jpg", "set/images/y.jpg"),
        (".//images/./y.jpg", "set/images/y.jpg"),
    ],
)
def test_two_dots_lead_where_the_system_leads(
    tmp_path: Path, entry: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = linked_set(tmp_path), str(tmp_path / wanted)
    (folder / "list.txt").write_text(entry + "\n", encoding="utf-8")
    assert list_images(folder / "list.txt").files == [expected]
    assert list_images(f"{folder}/up/../../../set/list.txt").files == [expected]  # up/.. is disk/images
    assert list_images(f"{folder}/{entry}").files == [expected]
    monkeypatch.chdir(folder)
    assert list_images(entry).files == [expected]
    if "missing" not in entry:
        assert os.path.samefile(expected, f"{folder}/{entry}")


def test_folders_behind_links_and_two_dots_keep_their_labels(tmp_path: Path) -> None:
    folder = linked_set(tmp_path)
    assert list_images(f"{folder}/images/link/..").files == [
        str(tmp_path / name) for name in ("disk/images/part/p.jpg", "disk/images/x.jpg")
    ]
    (folder / "list.txt").write_text("images/link/../x.jpg\nimages/link/p.jpg\n", encoding="utf-8")
    found = label_paths(list_images(folder / "list.txt").files)
    assert found == [str(tmp_path / name) for name in ("disk/labels/x.txt", "set/labels/link/p.txt")]


def test_plain_paths_of_odd_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = linked_set(tmp_path)
    monkeypatch.chdir(folder)
    assert plain_path("gone/../x.jpg") == str(tmp_path / "x.jpg")  # a dead link leads beside what it names
    assert plain_path("/../../x.jpg") == "/x.jpg"
    assert plain_path("") == plain_path(".") == str(folder)
    (folder / "loop").symlink_to("loop")
    assert plain_path("loop/../y.jpg") == str(folder / "y.jpg")
