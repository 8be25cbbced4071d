"""Tests of the rendered picture set and of the shell functions that prepare an environment."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from scripts import make_shapes as shapes
from utils.train.monitor import ResultsTable

REPO_ROOT = Path(__file__).resolve().parents[1]
SHELL_FILES = ["scripts/common.sh", "scripts/demo.sh", "scripts/test.sh", ".ci/run"]
LIBGL_MESSAGE = "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


# --- picture set ---


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_same_seed_same_files(tmp_path: Path) -> None:
    counts = {"train": 3, "val": 2}
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        shapes.make_shapes(tmp_path / name, counts, 64, seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


def test_larger_set_begins_with_the_smaller_one(tmp_path: Path) -> None:
    shapes.make_shapes(tmp_path / "small", {"train": 2, "val": 1}, 64, 0)
    shapes.make_shapes(tmp_path / "large", {"train": 4, "val": 1}, 64, 0)
    small, large = contents(tmp_path / "small"), contents(tmp_path / "large")
    assert set(small) < set(large)
    assert all(large[name] == data for name, data in small.items())


def test_dataset_files_fit_the_yaml(shapes_dataset: Path) -> None:
    spec = yaml.safe_load(shapes_dataset.read_text(encoding="utf-8"))
    assert spec["names"] == {0: "rectangle", 1: "ellipse", 2: "triangle"}
    root = (shapes_dataset.parent / spec["path"]).resolve()
    for split, count in (("train", 24), ("val", 8), ("test", 4)):
        pictures = sorted((root / spec[split]).glob("*.jpg"))
        assert len(pictures) == count
        assert all(cv2.imread(str(file)).shape == (128, 128, 3) for file in pictures)


def test_labels_are_valid(shapes_dataset: Path) -> None:
    rows = []
    for file in (shapes_dataset.parent / "labels" / "train").glob("*.txt"):
        rows += [[float(value) for value in line.split()] for line in file.read_text(encoding="utf-8").splitlines()]
    labels = np.array(rows)
    assert labels.shape[0] > 24 and labels.shape[1] == 5
    assert set(labels[:, 0]) == {0, 1, 2}
    low, high = labels[:, 1:3] - labels[:, 3:] / 2, labels[:, 1:3] + labels[:, 3:] / 2
    assert (low > -1e-5).all() and (high < 1 + 1e-5).all()
    assert (labels[:, 3:] > 0.02).all()


@pytest.mark.parametrize("seed", range(12))
def test_boxes_fit_the_painted_pixels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    canvas = np.full((256, 256, 3), 128, np.float32)
    shape = shapes._place(rng, 256, [], 4)
    assert shape is not None
    shapes._paint(rng, canvas, shape)
    rows, columns = np.nonzero(np.abs(canvas - 128).max(2) > 20)
    painted = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert np.abs(shape.box_xyxy - painted).max() <= 4  # an outline drawn around the shape is 2 pixels thick


def test_some_pictures_are_empty_and_boxes_hardly_overlap() -> None:
    counts = []
    for index in range(60):
        _, labels = shapes.render(48, np.random.default_rng(index), 3)
        counts.append(len(labels))
        corners = np.hstack([labels[:, 1:3] - labels[:, 3:] / 2, labels[:, 1:3] + labels[:, 3:] / 2])
        for first in range(len(corners)):
            for second in range(first):
                assert shapes._cover(corners[first], corners[second]) <= shapes.MAX_COVER + 1e-6
    assert 0 < counts.count(0) < 15
    assert max(counts) >= 4


@pytest.mark.parametrize(
    ("counts", "size", "num_classes", "message"),
    [
        ({"train": 1}, 64, 3, "both train and val"),
        ({"train": 1, "val": 1, "dev": 1}, 64, 3, "unknown split 'dev'"),
        ({"train": 0, "val": 1}, 64, 3, "train = 0"),
        ({"train": 1, "val": 1}, 16, 3, "size 16"),
        ({"train": 1, "val": 1}, 64, 9, "9 classes"),
    ],
)
def test_wrong_requests_are_named(
    tmp_path: Path, counts: dict[str, int], size: int, num_classes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shapes.make_shapes(tmp_path, counts, size, 0, num_classes=num_classes)
    assert not any(tmp_path.iterdir())


def test_existing_pictures_are_not_overwritten(tmp_path: Path) -> None:
    shapes.make_shapes(tmp_path, {"train": 1, "val": 1}, 64, 0)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="already holds files"):
        shapes.make_shapes(tmp_path, {"train": 2, "val": 1}, 64, 1)
    assert contents(tmp_path) == before


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--folder", str(tmp_path / "set 一"), "--train", "1", "--val", "1", "--test", "0", "--size", "64"]
    assert shapes.main(words) == 0
    assert "2 pictures rendered" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        shapes.main(words)
    assert end.value.code == 2
    assert "already holds files" in capsys.readouterr().err


# --- shell scripts ---


def write_program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def run_bash(body: str, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    """Source common.sh and run ``body`` with a clean environment plus the given variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("YOLO_")}
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail\nsource '{REPO_ROOT}/scripts/common.sh'\n{body}"],
        env=inherited | {name: str(value) for name, value in environment.items()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@needs_bash
@pytest.mark.parametrize("name", SHELL_FILES)
def test_shell_syntax(name: str) -> None:
    run = subprocess.run(["bash", "-n", str(REPO_ROOT / name)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """A stand-in for an environment whose OpenCV lacks libGL until the headless build is installed; logs pip calls."""
    return write_program(
        tmp_path / "venv" / "bin" / "python",
        f"""here=$(dirname "$0")
case "$*" in
    "-c import cv2") [ -f "$here/headless" ] || {{ echo "{LIBGL_MESSAGE}" >&2; exit 1; }} ;;
    "-m pip "*)
        echo "$*" >>"$here/pip.txt"
        case "$*" in *" install "*headless*) touch "$here/headless" ;; esac ;;
    "-c import hashlib"*) cat | wc -c ;;
    --version) echo "Python 3.11.0" ;;
esac
""",
    )


@needs_bash
def test_missing_libgl_brings_the_headless_opencv(fake_python: Path) -> None:
    body = 'PYTHON=$YOLO_VENV/bin/python; ensure_cv2; "$PYTHON" -c "import cv2"'
    run = run_bash(body, YOLO_VENV=fake_python.parents[1])
    assert run.returncode == 0, run.stderr
    assert "opencv-python-headless" in run.stdout and "libGL.so.1" in run.stdout
    assert len(run.stdout.splitlines()) == 1
    calls = (fake_python.parent / "pip.txt").read_text(encoding="utf-8").splitlines()
    assert "uninstall" in calls[0] and "opencv-python" in calls[0]
    assert "install" in calls[1] and "--force-reinstall" in calls[1]


@needs_bash
def test_working_opencv_is_left_alone(fake_python: Path) -> None:
    (fake_python.parent / "headless").touch()
    run = run_bash("PYTHON=$YOLO_VENV/bin/python; ensure_cv2", YOLO_VENV=fake_python.parents[1])
    assert run.returncode == 0 and run.stdout == ""
    assert not (fake_python.parent / "pip.txt").exists()


@needs_bash
def test_other_opencv_faults_are_shown_and_stop(tmp_path: Path) -> None:
    program = write_program(tmp_path / "python", 'echo "AttributeError: numpy has no float" >&2; exit 1\n')
    run = run_bash(f"PYTHON='{program}'; ensure_cv2", YOLO_VENV=tmp_path)
    assert run.returncode == 1
    assert "numpy has no float" in run.stderr and "--force-reinstall opencv-python" in run.stderr


@needs_bash
def test_second_start_installs_nothing(fake_python: Path, tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("opencv-python>=4.8\nnumpy>=1.26\n", encoding="utf-8")
    body, log = f"use_environment '{requirements}'", fake_python.parent / "pip.txt"
    venv = fake_python.parents[1]
    assert run_bash(body, YOLO_VENV=venv).returncode == 0
    assert any(" install " in line and "-r " in line for line in log.read_text(encoding="utf-8").splitlines())
    log.unlink()
    assert run_bash(body, YOLO_VENV=venv).returncode == 0
    assert " install " not in log.read_text(encoding="utf-8")
    requirements.write_text("opencv-python>=4.8\nnumpy>=1.26\npandas>=2\n", encoding="utf-8")
    assert run_bash(body, YOLO_VENV=venv).returncode == 0
    assert " install " in log.read_text(encoding="utf-8")
    # the build of OpenCV that works here is asked for, not the one that was just replaced
    wanted = (venv / "requirements.txt").read_text(encoding="utf-8")
    assert wanted.startswith("opencv-python-headless>=4.8\n")


@needs_bash
def test_failed_installation_shows_pip_and_leaves_no_stamp(tmp_path: Path) -> None:
    write_program(
        tmp_path / "venv/bin/python",
        'case "$*" in *" install "*) echo "ERROR: no space left"; exit 3 ;; *hashlib*) cat | wc -c ;; esac\n',
    )
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("numpy\n", encoding="utf-8")
    run = run_bash(f"use_environment '{requirements}'", YOLO_VENV=tmp_path / "venv")
    assert run.returncode == 1
    assert "no space left" in run.stderr and "installation failed" in run.stderr
    assert not list((tmp_path / "venv").glob(".installed-*"))


@needs_bash
def test_full_disk_is_told_with_what_helps(tmp_path: Path) -> None:
    write_program(
        tmp_path / "venv/bin/python",
        'case "$*" in *" install "*) echo "ERROR: [Errno 28] No space left on device"; exit 1 ;; '
        "*hashlib*) cat | wc -c ;; esac\n",
    )
    write_program(tmp_path / "bin/df", 'echo "Filesystem 1024-blocks Used Available"; echo "/dev/vda 9 9 3145728"\n')
    (tmp_path / "requirements.txt").write_text("numpy\n", encoding="utf-8")
    body = f"PATH='{tmp_path}/bin':$PATH; use_environment '{tmp_path}/requirements.txt'"
    run = run_bash(body, YOLO_VENV=tmp_path / "venv")
    assert run.returncode == 1
    assert "only 3 GB are free" in run.stdout and "YOLO_VENV" in run.stdout
    assert "the disk is full" in run.stderr and "TMPDIR" in run.stderr


@needs_bash
@pytest.mark.parametrize("answer", ['echo "Filesystem"; echo "/dev/vda 9 9 99999999"', "exit 1", ":"])
def test_enough_space_or_none_known_is_no_matter(tmp_path: Path, answer: str) -> None:
    write_program(tmp_path / "bin/df", answer + "\n")
    run = run_bash(f"PATH='{tmp_path}/bin':$PATH; check_space '{tmp_path}'; echo on")
    assert (run.returncode, run.stdout) == (0, "on\n")


@needs_bash
def test_old_python_is_passed_over(tmp_path: Path) -> None:
    write_program(tmp_path / "python3", "exit 1\n")  # as an interpreter older than 3.10 answers the question
    recent = write_program(tmp_path / "python3.12", "exit 0\n")
    run = run_bash(f"PATH='{tmp_path}'; find_python")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(recent)


@needs_bash
def test_missing_venv_module_is_named(tmp_path: Path) -> None:
    write_program(tmp_path / "bin/python3", 'case "$*" in *ensurepip*) exit 1 ;; esac\n')
    run = run_bash(f"PATH='{tmp_path}/bin':$PATH; make_venv", YOLO_VENV=tmp_path / "venv")
    assert run.returncode == 1
    assert run.stderr.strip().endswith("type: apt-get install python3-venv")
    assert len(run.stderr.splitlines()) == 1


@needs_bash
def test_own_interpreter_is_checked_and_not_changed(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("numpy>=1.26  # arrays\nno-such-package>=1\n", encoding="utf-8")
    run = run_bash(f"use_environment '{requirements}'", YOLO_PYTHON=sys.executable, YOLO_VENV=tmp_path / "venv")
    assert run.returncode == 1
    assert "lacks: no-such-package" in run.stderr
    assert not (tmp_path / "venv").exists()
    requirements.write_text("numpy>=1.26\nopencv-python\n", encoding="utf-8")
    run = run_bash(f'use_environment "{requirements}"; echo "$PYTHON"', YOLO_PYTHON=sys.executable)
    assert run.stdout.strip() == sys.executable, run.stderr


@needs_bash
def test_optional_packages_may_fail(fake_python: Path) -> None:
    program = fake_python
    program.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    run = run_bash(
        "PYTHON=$YOLO_VENV/bin/python; add_optional onnx || echo 'going on'", YOLO_VENV=fake_python.parents[1]
    )
    assert run.returncode == 0
    assert "going on" in run.stdout


@needs_bash
def test_free_folder_counts_up(tmp_path: Path) -> None:
    base = tmp_path / "demo"
    assert run_bash(f"free_folder '{base}'").stdout.strip() == str(base)
    base.mkdir()
    (tmp_path / "demo2").mkdir()
    assert run_bash(f"free_folder '{base}'").stdout.strip() == f"{base}3"


@needs_bash
@pytest.mark.skipif(shutil.which("awk") is None, reason="needs awk")
def test_best_map_reads_the_best_row(tmp_path: Path) -> None:
    table = ResultsTable(tmp_path / "results.csv")
    for half, full in ((0.2, 0.1), (0.9, 0.7), (0.95, 0.65)):
        table.append({"metrics/mAP_0.5": half, "metrics/mAP_0.5:0.95": full})
    run = run_bash(f"best_map '{tmp_path}/results.csv'")
    assert run.stdout == "mAP@.5 0.900, mAP@.5:.95 0.700", run.stderr
