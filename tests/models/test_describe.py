"""What ``python -m models.checkpoint info FILE`` says, of our files and of the original's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.checkpoint import PROGRAM, Checkpoint, info, load_checkpoint, main, save_checkpoint
from models.graph import DetectionModel
from models.reparam import inference_form
from tests.reference.tiny import tiny_dual

REPO_ROOT = Path(__file__).resolve().parents[2]


def entries(path: Path) -> dict[str, str]:
    return {line[:17].strip(): line[17:] for line in info(path)}


@pytest.fixture
def training_file(tmp_path: Path) -> Path:
    model = tiny_dual()
    checkpoint = Checkpoint(
        model=model.state_dict(),
        ema=model.state_dict(),
        yaml=model.yaml,
        nc=3,
        names={0: "bolt", 1: "螺母", 2: "washer"},
        epoch=4,
        updates=70,
        best_fitness=0.25,
        optimizer={"state": {0: {}, 1: {}}, "param_groups": []},
        metrics={"train/box_loss": 1.5, "metrics/mAP_0.5": 0.5},
        data={"yaml": "bolts.yaml", "train_images": 24},
        opt={"data": "bolts.yaml", "epochs": 10, "imgsz": 64},
        hyp={"lr0": 0.01},
    )
    save_checkpoint(tmp_path / "last.pt", checkpoint)
    return tmp_path / "last.pt"


def test_training_file(training_file: Path) -> None:
    told = entries(training_file)
    assert told["format"] == "yolov9-checkpoint, version 1"
    assert told["kind"] == "training, training form (2 branches)"
    assert told["network"] == "Model (DualDDetect), strides 8, 16, 32"
    assert told["classes"] == "3: 0 bolt, 1 螺母, 2 washer"
    assert told["training"] == "5 epochs done, 70 optimizer steps"
    assert told["figures"] == "mAP_0.5 0.5" and told["data"] == "yaml bolts.yaml, train_images 24"
    assert told["options"] == "data bolts.yaml, imgsz 64, epochs 10" and told["hyper-parameters"] == "lr0 0.01"
    assert "optimizer state of 2 parameters" in told["tensors"]
    assert told["written"].endswith(f"{PROGRAM}, torch {torch.__version__}")


def test_provenance_comes_back(training_file: Path) -> None:
    loaded = load_checkpoint(training_file)
    assert loaded.data == {"yaml": "bolts.yaml", "train_images": 24}
    assert loaded.program == f"{PROGRAM}, torch {torch.__version__}" and loaded.version == 1
    assert PROGRAM.split()[1] in (REPO_ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("yolov9-t_train", "training, training form (2 branches)", "3,717,680 parameters, 16.5 GFLOPs"),
        ("yolov9-t_stripped", "stripped, training form (2 branches)", "3,717,680 parameters, 16.5 GFLOPs"),
        ("gelan-t_stripped", "stripped, inference form (lead branch only)", "2,442,640 parameters, 10.1 GFLOPs"),
    ],
)
def test_files_of_the_original(golden: Callable[[str], Path], name: str, kind: str, size: str) -> None:
    told = entries(golden(f"models/upstream_{name}.pt"))
    assert told["format"] == "the original's format (pickled objects, read as data)" and told["kind"] == kind
    assert told["network"].startswith(name.split("_")[0]) and told["size"] == f"{size} at 640 px"
    assert told["for inference"] == "2,407,632 parameters, 9.8 GFLOPs"
    assert told["published"] == "2.0 M parameters, 7.7 GFLOPs"
    assert told["classes"].startswith("80: 0 person, 1 bicycle") and told["classes"].endswith("…")


def test_lean_file_and_state_dict(tmp_path: Path) -> None:
    lean = inference_form(DetectionModel("gelan-t.yaml", nc=2))
    save_checkpoint(tmp_path / "lean.pt", Checkpoint(model=lean.state_dict(), yaml=lean.yaml, kind="inference"))
    told = entries(tmp_path / "lean.pt")
    assert told["kind"] == "inference, inference form (lead branch only), batch norm folded"
    assert "for inference" not in told and told["published"].endswith("with 80 classes")
    torch.save(lean.state_dict(), tmp_path / "plain.pt")
    told = entries(tmp_path / "plain.pt")
    assert told["format"] == "state dict (tensors only)" and "network not stored" in told["kind"]


def test_one_bad_file_does_not_hide_the_others(training_file: Path, capsys: pytest.CaptureFixture) -> None:
    bad = training_file.with_name("bad.pt")
    bad.write_bytes(b"<html>")
    assert main(["info", str(bad), str(training_file), "nowhere.pt"]) == 1
    printed = capsys.readouterr()
    assert "web page" in printed.err and "nowhere.pt" in printed.err and "DualDDetect" in printed.out
    assert main(["info", str(training_file)]) == 0


@pytest.mark.slow
def test_command_line(training_file: Path) -> None:
    line = [sys.executable, "-m", "models.checkpoint", "info", str(training_file)]
    done = subprocess.run(line, cwd=REPO_ROOT, capture_output=True, text=True, check=True)
    assert "螺母" in done.stdout and not done.stderr


def test_text_of_a_file_cannot_rewrite_the_terminal(tmp_path: Path) -> None:
    model = tiny_dual()
    names = {0: "bolt\x1b[2K\rkind: harmless", 1: "螺母", 2: "x" * 5000}
    content = Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, names=names, opt={"data": "a\nformat  mine"})
    content.optimizer = {"state": 5}
    save_checkpoint(tmp_path / "a.pt", content)
    lines = info(tmp_path / "a.pt")
    assert all(line.isprintable() and len(line) < 1100 for line in lines)
    assert any("bolt\\x1b[2K\\rkind" in line and "螺母" in line for line in lines)
