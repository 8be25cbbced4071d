"""Caches that are asked for and cannot be of use: each is told in one line, and a useful one is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from utils.data import mosaic_cache
from utils.data.dataset import LoadImagesAndLabels
from utils.data.spec import load_data_spec
from utils.options import Hyp, TrainOptions
from utils.train import loaders
from utils.train.loaders import idle_caches, make_loaders

IDLE = {
    "validation cache without validation": ({"cache": "val", "noval": True}, "--cache val", "--noval"),
    "folder for nothing": ({"cache_dir": "x"}, "--cache-dir", "--cache disk"),
    "folder for memory": ({"cache_dir": "x", "cache": "ram"}, "--cache-dir", "--mosaic-cache"),
    "all epochs closed": ({"mosaic_cache": 4, "close_mosaic": 2}, "--mosaic-cache 4", "--close-mosaic"),
    "all epochs open": ({"mosaic_cache": 4, "close_mosaic": 1, "open_mosaic": 1}, "--mosaic-cache 4", "--open-mosaic"),
}
USEFUL = [
    {},
    {"cache": "val"},
    {"cache": "ram", "noval": True},
    {"cache": "disk", "cache_dir": "x", "noval": True},
    {"mosaic_cache": 4, "cache_dir": "x"},
    {"mosaic_cache": 4, "close_mosaic": 1},
]


@pytest.mark.parametrize("case", IDLE)
def test_a_cache_without_effect_is_told(make_options: Callable[..., TrainOptions], case: str) -> None:
    changes, *words = IDLE[case]
    (line,) = idle_caches(make_options(**changes))
    assert all(word in line for word in words)


@pytest.mark.parametrize("changes", USEFUL)
def test_nothing_is_said_of_useful_ones(make_options: Callable[..., TrainOptions], changes: dict[str, object]) -> None:
    assert idle_caches(make_options(**changes)) == []


def test_lines_are_printed_once(make_options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(loaders.LOGGER, "warning", said.append)
    options = make_options(cache="val", noval=True, mosaic_cache=4, mosaic=0.0)
    make_loaders(options, options.load_hyp(), load_data_spec(options.data), imgsz=64, batch_size=4, stride=32)
    assert len(said) == 2
    assert "--cache val" in said[0]
    assert said[1].startswith("train: --mosaic-cache 4")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"augment": False}, "validation"),
        ({"augment": True, "hyp": {"mosaic": 0.0}}, "mosaic is 0"),
        ({"augment": True, "hyp": Hyp(mosaic=0.0)}, "mosaic is 0"),
        ({"augment": True, "hyp": {"mosaic": 1.0}, "rect": True}, "--rect"),
    ],
)
def test_prepared_mosaics_that_nobody_uses(
    shapes_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], reason: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(mosaic_cache.LOGGER, "warning", said.append)
    images = load_data_spec(shapes_dataset).train
    LoadImagesAndLabels(images, 64, **options, mosaic_cache=4, cache_dir=tmp_path / "kept", prefix="train: ")
    (line,) = said
    assert line.startswith("train: --mosaic-cache 4 has no effect") and reason in line
    assert not (tmp_path / "kept").exists()
