"""What is refused or said before anything is built: folders, devices, layers, schedules, the run to continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.checkpoint import Checkpoint, save_checkpoint
from tests.reference.tiny import tiny_dual
from utils.options import Hyp, TrainOptions
from utils.train import setup
from utils.train.setup import check_demands, check_run_path, freeze_model, make_schedule, prepare_run, resumed_options

CPU = torch.device("cpu")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged, warnings marked."""
    said: list[str] = []
    monkeypatch.setattr(setup.LOGGER, "info", said.append)
    monkeypatch.setattr(setup.LOGGER, "warning", lambda text: said.append(f"WARNING: {text}"))
    return said


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of ten epochs that was stopped after the second."""
    folder = tmp_path / "base"
    options = TrainOptions(epochs=10, data="shapes.yaml").to_dict()
    checkpoint = Checkpoint(model={"a": torch.zeros(1)}, epoch=1, optimizer={"state": {}}, opt=options)
    save_checkpoint(folder / "weights" / "last.pt", checkpoint)
    return folder


# --- the run to continue ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "weights"])
def test_a_folder_is_resumed_from_its_last_weights(run: Path, part: str, lines: list[str]) -> None:
    options, checkpoint, folder = prepare_run(TrainOptions(resume=str(run / part)))
    assert (folder, checkpoint.epoch) == (run, 1)
    assert options.resume == str(run / "weights" / "last.pt")
    assert any(f"goes on from {run / 'weights' / 'last.pt'}" in line for line in lines)


def test_a_folder_without_last_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is a folder, and \S+/weights/last\.pt is not there"):
        prepare_run(TrainOptions(resume=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match="absent not found"):
        prepare_run(TrainOptions(resume=str(tmp_path / "absent")))


def test_only_what_changes_is_told_beside_resume(lines: list[str]) -> None:
    checkpoint = Checkpoint(model={}, opt=TrainOptions(epochs=5, workers=2, imgsz=320).to_dict())
    same = TrainOptions.from_cli("--resume last.pt --epochs 5 --workers 2 --img 320".split())
    assert resumed_options(same, checkpoint).epochs == 5 and lines == []
    other = TrainOptions.from_cli("--resume last.pt --epochs 9 --workers 2 --img 640".split())
    resumed = resumed_options(other, checkpoint)
    assert (resumed.epochs, resumed.imgsz) == (9, 320)
    assert lines == [
        "--resume: --epochs 9 replaces 5",
        "WARNING: --resume: --imgsz is ignored, the run keeps 320",
    ]


# --- the new run's folder ---------------------------------------------------------------------------------------------


def in_a_file(folder: Path) -> dict[str, object]:
    (folder / "tiny.yaml").touch()
    return {"project": str(folder / "tiny.yaml")}


def below_a_file(folder: Path) -> dict[str, object]:
    (folder / "tiny.yaml").touch()
    return {"project": str(folder / "tiny.yaml" / "deeper"), "name": "x"}


def instead_of_a_file(folder: Path) -> dict[str, object]:
    (folder / "exp").touch()
    return {"project": str(folder), "exist_ok": True}


def long_name(folder: Path) -> dict[str, object]:
    return {"project": str(folder / "new"), "name": "ü" * 150}  # 300 bytes


def long_project(folder: Path) -> dict[str, object]:
    return {"project": str(folder / ("x" * 300))}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (in_a_file, "^--project .*tiny.yaml --name exp: .*tiny.yaml is a file, not a folder; choose another --project"),
        (below_a_file, "tiny.yaml is a file, not a folder"),
        (instead_of_a_file, "exp is a file, not a folder"),
        (long_name, "^--name üü[^ ]*: 300 bytes, a folder's name may have 255; choose a shorter"),
        (long_project, "^--project xx[^ ]*: 300 bytes"),
    ],
)
def test_impossible_folders_are_refused_at_once(
    tmp_path: Path, make: Callable[[Path], dict[str, object]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_run(TrainOptions(**make(tmp_path)))


def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} may not be written to; choose another --project"):
        check_run_path(TrainOptions(project=str(tmp_path / "runs" / "new")))


@pytest.mark.parametrize("name", ["exp", "a/b", "x" * 255])
def test_possible_folders_are_not_made_yet(tmp_path: Path, name: str) -> None:
    check_run_path(TrainOptions(project=str(tmp_path / "runs"), name=name))
    assert list(tmp_path.iterdir()) == []


# --- device and hyper-parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "gpu"}, "--augment gpu needs a CUDA device"),
        ({"cache": "gpu:3"}, "--cache gpu:3 needs a CUDA device"),
        ({"cos_restarts": [5, 2, 0.5]}, "--cos-restarts: .*eta_min 0.5 is above the peak lr0 0.01"),
    ],
)
def test_demands_that_cannot_be_met(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_demands(TrainOptions(**options), Hyp(), CPU)


@pytest.mark.parametrize("options", [{}, {"cache": "ram"}, {"cos_restarts": []}, {"augment": "cpu"}])
def test_demands_that_can_be_met(options: dict[str, object]) -> None:
    check_demands(TrainOptions(**options), Hyp(), CPU)


def test_a_cuda_device_may_be_asked_for_where_there_is_one() -> None:
    check_demands(TrainOptions(augment="gpu", cache="gpu"), Hyp(), torch.device("cuda"))


# --- layers and schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ([100], "^--freeze 100: this model has 19 layers, 0 to 18;"),
        ([10**12], f"^--freeze {10**12}: this model has 19 layers"),
        ([3, 19], "^--freeze 3 19: this model has 19 layers"),
        ([19], "^--freeze 19: all layers would be frozen"),
    ],
)
def test_layers_that_cannot_be_frozen_are_named_as_typed(freeze: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        freeze_model(tiny_dual(), freeze)


@pytest.mark.parametrize(("freeze", "count"), [([18], 18), ([18, 3, 3], 2), ([0], 0), (["backbone"], 10)])
def test_layers_that_can_be_frozen(freeze: list[int | str], count: int) -> None:
    assert len(freeze_model(tiny_dual(), freeze)) == count


def test_the_schedule_in_force_is_told_where_several_are_asked_for(lines: list[str]) -> None:
    make_schedule(TrainOptions(cos_lr=True), Hyp(), 16, 100)
    assert not [line for line in lines if "ignored" in line]
    schedule = make_schedule(TrainOptions(cos_lr=True, flat_cos_lr=True, fixed_lr=True), Hyp(), 16, 100)
    assert schedule.kind == "cosine"
    assert [line for line in lines if "ignored" in line] == [
        "WARNING: --cos-lr is used, --flat-cos-lr and --fixed-lr ignored: one schedule at a time"
    ]


@pytest.mark.parametrize(
    ("batches", "options", "is_told"),
    [
        (2, {"epochs": 99}, True),  # twenty pictures: 99 steps, half of the batches warm-up
        (30, {"epochs": 20}, True),  # 160 steps
        (30, {"epochs": 20, "weights": "start.pt"}, False),
        (20, {"epochs": 24, "accumulate": 1}, False),
        (5, {"epochs": 30, "weights": "start.pt"}, True),  # 100 of 150 batches are warm-up
        (100, {"epochs": 100}, False),
    ],
)
def test_a_run_too_short_to_learn_anything_is_told(
    lines: list[str], batches: int, options: dict[str, object], is_told: bool
) -> None:
    make_schedule(TrainOptions(**options), Hyp(), 16, batches)
    told = [line for line in lines if "optimizer steps; a new model needs" in line]
    assert len(told) == is_told
    if batches == 2:
        assert "198 batches, 100 of them warm-up, and makes about 99 optimizer steps" in told[0]
