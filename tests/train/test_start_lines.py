"""What a run says before its first batch, of which users make sure that it does what they meant."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.reference.tiny import tiny_dual
from utils.options import Hyp, TrainOptions
from utils.train.schedule import describe_mosaic, has_mosaic
from utils.train.setup import freeze_model, make_schedule
from utils.train.trainer import Trainer

MakeOptions = Callable[..., TrainOptions]


# --- --freeze ---------------------------------------------------------------------------------------------------------


def named_layers(text: str) -> list[int]:
    """Layer numbers of the line that tells what stands still."""
    (numbers,) = re.findall(r"Freeze: layers? ([\d, ]+) stands? still", text)
    return [int(number) for number in numbers.split(", ")]


def test_freeze_0_freezes_nothing_and_says_how_to_freeze_the_first_ten(messages: list[str]) -> None:
    """Some guides take --freeze 0 for the first ten layers; it has always meant none."""
    model = tiny_dual().requires_grad_(True)
    assert freeze_model(model, [0]) == []
    assert all(parameter.requires_grad for parameter in model.parameters())
    (line,) = messages
    assert "0 layers stand still" in line
    assert "--freeze 10 freezes the first ten" in line and "--freeze backbone" in line


@pytest.mark.parametrize(
    ("freeze", "layers"),
    [([1], [0]), ([3], [0, 1, 2]), ([0, 3], [0, 3]), ([10], list(range(10))), (["backbone"], list(range(10)))],
)
def test_freeze_names_each_layer(freeze: list[int | str], layers: list[int], messages: list[str]) -> None:
    """A single number is how many of the first layers stand still, not the number of one layer."""
    model = tiny_dual().requires_grad_(True)
    freeze_model(model, freeze)
    (line,) = messages
    assert named_layers(line) == layers
    still = {int(name.split(".")[1]) for name, p in model.named_parameters() if not p.requires_grad}
    moving = {int(name.split(".")[1]) for name, p in model.named_parameters() if p.requires_grad}
    assert still <= set(layers) and not moving & set(layers)
    assert f"{sum(not p.requires_grad for p in model.parameters())} tensors" in line


# --- --open-mosaic, --close-mosaic ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "opened", "closed", "sentence"),
    [
        (10, 0, 0, "Mosaic: on in epochs 0 to 9 of 0 to 9"),
        (10, 3, 0, "Mosaic: on in epochs 3 to 9 of 0 to 9"),
        (10, 3, 2, "Mosaic: on in epochs 3 to 7 of 0 to 9"),
        (10, 9, 0, "Mosaic: on in epochs 9 to 9 of 0 to 9"),
        (10, 6, 4, "Mosaic: off in all epochs (--close-mosaic and --open-mosaic cover the whole run)"),
    ],
)
def test_mosaic_sentence(epochs: int, opened: int, closed: int, sentence: str) -> None:
    assert describe_mosaic(epochs, closed, opened, 1.0) == sentence
    with_mosaic = [epoch for epoch in range(epochs) if has_mosaic(epoch, epochs, closed, opened)]
    if with_mosaic:
        assert f"epochs {with_mosaic[0]} to {with_mosaic[-1]} of" in sentence


def test_open_mosaic_without_mosaics_is_told() -> None:
    sentence = describe_mosaic(10, 0, 3, 0.0)
    assert sentence.startswith("Mosaic: off in all epochs (the hyper-parameter mosaic is 0")


def test_a_run_begins_with_the_sentence_and_keeps_to_it(make_options: MakeOptions, messages: list[str]) -> None:
    trainer = Trainer(make_options(epochs=3, open_mosaic=1, close_mosaic=1, mosaic=1.0))
    mosaics = []
    set_epoch = trainer.train_loader.set_epoch
    trainer.train_loader.set_epoch = lambda epoch, *, mosaic, **more: (
        mosaics.append(mosaic),
        set_epoch(epoch, mosaic=mosaic, **more),
    )
    trainer.fit()
    assert mosaics == [False, True, False]
    assert sum("Mosaic: on in epochs 1 to 1 of 0 to 2" in line for line in messages) == 1


# --- --accumulate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "batch", "words"),
    [
        ({}, 16, "batch 16 x accumulate 4 = 64 images per optimizer step"),
        ({}, 24, "batch 24 x accumulate 3 = 72 images per optimizer step"),
        ({}, 128, "batch 128 x accumulate 1 = 128 images per optimizer step"),
        ({"accumulate": 1}, 16, "batch 16 x accumulate 1 = 16 images per optimizer step"),
        ({"accumulate": 5}, 8, "batch 8 x accumulate 5 = 40 images per optimizer step"),
    ],
)
def test_images_of_an_optimizer_step(options: dict[str, int], batch: int, words: str, messages: list[str]) -> None:
    schedule = make_schedule(TrainOptions(**options), Hyp(), batch, 1000)
    (line,) = (line for line in messages if line.startswith("Schedule: "))
    assert line.endswith(words)
    assert schedule.at(10**6, 0).accumulate == int(words.split("accumulate ")[1].split()[0])


def test_the_run_says_it_once(make_options: MakeOptions, messages: list[str]) -> None:
    Trainer(make_options(accumulate=3))
    assert sum("batch 8 x accumulate 3 = 24 images per optimizer step" in line for line in messages) == 1
