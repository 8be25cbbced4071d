"""``--multi-scale``: which sizes the network sees, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from utils.options import TrainOptions
from utils.train.schedule import random_size
from utils.train.trainer import Trainer

MakeOptions = Callable[..., TrainOptions]
IMGSZ, STRIDE = 128, 32


class SizeWatch:
    """Notes height and width of every batch that a trainer's network sees in training."""

    def __init__(self, options: TrainOptions) -> None:
        self.trainer = Trainer(options)
        self.seen: list[tuple[int, int]] = []
        self.trainer.model.register_forward_pre_hook(lambda _, inputs: self.seen.append(tuple(inputs[0].shape[-2:])))

    def epoch(self, number: int) -> list[tuple[int, int]]:
        self.seen.clear()
        self.trainer.begin_epoch(number)
        self.trainer.run_epoch()
        return list(self.seen)


@pytest.fixture
def watch(make_options: MakeOptions) -> SizeWatch:
    return SizeWatch(make_options(imgsz=IMGSZ, batch_size=2, multi_scale=True, epochs=9))


def test_sizes_are_many_multiples_of_the_stride_from_half_to_half_as_much_again(watch: SizeWatch) -> None:
    seen = watch.epoch(0)
    assert len(seen) == 12
    assert all(height == width for height, width in seen)
    sides = {height for height, _ in seen}
    assert len(sides) >= 3
    assert all(side % STRIDE == 0 and 0.5 * IMGSZ <= side <= 1.5 * IMGSZ for side in sides)
    assert min(sides) < IMGSZ < max(sides)


def test_sizes_depend_on_the_epoch_and_nothing_before_it(watch: SizeWatch) -> None:
    later = watch.epoch(5)
    assert watch.epoch(0) != later
    assert watch.epoch(5) == later


@pytest.mark.parametrize("imgsz", [128, 640])
def test_both_ends_of_the_range_are_reached_and_never_passed(imgsz: int) -> None:
    generator = np.random.default_rng(0)
    drawn = {random_size(generator, (imgsz, imgsz), imgsz, STRIDE) for _ in range(2000)}
    assert drawn == {(side, side) for side in range(imgsz // 2, imgsz * 3 // 2 + 1, STRIDE)}


def test_oblong_batches_keep_their_aspect() -> None:
    generator = np.random.default_rng(0)
    for _ in range(100):
        height, width = random_size(generator, (64, 128), IMGSZ, STRIDE)
        assert height % STRIDE == width % STRIDE == 0
        assert width / 2 <= height < width / 2 + STRIDE


def test_without_it_all_batches_have_one_size(make_options: MakeOptions) -> None:
    assert set(SizeWatch(make_options()).epoch(0)) == {(64, 64)}
