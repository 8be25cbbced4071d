"""Figures of a whole run: drawn from complete, partly empty and foreign tables, never ending anything."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.evaluate import draw, plots, run_plots
from utils.evaluate.run_plots import plot_lr, plot_monitor, plot_run, read_table

REPO_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch):
    counts = type(draw._failures.counts)()
    monkeypatch.setattr(run_plots, "DPI", 40)
    monkeypatch.setattr(draw._failures, "counts", counts)
    return counts


def write_monitor(path: Path, columns: tuple[str, ...], rows: int = 5) -> None:
    lines = [",".join(("step", "epoch", *columns))]
    lines += [",".join([str(10 * row), "0", *[f"{1 + row / 10:.3f}" for _ in columns]]) for row in range(1, rows + 1)]
    path.write_text("\n".join(lines) + "\n")


def is_picture(path: Path) -> bool:
    image = cv2.imread(str(path))
    return image is not None and len(np.unique(image.reshape(-1, 3), axis=0)) > 3


@pytest.mark.slow
def test_both_figures_of_a_run(tmp_path: Path, failures) -> None:
    write_monitor(
        tmp_path / "monitor.csv", tuple(dict.fromkeys(name for panel in run_plots.PANELS for name in panel[1]))
    )
    plot_run(tmp_path)
    assert is_picture(tmp_path / "monitor.png") and is_picture(tmp_path / "lr.png")
    assert not failures


@pytest.mark.slow
def test_figures_of_a_run_without_a_card(tmp_path: Path, failures) -> None:
    write_monitor(tmp_path / "monitor.csv", (*run_plots.LOSS_COLUMNS, "train/grad_norm"))
    text = (tmp_path / "monitor.csv").read_text().replace("step,", "step,gpu/utilisation,", 1).splitlines()
    body = [row.replace(",", ",,", 1) for row in text[1:]]
    (tmp_path / "monitor.csv").write_text("\n".join([text[0], *body]))
    assert np.isnan(read_table(tmp_path / "monitor.csv")["gpu/utilisation"]).all()
    plot_monitor(tmp_path / "monitor.csv", tmp_path / "other.png")
    assert is_picture(tmp_path / "other.png")
    assert not failures


def test_learning_rate_from_results(tmp_path: Path, failures) -> None:
    names = ("epoch", "train/box_loss", *run_plots.RATE_COLUMNS)
    rows = [",".join(f"{name:>20s}" for name in names)]
    rows += [",".join(f"{value:>20.5g}" for value in (epoch, 1.0, 0.1, 0.01, 0.01)) for epoch in range(3)]
    (tmp_path / "results.csv").write_text("\n".join(rows) + "\n")
    plot_lr(tmp_path / "results.csv")
    assert is_picture(tmp_path / "lr.png")
    assert read_table(tmp_path / "results.csv")["epoch"].tolist() == [0, 1, 2]
    assert not failures


def test_the_name_of_a_run_in_any_script_causes_no_warning(tmp_path: Path, failures, monkeypatch) -> None:
    folder = tmp_path / "訓練 שלום"
    folder.mkdir()
    write_monitor(folder / "monitor.csv", run_plots.LOSS_COLUMNS)
    monkeypatch.setattr(plots, "font_for", lambda text: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_monitor(folder / "monitor.csv")
    assert is_picture(folder / "monitor.png") and not failures


def test_empty_and_missing_tables_are_warnings(tmp_path: Path, failures) -> None:
    write_monitor(tmp_path / "monitor.csv", run_plots.LOSS_COLUMNS, rows=0)
    plot_run(tmp_path)
    plot_run(tmp_path / "nowhere")
    assert failures == {"plot_monitor": 2, "plot_lr": 2}
    assert not list(tmp_path.glob("*.png"))
    with pytest.raises(ValueError, match="no row yet"):
        read_table(tmp_path / "monitor.csv")


@pytest.mark.slow
def test_matplotlib_is_loaded_by_drawing_only() -> None:
    code = "import sys, utils.evaluate.run_plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_figures_of_a_run_of_any_name(tmp_path: Path, failures) -> None:
    for number, name in enumerate((os.fsdecode(b"caf\xe9"), "$x^$", "中")):
        (tmp_path / name).mkdir()
        write_monitor(tmp_path / name / "monitor.csv", run_plots.LOSS_COLUMNS)
        plot_monitor(tmp_path / name / "monitor.csv", tmp_path / f"{number}.png")
        assert is_picture(tmp_path / f"{number}.png")
    assert not failures
