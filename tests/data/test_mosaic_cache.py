"""Prepared mosaics: labels that fit, repeatable for any number of processes, noticed changes, full disks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.drawing import Box, colour_faults, label_text, paint, write_set
from utils.data import mosaic_cache
from utils.data.dataset import LoadImagesAndLabels, SampleKey
from utils.data.mosaic_cache import REFRESH_EPOCHS, SUFFIX, MosaicSchedule

COUNT = 6  # pictures
PLACES = {"mosaic": 1.0, "translate": 0.1, "scale": 0.3, "fliplr": 0.5, "flipud": 0.5}
Make = Callable[..., LoadImagesAndLabels]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """One large object per picture; its class is the picture's number modulo 3."""
    files = {}
    for i in range(COUNT):
        box: list[Box] = [(i % 3, 0.5, 0.5, 0.9, 0.9)]
        files[f"{i}.png"] = (paint(64, 64 - 4 * i, box), label_text(box))
    return write_set(tmp_path, files)


@pytest.fixture
def make(images: Path, tmp_path: Path) -> Make:
    def build(size: int = 64, mosaic_cache: int = COUNT, **options: object) -> LoadImagesAndLabels:
        hyp = {**PLACES, **options.pop("hyp", {})}
        return LoadImagesAndLabels(
            images, size, augment=True, hyp=hyp, mosaic_cache=mosaic_cache, cache_dir=tmp_path / "kept", **options
        )

    return build


def stored(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept").rglob(f"*{SUFFIX}"))


def samples(data: LoadImagesAndLabels, epoch: int) -> list[tuple]:
    return [data[SampleKey(epoch, index)] for index in range(len(data))]


def assert_equal(one: list[tuple], two: list[tuple]) -> None:
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("polygons", [False, True])
def test_labels_lie_on_their_objects(images: Path, make: Make, polygons: bool) -> None:
    if polygons:
        for path in (images.parents[1] / "labels" / "train").iterdir():
            cls = path.read_text(encoding="ascii").split()[0]
            path.write_text(f"{cls} .05 .05 .95 .05 .95 .95 .05 .95\n", encoding="ascii")
    data, boxes = make(), 0
    for epoch in range(8):
        for image, labels, _, shapes in samples(data, epoch):
            assert shapes is None
            assert image.shape == (3, 64, 64)
            rows = labels.numpy()[:, 1:]
            rows = rows[(rows[:, 3:] > 0.1).all(1)]
            assert colour_faults(image.numpy()[::-1].transpose(1, 2, 0), rows, shrink=0.4) == []
            boxes += len(rows)
    assert boxes > 60


def test_stored_mosaics_are_used_and_drawn_on_anew(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make()
    first = samples(data, 0)
    monkeypatch.setattr(data, "load_image", lambda index: pytest.fail("a file was read"))
    assert_equal(samples(data, 0), first)
    later = samples(data, 1)
    assert all(not torch.equal(a[0], b[0]) for a, b in zip(first, later, strict=True))


def test_another_start_continues_with_the_same_mosaics(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = samples(make(), 3)
    data = make()
    monkeypatch.setattr(data, "load_image", lambda index: pytest.fail("a file was read"))
    assert_equal(samples(data, 3), expected)


def test_other_random_steps_still_happen(make: Make) -> None:
    hyp = {"mixup": 1.0, "copy_paste": 0.0, "hsv_v": 0.4}
    mixed, plain = make(hyp=hyp), make()
    assert not torch.equal(mixed[SampleKey(0, 1)][0], plain[SampleKey(0, 1)][0])
    assert mixed[SampleKey(0, 1, False)][3] is not None  # mosaic switched off


@pytest.mark.parametrize("workers", [1, 2])
def test_number_of_workers_makes_no_difference(make: Make, tmp_path: Path, workers: int) -> None:
    expected = samples(make(), 0) + samples(make(), REFRESH_EPOCHS)
    for path in stored(tmp_path):
        path.unlink()
    keys = [SampleKey(epoch, index) for epoch in (0, REFRESH_EPOCHS) for index in range(COUNT)]
    loader = DataLoader(make(), batch_size=None, sampler=keys, num_workers=workers)
    assert_equal(list(loader), expected)


def test_renewal_leaves_one_file(make: Make, tmp_path: Path) -> None:
    data = make()
    samples(data, REFRESH_EPOCHS - 1)
    before = stored(tmp_path)
    samples(data, REFRESH_EPOCHS)
    assert len(before) == len(stored(tmp_path)) == 1
    assert before != stored(tmp_path)


def test_changes_lead_to_new_mosaics(images: Path, make: Make, tmp_path: Path) -> None:
    data = make()
    samples(data, 0)
    del data  # else they are in use
    names = {stored(tmp_path)[0].parent.name}
    for change in ("size", "seed", "count", "label", "picture"):
        if change == "label":
            label = images.parents[1] / "labels" / "train" / "0.txt"
            label.write_text("2" + label.read_text(encoding="ascii")[1:], encoding="ascii")
        if change in ("label", "picture"):
            os.utime(images / "0.png", ns=(5, len(names)))
        options = {"size": {"size": 96}, "seed": {"seed": 1}, "count": {"mosaic_cache": 3}}.get(change, {})
        image = samples(make(**options), 0)[0][0]
        assert image.shape[1] == options.get("size", 64)
        assert len(stored(tmp_path)) == 1  # what belonged to the former state is gone
        names.add(stored(tmp_path)[0].parent.name)
    assert len(names) == 6


def test_lost_pixels_are_noticed(make: Make, tmp_path: Path) -> None:
    expected = samples(make(), 0)
    path = stored(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[: 128 * 128 * 3] = bytes(128 * 128 * 3)  # the first mosaic, as after a power failure
    path.write_bytes(content)
    assert_equal(samples(make(), 0), expected)


def test_without_space_mosaics_are_made_anew(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_cache, "free_disk_bytes", lambda folder: 1000)
    data = make()
    assert data[SampleKey(0, 0)][3] is None
    assert stored(tmp_path) == []


def test_full_disk_during_training(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = samples(make(), 20)
    data = make(seed=0, mosaic_cache=COUNT)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mosaic_cache, "_write_all", fail)
    assert_equal(samples(data, 20), expected)
    assert samples(data, 30)[0][3] is None


@pytest.mark.parametrize(("length", "count"), [(6, 6), (10, 3), (40, 4), (7, 2), (4, 1), (1, 1)])
def test_schedule_shows_every_picture(length: int, count: int) -> None:
    schedule = MosaicSchedule(length, count, 0)
    sets = [[i for slot in range(count) for i in schedule.pictures(g, slot)] for g in range(12)]
    if 4 * count >= length:
        assert all(set(shown) == set(range(length)) for shown in sets)
    counts = Counter(i for shown in sets[: max(length // (4 * count), 1)] for i in shown)
    assert max(counts.values()) <= -(-4 * count // length)
    assert set().union(*sets) == set(range(length))
    for epoch in range(3):
        used = Counter(schedule.slot(epoch, index) for index in range(length))
        assert max(used.values()) - min(used.values()) <= 1
        assert len(used) == count
    other = MosaicSchedule(length, count, 1)
    if length > 4:
        assert sets[0] != [i for slot in range(count) for i in other.pictures(0, slot)]


def test_nothing_is_prepared_where_nothing_is_used(images: Path, tmp_path: Path) -> None:
    for options in ({"augment": False}, {"augment": True, "hyp": {"mosaic": 0.0}}, {"augment": True, "rect": True}):
        data = LoadImagesAndLabels(
            images, 64, **{"hyp": PLACES, **options}, mosaic_cache=4, cache_dir=tmp_path / "kept"
        )
        assert isinstance(data[0][0], torch.Tensor)
    assert not (tmp_path / "kept").exists()


def test_broken_picture_becomes_another_with_its_labels(images: Path, make: Make) -> None:
    data = make()
    (images / "0.png").write_bytes(b"")
    rows = np.concatenate([sample[1].numpy() for epoch in range(4) for sample in samples(data, epoch)])
    assert len(rows) > 10
    assert [Path(path).name for path in data.broken_files()] == ["0.png"]


# ------------------------------------------------------------------------------------------------ damaged files

SLOT = 128 * 128 * 3  # bytes of a mosaic's pixels


def spoil(path: Path, change: Callable[[bytearray], object]) -> None:
    """Change a file in place, so that those who have it open see it."""
    content = bytearray(path.read_bytes())
    change(content)
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate(len(content))


def flip(at: int) -> Callable[[bytearray], object]:
    return lambda content: content.__setitem__(at, content[at] ^ 1)


def pick(folder: Path) -> Path:
    return sorted(folder.rglob(f"*{SUFFIX}"))[-1]


@pytest.mark.parametrize(
    "change",
    [
        *(flip(at) for at in (0, 1, 4092, 4094, SLOT // 2 + 1, SLOT - 1, 2 * SLOT + 77)),  # any single byte
        flip(COUNT * SLOT + 8),  # the centre in a header
        flip(COUNT * SLOT + 8 * 3),  # the index of a picture: wrong labels
        lambda content: content.__setitem__(slice(100, 200), bytes(100)),
        lambda content: content.__setitem__(COUNT * SLOT, 7),  # neither made nor not made
        lambda content: content.__delitem__(slice(len(content) // 2, None)),
        lambda content: content.__delitem__(slice(len(content) - 8, None)),
        lambda content: content.clear(),
    ],
)
@pytest.mark.parametrize("state", ["new", "opened"])
def test_a_damaged_mosaic_is_made_anew(make: Make, tmp_path: Path, change: Callable, state: str) -> None:
    data = make()
    expected = samples(data, 0) + samples(data, 1)
    sound = pick(tmp_path).read_bytes()
    data = make()
    if state == "opened":
        data._mosaics._enter(0)
    spoil(pick(tmp_path), change)
    assert_equal(samples(data, 0) + samples(data, 1), expected)
    assert pick(tmp_path).read_bytes() == sound


def test_a_file_that_is_cut_while_it_is_used_is_no_crash(make: Make, tmp_path: Path) -> None:
    data = make()
    expected = samples(data, 0)
    sound = pick(tmp_path).read_bytes()
    for left in (0, 1, SLOT, COUNT * SLOT, len(sound) - 8, len(sound) - 1):
        os.truncate(pick(tmp_path), left)
        assert_equal(samples(data, 0), expected)
        assert pick(tmp_path).read_bytes() == sound


def test_damage_is_told_once_with_the_file(make: Make, tmp_path: Path, messages: list[str]) -> None:
    samples(make(), 0)
    spoil(pick(tmp_path), lambda content: content.__setitem__(slice(0, COUNT * SLOT), bytes(COUNT * SLOT)))
    messages.clear()
    data = make(prefix="train: ")
    samples(data, 0)
    samples(data, 1)
    told = [message for message in messages if "checksum" in message]
    assert len(told) == 1
    assert told[0].startswith("train: --mosaic-cache") and str(pick(tmp_path)) in told[0]
    messages.clear()
    samples(make(), 0)  # all of them are sound again
    assert not [message for message in messages if "checksum" in message]


def test_a_place_that_spoils_again_is_given_up(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = samples(make(), 0)
    written: list[int] = []
    real = mosaic_cache._write_all

    def spoiling(descriptor: int, data: np.ndarray, offset: int) -> None:
        if len(data) == SLOT:
            written.append(offset)
            data = data ^ 1  # a disk that keeps other bytes than it was given
        real(descriptor, data, offset)

    spoil(pick(tmp_path), flip(5))
    monkeypatch.setattr(mosaic_cache, "_write_all", spoiling)
    data = make()
    for _ in range(4):
        assert_equal(samples(data, 0), expected)
    assert written == [0]


def test_each_mosaic_is_checked_once_for_all_processes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    samples(make(), 0)
    data, sums = make(), []
    real = mosaic_cache._checksum
    monkeypatch.setattr(mosaic_cache, "_checksum", lambda pixels, values: (sums.append(1), real(pixels, values))[1])
    for epoch in range(3):
        samples(data, epoch)
    assert len(sums) == COUNT
    list(DataLoader(data, batch_size=None, sampler=[SampleKey(0, index) for index in range(COUNT)], num_workers=1))
    assert set(np.frombuffer(data._mosaics._states, np.int64)) == {1}


def test_files_of_the_wrong_size_are_found(make: Make, tmp_path: Path) -> None:
    data = make()
    samples(data, 0)
    assert data.cut_files() == []
    path = pick(tmp_path)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    (cut,) = data.cut_files()
    assert (cut.path, cut.size, cut.needed, cut.option) == (path, size // 2, size, "--mosaic-cache")
