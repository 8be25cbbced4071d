"""Figures of a run: each is written, shows what it should, and never stops anything."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import cv2
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from utils.evaluate import draw, fonts, plots
from utils.evaluate.metrics import ap_per_class

NAMES = {0: "cat", 1: "кошка", 2: "行人"}
REPO_ROOT = Path(__file__).resolve().parents[2]


def picture(path):
    image = cv2.imread(str(path))
    assert image is not None, f"{path} is no picture"
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 3, f"{path} is blank"
    return image


@pytest.fixture(autouse=True)
def no_failure(monkeypatch):
    """Count failures of plots afresh, and expect none unless a test says so."""
    counts = type(draw._failures.counts)()
    monkeypatch.setattr(plots, "DPI", 50)
    monkeypatch.setattr(draw._failures, "counts", counts)
    yield counts
    assert not counts, f"plots that failed: {dict(counts)}"


@pytest.mark.parametrize("classes", [3, 25])
def test_curves(tmp_path, classes):
    rng = np.random.default_rng(0)
    correct, conf = rng.random((200, 10)) < 0.5, rng.random(200)
    kinds = rng.integers(0, classes, 200), rng.integers(0, classes, 150)
    ap_per_class(correct, conf, *kinds, plot=True, save_dir=tmp_path, names=NAMES, prefix="x_")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"x_{name}_curve.png" for name in ("F1", "PR", "P", "R")
    ]
    for file in tmp_path.iterdir():
        picture(file)


def test_confusion_matrix_is_darkest_where_the_counts_are(tmp_path):
    counts = np.diag([5.0, 5, 5, 0])
    plots.plot_confusion_matrix(counts, NAMES, tmp_path / "a.png", note="confidence > 0.25")
    plots.plot_confusion_matrix(counts * 0, NAMES, tmp_path / "empty.png", normalize=False)
    plots.plot_confusion_matrix(np.eye(120), {}, tmp_path / "large.png")
    blue = picture(tmp_path / "a.png").astype(int)
    dark = (blue[..., 0] - blue[..., 2] > 60) & (blue[..., 2] < 40)
    rows, columns = np.nonzero(dark[:, : dark.shape[1] * 7 // 10])
    assert np.corrcoef(rows, columns)[0, 1] > 0.8, "the dark cells lie on the diagonal"


@pytest.mark.parametrize("count", [0, 1, 1500])
def test_label_statistics_leave_the_labels_alone(tmp_path, count):
    rng = np.random.default_rng(1)
    labels = np.concatenate((rng.integers(0, 3, (count, 1)), rng.random((count, 4))), 1).astype(np.float32)
    before = labels.copy()
    plots.plot_labels(labels, NAMES, tmp_path)
    assert np.array_equal(labels, before)
    picture(tmp_path / "labels.jpg")
    picture(tmp_path / "labels_correlogram.jpg")


def test_label_statistics_take_arrays_per_image(tmp_path):
    plots.plot_labels(
        [np.array([[0, 0.5, 0.5, 0.2, 0.2]]), np.zeros((0, 5)), np.array([[1, 0.5, 0.5, 1, 1]])], NAMES, tmp_path
    )
    picture(tmp_path / "labels.jpg")


def test_names_of_any_script_cause_no_warning(tmp_path, monkeypatch):
    """Whether or not this machine has a font for them; the figure is written in either case."""
    monkeypatch.setattr(plots, "font_for", lambda text: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.plot_confusion_matrix(np.eye(5), {**NAMES, 3: "שלום"}, tmp_path / "a.png", note="犬")
    picture(tmp_path / "a.png")


def test_names_get_a_font_of_this_machine_that_has_them(tmp_path, monkeypatch):
    other = next(path for path in fonts.font_files() if path.name == "DejaVuSans.ttf").with_name("DejaVuSerif.ttf")
    monkeypatch.setattr(plots, "font_for", lambda text: other if "行人" in text else None)
    used = {}

    def note(figure, *_, **__):
        for part in figure.findobj(Text):
            used[part.get_text()] = part.get_fontproperties().get_file(), part.get_fontsize()

    monkeypatch.setattr(plots, "atomic_write", lambda path: nullcontext(path))
    monkeypatch.setattr(Figure, "savefig", note)
    plots.plot_confusion_matrix(np.eye(5), NAMES, tmp_path / "a.png", note="行人")
    plots.plot_confusion_matrix(np.eye(5), NAMES, tmp_path / "a.png", note="plain")
    assert used["Confusion matrix (行人)"] == (str(other), used["Confusion matrix (plain)"][1]), "only the font differs"
    assert used["Confusion matrix (plain)"][0] is None


COLUMNS = (
    "epoch, train/box_loss, train/cls_loss, train/dfl_loss, metrics/precision, metrics/recall, metrics/mAP_0.5, "
    "metrics/mAP_0.5:0.95, val/box_loss, val/cls_loss, val/dfl_loss, x/lr0, x/lr1, x/lr2"
)


@pytest.mark.parametrize("epochs", [1, 2, 30])
def test_results(tmp_path, epochs):
    rows = [
        ", ".join(f"{epoch if column == 0 else column / (epoch + 1):20.5g}" for column in range(14))
        for epoch in range(epochs)
    ]
    (tmp_path / "results.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    plots.plot_results(tmp_path / "results.csv")
    picture(tmp_path / "results.png")


def test_results_without_an_epoch_only_warn(tmp_path, no_failure):
    (tmp_path / "results.csv").write_text(COLUMNS + "\n")
    plots.plot_results(tmp_path / "results.csv")
    plots.plot_results(tmp_path / "absent.csv")
    assert dict(no_failure) == {"plot_results": 2}
    no_failure.clear()


def test_smoothing_keeps_a_constant():
    assert plots._gaussian_smooth(np.full(7, 3.0)) == pytest.approx(np.full(7, 3.0))


def test_study(tmp_path):
    plots.plot_study([256, 384], {"a": np.random.default_rng(0).random((2, 10))}, tmp_path / "study.png")
    picture(tmp_path / "study.png")


@pytest.mark.slow
def test_a_display_that_does_not_exist_is_not_asked_for(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from utils.evaluate import plots\n"
        "assert 'matplotlib' not in sys.modules, 'loaded too early'\n"
        f"plots.plot_labels(np.zeros((0, 5)), (), {str(tmp_path)!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {**os.environ, "MPLBACKEND": "TkAgg", "DISPLAY": ":99"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO_ROOT, env=environment, timeout=120)
    assert (tmp_path / "labels.jpg").exists()
