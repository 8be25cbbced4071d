"""The order of an epoch, the stream of batches, and weights of classes and pictures."""

from __future__ import annotations

import numpy as np
import pytest

from utils.data.dataset import SampleKey
from utils.data.sampling import (
    PARTNERS,
    BatchStream,
    EpochPlan,
    checked_weights,
    class_weights,
    epoch_order,
    image_weights,
)
from utils.data.tables import RowTable

LABELS = [
    np.float32([[0, 0.5, 0.5, 0.1, 0.1], [0, 0.2, 0.2, 0.1, 0.1], [2, 0.7, 0.7, 0.1, 0.1]]),
    np.zeros((0, 5), np.float32),
    np.float32([[0, 0.5, 0.5, 0.1, 0.1]]),
]


def test_order_follows_from_seed_and_epoch_alone() -> None:
    orders = {(seed, epoch): tuple(epoch_order(20, epoch, seed=seed)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert all(sorted(order) == list(range(20)) for order in orders.values())
    assert tuple(epoch_order(20, 1, seed=1)) == orders[1, 1]
    assert list(epoch_order(5, 3, shuffle=False)) == [0, 1, 2, 3, 4]
    assert tuple(epoch_order(20, 0, seed=-1)) != orders[0, 0]  # negative seeds are allowed


def test_weighted_order_draws_in_proportion() -> None:
    weights = np.array([0.0, 1.0, 3.0])
    drawn = np.concatenate([epoch_order(3, epoch, weights=weights) for epoch in range(1000)])
    assert np.bincount(drawn, minlength=3) / len(drawn) == pytest.approx([0, 0.25, 0.75], abs=0.03)
    assert list(epoch_order(3, 5, weights=weights)) == list(epoch_order(3, 5, weights=weights * 7))


def test_stream_goes_on_with_the_announced_epoch_only() -> None:
    stream = BatchStream(5, 2, shuffle=True, seed=3)
    stream.current, stream.announced = EpochPlan(4), EpochPlan(5, is_mosaic=False)
    batches = list(stream)
    assert [[key.epoch for key in batch] for batch in batches] == [[4, 4], [4, 4], [4], [5, 5], [5, 5], [5]]
    assert [key.index for batch in batches[:3] for key in batch] == list(epoch_order(5, 4, seed=3))
    assert [key.index for batch in batches[3:] for key in batch] == list(epoch_order(5, 5, seed=3))
    assert [batch[0].is_mosaic for batch in batches] == [True] * 3 + [False] * 3
    assert [plan.epoch for plan in stream.begun] == [5]
    assert stream.announced is None
    assert len(list(stream)) == 3


def test_weighted_keys_tell_repetitions_and_partners() -> None:
    """The n-th showing of a picture has the number n - 1; partners come from the drawn pictures, as often as those."""
    weights = np.array([0, 1, 1, 2, 0, 20])
    stream = BatchStream(6, 4, seed=3)
    stream.current = EpochPlan(7, weights=weights)
    keys = [key for batch in stream for key in batch]
    order = epoch_order(6, 7, seed=3, weights=weights).tolist()
    assert [key.index for key in keys] == order
    assert [key.repeat for key in keys] == [order[:i].count(index) for i, index in enumerate(order)]
    assert len(set(keys)) == len(keys)
    assert all(len(key.partners) == PARTNERS and set(key.partners) <= set(order) for key in keys)
    partners = [index for epoch in range(300) for key in keys_of(epoch, weights) for index in key.partners]
    assert np.bincount(partners, minlength=6) / len(partners) == pytest.approx(weights / weights.sum(), abs=0.03)
    assert keys_of(7, weights) == keys
    assert all((key.repeat, key.partners) == (0, ()) for key in keys_of(7, None))


def keys_of(epoch: int, weights: np.ndarray | None) -> list[SampleKey]:
    stream = BatchStream(6, 6, seed=3)
    stream.current = EpochPlan(epoch, weights=weights)
    return next(iter(stream))


@pytest.mark.parametrize(
    ("length", "batch", "options", "sizes"),
    [
        (10, 4, {}, [4, 4, 2]),
        (10, 4, {"drop_last": True}, [4, 4]),
        (11, 8, {"group": 4}, [8]),
        (14, 8, {"group": 4}, [8, 4]),
        (14, 8, {"group": 4, "drop_last": True}, [8]),
    ],
)
def test_sizes_of_batches(length: int, batch: int, options: dict, sizes: list[int]) -> None:
    stream = BatchStream(length, batch, **options)
    assert [len(keys) for keys in stream] == sizes
    assert len(stream) == len(sizes)


def test_plans_compare_by_content() -> None:
    weights = np.array([1.0, 2.0])
    assert EpochPlan(1, True, weights).is_same(EpochPlan(1, True, weights.copy()))
    assert not EpochPlan(1, True, weights).is_same(EpochPlan(1, True, weights + 1))
    assert not EpochPlan(1, True, weights).is_same(EpochPlan(1))
    assert not EpochPlan(1).is_same(EpochPlan(1, False))
    assert not EpochPlan(1).is_same(EpochPlan(2))
    assert not EpochPlan(1).is_same(None)


@pytest.mark.parametrize("as_table", [False, True])
def test_weights_of_classes_and_pictures(as_table: bool) -> None:
    labels = RowTable.from_pieces(LABELS, 5) if as_table else LABELS
    weights = class_weights(labels, 3)  # counts 3, 0 (taken as 1), 1
    assert weights == pytest.approx(np.array([1 / 3, 1, 1]) / (7 / 3) * 3)
    assert weights.sum() == pytest.approx(3)
    assert image_weights(labels, 3, weights) == pytest.approx([2 * weights[0] + weights[2], 0, weights[0]])
    accuracy = np.array([0.9, 0, 0.1])
    stressed = image_weights(labels, 3, weights * (1 - accuracy) ** 2 / 3)
    assert stressed == pytest.approx([weights[0] * 0.02 / 3 + weights[2] * 0.81 / 3, 0, weights[0] * 0.01 / 3])
    with pytest.raises(ValueError, match=r"class weights have the shape \(2,\), expected \(3,\)"):
        image_weights(labels, 3, weights[:2])


def test_weights_are_checked() -> None:
    assert checked_weights([1, 2], 2).dtype == np.float64
    assert list(checked_weights([0, 0, 0], 3)) == [1, 1, 1]
    with pytest.raises(ValueError, match="one number for each of 3 pictures"):
        checked_weights([1, 2], 3)
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="negative or not finite"):
            checked_weights([1, bad], 2)
