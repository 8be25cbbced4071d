"""Batches, their order, and independence of the number of workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.drawing import colour_faults, label_text, paint, write_set
from tests.data.loader_kit import HYP, count_restarts, fingerprints, loader_of, probe_loader
from utils.data.dataset import LoadImagesAndLabels
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.spec import load_data_spec


def passes(loader: EpochLoader, epochs: int) -> list[tuple[Tensor, Tensor, tuple[str, ...]]]:
    out = []
    for epoch in range(epochs):
        loader.set_epoch(epoch, mosaic=epoch != 1)
        out += [(images.clone(), targets.clone(), paths) for images, targets, paths, _ in loader]
    return out


def test_batch_layout(shapes_dataset: Path) -> None:
    loader = loader_of(shapes_dataset)
    batches = passes(loader, 1)
    assert len(loader) == len(batches) == 5
    assert [len(images) for images, _, _ in batches] == [5, 5, 5, 5, 4]
    images, targets, paths = batches[0]
    assert images.dtype == torch.uint8
    assert images.shape == (5, 3, 64, 64)
    assert targets.shape[1] == 6
    assert set(targets[:, 0].tolist()) <= set(range(5))
    assert len(paths) == 5
    assert sorted(path for _, _, group in batches for path in group) == sorted(loader.dataset.im_files)


@pytest.mark.slow
def test_first_ten_batches_do_not_depend_on_the_number_of_workers(
    shapes_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.data.loader.worker_count", lambda wanted, _: wanted)
    found = {}
    for workers in (0, 2, 8):
        loader = loader_of(shapes_dataset, workers, seed=3)
        assert loader.num_workers == workers
        found[workers] = fingerprints(loader, range(2))
        loader.close()
    assert len(set(found[0])) == 10
    assert found[0] == found[2] == found[8]
    assert not set(found[0]) & set(fingerprints(loader_of(shapes_dataset, seed=4), range(2)))


def test_an_epoch_does_not_depend_on_earlier_ones(shapes_dataset: Path) -> None:
    whole = fingerprints(loader_of(shapes_dataset), range(4))
    assert fingerprints(loader_of(shapes_dataset), [3]) == whole[15:]
    assert fingerprints(loader_of(shapes_dataset), [2, 3]) == whole[10:]
    assert len(set(whole)) == 20


@pytest.mark.parametrize("workers", [0, 2])
def test_announced_epochs_give_the_same_batches(workers: int, shapes_dataset: Path) -> None:
    plain = fingerprints(loader_of(shapes_dataset), range(4))
    loader = loader_of(shapes_dataset, workers)
    assert fingerprints(loader, range(4), announce=True) == plain
    loader.close()


def test_workers_start_on_the_announced_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = probe_loader(1)
    restarts = count_restarts(monkeypatch)
    for epoch in range(4):
        loader.set_epoch(epoch)
        loader.announce(epoch + 1)
        assert [int(row) for batch in loader for row in batch[1][:, 4]] == [epoch] * 16
        assert loader._stream.begun[0].epoch == epoch + 1
    assert len(restarts) == 1
    loader.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_kept_batches_come_again_without_workers(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = probe_loader(workers)
    loader.keep()
    restarts = count_restarts(monkeypatch)
    for _ in loader:  # a pass that is given up is not kept
        break
    first = list(loader)
    assert [int(row) for batch in first for row in batch[1][:, 5]] == list(range(16))
    assert loader.worker_pids() == []
    assert not any(value.is_shared() for batch in first for value in batch[:2])  # that memory is scarce
    for _ in range(2):
        assert all(again is before for again, before in zip(loader, first, strict=True))
    loader.begin()  # there is nothing to prepare
    assert list(loader) == first
    assert len(restarts) == 2
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_pass_ends_where_another_one_begins(workers: int, is_kept: bool) -> None:
    loader = probe_loader(workers)
    if is_kept:
        loader.keep()
    for start in (loader.begin, lambda: next(iter(loader))):
        given_up = iter(loader)
        next(given_up)
        start()
        with pytest.raises(RuntimeError, match="another one has begun"):
            next(given_up)
    assert [int(row) for batch in loader for row in batch[1][:, 5]] == list(range(16))
    loader.close()


def test_only_whole_passes_are_kept() -> None:
    loader = probe_loader(2)
    batches = iter(loader)
    next(batches)
    loader.keep()
    assert len(list(batches)) == 7
    assert len(list(loader)) == len(list(loader)) == 8
    loader.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_pass_that_was_begun_is_taken_once(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> list[tuple[float, float]]:
        return [(row[4].item(), row[5].item()) for batch in loader for row in batch[1]]

    loader = probe_loader(workers)
    restarts = count_restarts(monkeypatch)
    loader.begin()
    pids = loader.worker_pids()
    assert len(pids) == workers
    assert rows() == [(0, index) for index in range(16)]
    assert len(restarts) == 1
    assert loader.worker_pids() == pids
    assert rows() == [(0, index) for index in range(16)]  # and this pass began by itself
    assert len(restarts) == 2
    loader.begin()
    loader.set_epoch(3)  # after all, another one
    assert rows() == [(3, index) for index in range(16)]
    loader.begin()
    loader.announce(4)
    assert rows() == [(3, index) for index in range(16)]
    loader.set_epoch(4)
    loader.begin()
    loader.begin()
    assert rows() == [(4, index) for index in range(16)]
    loader.begin()
    loader.close()


def test_a_wrong_announcement_and_a_broken_pass_are_thrown_away() -> None:
    def epochs_and_indices() -> list[tuple[float, float]]:
        return [(row[4].item(), row[5].item()) for batch in loader for row in batch[1]]

    loader = probe_loader(1)
    loader.announce(1)
    assert epochs_and_indices() == [(0, index) for index in range(16)]
    loader.set_epoch(7)
    assert epochs_and_indices() == [(7, index) for index in range(16)]
    loader.announce(8)
    for number, _ in enumerate(loader):
        if number == 6:  # the worker is in epoch 8 already, the trainer is not
            break
    loader.set_epoch(8)
    assert epochs_and_indices() == [(8, index) for index in range(16)]
    assert epochs_and_indices() == [(8, index) for index in range(16)]
    loader.close()


@pytest.mark.slow
def test_spawned_workers_give_the_same_batches(shapes_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.data.loader.worker_count", lambda wanted, _: wanted)
    loader = loader_of(shapes_dataset, 2, multiprocessing_context="spawn")
    assert fingerprints(loader, range(2), announce=True) == fingerprints(loader_of(shapes_dataset), range(2))
    loader.close()


def test_image_weights_draw_pictures_and_replace_rect(shapes_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("utils.data.loader.LOGGER.warning", said.append)
    loader = loader_of(shapes_dataset, image_weights=True, rect=True)
    assert not loader.dataset.rect
    assert any("--rect is off" in text for text in said)
    background = {
        path for path, rows in zip(loader.dataset.im_files, loader.dataset.labels, strict=True) if not len(rows)
    }
    assert not background & {path for batch in loader for path in batch[2]}  # nothing in them that is rare
    weights = np.zeros(len(loader.dataset))
    weights[[3, 5]] = 1
    loader.set_epoch(1, image_weights=weights)
    drawn = {path for batch in loader for path in batch[2]}
    assert drawn == {loader.dataset.im_files[3], loader.dataset.im_files[5]}
    with pytest.raises(ValueError, match="one number for each of 24 pictures"):
        loader.set_epoch(2, image_weights=[1, 2])


@pytest.fixture
def rare(tmp_path: Path) -> Path:
    """Ten pictures, one of which holds class 1."""
    files = {}
    for i in range(10):
        box = [(int(i == 4), 0.5, 0.5, 0.8, 0.8)]
        files[f"{i}.png"] = (paint(64, 64, box), label_text(box))
    images = write_set(tmp_path, files)
    (tmp_path / "data.yaml").write_text(f"train: {images}\nval: {images}\nnames: [a, b]\n")
    return tmp_path / "data.yaml"


@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_all_pictures_of_a_mosaic_follow_the_weights(rare: Path, mixup: float) -> None:
    """A picture of weight 0 is in no place of a mosaic; the first one of a second mosaic is drawn evenly."""
    loader = loader_of(rare, hyp={"mosaic": 1.0, "mixup": mixup}, image_weights=True)
    weights = np.zeros(10)
    weights[4] = 1
    loader.set_epoch(0, image_weights=weights)
    classes = torch.cat([batch[1][:, 1] for batch in loader])
    assert len(classes) > 20
    assert (classes == 1).all() if not mixup else (classes == 1).float().mean() > 0.8


@pytest.mark.parametrize("mosaic", [0.0, 1.0])
def test_a_picture_that_is_drawn_again_looks_different(rare: Path, mosaic: float) -> None:
    hyp, seen = {"mosaic": mosaic, "translate": 0.2, "scale": 0.5, "hsv_v": 0.4}, []
    for workers in (0, 2):
        loader = loader_of(rare, workers, hyp=hyp, image_weights=True)
        weights = np.zeros(10)
        weights[4] = 1
        loader.set_epoch(0, image_weights=weights)
        pictures = [picture.numpy().tobytes() for batch in loader for picture in batch[0]]
        assert len(pictures) == len(set(pictures)) == 10
        seen.append(pictures)
        loader.close()
    assert seen[0] == seen[1]


def test_cache_arguments_are_passed_on_where_given(monkeypatch: pytest.MonkeyPatch, shapes_dataset: Path) -> None:
    seen: list[dict] = []

    def fake(*_: object, **keywords: object) -> LoadImagesAndLabels:
        seen.append({name: keywords[name] for name in ("cache", "cache_dir", "mosaic_cache") if name in keywords})
        keywords.pop("cache_dir", None), keywords.pop("mosaic_cache", None), keywords.pop("cache", None)
        return LoadImagesAndLabels(*_, **keywords)

    monkeypatch.setattr("utils.data.loader.LoadImagesAndLabels", fake)
    loader_of(shapes_dataset)
    loader_of(shapes_dataset, cache="disk", cache_dir="somewhere", mosaic_cache=7)
    loader_of(shapes_dataset, cache="val")
    loader_of(shapes_dataset, cache="val", augment=False)
    assert seen == [{}, {"cache": "disk", "cache_dir": "somewhere", "mosaic_cache": 7}, {}, {"cache": "ram"}]


def test_mosaic_switch_reaches_the_samples(shapes_dataset: Path) -> None:
    loader = loader_of(shapes_dataset, hyp={"mosaic": 1.0})
    for mosaic in (True, False, True):
        loader.set_epoch(0, mosaic=mosaic)
        assert all((shapes is None) == mosaic for batch in loader for shapes in batch[3])


def test_validation_loader_is_rectangular_and_in_order(shapes_dataset: Path) -> None:
    spec = load_data_spec(shapes_dataset)
    loader, dataset = create_dataloader(spec.val, 64, 3, 32, rect=True, pad=0.5, workers=0, names=spec.names)
    paths = [path for batch in loader for path in batch[2]]
    assert paths == list(dataset.im_files)
    assert next(iter(loader))[0].shape == (3, 3, 96, 96)


def test_batch_is_no_larger_than_the_set_and_the_rest_can_be_dropped(shapes_dataset: Path) -> None:
    spec = load_data_spec(shapes_dataset)
    loader, _ = create_dataloader(spec.val, 64, 100, workers=0)
    assert [len(batch[0]) for batch in loader] == [8]
    loader, _ = create_dataloader(spec.val, 64, 3, workers=0, drop_last=True)
    assert [len(batch[0]) for batch in loader] == [3, 3]


def test_class_beyond_nc_stops_every_loader(shapes_dataset: Path) -> None:
    spec = load_data_spec(shapes_dataset)
    for paths, augment in ((spec.train, True), (spec.val, False)):
        with pytest.raises(ValueError, match=r"\.txt, line \d+: class [12]"):
            create_dataloader(paths, 64, 4, augment=augment, hyp=HYP, nc=1)


def test_training_needs_an_object(tmp_path: Path) -> None:
    images = write_set(tmp_path, {"a.png": (paint(), None)})
    with pytest.raises(ValueError, match=r"nothing to learn.*labels/train/a\.txt"):
        create_dataloader(images, 64, 4, augment=True, hyp=HYP)
    assert len(create_dataloader(images, 64, 4, workers=0)[0]) == 1


def test_refused_labels_are_the_reason_where_nothing_is_left(tmp_path: Path) -> None:
    rows = {"a.png": (paint(), "0 120 80 30 30\n"), "b.png": (paint(), "0 0.5 0.5 0 0.2\n"), "c.png": (paint(), None)}
    images = write_set(tmp_path, rows)
    with pytest.raises(ValueError, match=r"nothing to learn: \d pictures were left out and \d rows refused .* above"):
        create_dataloader(images, 64, 4, augment=True, hyp=HYP)


@pytest.mark.slow
def test_living_workers_survive_bad_files_and_count_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.data.loader.worker_count", lambda wanted, _: wanted)
    images = write_set(tmp_path, {f"{i}.png": (paint(), label_text()) for i in range(8)})
    loader, dataset = create_dataloader(images, 64, 2, augment=True, hyp={"mosaic": 1.0}, workers=2, shuffle=True)
    for name in ("1.png", "4.png"):
        (images / name).write_bytes(b"broken")
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert sum(len(batch[0]) for batch in loader) == 8
    assert [Path(path).name for path in dataset.broken_files()] == ["1.png", "4.png"]


def test_pixels_and_labels_agree_after_the_loader(tmp_path: Path) -> None:
    images = write_set(tmp_path, {f"{i}.png": (paint(60 + 4 * i, 64), label_text()) for i in range(4)})
    loader, _ = create_dataloader(images, 64, 4, workers=0)
    batch, targets, _, _ = next(iter(loader))
    for position, image in enumerate(batch.numpy()):
        rows = targets[targets[:, 0] == position, 1:].numpy()
        assert len(rows) == 3
        assert colour_faults(image[::-1].transpose(1, 2, 0), rows) == []
