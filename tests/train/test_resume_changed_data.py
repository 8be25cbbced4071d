"""A run that is resumed after pictures were added or removed goes on with what is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from models.checkpoint import load_checkpoint
from scripts.make_shapes import make_shapes
from utils.options import TrainOptions
from utils.train.monitor import read_results
from utils.train.trainer import Trainer


@pytest.mark.parametrize("change", ["fewer", "more"])
def test_resuming_with_other_pictures(
    make_options: Callable[..., TrainOptions],
    interrupt_before: Callable[[TrainOptions, int], Path],
    tmp_path: Path,
    change: str,
) -> None:
    data = make_shapes(tmp_path / "set", {"train": 16, "val": 4}, size=64, seed=0, num_classes=3)
    last = interrupt_before(make_options(data=str(data), epochs=3, batch_size=4), 1)
    images = tmp_path / "set" / "images" / "train"
    for number, path in enumerate(sorted(images.iterdir())):
        if change == "fewer" and number % 2:
            path.unlink()
        elif change == "more":
            label = tmp_path / "set" / "labels" / "train" / path.with_suffix(".txt").name
            shutil.copyfile(path, path.with_stem(f"more_{path.stem}"))
            if label.exists():  # else a background
                shutil.copyfile(label, label.with_stem(f"more_{label.stem}"))
    trainer = Trainer(TrainOptions(resume=str(last)))
    assert len(trainer.train_set) == (8 if change == "fewer" else 32)
    trainer.fit()
    columns = read_results(last.parents[1] / "results.csv")
    assert columns["epoch"] == [0, 1, 2]
    assert all(value > 0 for value in columns["train/box_loss"])
    assert load_checkpoint(last).epoch == 2
