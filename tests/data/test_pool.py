"""The pool of decoded pictures: what fits, what lies where at each moment, and that batches come out the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.loader_kit import fingerprint
from tests.data.plan_kit import CPU, PLACES, SIZE, whole_composer, write_textured
from utils.data.batching import Batch
from utils.data.dataset import SampleKey
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.plan_batches import SLOT, PlanBatch, PlanMaker
from utils.data.plan_stream import LAST_EPOCH, PlanStream
from utils.data.pool import PicturePool, PoolLayout, PoolSettings, plan_pool
from utils.data.prefetch import DevicePrefetcher, count_images
from utils.data.sampling import epoch_order

HYP = {**PLACES, "mosaic": 0.9, "mixup": 0.3, "copy_paste": 0.3}
SLOT_BYTES = 3 * SIZE * SIZE
SLOTS, BATCH = 12, 4
SHAPES = np.array([(96, 64), (64, 96), (80, 80), (120, 30)] * 5 + [(70, 90)] * 3)  # width, height
WHOLE = PoolSettings(CPU, budget_bytes=1 << 30, use_triton=False)
RING = PoolSettings(CPU, budget_bytes=SLOTS * SLOT_BYTES, use_triton=False)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 pictures of several shapes."""
    return write_textured(tmp_path_factory.mktemp("pictures"), [tuple(shape) for shape in SHAPES.tolist()])


def loader_of(images: Path, settings: PoolSettings | None, workers: int = 0, **options: object) -> EpochLoader:
    """Shuffled training loader, with a pool if there are settings."""
    given = {"hyp": HYP, "augment": True, "shuffle": True, "nc": 3, "pool": settings, **options}
    return create_dataloader(images, SIZE, BATCH, 32, workers=workers, **given)[0]


def batches_of(loader: EpochLoader, epochs: Iterable[int], *, announce: bool = False) -> list[Batch]:
    """All batches of some epochs as they reach the device; the second epoch has no mosaic."""
    out, epochs = [], list(epochs)
    for number, epoch in enumerate(epochs):
        loader.set_epoch(epoch, mosaic=epoch != 1)
        if announce and number + 1 < len(epochs):
            loader.announce(epochs[number + 1], mosaic=epochs[number + 1] != 1)
        out += list(DevicePrefetcher(loader, CPU))
    return out


def hashes(batches: Iterable[Batch]) -> list[str]:
    return [fingerprint(batch) for batch in batches]


# ------------------------------------------------------------------------------------------------ layout and storage


def test_a_set_that_fits_lies_densely() -> None:
    layout = plan_pool(SHAPES, SIZE, BATCH, WHOLE)
    assert layout.is_whole
    assert layout.slots == len(SHAPES)
    assert layout.offsets[:3].tolist() == [0, 3 * 64 * 42, 2 * 3 * 64 * 42]
    assert layout.stride == 0
    assert plan_pool(SHAPES, SIZE, BATCH, PoolSettings(CPU, budget_bytes=layout.total_bytes)).is_whole
    assert not plan_pool(SHAPES, SIZE, BATCH, PoolSettings(CPU, budget_bytes=layout.total_bytes - 1)).is_whole


def test_a_larger_set_gets_a_ring() -> None:
    layout = plan_pool(SHAPES, SIZE, BATCH, RING)
    assert (layout.is_whole, layout.slots, layout.stride) == (False, SLOTS, SLOT_BYTES)
    assert layout.total_bytes == SLOTS * SLOT_BYTES


def test_too_small_a_budget_is_refused_with_figures(messages: list[str]) -> None:
    few = PoolSettings(CPU, budget_bytes=3 * SLOT_BYTES)
    assert plan_pool(SHAPES, SIZE, BATCH, few) is None
    assert "pool of at least 8 of 64 pixels" in messages[-1]
    assert "--augment cpu" in messages[-1]
    with pytest.raises(ValueError, match="at least 8 of 64 pixels.*--cache gpu:GB"):
        plan_pool(SHAPES, SIZE, BATCH, PoolSettings(CPU, budget_bytes=3 * SLOT_BYTES, is_required=True))


def test_what_is_stored_goes_round_the_end() -> None:
    pool = PicturePool(PoolLayout(np.arange(4) * 10, False), CPU)
    assert bool((pool.data == 114).all())
    pool.put(2, torch.arange(20, dtype=torch.uint8))
    assert pool.data[20:].tolist() == list(range(10))
    assert pool.data[:10].tolist() == list(range(10, 20))
    assert bool((pool.data[10:20] == 114).all())


# ------------------------------------------------------------------------------------------------ what lies where


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("start", [0, 3])
def test_slots_hold_the_last_positions(start: int, drop_last: bool) -> None:
    """Against a list to which one picture after the other is added."""
    layout = PoolLayout(np.arange(SLOTS + 1) * SLOT_BYTES, False)
    stream = PlanStream(23, BATCH, layout, shuffle=True, seed=5, drop_last=drop_last)
    stream.current = type(stream.current)(start)
    usable = 20 if drop_last else 23
    before = epoch_order(23, start - 1 if start else LAST_EPOCH, seed=5)[:usable]
    seen = before.tolist()
    fills = stream.fill_requests()
    held = np.full(SLOTS, -1)
    for request in fills:
        held[request.first_slot : request.first_slot + len(request.decoded)] = request.decoded
    for number, request in enumerate(stream):
        keys = [key.index for key in request.keys]
        assert request.decoded == tuple(keys)
        seen += keys
        held[(request.first_slot + np.arange(len(keys))) % SLOTS] = keys
        assert np.array_equal(request.pictures, held)
        assert sorted(held.tolist()) == sorted(seen[-SLOTS:])
        assert stream.sent.popleft() is request
        if number == len(stream) - 1:
            break


def test_an_epoch_begins_with_what_the_one_before_left() -> None:
    layout = PoolLayout(np.arange(SLOTS + 1) * SLOT_BYTES, False)
    stream = PlanStream(23, BATCH, layout, shuffle=True, seed=1)
    last = [request.pictures for request in stream][-1]
    stream.current = type(stream.current)(1)
    assert np.array_equal(stream.first_ring(), last)


def test_a_whole_pool_is_asked_for_in_order() -> None:
    stream = PlanStream(23, BATCH, plan_pool(SHAPES, SIZE, BATCH, WHOLE), shuffle=True)
    requests = stream.fill_requests()
    assert [index for request in requests for index in request.decoded] == list(range(23))
    assert all(request.first_slot == request.decoded[0] and not request.stride for request in requests)
    assert all(request.pictures is None and not request.decoded for request in stream)


# ------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("workers", [0, 2])
def test_a_whole_pool_gives_the_batches_of_the_cpu(images: Path, workers: int) -> None:
    """Order, targets, paths and shapes are the same, pixels nearly."""
    plain = batches_of(loader_of(images, None), range(3))
    loader = loader_of(images, WHOLE, workers)
    made = batches_of(loader, range(3), announce=True)
    loader.close()
    assert len(made) == len(plain) == 18
    for ours, theirs in zip(made, plain, strict=True):
        assert torch.equal(ours[1], theirs[1])
        assert ours[2:] == theirs[2:]
        assert (ours[0].int() - theirs[0].int()).abs().float().mean() < 1.0


@pytest.mark.slow
def test_a_ring_gives_the_same_however_it_is_reached(images: Path) -> None:
    """With and without workers and announcements, and when training is resumed."""
    expected = hashes(batches_of(loader_of(images, RING), range(3), announce=True))
    assert hashes(batches_of(loader_of(images, RING), range(3))) == expected
    assert hashes(batches_of(loader_of(images, RING), range(2, 3))) == expected[12:]
    loader = loader_of(images, RING, 2)
    assert hashes(batches_of(loader, range(3), announce=True)) == expected
    loader.close()
    assert hashes(batches_of(loader_of(images, RING, seed=1), range(1))) != expected[:6]


def test_a_ring_shows_the_pictures_that_it_says(images: Path) -> None:
    """Each batch as from a pool that holds all pictures; own pictures in the order of the set without a pool."""
    loader = loader_of(images, RING)
    whole = whole_composer(loader.dataset)
    loader.set_epoch(0)
    order = [path for batch in batches_of(loader_of(images, None), [0]) for path in batch[2]]
    used, paths, stream = [], [], loader._stream
    for plans in loader:
        pictures = stream._pictures
        made = loader.composer(plans)[0]
        slots = plans.tiles[..., SLOT].clone()
        plans.tiles[..., SLOT] = torch.from_numpy(np.append(pictures, -1))[slots.long()].int()
        assert torch.equal(whole.compose(plans), made)
        used += slots[slots >= 0].tolist()
        paths += plans.paths
        assert count_images(plans) == len(made)
    assert paths == order
    assert set(used) == set(range(SLOTS))


def test_drawn_with_replacement(images: Path) -> None:
    """--image-weights: nothing is announced, every epoch fills the ring anew, with pictures drawn by the weights."""
    weights = np.zeros(23)
    weights[:3] = 1
    expected = []
    for settings in (None, WHOLE, RING):
        loader = loader_of(images, settings, image_weights=True)
        paths = []
        for epoch in range(2):
            loader.set_epoch(epoch, image_weights=weights)
            paths += [batch[2] for batch in DevicePrefetcher(loader, CPU)]
        if settings is RING:
            assert set(loader._stream.first_ring().tolist()) <= {0, 1, 2}
        expected = expected or paths
        assert paths == expected
    assert len({path for batch in expected for path in batch}) == 3


def test_quads_and_rectangles(images: Path) -> None:
    for options in ({"quad": True}, {"rect": True, "shuffle": False}):
        plain = batches_of(loader_of(images, None, **options), [0])
        for settings in (WHOLE, RING):
            made = batches_of(loader_of(images, settings, **options), [0])
            assert [batch[0].shape for batch in made] == [batch[0].shape for batch in plain]
            if settings is WHOLE or "rect" in options:
                assert all(torch.equal(ours[1], theirs[1]) for ours, theirs in zip(made, plain, strict=True))


def test_a_picture_that_goes_bad_is_in_no_plan_that_comes_later(tmp_path: Path) -> None:
    """A plan that another process made before it knew is made anew, with the pixels that came along."""
    images = write_textured(tmp_path, [tuple(shape) for shape in SHAPES.tolist()])
    loader = loader_of(images, RING, hyp={"mosaic": 1.0})
    dataset, stream, maker = loader.dataset, loader._stream, PlanMaker(loader.dataset)
    request = next(iter(stream))
    stale = maker[request]
    assert isinstance(stale, PlanBatch)
    assert loader._renewed(stale) is stale
    bad = request.keys[1].index
    dataset._broken[bad] = 1
    stream.sent.append(request)
    fresh = loader._renewed(stale)
    before, after = (
        [request.pictures[slot] for slot in plans.tiles[..., SLOT].flatten().tolist() if slot >= 0].count(bad)
        for plans in (stale, fresh)
    )
    assert 0 <= after < before  # out of sight it may stay
    assert fresh.known_broken == 1
    assert fresh.pixels is stale.pixels


def test_unreadable_files_in_a_running_loader(tmp_path: Path, messages: list[str]) -> None:
    for name, settings in (("whole", WHOLE), ("ring", RING)):
        images = write_textured(tmp_path / name, [tuple(shape) for shape in SHAPES.tolist()])
        loader = loader_of(images, settings)
        bad = ["03.png", "07.png"]
        for file in bad:
            (images / file).write_bytes(b"")
        batches = batches_of(loader, range(2))
        assert sum(len(batch[0]) for batch in batches) == 46
        assert sorted(Path(file).name for file in loader.dataset.broken_files()) == bad
    assert sum("03.png cannot be read," in message for message in messages) == 2


def test_keys_of_a_plan_are_those_of_the_sampler(images: Path) -> None:
    loader = loader_of(images, WHOLE)
    loader.set_epoch(2, mosaic=False)
    request = next(iter(loader._stream))
    assert request.keys[0] == SampleKey(2, request.keys[0].index, False)
