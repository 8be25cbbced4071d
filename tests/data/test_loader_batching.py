"""Collating, --quad, and what a loader process says when a sample fails."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.drawing import colour_faults, label_text, paint, write_set
from tests.data.loader_kit import Probe
from utils.data import batching
from utils.data.batching import BatchMaker, Failure, Parcel, collate, collate_quad
from utils.data.dataset import Sample, SampleKey
from utils.data.loader import create_dataloader
from utils.data.plan_batches import PlanBatch


def sample(value: int, rows: list[list[float]]) -> Sample:
    targets = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
    return torch.full((3, 2, 4), value, dtype=torch.uint8), targets, f"{value}.jpg", ((2, 4), ((1.0, 1.0), (0.0, 0.0)))


ROW = [0, 1, 0.5, 0.25, 0.2, 0.5]


def test_collate_numbers_the_pictures() -> None:
    images, targets, paths, shapes = collate([sample(1, [ROW, ROW]), sample(2, []), sample(3, [ROW])])
    assert images.shape == (3, 3, 2, 4)
    assert targets[:, 0].tolist() == [0, 0, 2]
    assert paths == ("1.jpg", "2.jpg", "3.jpg")
    assert len(shapes) == 3


@pytest.mark.parametrize("has_private_call", [True, False])
def test_collate_into_shared_memory(has_private_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MESSAGE_BYTES", 0)
    if not has_private_call:
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared", None, raising=False)
    samples = [sample(1, [ROW, ROW]), sample(2, [])]
    plain, shared = collate(samples), Parcel(*collate(samples, shared=True)).to_shared_memory()
    assert collate(samples, shared=True)[0].is_shared() == has_private_call
    assert shared.images.is_shared()
    assert torch.equal(plain[0], shared.images)
    assert torch.equal(plain[1], shared.targets)


def test_quad_tiles_or_enlarges() -> None:
    group = [sample(value, [ROW]) for value in (10, 20, 30, 40)]
    images, targets, paths, shapes = collate_quad(group * 2, [False, True])
    assert images.shape == (2, 3, 4, 8)
    tiled = images[0, 0]
    assert [int(tiled[y, x]) for y, x in ((0, 0), (3, 0), (0, 7), (3, 7))] == [10, 20, 30, 40]
    assert (images[1] == 10).all()
    where = targets[targets[:, 0] == 0, 2:]
    expected = [[0.25, 0.125], [0.25, 0.625], [0.75, 0.125], [0.75, 0.625]]
    assert where[:, :2].tolist() == expected
    assert np.allclose(where[:, 2:], [0.1, 0.25])
    assert torch.equal(targets[targets[:, 0] == 1], torch.tensor([[1, *ROW[1:]]]))
    assert paths == ("10.jpg", "10.jpg")
    assert shapes == (None, None)


def test_quad_pixels_and_labels_agree(tmp_path: Path) -> None:
    images = write_set(tmp_path, {f"{i}.png": (paint(60 + 4 * i, 64), label_text()) for i in range(16)})
    loader, dataset = create_dataloader(images, 64, 8, workers=0, quad=True, shuffle=True, seed=5)
    counts = []
    for batch, targets, paths, _ in loader:
        assert batch.shape == (2, 3, 128, 128)
        assert len(paths) == 2
        for position, image in enumerate(batch.numpy()):
            rows = targets[targets[:, 0] == position, 1:].numpy()
            counts.append(len(rows))
            assert colour_faults(image[::-1].transpose(1, 2, 0), rows) == []
    assert set(counts) == {3, 12}  # both forms occur
    assert len(dataset) == 16


def test_quad_draws_follow_from_seed_epoch_and_index() -> None:
    keys = [SampleKey(epoch, index) for epoch in range(4) for index in range(32)]
    draws = BatchMaker(Probe(), quad=True, seed=1).zoomed(keys)
    assert draws == BatchMaker(Probe(), quad=True, seed=1).zoomed(keys)
    assert draws != BatchMaker(Probe(), quad=True, seed=2).zoomed(keys)
    assert len(draws) == len(keys) // 4
    assert 0.2 < np.mean(draws) < 0.8
    assert draws[3:5] == BatchMaker(Probe(), quad=True, seed=1).zoomed(keys[12:20])


def test_quad_is_refused_up_front(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--quad joins 4 pictures.*--batch-size 6.*use --batch-size 4"):
        create_dataloader(tmp_path / "never-read", 64, 6, quad=True)
    images = write_set(tmp_path, {f"{i}.png": (paint(), label_text()) for i in range(3)})
    with pytest.raises(ValueError, match="--quad needs at least 4 pictures, there are 3"):
        create_dataloader(images, 64, 8, quad=True)


def test_quad_leaves_out_an_incomplete_group(tmp_path: Path) -> None:
    images = write_set(tmp_path, {f"{i}.png": (paint(), label_text()) for i in range(7)})
    loader, _ = create_dataloader(images, 64, 8, workers=0, quad=True)
    assert len(loader) == 1
    assert [len(batch[0]) for batch in loader] == [1]


class Breaking(Probe):
    """Fails on the picture with index 3."""

    def __getitem__(self, key: SampleKey) -> Sample:
        if key.index == 3:
            raise KeyError("nothing there")
        return super().__getitem__(key)


def test_a_failing_sample_is_named() -> None:
    maker = BatchMaker(Breaking())
    good = maker[[SampleKey(0, 1), SampleKey(0, 2)]]
    assert isinstance(good, Parcel)
    assert good.batch()[2] == ("1.jpg", "2.jpg")
    failure = maker[[SampleKey(0, 2), SampleKey(0, 3)]]
    assert isinstance(failure, Failure)
    assert failure.where == "the picture 3.jpg"
    assert failure.reason == "KeyError: 'nothing there'"
    assert "__getitem__" in failure.details


def test_pictures_of_different_sizes_are_a_failure_too() -> None:
    class Uneven(Probe):
        def __getitem__(self, key: SampleKey) -> Sample:
            return torch.zeros(3, 8, 8 + key.index, dtype=torch.uint8), torch.zeros(0, 6), "x", None

    failure = BatchMaker(Uneven())[[SampleKey(0, 0), SampleKey(0, 1)]]
    assert isinstance(failure, Failure)
    assert failure.where == "a batch of 2 pictures"


def test_large_tensors_move_to_shared_memory_and_small_ones_into_the_message() -> None:
    samples = [(torch.full((3, 300, 300), 7, dtype=torch.uint8), torch.tensor([ROW]), "a.jpg", None)]
    parcel = Parcel(*collate(samples)).to_shared_memory()
    assert parcel.images.is_shared() and not parcel.targets.is_shared()
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()  # with the pickling of loaders
    queue.put(parcel)
    moved = queue.get()
    assert moved.images.is_shared()
    parcel.images[0, 0, 0, 0] = 9  # the same memory, not a copy
    assert moved.images[0, 0, 0, 0] == 9 and torch.equal(moved.images, parcel.images)
    assert torch.equal(moved.targets, parcel.targets) and moved.targets.dtype == parcel.targets.dtype
    assert (moved.paths, moved.shapes) == (parcel.paths, parcel.shapes)
    moved.targets[:, 0] += 1  # as joining pieces does


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4))
def test_what_travels_inside_the_message_fits_a_pipe(kilobytes: list[int]) -> None:
    tiles, views, looks, targets = (torch.zeros(size << 10, dtype=torch.uint8) for size in kilobytes)
    empty = torch.zeros(0)
    plans = PlanBatch(tiles, views, looks, empty, targets, empty).to_shared_memory()
    inside = sorted(value.nbytes for value in plans.tensors().values() if not value.is_shared())
    assert sum(inside) <= batching.MESSAGE_BYTES
    outside = [value.nbytes for value in plans.tensors().values() if value.is_shared()]
    assert not outside or sum(inside) + min(outside) > batching.MESSAGE_BYTES  # none went without need


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.sampled_from(["float32", "int32", "uint8", "int64"]))
def test_small_tensors_of_any_shape_survive_the_message(shape: list[int], dtype: str) -> None:
    value = torch.arange(math.prod(shape)).view(shape).to(getattr(torch, dtype))
    parcel = Parcel(value, value.t() if value.ndim == 2 else value, (), ())
    moved = pickle.loads(pickle.dumps(parcel))
    for name, tensor in parcel.tensors().items():
        assert torch.equal(getattr(moved, name), tensor) and getattr(moved, name).dtype == tensor.dtype


@pytest.mark.gpu
def test_parcel_pins_its_tensors_and_keeps_tuples() -> None:
    pinned = Parcel(*collate([sample(1, [ROW])])).pin_memory()
    assert pinned.images.is_pinned()
    assert pinned.targets.is_pinned()
    assert isinstance(pinned.paths, tuple)
