"""Command lines as guides and articles print them, run from a working folder of the user's own.

Only what a test machine cannot do is overridden behind the printed words: device, image size, batch and epochs.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from utils.files import read_yaml, write_yaml
from utils.train.monitor import read_results

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = "--device cpu --img 64 --batch 8 --workers 2"
TRAIN = "--workers 8 --device 0 --batch 64 --data data.yaml --img 640 --cfg models/detect/yolov9-s.yaml"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, shapes_dataset: Path) -> Path:
    """A folder with data.yaml and data/images/horses.jpg, as somebody prepares it before typing the commands."""
    folder = tmp_path_factory.mktemp("workplace")
    content = read_yaml(shapes_dataset)
    write_yaml(folder / "data.yaml", {**content, "path": str(shapes_dataset.parent), "train": content["val"]})
    (folder / "data" / "images").mkdir(parents=True)
    picture = next((shapes_dataset.parent / "images" / "test").iterdir())
    shutil.copy(picture, folder / "data" / "images" / "horses.jpg")
    return folder


def run(folder: Path, script: str, line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / script), *shlex.split(line)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, f"{script} {line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def trained(workplace: Path) -> Path:
    """From scratch, high preset, mosaic closed for the last 15 epochs; the result becomes yolov9-s.pt."""
    line = f"{TRAIN} --weights '' --name yolov9-s --hyp hyp.scratch-high.yaml --min-items 0 --epochs 20"
    done = run(workplace, "train_dual.py", f"{line} --close-mosaic 15 --seed 0 --freeze 0 {SMALL} --epochs 2")
    assert "off in all epochs" in done.stdout  # 15 closed epochs cover a run of two
    folder = workplace / "runs" / "train" / "yolov9-s"
    assert read_results(folder / "results.csv")["epoch"] == [0, 1]
    shutil.copy(folder / "weights" / "best.pt", workplace / "yolov9-s.pt")
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "--weights ./yolov9-s.pt --hyp hyp.scratch-high.yaml --epochs 1 --close-mosaic 0 --name probe",
        "--weights yolov9-s.pt --hyp hyp.scratch-high.yaml --batch 16 --accumulate 4 --amp --name accumulated",
        "--weights '' --hyp hyp.scratch-high.yaml --batch 32 --cache --epochs 20 --mosaic 0 --copy_paste 0 "
        "--close-mosaic 10 --clip-grad 35 --label-smoothing 0.1 --name cached",
        "--weights '' --hyp hyp.scratch-high.yaml --multi-scale --img 736 --optimizer AdamW --cos-lr --name scaled",
    ],
)
def test_training_lines(workplace: Path, trained: Path, line: str) -> None:
    run(workplace, "train_dual.py", f"{TRAIN} {line} {SMALL} --epochs 2")
    folder = workplace / "runs" / "train" / line.split()[-1]
    assert (folder / "weights" / "best.pt").stat().st_size > 1e7
    assert read_results(folder / "results.csv")["epoch"] == [0, 1]


def test_detection_line(workplace: Path, trained: Path) -> None:
    line = "--source './data/images/horses.jpg' --img 640 --device 0 --weights './yolov9-s.pt'"
    run(workplace, "detect_dual.py", f"{line} --name yolov9_s_640_detect --device cpu --img 64")
    folder = workplace / "runs" / "detect" / "yolov9_s_640_detect"
    assert (folder / "horses.jpg").stat().st_size > 0
    assert (folder / "results.txt").is_file()


def test_validation_line(workplace: Path, trained: Path) -> None:
    line = "--data data.yaml --img 640 --batch 32 --conf 0.001 --iou 0.7 --device 0 --weights './yolov9-s.pt'"
    more = "--save-json --name yolov9_s_640_val"
    done = run(workplace, "val_dual.py", f"{line} {more} --device cpu --img 64 --workers 0")
    assert "mAP50-95" in done.stdout
    assert list((workplace / "runs" / "val" / "yolov9_s_640_val").glob("*predictions.json"))


def test_export_line(workplace: Path, trained: Path) -> None:
    pytest.importorskip("onnxruntime")
    best = trained / "weights" / "best.pt"
    run(workplace, "export.py", f"--weights {best} --include onnx torchscript --opset 17 --simplify --img 64 64")
    for suffix in (".onnx", ".torchscript"):
        exported = best.with_suffix(suffix)
        assert exported.stat().st_size > 1e7
        run(workplace, "val_dual.py", f"--data data.yaml --img 64 --weights {exported} --device cpu --workers 0")


def test_continuing_line(workplace: Path, trained: Path) -> None:
    """A finished run has nothing left to do: one line says so, and what to type instead."""
    command = [sys.executable, str(REPOSITORY / "train_dual.py"), "--resume", str(trained / "weights" / "last.pt")]
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--epochs N" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
