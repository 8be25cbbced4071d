"""Where training pictures are put together: what the options say, what is refused, and whole runs that use it."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.drawing import label_text, paint, write_set
from utils.data.dataset import LoadImagesAndLabels, SampleKey
from utils.data.pool import PoolSettings
from utils.data.spec import load_data_spec
from utils.files import write_yaml
from utils.options import Hyp, TrainOptions
from utils.train import loaders
from utils.train.loaders import pool_settings, stays_in_memory
from utils.train.monitor import read_results
from utils.train.trainer import Trainer

MakeOptions = Callable[..., TrainOptions]
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("options", "is_cached", "budget", "is_required"),
    [
        ({}, False, 0, False),
        ({"augment": "gpu"}, False, 0, True),
        ({"cache": "gpu"}, True, 0, True),
        ({"cache": "gpu:2.5", "augment": "gpu"}, True, 5 << 29, True),
        ({"cache": "ram"}, False, 0, False),
    ],
)
def test_pool_that_the_options_ask_for(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], is_cached: bool, budget: int, is_required: bool
) -> None:
    monkeypatch.setattr(loaders, "has_triton", lambda: True)
    settings = pool_settings(TrainOptions(**options), CUDA)
    assert settings == PoolSettings(CUDA, is_cached=is_cached, budget_bytes=budget, is_required=is_required)


def test_what_leaves_pictures_to_the_loader_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "has_triton", lambda: True)
    for options, device in (
        ({}, CPU),
        ({}, torch.device("mps")),
        ({"augment": "cpu"}, CUDA),
        ({"mosaic_cache": 9}, CUDA),
    ):
        assert pool_settings(TrainOptions(**options), device) is None
    monkeypatch.setattr(loaders, "has_triton", lambda: False)
    assert pool_settings(TrainOptions(), CUDA) is None
    assert pool_settings(TrainOptions(augment="gpu"), CUDA) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "gpu"}, "--augment gpu needs a CUDA device; leave it out or use --augment cpu"),
        ({"cache": "gpu:3"}, "--cache gpu:3 needs a CUDA device; use --cache ram"),
    ],
)
def test_no_cuda_device(make_options: MakeOptions, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(make_options(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "gpu:"}, "--cache gpu:: expected ram, disk, val, gpu or gpu:GB"),
        ({"cache": "gpu:lots"}, "expected ram, disk, val, gpu or gpu:GB"),
        ({"cache": "gpu", "augment": "cpu"}, "--augment cpu leaves that to the loader processes"),
        ({"cache": "gpu", "mosaic_cache": 5}, "--mosaic-cache 5 leaves that to the loader processes"),
        ({"augment": "gpu", "mosaic_cache": 5}, "--augment gpu makes mosaics anew"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**options)


@pytest.mark.slow
def test_a_resumed_run_with_plans_is_the_uninterrupted_one(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole runs with a ring on the CPU: the loader processes plan, the trainer's side puts the pictures together."""
    ring = PoolSettings(CPU, budget_bytes=16 * 3 * 64 * 64, use_triton=False)
    monkeypatch.setattr(loaders, "pool_settings", lambda *_: ring)
    whole = make_options(epochs=3, close_mosaic=1, name="whole", hyp="hyp/hyp.scratch-high.yaml")
    Trainer(whole).fit()
    parted = make_options(epochs=3, close_mosaic=1, name="parted", hyp="hyp/hyp.scratch-high.yaml")
    trainer = Trainer(parted)
    assert trainer.train_loader.composer is not None
    end_epoch = trainer.end_epoch

    def stop_after_the_first(record: dict[str, float]) -> object:
        end_epoch(record)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "end_epoch", stop_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    trainer.close()
    Trainer(TrainOptions(resume=str(Path(parted.project) / "parted" / "weights" / "last.pt"))).fit()
    columns = [read_results(Path(parted.project) / name / "results.csv") for name in ("whole", "parted")]
    for name in ("train/box_loss", "train/cls_loss", "train/dfl_loss"):
        assert columns[0][name] == pytest.approx(columns[1][name], rel=1e-6), name


def test_a_training_whose_sets_are_one_folder_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    faulty = label_text() + label_text() + "nonsense\n"  # each row twice
    images = write_set(tmp_path, {"a.png": (paint(), faulty), "b.png": (paint(), label_text()), "c.png": (b"", "")})
    write_yaml(tmp_path / "data.yaml", {"train": str(images), "val": str(images), "names": ["a", "b", "c"]})
    options, spec = TrainOptions(workers=0), load_data_spec(tmp_path / "data.yaml")
    made = loaders.make_loaders(options, Hyp(), spec, imgsz=64, batch_size=2, stride=32)
    for words in ("c.png: left out", "row refused"):
        assert sum(words in line for line in messages) == 1, messages
    train, val = (dataset.report for _, dataset in made)
    assert train.counts == val.counts
    assert (val.counts.left_out, val.counts.rows_refused, val.counts.duplicates) == (1, 1, 3)


@pytest.mark.parametrize(
    ("pictures", "side", "free_gib", "expected"),
    [
        (87, 672, 64, True),
        (792, 672, 64, True),  # 1.00 GiB
        (793, 672, 64, False),
        (87, 672, 1, True),
        (200, 672, 1, False),
        (87, 2592, 64, False),
        (1, 2**14, 64, True),
        (1, 2**16, 64, False),  # more than 32 bits can tell
    ],
)
def test_validation_sets_that_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch, pictures: int, side: int, free_gib: int, expected: bool
) -> None:
    class Pictures:
        batch_shapes = np.array([[side, side], [32, 32]], np.int32)
        batch_index = np.zeros(pictures, int)

    monkeypatch.setattr(loaders, "available_memory_bytes", lambda: free_gib << 30)
    assert stays_in_memory(Pictures()) == expected


@pytest.mark.parametrize(("free_bytes", "passes"), [(1 << 40, 1), (0, 4)])  # three epochs and the best weights
def test_validation_reads_its_pictures_once_where_they_stay(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, free_bytes: int, passes: int
) -> None:
    monkeypatch.setattr(loaders, "available_memory_bytes", lambda: free_bytes)
    trainer = Trainer(make_options(epochs=3, workers=0))
    read: list[int] = []
    get = type(trainer.val_set).__getitem__

    def counted(self: LoadImagesAndLabels, key: SampleKey) -> object:
        read.extend([key.index] if self is trainer.val_set else [])
        return get(self, key)

    monkeypatch.setattr(type(trainer.val_set), "__getitem__", counted)
    trainer.fit()
    assert sorted(read) == sorted(list(range(len(trainer.val_set))) * passes)


def test_a_training_ends_its_workers_and_goes_with_its_last_name(make_options: MakeOptions) -> None:
    """Without waiting for the garbage collector, which rarely comes."""
    before = set(multiprocessing.active_children())
    trainer = Trainer(make_options(epochs=2, workers=2))
    trainer.fit()
    assert set(multiprocessing.active_children()) <= before
    average = weakref.ref(trainer.ema.ema)
    gc.disable()
    try:
        del trainer
        assert average() is None
    finally:
        gc.enable()
