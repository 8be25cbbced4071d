"""The scan of a whole set: counts, messages, label cache, stops."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from tests.data.drawing import BOXES, encode, label_text, paint, write_set
from utils.data import scan as scan_module
from utils.data.scan import check_classes, printable, scan_dataset
from utils.data.spec import load_data_spec
from utils.log import LOGGER


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All log messages of a test."""
    seen: list[str] = []
    monkeypatch.setattr(LOGGER, "handle", lambda record: seen.append(record.getMessage()))
    LOGGER.setLevel(logging.INFO)
    return seen


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def make(root: Path) -> Path:
    """A set with one of everything."""
    good = encode(paint(), ".jpg")
    return write_set(
        root,
        {
            "good.jpg": (good, label_text()),
            "polygon.jpg": (good, "0 .1 .1 .3 .1 .3 .4\n1 .5 .5 .2 .2\n"),
            "none.jpg": (good, None),
            "empty.jpg": (good, "\n\n"),
            "cut.jpg": (good[: len(good) // 2], label_text()),
            "zero.jpg": (b"", label_text()),
            "pixels.jpg": (good, "0 30 20 10 10\n"),
            "rows.jpg": (good, label_text() + "0 .5 .5 -.1 .1\n" + label_text(BOXES[:1]) + "1 .5 .5 1.2 .1\n"),
        },
    )


def test_counts_and_messages(tmp_path: Path, messages: list[str]) -> None:
    result = scan_dataset(make(tmp_path), prefix="train: ")
    assert [Path(path).stem for path in result.im_files] == ["empty", "good", "none", "polygon", "rows"]
    assert [len(rows) for rows in result.labels] == [0, 3, 0, 2, 4]
    counts = result.counts
    assert (counts.used, counts.empty, counts.missing, counts.background, counts.left_out) == (5, 1, 1, 2, 3)
    assert (counts.rows_refused, counts.rows_clipped, counts.duplicates, counts.objects) == (1, 1, 1, 9)
    assert result.shapes.tolist() == [[96, 64]] * 5
    assert [len(points) for points in result.segments(3)] == [3, 0]
    text = "\n".join(messages)
    for words in ("cut.jpg: left out: JPEG is cut off", "zero.jpg: left out: empty", "pixels", "rows.txt, line 4: row"):
        assert words in text
    assert "5 pictures used with 9 objects, 2 background" in messages[-1]
    assert "1 refused, 1 clipped, 1 duplicates" in messages[-1]


def test_second_scan_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make(tmp_path)
    first = scan_dataset(images)
    assert (tmp_path / "labels" / "train.scan.cache").is_file()
    monkeypatch.setattr(scan_module, "scan_one", lambda *_: pytest.fail("looked at a file again"))
    second = scan_dataset(images)
    assert second.counts == first.counts
    assert second.problems == first.problems
    assert list(second.im_files) == list(first.im_files)
    for name in ("shapes", "point_counts"):
        assert np.array_equal(getattr(second, name), getattr(first, name))
    for name in ("labels", "points"):
        assert np.array_equal(getattr(second, name).values, getattr(first, name).values)


def test_changes_are_noticed_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make(tmp_path)
    scan_dataset(images)
    label = tmp_path / "labels" / "train" / "good.txt"
    label.write_text(label_text().replace("0 0.2", "3 0.2", 1))  # same size, another class
    os.utime(label, ns=(1, 1))
    (tmp_path / "labels" / "train" / "none.txt").write_text("1 .5 .5 .1 .1\n")
    (images / "empty.jpg").unlink()
    looked_at = []
    real = scan_module.scan_one
    monkeypatch.setattr(scan_module, "scan_one", lambda i, lb: (looked_at.append(Path(i).name), real(i, lb))[1])
    result = scan_dataset(images)
    assert sorted(looked_at) == ["good.jpg", "none.jpg"]
    assert result.labels[0][0, 0] == 3
    assert [Path(path).stem for path in result.im_files] == ["good", "none", "polygon", "rows"]


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 rubbish", bytes(2000)])
def test_damaged_cache_is_replaced(tmp_path: Path, damage: bytes) -> None:
    images = make(tmp_path)
    wanted = scan_dataset(images).counts
    cache = tmp_path / "labels" / "train.scan.cache"
    cache.write_bytes(damage)
    assert scan_dataset(images).counts == wanted
    assert len(cache.read_bytes()) > 2000


def test_read_only_set(tmp_path: Path, messages: list[str], user_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make(tmp_path)
    (tmp_path / "labels").chmod(0o555)
    wanted = scan_dataset(images).counts
    assert not list((tmp_path / "labels").glob("*.cache"))
    assert sum("label cache kept in" in message for message in messages) == 1
    monkeypatch.setattr(scan_module, "scan_one", lambda *_: pytest.fail("looked at a file again"))
    assert scan_dataset(images).counts == wanted


def test_no_place_for_the_cache(tmp_path: Path, messages: list[str], user_cache: Path) -> None:
    images = make(tmp_path)
    (tmp_path / "labels").chmod(0o555)
    (user_cache / "yolov9").write_text("a file in the way")
    assert scan_dataset(images).counts.used == 5
    assert sum("cannot be written" in message for message in messages) == 1


def test_nothing_but_the_cache_is_written(tmp_path: Path) -> None:
    images = make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    scan_dataset(images)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert set(after) - set(before) == {tmp_path / "labels" / "train.scan.cache"}
    assert all(after[path] == data for path, data in before.items())


def test_class_beyond_nc_stops(tmp_path: Path) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), label_text()), "b.jpg": (paint(), "# x\n0 .5 .5 .1 .1\n")})
    with pytest.raises(ValueError, match=r"a\.txt, line 3: class 2, .* 2 classes") as caught:
        scan_dataset(images, nc=2)
    with pytest.raises(ValueError) as again:  # from the cache
        scan_dataset(images, nc=2)
    assert str(caught.value) == str(again.value)
    check_classes(scan_dataset(images, nc=3), 3)


def test_nothing_usable_stops(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the 1 pictures"):
        scan_dataset(write_set(tmp_path, {"a.jpg": (b"", None)}))


def test_missing_and_odd_files_are_left_out(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), label_text())})
    (images / "dead.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "list.txt").write_text("images/train/a.jpg\nimages/train/gone.jpg\nimages/train/dead.jpg\nimages\n")
    result = scan_dataset(tmp_path / "list.txt")
    assert (result.counts.used, result.counts.left_out) == (1, 3)
    text = "\n".join(messages)
    assert "gone.jpg: left out: file is not there" in text
    assert "images: left out: is a folder" in text


def test_label_of_another_spelling_is_used_unless_it_belongs_elsewhere(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"A.jpg": (paint(), None), "b.jpg": (paint(), label_text()), "B.jpg": (paint(), None)})
    (tmp_path / "labels" / "train" / "a.TXT").write_text(label_text())
    result = scan_dataset(images)
    assert dict(zip([Path(path).name for path in result.im_files], map(len, result.labels), strict=True)) == {
        "A.jpg": 3, "B.jpg": 0, "b.jpg": 3,
    }  # fmt: skip
    assert any("differs in case" in message for message in messages)


def test_twins_share_a_label_and_are_reported(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), label_text()), "a.png": (paint(), None)})
    assert scan_dataset(images).counts.objects == 6
    assert any("shared by pictures of the same stem" in message for message in messages)


def test_names_that_are_no_text(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), label_text())})
    os.rename(os.fsencode(images / "a.jpg"), os.fsencode(images) + b"/\xff\xfe.jpg")
    os.rename(os.fsencode(tmp_path / "labels/train/a.txt"), os.fsencode(tmp_path / "labels/train") + b"/\xff\xfe.txt")
    (images / os.fsdecode(b"\xfd.jpg")).write_bytes(b"")
    for _ in range(2):
        assert scan_dataset(images).counts.objects == 3
    "\n".join(messages).encode()
    assert printable("ok ä") == "ok ä"


def test_blood_cells(shared_dir: Path) -> None:
    path = shared_dir / "datasets" / "bccd" / "bccd.yaml"
    if not path.is_file():
        pytest.skip(f"no {path}")
    spec = load_data_spec(path)
    train, val = (scan_dataset(spec.split(name), nc=spec.nc) for name in ("train", "val"))
    assert (train.counts.used, train.counts.objects, val.counts.used, val.counts.objects) == (205, 2804, 87, 1137)
