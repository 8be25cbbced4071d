"""What the measurements of detection are made on: clips of the wanted length and size, canvases with true labels."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench.clips import make_clip, write_plot
from bench.detect import measure_single
from bench.slicing import compose, measure
from tests.deploy.fakes import ColourBackend, picture, read_video, write_picture, write_video
from utils.deploy.predictor import Predictor


def test_a_clip_is_scaled_and_repeated(tmp_path: Path) -> None:
    source = write_video(tmp_path / "in.mp4", 5)
    frames, rate = read_video(make_clip(tmp_path / "out.mp4", 12, 192, 128, source))
    assert len(frames) == 12 and frames[0].shape == (128, 192, 3) and rate == 25
    assert np.abs(frames[5].astype(int) - frames[0]).mean() < 3  # from its beginning again
    made, _ = read_video(make_clip(tmp_path / "made.mp4", 4, 64, 48))
    assert len(made) == 4 and made[0].shape == (48, 64, 3) and not np.array_equal(made[0], made[3])


def test_canvases_keep_boxes_and_pixels_together(tmp_path: Path) -> None:
    for number, size in enumerate(((96, 64), (80, 60))):
        write_picture(tmp_path / "images" / f"{number}.png", picture(*size))
        x, y, w, h = 40 / size[0], 25 / size[1], 40 / size[0], 30 / size[1]
        (tmp_path / "labels").mkdir(exist_ok=True)
        (tmp_path / "labels" / f"{number}.txt").write_text(f"0 {x} {y} {w} {h}\n")
    images = sorted(map(str, (tmp_path / "images").iterdir()))
    canvas = compose(images, 300, seed=0)
    assert canvas.image.shape == (300, 300, 3) and len(canvas.labels) == 3 * 4
    for _, x1, y1, x2, y2 in canvas.labels.round().astype(int).tolist():
        assert (canvas.image[y1:y2, x1:x2] == (0, 0, 255)).all()
        assert not (canvas.image[y1 - 1, x1:x2] == (0, 0, 255)).all(1).any()
    one = compose(images[:1], 100, seed=0)
    figures = measure(Predictor(ColourBackend(), imgsz=96), [one])
    assert (figures.recall, figures.precision) == (1, 1) and figures.ap50 > 0.99


def test_the_plot_is_a_line_from_zero(tmp_path: Path) -> None:
    write_plot(tmp_path / "a.svg", [(1, 50.0), (2, 100.0)], "a < b", "frame", "MiB")
    tree = ElementTree.parse(tmp_path / "a.svg").getroot()
    line = next(node for node in tree if node.tag.endswith("polyline")).attrib["points"].split()
    heights = [250 - float(point.split(",")[1]) for point in line]
    assert len(line) == 2 and abs(heights[1] - 2 * heights[0]) < 0.2


def test_one_picture_is_timed_with_bytecode_beside_the_start_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        assert "PYTHONDONTWRITEBYTECODE" not in env and Path(env["PYTHONPYCACHEPREFIX"]).is_relative_to(tmp_path)
        assert env["PATH"] == os.environ["PATH"]
        return subprocess.CompletedProcess(command, int("fails" in str(command)), "found it", "no such thing")

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(subprocess, "run", run)
    options = argparse.Namespace(single=Path(), imgsz=640, device="cpu", runs=2)
    figures = measure_single(options, Path("best.pt"), tmp_path)
    assert [command[1] for command in calls] == ["detect_dual.py", "-c"] * 3
    assert all(command[0] == sys.executable for command in calls) and (tmp_path / "picture.jpg").exists()
    assert "device='cpu'" in calls[1][2]
    whole, alone = figures.split("; torch alone: ")
    assert whole.startswith("one picture with imports, bytecode kept: ") and "(first 0.00 s)" in whole
    assert alone == "0.00 0.00 s"
    with pytest.raises(RuntimeError, match="detect_dual.py .*failed:\nfound itno such thing"):
        measure_single(options, Path("fails.pt"), tmp_path)
