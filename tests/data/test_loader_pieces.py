"""Batches that several workers make together: the same as those of one, in sets of few batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.loader_kit import Probe, count_restarts, fingerprint, loader_of, probe_loader
from tests.data.test_loader_batching import Breaking
from utils.data.batching import Parcel
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.sampling import BatchStream, Pieces, piece_size
from utils.data.spec import load_data_spec
from utils.data.workers import LoaderError


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=200)
def test_pieces_are_even_and_in_order(length: int, batch_size: int, size: int) -> None:
    stream = BatchStream(length, batch_size)
    pieces = Pieces(stream, size)
    found = list(pieces)
    assert len(found) == sum(pieces.counts)
    for keys in stream:
        own = [found.pop(0) for _ in range(pieces.counts.popleft())]
        assert [key for piece in own for key in piece] == keys
        lengths = [len(piece) for piece in own]
        assert max(lengths) <= size and max(lengths) - min(lengths) <= 1 and len(own) == -(-len(keys) // size)


@pytest.mark.parametrize(
    ("length", "batch_size", "workers", "expected"),
    [
        (87, 32, 8, 6),  # three batches would leave five workers idle
        (87, 64, 8, 6),
        (87, 6, 8, 6),
        (512, 32, 8, 32),  # 16 batches, which is what workers prepare
        (480, 32, 8, 30),
        (3, 3, 2, 1),
        (87, 64, 1, 64),
        (87, 64, 0, 64),
    ],
)
def test_sets_of_few_batches_are_handed_round(length: int, batch_size: int, workers: int, expected: int) -> None:
    assert piece_size(length, batch_size, workers, prefetch=2) == expected


@pytest.mark.parametrize("piece", [1, 3, 4, 5, 7, 100])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_do_not_depend_on_pieces(workers: int, piece: int, shapes_dataset: Path) -> None:
    whole = loader_of(shapes_dataset, 0, batch_size=7)
    loader = EpochLoader(
        whole.dataset, BatchStream(len(whole.dataset), 7, shuffle=True), workers=workers, piece=piece, prefetch=1
    )
    for epoch in (0, 1):
        for each in (whole, loader):
            each.set_epoch(epoch)
        assert [fingerprint(batch) for batch in loader] == [fingerprint(batch) for batch in whole]
    loader.close()


@pytest.mark.parametrize("is_kept", [False, True])
def test_validation_is_the_same_in_every_pass(is_kept: bool, shapes_dataset: Path) -> None:
    spec = load_data_spec(shapes_dataset)
    options = {"stride": 32, "rect": True, "pad": 0.5, "names": spec.names}
    whole, _ = create_dataloader(spec.train, 64, 10, workers=0, **options)
    loader, _ = create_dataloader(spec.train, 64, 10, workers=2, **options)
    assert loader._pieces is not None
    if is_kept:
        loader.keep()
    expected = [fingerprint(batch) for batch in whole]
    for _ in range(3):
        assert [fingerprint(batch) for batch in loader] == expected
    next(iter(loader))  # a pass that is given up
    assert [fingerprint(batch) for batch in loader] == expected
    loader.close()


def test_announced_epochs_follow_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = probe_loader(2, 8, piece=3)
    restarts = count_restarts(monkeypatch)
    for epoch in range(4):
        loader.set_epoch(epoch)
        loader.announce(epoch + 1)
        assert [int(row) for batch in loader for row in batch[1][:, 4]] == [epoch] * 16
    assert len(restarts) == 1
    loader.close()


def test_a_failing_piece_is_named_and_the_next_pass_begins_anew() -> None:
    loader = EpochLoader(Breaking(16), BatchStream(16, 8), workers=2, piece=2)
    for _ in range(2):
        with pytest.raises(LoaderError, match=r"3\.jpg could not be prepared"):
            list(loader)
    loader.close()


def test_pieces_number_the_pictures_of_the_whole_batch() -> None:
    probe, keys = Probe(), list(BatchStream(5, 5))[0]
    pieces = []
    for own in (keys[:2], keys[2:3], keys[3:]):
        samples = [probe[key] for key in own]
        rows = torch.cat([sample[1] for sample in samples])
        rows[:, 0] = torch.arange(len(own))
        images = torch.stack([sample[0] + key.index for sample, key in zip(samples, own, strict=True)])
        pieces.append(Parcel(images, rows, tuple(sample[2] for sample in samples), (None,) * len(own)))
    images, targets, paths, shapes = Parcel.joined(pieces).batch()
    assert images[:, 0, 0, 0].tolist() == targets[:, 0].tolist() == targets[:, 5].tolist() == [0, 1, 2, 3, 4]
    assert paths == tuple(f"{index}.jpg" for index in range(5)) and len(shapes) == 5
    assert Parcel.joined(pieces[:1]) is pieces[0]
    assert pieces[2].targets[:, 0].tolist() == [0, 1]
