"""Options and hyper-parameters at and beyond their limits: refused with a sentence, or meant as they are typed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.checkpoint import Checkpoint, load_checkpoint
from scripts.make_shapes import make_shapes
from tests.reference.tiny import tiny_dual
from utils.options import Hyp, TrainOptions
from utils.runtime import is_out_of_memory
from utils.train import setup
from utils.train import trainer as trainer_module
from utils.train.autobatch import memory_advice
from utils.train.setup import freeze_model, make_schedule, resumed_options
from utils.train.trainer import Trainer

MakeOptions = Callable[..., TrainOptions]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stall_warning": float("nan")}, "--stall-warning nan: .*seconds up to 1000000; 0 never warns"),
        ({"stall_warning": float("inf")}, "--stall-warning inf"),
        ({"stall_warning": 1e300}, r"--stall-warning 1e\+300"),
        ({"epochs": 10**9}, "--epochs 1000000000: should be at most 1000000"),
        ({"resume": ""}, "--resume '': the path is empty; give RUN/weights/last.pt"),
        ({"resume": " "}, "--resume ''"),
        ({"resume": True, "profile_loader": True}, "--profile-loader .*--resume .*leave one of the two out"),
        ({"resume": "last.pt", "profile_loader": True}, "--profile-loader .*--resume"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**changes)


@pytest.mark.parametrize("changes", [{"stall_warning": 0}, {"stall_warning": 1e6}, {"epochs": 10**6}])
def test_what_lies_just_within_is_taken(changes: dict[str, object]) -> None:
    TrainOptions(**changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"warmup_bias_lr": -0.1}, "my.yaml: hyper-parameter warmup_bias_lr: -0.1 should not be negative; hyp/hyp.scr"),
        ({"scale": 2}, "my.yaml: hyper-parameter scale: 2.0"),
        ({"degrees": 1e308}, "my.yaml: hyper-parameter degrees: 1e\\+308 should lie between -360 and 360"),
        ({"shear": -91}, "my.yaml: hyper-parameter shear: -91 should lie"),
        ({"perspective": 2}, "my.yaml: hyper-parameter perspective: 2 should lie"),
        ({"lr0": True}, "my.yaml: 'lr0: True' should be a number"),
        ({"mosaic": False}, "my.yaml: 'mosaic: False' should be a number"),
        ({"lr0": None}, "my.yaml: 'lr0: None' should be a number"),
        ({"lr0": [0.1]}, "my.yaml: 'lr0:"),
        ({"lr0": 10**400}, "my.yaml: 'lr0:"),
        ({"path": "x", "names": {}}, r"my.yaml: none of its keys \(path, names\) is a hyper-parameter; .*--hyp"),
    ],
)
def test_hyper_parameters_that_are_none_name_the_file(content: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hyp.from_mapping(content, "my.yaml")


def test_a_misspelt_hyper_parameter_is_told_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_module.LOGGER, "propagate", True)
    Hyp.from_mapping({"lr0": 0.1, "warmup_epoch": 3, "zzz": 1}, "my.yaml")
    assert "unknown key 'warmup_epoch' is ignored; is 'warmup_epochs' meant?" in caplog.text
    assert "unknown key 'zzz' is ignored\n" in caplog.text


@pytest.mark.parametrize("typed", [["--augment", "gpu"], ["--cache", "gpu"], ["--cache", "nonsense"]])
def test_what_is_typed_beside_resume_has_to_go_with_the_run(typed: list[str]) -> None:
    checkpoint = Checkpoint(model={}, opt=TrainOptions(mosaic_cache=6).to_dict())
    options = TrainOptions.from_cli(["--resume", "last.pt"])
    options.given |= {typed[0].removeprefix("--")}
    setattr(options, typed[0].removeprefix("--"), typed[1])
    with pytest.raises(ValueError, match=f"{typed[0]} {typed[1]}"):
        resumed_options(options, checkpoint)


def test_freezing_all_that_has_weights_is_refused() -> None:
    model = tiny_dual().requires_grad_(True)
    with_weights = [index for index, layer in enumerate(model.model) if list(layer.parameters())]
    assert len(with_weights) < len(model.model)
    with pytest.raises(ValueError, match="^--freeze 1 2 .*the layers left have no weights"):
        freeze_model(model, with_weights)
    model.requires_grad_(True)
    freeze_model(model, with_weights[:-1])
    assert any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("accumulate", "is_told"), [(0, False), (10, False), (11, True), (10**9, True)])
def test_more_accumulated_batches_than_an_epoch_has_are_told(
    accumulate: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(setup.LOGGER, "warning", said.append)
    make_schedule(TrainOptions(accumulate=accumulate), Hyp(), 4, 10)
    assert any(f"--accumulate {accumulate}: an epoch has only 10 batches" in line for line in said) == is_told


@pytest.mark.parametrize("found", [1, 6, 16, 23])
def test_the_automatic_batch_of_quads_is_a_multiple_of_four(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    monkeypatch.setattr(trainer_module, "find_batch_size", lambda *_: found)
    trainer = Trainer(make_options(batch_size=-1, quad=True, epochs=1))
    assert trainer.batch_size == max(found // 4 * 4, 4)
    assert trainer.recorded_options["batch_size"] == trainer.batch_size


def test_a_run_of_quads_on_a_set_of_any_size_is_resumed(
    make_options: MakeOptions, tmp_path: Path, interrupt_before: Callable[[TrainOptions, int], Path]
) -> None:
    data = make_shapes(tmp_path / "shapes", {"train": 10, "val": 2, "test": 1}, size=64, seed=1, num_classes=3)
    last = interrupt_before(make_options(data=str(data), batch_size=16, quad=True), 1)
    resumed = Trainer(TrainOptions(resume=str(last)))
    assert resumed.batch_size == len(resumed.train_set) < 16
    resumed.fit()
    assert load_checkpoint(last).epoch == 1


def test_main_memory_that_is_full_is_told_as_such() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("sizes do not match"))
    text = memory_advice(torch.device("cpu"), 32, 640)
    assert "main memory" in text and "--batch 16" in text


def test_a_loss_without_memory_ends_the_run_with_advice(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(make_options(epochs=1))
    monkeypatch.setattr(trainer, "batch_pass", lambda *_, **__: torch.empty(2**60, dtype=torch.uint8))
    with pytest.raises(MemoryError, match="--batch 4"):
        trainer.fit()


def test_other_errors_of_torch_are_not_mistaken_for_it(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(make_options(epochs=1))
    monkeypatch.setattr(trainer, "batch_pass", lambda *_, **__: torch.ones(2) @ torch.ones(3))
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="size"):
        trainer.fit()
