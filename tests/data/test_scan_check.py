"""A label cache that is a sound file with contents that contradict each other costs a new scan, and says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.drawing import encode, label_text, paint, write_set
from utils.data.scan import ScanResult, scan_dataset
from utils.data.scan_check import checksum, contradiction

Arrays = dict[str, np.ndarray]


def make(root: Path) -> Path:
    good = encode(paint(), ".jpg")
    return write_set(
        root,
        {
            "a.jpg": (good, label_text()),
            "b.jpg": (good, "0 .1 .1 .3 .1 .3 .4\n1 .5 .5 .2 .2\n"),
            "c.jpg": (good, None),
            "d.jpg": (good, "0 .5 .5 .2 .2\n0 .5 .5 -.2 .2\n"),
            "e.jpg": (b"", None),
        },
    )


def put(part: str, index: object, value: object) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[part] = arrays[part].copy()
        arrays[part][index] = value

    return change


def retype(part: str, kind: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({part: arrays[part].astype(kind)})


def reshape(part: str, *shape: int) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({part: arrays[part].reshape(shape)})


def change_texts(change: Callable[[dict], object]) -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        texts = json.loads(arrays["texts"].tobytes())
        change(texts)
        arrays["texts"] = np.frombuffer(json.dumps(texts).encode(), np.uint8)

    return apply


def repeat_name(arrays: Arrays) -> None:
    """Let the first picture have the name of the second, which is as long."""
    first, second = arrays["images_lengths"][:2]
    arrays["images"] = arrays["images"].copy()
    arrays["images"][:first] = arrays["images"][first : first + second]


# Pictures a to e; e is left out. Boxes: three of a, two of b (the first a polygon of three points), one of d.
CHANGES = {
    "offsets that run backwards": (put("box_offsets", 3, 2), "offsets"),
    "offsets that begin late": (put("box_offsets", 0, 1), "offsets"),
    "offsets beyond the rows": (put("box_offsets", -1, 7), "offsets"),
    "negative offsets": (put("point_offsets", 1, -1), "offsets"),
    "offsets of boxes that give a row to another picture": (put("box_offsets", 1, 4), "points"),
    "offsets of points that give points to another picture": (put("point_offsets", 1, 3), "points"),
    "negative counts": (put("point_counts", 0, -1), "points"),
    "counts that add up by chance": (put("point_counts", slice(0, 2), (-3, 3)), "points"),
    "polygons of two points": (put("point_counts", slice(3, 5), (2, 1)), "points"),
    "negative lengths of names": (put("images_lengths", slice(0, 2), (-5, 500)), "names"),
    "lengths of labels that do not add up": (put("labels_lengths", 0, 3), "names"),
    "the same picture twice": (repeat_name, "twice"),
    "a class that is no whole number": (put("boxes", (0, 0), 0.5), "class"),
    "a class below 0": (put("boxes", (0, 0), -1), "class"),
    "a class no label file can hold": (put("boxes", (0, 0), 2.0**25), "class"),
    "boxes that are not finite": (put("boxes", (1, 2), np.nan), "boxes"),
    "endless boxes": (put("boxes", (1, 3), np.inf), "boxes"),
    "boxes in pixels": (put("boxes", (1, 1), 320), "boxes"),
    "boxes beyond the border": (put("boxes", (1, slice(1, 5)), (0.9, 0.5, 0.4, 0.1)), "boxes"),
    "boxes without width": (put("boxes", (1, 3), 0), "boxes"),
    "points beyond the border": (put("points", (0, 0), 1.5), "points"),
    "points that are not finite": (put("points", (0, 1), np.nan), "points"),
    "pictures without width": (put("figures", (0, 0), 0), "sizes"),
    "pictures of negative height": (put("figures", (0, 1), -64), "sizes"),
    "pictures of endless width": (put("figures", (0, 0), 2**40), "sizes"),
    "negative numbers of rows": (put("figures", (3, 3), -1), "counts"),
    "boxes of a picture without a label file": (put("figures", (0, 2), 0), "label file"),
    "a flag that is no flag": (put("figures", (0, 2), 7), "label file"),
    "boxes of another type": (retype("boxes", "float64"), "type"),
    "offsets of another type": (retype("box_offsets", "float64"), "type"),
    "stamps of another type": (retype("stamps", "float64"), "type"),
    "boxes of another shape": (reshape("boxes", -1), "type"),
    "stamps of another shape": (reshape("stamps", -1, 2), "type"),
    "remarks on a picture that is not there": (change_texts(lambda t: t.update({"17": ["", "", []]})), "remarks"),
    "remarks on a negative picture": (change_texts(lambda t: t.update({"-1": ["", "", []]})), "remarks"),
    "remarks of another form": (change_texts(lambda t: t["3"].__setitem__(2, [["x", "label", "k", "t"]])), "remarks"),
    "remarks about another thing": (change_texts(lambda t: t["3"].__setitem__(2, [[1, "moon", "k", "t"]])), "remarks"),
    "boxes of a picture that is left out": (change_texts(lambda t: t.update({"0": ["gone", "gone", []]})), "left out"),
    "another form of texts": (lambda a: a.update(texts=np.frombuffer(b"[1]", np.uint8)), "remarks"),
}


def spoil(cache: Path, change: Callable[[Arrays], None], *, is_signed: bool) -> None:
    with np.load(cache) as stored:
        arrays = {name: stored[name] for name in stored.files}
    change(arrays)
    if is_signed:
        arrays["checksum"] = np.array(checksum(arrays))
    with open(cache, "wb") as file:
        np.savez(file, **arrays)


def assert_same(one: ScanResult, two: ScanResult) -> None:
    assert list(one.im_files) == list(two.im_files)
    assert one.counts == two.counts
    for name in ("labels", "points"):
        assert np.array_equal(getattr(one, name).values, getattr(two, name).values)
        assert np.array_equal(getattr(one, name).offsets, getattr(two, name).offsets)
    assert np.array_equal(one.point_counts, two.point_counts)
    assert np.array_equal(one.shapes, two.shapes)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_contents_that_contradict_each_other_are_scanned_again(
    tmp_path: Path, name: str, is_signed: bool, messages: list[str]
) -> None:
    images, (change, word) = make(tmp_path), CHANGES[name]
    wanted, cache = scan_dataset(images), tmp_path / "labels" / "train.scan.cache"
    spoil(cache, change, is_signed=is_signed)
    messages.clear()
    assert_same(scan_dataset(images), wanted)
    told = [message for message in messages if "is not used, all files are scanned again" in message]
    assert len(told) == 1
    assert word in told[0].partition("scanned again")[2]
    messages.clear()
    assert_same(scan_dataset(images), wanted)
    assert not any("scanned again" in message for message in messages)


@pytest.mark.parametrize(
    "change",
    [
        put("boxes", (0, 0), 9),  # a class that may be, of a box that may be
        put("boxes", (0, slice(1, 5)), (0.5, 0.5, 0.1, 0.1)),
        put("figures", (0, slice(0, 2)), (640, 480)),
        put("stamps", (4, 0), 7),
        change_texts(lambda texts: texts["3"][2][0].__setitem__(3, "another text")),
    ],
)
def test_contents_that_could_be_true_are_told_by_the_checksum(
    tmp_path: Path, change: Callable[[Arrays], None], messages: list[str]
) -> None:
    images = make(tmp_path)
    wanted, cache = scan_dataset(images, nc=3), tmp_path / "labels" / "train.scan.cache"
    spoil(cache, change, is_signed=False)
    messages.clear()
    assert_same(scan_dataset(images, nc=3), wanted)
    assert any("is not used" in message and "checksum" in message for message in messages)


def test_a_class_that_only_the_cache_knows_is_scanned_again(tmp_path: Path, messages: list[str]) -> None:
    images = make(tmp_path)
    wanted, cache = scan_dataset(images, nc=3), tmp_path / "labels" / "train.scan.cache"
    spoil(cache, put("boxes", (0, 0), 9), is_signed=True)
    messages.clear()
    assert_same(scan_dataset(images, nc=3), wanted)
    assert any("label cache" in message and "class 9" in message for message in messages)


def test_what_the_scan_writes_passes(tmp_path: Path) -> None:
    scan_dataset(make(tmp_path))
    with np.load(tmp_path / "labels" / "train.scan.cache") as stored:
        arrays = {name: stored[name] for name in stored.files}
    assert contradiction(arrays) == ""
    assert int(arrays["checksum"]) == checksum(arrays)
