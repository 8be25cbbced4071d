"""Figures of a run as a whole: monitor.png (losses, gradients, speed, card) and lr.png (course of the learning rate).

They are drawn from monitor.csv and results.csv, so they can be made of any folder, also of a run that goes on.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from utils.evaluate.draw import harmless
from utils.evaluate.plots import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
LOSS_COLUMNS = ("train/box_loss", "train/cls_loss", "train/dfl_loss")
RATE_COLUMNS = ("x/lr0", "x/lr1", "x/lr2")
LABELS = {"x/lr0": "biases", "x/lr1": "weights", "x/lr2": "norms", "gpu_gb": "reserved_gb"}  # else the column's name
# title, columns, unit of the vertical axis, whether it is logarithmic
PANELS: tuple[tuple[str, tuple[str, ...], str, bool], ...] = (
    ("losses", LOSS_COLUMNS, "", False),
    ("gradient norm before clipping", ("train/grad_norm", "train/grad_norm_max"), "", True),
    ("box / class loss", ("train/box_cls_ratio",), "", False),
    ("learning rate", RATE_COLUMNS, "", False),
    ("speed", ("train/img_per_s",), "images/s", False),
    ("waiting for pictures", ("train/data_wait",), "share of time", False),
    ("utilisation", ("gpu/utilisation", "gpu/utilisation_min", "gpu/utilisation_max"), "percent", False),
    ("graphics memory", ("gpu/allocated_gb", "gpu_gb", "gpu/device_gb"), "GB", False),
)


def read_table(path: str | Path) -> dict[str, np.ndarray]:
    """Read monitor.csv or results.csv as columns (n,); empty cells and short rows give NaN.

    Raises:
        ValueError: the table has no row yet.
    """
    with open(path, encoding="utf-8", newline="") as handle:
        rows = [[cell.strip() for cell in row] for row in csv.reader(handle) if row]
    if len(rows) < 2:
        raise ValueError(f"{path} has no row yet")
    header = rows[0]
    values = [[float(cell or "nan") for cell in (*row, *[""] * (len(header) - len(row)))] for row in rows[1:]]
    return dict(zip(header, np.array(values).T, strict=True))


@harmless
def plot_monitor(file: str | Path = "monitor.csv", target: str | Path = "") -> None:
    """Write monitor.png beside ``file`` (or as ``target``): what the run did, over its steps."""
    path = Path(file)
    table = read_table(path)
    figure = _figure((16, 8))
    panels = figure.subplots(2, 4)
    for panel, (title, columns, unit, is_log) in zip(panels.flat, PANELS, strict=True):
        _draw(panel, table, "step", columns)
        panel.set(title=title, xlabel="step", ylabel=unit)
        if is_log and panel.lines:
            panel.set_yscale("log")
    figure.suptitle(f"{path.parent.name}: {len(table['step'])} rows", parse_math=False)  # a name may hold any sign
    _save(figure, Path(target) if target else path.with_name("monitor.png"))


@harmless
def plot_lr(file: str | Path = "monitor.csv", target: str | Path = "") -> None:
    """Write lr.png beside ``file`` (or as ``target``); over steps from monitor.csv, over epochs from results.csv."""
    path = Path(file)
    table = read_table(path)
    axis = "step" if "step" in table else "epoch"
    figure = _figure((8, 5))
    panel = figure.subplots()
    _draw(panel, table, axis, RATE_COLUMNS)
    panel.set(title="learning rate", xlabel=axis)
    panel.grid(alpha=0.3)
    _save(figure, Path(target) if target else path.with_name("lr.png"))


def plot_run(folder: str | Path) -> None:
    """Write both figures of a run's folder: monitor.png and lr.png."""
    plot_monitor(Path(folder) / "monitor.csv")
    plot_lr(Path(folder) / "monitor.csv")


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="tight")


def _draw(panel: Axes, table: dict[str, np.ndarray], axis: str, columns: Sequence[str]) -> None:
    """Draw those of ``columns`` that hold something; say so in the panel when none does."""
    for name in columns:
        if name in table and np.isfinite(table[name]).any():
            panel.plot(table[axis], table[name], linewidth=1.2, label=LABELS.get(name, name.split("/")[-1]))
    if len(panel.lines) > 1:
        panel.legend(fontsize=8)
    if not panel.lines:
        panel.text(0.5, 0.5, "not measured", ha="center", va="center", transform=panel.transAxes)


def _save(figure: Figure, path: Path) -> None:
    save_figure(figure, path, DPI)
