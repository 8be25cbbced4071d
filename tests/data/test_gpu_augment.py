"""Pictures put together from plans, by plain torch on the CPU, against those that OpenCV makes for the same keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.plan_kit import (
    ALL,
    COLOURS,
    CPU,
    PLACES,
    SIZE,
    keys_of,
    planner,
    plans_of,
    whole_composer,
    write_textured,
)
from utils.data.batching import BatchMaker
from utils.data.colour import rgb_planes
from utils.data.gpu_augment import join_quads, recolour
from utils.data.plan_batches import GRID
from utils.data.plans import PlannedImagesAndLabels

MEAN = 0.05  # largest mean difference in levels
SHARE = 1e-3  # of values that may differ by more than one level: a level of a warp can move a hue by two degrees
MEAN_REDUCED = 2.0  # of mosaics reduced to half their size or less, where means are taken over other points


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Six pictures of several shapes with polygons and boxes."""
    return write_textured(tmp_path)


def assert_close(*differences: np.ndarray) -> None:
    """Check whole-number differences of pictures."""
    for far in differences:
        assert far.mean() < MEAN
        assert (far > 1).mean() < SHARE


def differences(data: PlannedImagesAndLabels, epochs: int = 3, **keys: bool) -> tuple[list[np.ndarray], list[float]]:
    """Differences (3, H, W) of all samples that are not reduced, and mean differences of those that are."""
    composer, near, reduced = whole_composer(data), [], []
    for epoch in range(epochs):
        plans = plans_of(data, keys_of(data, epoch, **keys))
        made, targets, paths, shapes = composer(plans)
        assert made.dtype == torch.uint8
        for row, key in enumerate(keys_of(data, epoch, **keys)):
            image, labels, path, shape = data[key]
            assert torch.equal(targets[targets[:, 0] == row, 1:], labels[:, 1:])
            assert (paths[row], shapes[row]) == (path, shape)
            far = np.abs(made[row].numpy().astype(int) - image.numpy())
            if float(plans.views[row, :, GRID].max()) > 1:
                reduced.append(far.mean())
            else:
                near.append(far)
    return near, reduced


@pytest.mark.parametrize(
    "hyp",
    [
        {},
        PLACES,
        COLOURS,
        {**PLACES, "degrees": 30.0, "shear": 10.0},
        {**PLACES, **COLOURS, "mosaic": 1.0, "degrees": 10.0},
        {**PLACES, "mosaic": 1.0, "mixup": 1.0},
        {**PLACES, **COLOURS, "mosaic": 1.0, "mixup": 0.5, "copy_paste": 0.8},
        {**PLACES, "mosaic": 0.7, "perspective": 0.001},
    ],
)
def test_pixels_are_those_of_opencv(images: Path, hyp: dict[str, float]) -> None:
    near, reduced = differences(planner(images, hyp))
    assert len(near) == 18
    assert not reduced
    assert_close(*near)


def test_reduced_mosaics_are_smoothed_as_much(images: Path) -> None:
    """Means over points instead of reduced pictures: the same on average, while a plain warp would be rougher."""
    near, reduced = differences(planner(images, {**ALL, "mosaic": 1.0}), epochs=6)
    assert_close(*near)
    assert len(reduced) > 5
    assert max(reduced) < MEAN_REDUCED


def test_exact_mosaics_are_not_averaged(images: Path) -> None:
    data = planner(images, {**ALL, "mosaic": 1.0})
    data.is_exact = True
    near, reduced = differences(data)
    assert not reduced
    assert_close(*near)


def test_rectangular_batches(images: Path) -> None:
    data = planner(images, {**PLACES, **COLOURS}, rect=True, batch_size=2, stride=16)
    composer, sizes = whole_composer(data), set()
    for start in range(0, len(data), 2):
        keys = keys_of(data)[start : start + 2]
        made = composer(plans_of(data, keys))[0]
        expected = torch.stack([data[key][0] for key in keys])
        assert made.shape == expected.shape
        sizes.add(made.shape)
        far = (made.int() - expected.int()).abs().numpy()
        assert far.max() <= 1  # OpenCV rounds colours of rows that its vectors do not divide, and cuts others
        assert far.mean() < 0.2
    assert len(sizes) > 1


def test_quads(images: Path) -> None:
    data = planner(images, {**PLACES, "mosaic": 0.5})
    composer = whole_composer(data)
    seen = set()
    for epoch in range(4):
        keys = keys_of(data, epoch)[:4]
        expected = BatchMaker(data, quad=True, seed=3)[keys]
        plans = plans_of(data, keys, quad=True, seed=3)
        made, targets, paths, shapes = composer(plans)
        seen.add(plans.zoomed)
        assert made.shape == (1, 3, 2 * SIZE, 2 * SIZE)
        assert torch.equal(targets, expected.targets)
        assert (paths, shapes) == (expected.paths, expected.shapes)
        assert_close((made.int() - expected.images.int()).abs().numpy())
    assert len(seen) == 2


def test_quads_of_several_groups_keep_their_order() -> None:
    images = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 3, 2, 2)
    joined = join_quads(images, (False, True))
    assert joined[0, 0].tolist() == [[0, 0, 2, 2]] * 2 + [[1, 1, 3, 3]] * 2
    assert bool((joined[1] == 4).all())


@pytest.mark.parametrize(
    "factors",
    [(1.0, 1.0, 1.0), (1.01, 0.5, 1.3), (0.99, 1.7, 0.6), (0.985, 0.31, 1.4), (1 - 1e-9, 1 + 1e-9, 1 - 1e-12)],
)
def test_colours_are_those_of_opencv(factors: tuple[float, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 4096, 3), np.uint8)
    image[0, :256] = np.arange(256)[:, None]  # all greys, black among them
    image[1, :256] = np.arange(256)[:, None] * (0, 0, 1)
    expected = rgb_planes(image, np.array(factors)).astype(int)
    planes = torch.from_numpy(image[..., ::-1].transpose(2, 0, 1).astype(np.float32))
    far = np.abs(recolour(planes, np.array(factors) - 1).numpy() - expected)
    assert far.max() <= 2
    assert_close(far)


def test_a_large_change_of_hue_goes_round() -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    for hue in (1.9, 0.1):
        factors = np.array([hue, 1.0, 1.0])
        planes = torch.from_numpy(image[..., ::-1].transpose(2, 0, 1).astype(np.float32))
        far = np.abs(recolour(planes, factors - 1).numpy() - rgb_planes(image, factors))
        assert far.max() <= 1


def test_nothing_is_grey(images: Path) -> None:
    """Slots that stand for nothing, and what lies outside of the tiles, show the grey of borders."""
    data = planner(images, {"mosaic": 0.0})
    plans = plans_of(data, keys_of(data)[:1])
    plans.tiles[..., 0], plans.tiles[..., 3:] = -1, 0
    assert bool((whole_composer(data)(plans)[0] == 114).all())


@pytest.mark.gpu
@pytest.mark.parametrize("use_triton", [True, False])
def test_on_the_gpu_the_same_pictures_without_waiting(images: Path, use_triton: bool) -> None:
    data = planner(images, {**ALL, "mosaic": 0.8, "copy_paste": 0.5})
    device = torch.device("cuda:0")
    here, there = whole_composer(data, CPU), whole_composer(data, device, use_triton=use_triton)
    for epoch in range(3):
        plans = plans_of(data, keys_of(data, epoch))
        expected = here(plans)[0].int()
        pinned = plans.pin_memory()
        there(pinned)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = there(pinned)[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_close((made.cpu().int() - expected).abs().numpy())
