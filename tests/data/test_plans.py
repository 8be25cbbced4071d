"""Plans against the samples that they stand for: the same labels bit by bit, the same pictures, the same draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.drawing import encode
from tests.data.plan_kit import ALL, COLOURS, PLACES, SIZE, keys_of, planner, plans_of, textured, write_textured
from utils.data import plan_batches
from utils.data.batching import Failure
from utils.data.dataset import SampleKey
from utils.data.images import letterbox
from utils.data.plan_batches import PlanBatch, PlanMaker, Request, collate_plans
from utils.data.plans import NOTHING, PlannedImagesAndLabels, Slots, _letterbox_place

BOX_ROWS = "0 .3 .3 .3 .3\n2 .7 .6 .2 .3\n"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Six pictures of several shapes with polygons and boxes."""
    return write_textured(tmp_path)


def assert_same_labels(data: PlannedImagesAndLabels, keys: tuple[SampleKey, ...]) -> int:
    """Compare everything but pixels with the samples of the same keys; gives the number of labels."""
    count = 0
    for key in keys:
        _, targets, path, shapes = data[key]
        plan = data.plan(key)
        assert np.array_equal(plan.targets, targets.numpy())
        assert (plan.path, plan.shapes) == (path, shapes)
        count += len(targets)
    return count


@pytest.mark.parametrize(
    "hyp",
    [
        {},
        PLACES,
        {**PLACES, **COLOURS, "degrees": 20.0, "shear": 5.0, "perspective": 0.001},
        ALL,
        {**ALL, "perspective": 0.001, "mixup": 1.0},
        {**ALL, "copy_paste": 0.7, "mosaic": 1.0},
    ],
)
@pytest.mark.parametrize("rows", [None, BOX_ROWS])
def test_labels_are_those_of_the_sample(tmp_path: Path, hyp: dict[str, float], rows: str | None) -> None:
    data = planner(write_textured(tmp_path, **({} if rows is None else {"rows": rows})), hyp)
    count = sum(assert_same_labels(data, keys_of(data, epoch, is_mosaic=epoch != 2)) for epoch in range(4))
    assert count > 40


def test_pictures_that_are_shown_again(images: Path) -> None:
    """Where weights draw the pictures, keys tell how often one was shown and which others are in its mosaics."""
    data = planner(images, {**ALL, "mosaic": 1.0, "mixup": 0.7})
    again = tuple(SampleKey(0, 1, True, repeat, (0, 3, 3, 2, 5, 0)) for repeat in range(4))
    assert assert_same_labels(data, again) > 10
    plans = [data.plan(key) for key in again]
    assert len({plan.layers[0].centre for plan in plans}) > 1
    assert {tile.slot for plan in plans for tile in plan.layers[0].tiles} == {0, 1, 3}
    assert not {tile.slot for tile in data.plan(again[0], Slots(2, np.array([4, 1])), 1).layers[0].tiles} - {0, 1}


def test_labels_of_rectangular_batches(images: Path) -> None:
    data = planner(images, ALL, rect=True, batch_size=2, stride=16)
    assert assert_same_labels(data, keys_of(data)) > 10
    assert len({data.plan(key).size for key in keys_of(data)}) > 1


@pytest.mark.parametrize("hyp", [PLACES, {**ALL, "mosaic": 1.0}, {**ALL, "mosaic": 1.0, "copy_paste": 0.7}])
def test_pictures_that_went_bad_are_replaced_as_in_the_sample(images: Path, hyp: dict[str, float]) -> None:
    data = planner(images, hyp)
    for name in ("01.png", "04.png"):
        (images / name).write_bytes(b"")
    for index in (1, 4):
        assert data.pixels(index) is None
    assert data.known_broken() == 2
    assert assert_same_labels(data, tuple(SampleKey(e, i) for e in range(5) for i in range(6))) > 20
    seen = {
        tile.slot
        for epoch in range(5)
        for key in keys_of(data, epoch)
        for layer in data.plan(key).layers
        for tile in layer.tiles
        if len(layer.tiles) == 1
    }
    assert not seen & {1, 4}


def test_when_nothing_can_be_read_any_more(images: Path) -> None:
    data = planner(images, PLACES)
    for index, file in enumerate(sorted(images.iterdir())):
        file.write_bytes(b"")
        data.pixels(index)
    with pytest.raises(RuntimeError, match="none of the 6 pictures can be read any more"):
        data.plan(SampleKey(0, 0))


def test_too_many_bad_ones_in_a_row_give_grey(images: Path) -> None:
    data = planner(images, {"mosaic": 0.0})
    for index in range(5):
        data._broken[index] = 1
    plans = [data.plan(SampleKey(epoch, 0), Slots(5, np.arange(5)), 0) for epoch in range(3)]
    for plan in plans:
        assert plan.layers[0].tiles[0].slot == NOTHING
        assert plan.layers[0].tiles[0].rectangle == (0, 0, 0, 0)
        assert len(plan.targets) == 0


def test_partners_come_from_the_slots(images: Path) -> None:
    """With slots given, only what lies in them appears, the sample's own picture always, each with its own labels."""
    data = planner(images, {"mosaic": 1.0, "mixup": 0.5})
    slots = Slots(3, np.array([5, 2, 4]))
    used = []
    for epoch in range(10):
        plan = data.plan(SampleKey(epoch, 2), slots, 1)
        assert 1 in [tile.slot for tile in plan.layers[0].tiles]
        for layer in plan.layers:
            for tile in layer.tiles:
                assert tile.width == data.fitted(slots.picture(tile.slot))[0]
                used.append(tile.slot)
    assert set(used) == {0, 1, 2}
    whole, sliced = data.plan(SampleKey(0, 2)), data.plan(SampleKey(0, 2), Slots(6, np.arange(6)), 2)
    assert np.array_equal(whole.targets, sliced.targets)


def test_a_picture_that_changed_its_shape_is_stretched(images: Path) -> None:
    data = planner(images, PLACES)
    (images / "00.png").write_bytes(encode(textured(50, 90, 0)))
    assert data.pixels(0).shape == (*data.fitted(0)[::-1], 3)


@pytest.mark.parametrize("size", [(64, 43), (43, 64), (64, 64), (63, 40), (30, 20)])
@pytest.mark.parametrize("target", [(64, 64), (64, 96), (96, 64), (32, 64)])
def test_place_of_a_letterboxed_picture(size: tuple[int, int], target: tuple[int, int]) -> None:
    width, height = size
    image, ratios, pad = letterbox(np.full((height, width, 3), 200, np.uint8), target, auto=False)
    ratio, (left, top), padding = _letterbox_place(size, target)
    shown = np.argwhere(image[..., 0] == 200)
    assert (ratio, padding) == (ratios[0], pad)
    assert shown.min(0).tolist() == [top, left]


def test_arrays_of_a_batch(images: Path) -> None:
    data = planner(images, {**ALL, "mosaic": 1.0, "copy_paste": 0.7})
    keys = keys_of(data)
    plans, batch = [data.plan(key) for key in keys], plans_of(data, keys)
    assert batch.tiles.shape == (6, 2, 4, plan_batches.TILE_COLUMNS)
    assert batch.views.shape == (6, 2, plan_batches.VIEW_COLUMNS)
    assert batch.looks.shape == (6, plan_batches.LOOK_COLUMNS)
    assert batch.size == (SIZE, SIZE)
    assert len(batch.masks) == sum(layer.mask is not None for plan in plans for layer in plan.layers) > 0
    for row, plan in enumerate(plans):
        for number, layer in enumerate(plan.layers):
            view = batch.views[row, number].numpy()
            assert np.allclose(view[:9].reshape(3, 3), layer.inverse)
            assert batch.tiles[row, number, :, plan_batches.SLOT].tolist() == [tile.slot for tile in layer.tiles]
            if layer.mask is not None:
                packed = batch.masks[int(view[plan_batches.MASK])].numpy()
                assert np.array_equal(np.unpackbits(packed, axis=1, bitorder="little"), layer.mask)
        shares = batch.views[row, :, plan_batches.SHARE]
        assert float(shares.sum()) == pytest.approx(1)
        assert bool(shares[1] > 0) == (len(plan.layers) == 2)
        assert torch.equal(batch.targets[batch.targets[:, 0] == row, 1:], torch.from_numpy(plan.targets[:, 1:]))


def test_pictures_of_two_sizes_are_no_batch(images: Path) -> None:
    data = planner(images, PLACES, rect=True, batch_size=2, stride=16)
    with pytest.raises(ValueError, match="different sizes"):
        collate_plans([data.plan(key) for key in keys_of(data)])
    failure = PlanMaker(data)[Request(keys_of(data))]
    assert isinstance(failure, Failure)
    assert failure.where == "a batch of 6 pictures"


def test_a_failure_names_the_picture(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = planner(images, PLACES)
    monkeypatch.setattr(data, "plan", lambda *_: 1 / 0)
    failure = PlanMaker(data)[Request(keys_of(data))]
    assert isinstance(failure, Failure)
    assert failure.where.endswith("00.png")
    assert "ZeroDivisionError" in failure.reason


def test_decoded_pictures_lie_behind_each_other_or_a_stride_apart(images: Path) -> None:
    data = planner(images, PLACES)
    (images / "02.png").write_bytes(b"")
    dense = PlanMaker(data)[Request(decoded=(0, 2, 4))]
    wide = PlanMaker(data)[Request(decoded=(0, 2, 4), stride=3 * SIZE * SIZE, first_slot=1)]
    assert isinstance(dense, PlanBatch)
    parts = [data.pixels(0), np.full((*data.fitted(2)[::-1], 3), 114, np.uint8), data.pixels(4)]
    assert np.array_equal(dense.pixels.numpy(), np.concatenate([part.reshape(-1) for part in parts]))
    for position, part in enumerate(parts):
        start = position * 3 * SIZE * SIZE
        assert np.array_equal(wide.pixels.numpy()[start : start + part.size], part.reshape(-1))
    assert len(wide.pixels) == 3 * 3 * SIZE * SIZE
    assert (dense.known_broken, wide.known_broken, wide.first_slot) == (1, 1, 1)
    assert len(dense.tiles) == len(dense.targets) == 0
