"""Batches, their order, and independence of the number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.data.drawing import colour_faults, label_text, paint, write_set
from utils.data.loader import EpochLoader, EpochSampler, create_dataloader, fit_shared_memory, worker_count
from utils.data.spec import load_data_spec

HYP = {"mosaic": 0.8, "mixup": 0.3, "hsv_v": 0.4, "scale": 0.5, "translate": 0.1, "fliplr": 0.5}


def loader_of(shapes: Path, workers: int = 0, **options: object) -> EpochLoader:
    spec = load_data_spec(shapes)
    settings = {"augment": True, "hyp": HYP, "shuffle": True, "nc": spec.nc, **options}
    return create_dataloader(spec.train, 64, 5, 32, workers=workers, **settings)[0]


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
def test_workers_make_no_difference(shapes_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.data.loader.worker_count", lambda wanted, _: wanted)
    alone, helped = (passes(loader_of(shapes_dataset, workers, seed=3), 3) for workers in (0, 2))
    for (images, targets, paths), (images2, targets2, paths2) in zip(alone, helped, strict=True):
        assert torch.equal(images, images2)
        assert torch.equal(targets, targets2)
        assert paths == paths2


def test_seed_and_epoch_decide_the_order(shapes_dataset: Path) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = EpochSampler(20, shuffle=True, seed=seed)
        sampler.epoch = epoch
        return [key.index for key in sampler]

    assert order(0, 0) == order(0, 0)
    assert sorted(order(0, 0)) == list(range(20))
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    first, second = (passes(loader_of(shapes_dataset, seed=seed), 1) for seed in (0, 1))
    assert not torch.equal(first[0][0], second[0][0])


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


@pytest.mark.parametrize(
    ("free_mb", "wanted"),
    [(10_000, (8, 2)), (1000, (8, 2)), (300, (8, 1)), (120, (3, 1)), (40, (0, 0)), (0, (0, 0))],
)
def test_shared_memory(free_mb: int, wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("utils.data.loader.LOGGER.warning", said.append)
    batch_bytes = 16 * 3 * 640 * 640
    assert fit_shared_memory(8, batch_bytes, free_bytes=free_mb << 20) == wanted
    assert len(said) == (wanted != (8, 2))
    assert all("--shm-size" in text for text in said)
    assert fit_shared_memory(0, batch_bytes) == (0, 0)


def test_worker_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert worker_count(8, 16) == 6
    assert worker_count(2, 16) == 2
    assert worker_count(8, 1) == 0
    assert worker_count(8, 3) == 3
    assert worker_count(-1, 16) == 6


def test_pixels_and_labels_agree_after_the_loader(tmp_path: Path) -> None:
    images = write_set(tmp_path, {f"{i}.png": (paint(60 + 4 * i, 64), label_text()) for i in range(4)})
    loader, _ = create_dataloader(images, 64, 4, workers=0)
    batch, targets, _, _ = next(iter(loader))
    for position, image in enumerate(batch.numpy()):
        rows = targets[targets[:, 0] == position, 1:].numpy()
        assert len(rows) == 3
        assert colour_faults(image[::-1].transpose(1, 2, 0), rows) == []
