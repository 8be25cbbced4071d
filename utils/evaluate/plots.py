"""Figures of a run: curves, confusion matrix, label statistics, results, drawn with matplotlib.

Figures are drawn straight on matplotlib's Agg canvas, without pyplot: no window system, no global state, no threads.
Nothing in here ends a run (see ``draw.harmless``). Drawing on pictures is offered from ``draw`` under this name too.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from utils.boxes import xywh2xyxy
from utils.evaluate.curves import confidence_axis, smooth
from utils.evaluate.draw import (
    Annotator,
    Colors,
    Names,
    class_name,
    colors,
    draw_boxes,
    harmless,
    output_to_target,
    plot_images,
    write_image,
)
from utils.evaluate.fonts import font_for
from utils.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

    from utils.evaluate.metrics import ClassCurves, OperatingPoint

__all__ = [
    "Annotator",
    "Colors",
    "class_name",
    "colors",
    "draw_boxes",
    "output_to_target",
    "plot_confusion_matrix",
    "plot_curves",
    "plot_images",
    "plot_labels",
    "plot_mc_curve",
    "plot_pr_curve",
    "plot_results",
    "plot_study",
    "save_figure",
    "write_image",
]

MANY_CLASSES = 21  # from here on one line per class is drawn thin and grey, without a legend entry
ANNOTATED_CLASSES = 30  # below, the cells of a confusion matrix carry their number
RESULT_COLUMNS = (1, 2, 3, 4, 5, 8, 9, 10, 6, 7)  # of results.csv, in the order of the panels
VALIDATION_COLUMNS = (4, 5, 6, 7, 8, 9, 10)
OVERLAID_BOXES = 1000
DPI = 200
MISSING_GLYPHS = r"Glyph \d+ .*missing from|Matplotlib currently does not support"  # matplotlib's warnings


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, np.ndarray]:
    """Return a figure and its panels (rows, columns)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="tight")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Figure, path: str | Path) -> None:
    save_figure(figure, path, DPI)


def save_figure(figure: Figure, path: str | Path, dpi: int) -> None:
    """Write ``figure``, names of any script in a font that has them; where there is none they are rows of boxes."""
    path = Path(path)
    _choose_fonts(figure)
    with atomic_write(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", MISSING_GLYPHS)
        figure.savefig(temporary, dpi=dpi, format=path.suffix.lstrip(".") or "png")


def _choose_fonts(figure: Figure) -> None:
    """Give texts beyond ASCII the first font of this machine that has all of their characters."""
    from matplotlib.text import Text

    for part in figure.findobj(Text):
        shown = part.get_text().encode("utf-8", "replace").decode("utf-8")  # "?" for bytes of names that are no text
        if shown != part.get_text():
            part.set_text(shown)
        text = "".join(letter for letter in part.get_text() if letter.isprintable())
        font = None if text.isascii() else font_for(text)
        if font is not None:
            part.set_fontproperties(_with_file(part.get_fontproperties(), font))


def _with_file(properties: FontProperties, font: Path) -> FontProperties:
    changed = properties.copy()  # keeps the size
    changed.set_file(font)
    return changed


def _rgb(number: int) -> tuple[float, float, float]:
    """Return the colour of a class as matplotlib wants it."""
    red, green, blue = colors(number)
    return red / 255, green / 255, blue / 255


def plot_curves(curves: ClassCurves, point: OperatingPoint, folder: Path, names: Names = (), prefix: str = "") -> None:
    """Write PR_curve.png, F1_curve.png, P_curve.png and R_curve.png of labelled classes, with the operating point."""
    known = names if isinstance(names, Mapping) else dict(enumerate(names))
    shown = {row: known.get(int(number), str(number)) for row, number in enumerate(curves.classes)}
    axis, at = confidence_axis(), point.confidence
    precision, recall, f1 = (float(part.mean()) for part in (point.precision, point.recall, point.f1))
    corner = Mark(recall, precision, f"P {precision:.3f}, R {recall:.3f} at confidence {at:.3f}")
    plot_pr_curve(axis, curves.precision_at_recall, curves.ap, folder / f"{prefix}PR_curve.png", shown, mark=corner)
    for title, rows, value in (
        ("F1", curves.f1, f1),
        ("Precision", curves.precision, precision),
        ("Recall", curves.recall, recall),
    ):
        path = folder / f"{prefix}{title if title == 'F1' else title[0]}_curve.png"
        mark = Mark(at, value, f"best mean F1: {title} {value:.3f} at {at:.3f}")
        plot_mc_curve(axis, rows, path, shown, ylabel=title, mark=mark)


class Mark(NamedTuple):
    """A point to be pointed out in a figure, and its entry in the legend."""

    x: float
    y: float
    label: str


@harmless
def plot_pr_curve(
    px: np.ndarray,
    py: np.ndarray,
    ap: np.ndarray,
    save_dir: str | Path = "pr_curve.png",
    names: Names = (),
    *,
    mark: Mark | None = None,
) -> None:
    """Write precision over recall at IoU 0.5: ``px`` (S,) recalls, ``py`` (K, S) precisions, ``ap`` (K, T).

    ``save_dir`` is the file; ``names`` name the K rows.
    """
    rows = np.asarray(py)
    labels = [f"{class_name(row, names)} {value:.3f}" for row, value in enumerate(ap[:, 0])]
    average = f"all classes {ap[:, 0].mean():.3f} mAP@0.5"
    _plot_lines(px, rows, rows.mean(0), save_dir, labels, average, ("Recall", "Precision"), mark)


@harmless
def plot_mc_curve(
    px: np.ndarray,
    py: np.ndarray,
    save_dir: str | Path = "mc_curve.png",
    names: Names = (),
    xlabel: str = "Confidence",
    ylabel: str = "Metric",
    *,
    mark: Mark | None = None,
) -> None:
    """Write a figure over confidence: ``px`` (S,), ``py`` (K, S). The legend tells where the smoothed mean peaks."""
    rows = np.asarray(py)
    mean = smooth(rows.mean(0), 0.05)
    average = f"all classes {mean.max():.2f} at {px[mean.argmax()]:.3f}"
    labels = [class_name(row, names) for row in range(len(rows))]
    _plot_lines(px, rows, mean, save_dir, labels, average, (xlabel, ylabel), mark)


def _plot_lines(
    px: np.ndarray,
    rows: np.ndarray,
    mean: np.ndarray,
    path: str | Path,
    labels: list[str],
    average: str,
    titles: tuple[str, str],
    mark: Mark | None,
) -> None:
    """Write thin lines for the classes and a thick one for their mean, both axes 0 … 1."""
    figure, panels = _figure(1, 1, (9, 6))
    panel = panels[0, 0]
    if len(rows) < MANY_CLASSES:
        for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
            panel.plot(px, row, linewidth=1, label=label, color=_rgb(number))
    else:
        panel.plot(px, rows.T, linewidth=1, color="grey", alpha=0.6)
    panel.plot(px, mean, linewidth=3, color="blue", label=average)
    if mark is not None:
        panel.axvline(mark.x, linewidth=1, linestyle="--", color="black")
        panel.plot([mark.x], [mark.y], "o", color="black", label=mark.label)
    panel.set(xlabel=titles[0], ylabel=titles[1], xlim=(0, 1), ylim=(0, 1), title=f"{titles[1]}-{titles[0]} curve")
    panel.legend(bbox_to_anchor=(1.04, 1), loc="upper left")
    _save(figure, path)


@harmless
def plot_confusion_matrix(
    matrix: np.ndarray, names: Names, path: str | Path, *, normalize: bool = True, note: str = ""
) -> None:
    """Write counts (nc + 1, nc + 1), rows predicted, columns true, background last, as a coloured table.

    ``normalize`` divides each column by its sum; cells below 0.005 stay empty. ``note`` states what was counted.
    """
    size = len(matrix)
    shares = matrix / (matrix.sum(0, keepdims=True) + 1e-9) if normalize else matrix.astype(float)
    shares = np.where(shares < 0.005, np.nan, shares)
    titles = [class_name(number, names) for number in range(size - 1)] + ["background"]
    figure, panels = _figure(1, 1, (12, 9))
    panel = panels[0, 0]
    drawn = panel.imshow(shares, cmap="Blues", vmin=0, vmax=1 if normalize else None)
    figure.colorbar(drawn, ax=panel)
    if size - 1 < ANNOTATED_CLASSES:
        limit = 0.5 if normalize else np.nanmax(shares, initial=0) / 2
        for row, column in zip(*np.nonzero(~np.isnan(shares)), strict=True):
            value = shares[row, column]
            text = f"{value:.2f}" if normalize else f"{value:.0f}"
            shade = "white" if value > limit else "black"
            panel.text(column, row, text, ha="center", va="center", color=shade, fontsize=max(4, 12 - size / 4))
    if size <= 100:  # more names than that would only blacken the margin
        panel.set_xticks(range(size), titles, rotation=90)
        panel.set_yticks(range(size), titles)
    panel.set(xlabel="True", ylabel="Predicted", title=f"Confusion matrix ({note})" if note else "Confusion matrix")
    _save(figure, path)


@harmless
def plot_labels(labels: np.ndarray | Sequence[np.ndarray], names: Names = (), save_dir: str | Path = "") -> None:
    """Write labels.jpg and labels_correlogram.jpg.

    Args:
        labels: (n, 5) class, x, y, w, h normalised, or such an array for each image.
    """
    parts = [labels] if isinstance(labels, np.ndarray) else labels
    rows = np.concatenate([np.zeros((0, 5)), *(np.reshape(part, (-1, 5)) for part in parts)])
    _plot_label_panels(rows, names, Path(save_dir) / "labels.jpg")
    _plot_correlogram(rows[:, 1:], Path(save_dir) / "labels_correlogram.jpg")


@harmless
def _plot_label_panels(rows: np.ndarray, names: Names, path: Path) -> None:
    """Write four panels: how many of each class, the boxes laid over each other, centres, sizes."""
    figure, panels = _figure(2, 2, (8, 8))
    classes = rows[:, 0].astype(int)
    total = max(len(names), int(classes.max(initial=-1)) + 1, 1)
    counts = np.bincount(classes, minlength=total)
    panels[0, 0].bar(range(total), counts, color=[_rgb(number) for number in range(total)])
    panels[0, 0].set(ylabel="instances", xlabel="classes")
    if total < ANNOTATED_CLASSES:
        titles = [class_name(number, names) for number in range(total)]
        panels[0, 0].set_xticks(range(total), titles, rotation=90, fontsize=10)
    _overlay_boxes(panels[0, 1], rows)
    _histogram(panels[1, 0], rows[:, 1], rows[:, 2], ("x", "y"))
    _histogram(panels[1, 1], rows[:, 3], rows[:, 4], ("width", "height"))
    _save(figure, path)


def _overlay_boxes(panel: Axes, rows: np.ndarray) -> None:
    """Draw up to 1000 boxes with their centres moved to the middle: sizes and aspect ratios at a glance."""
    from matplotlib.patches import Rectangle

    sample = rows[np.linspace(0, len(rows) - 1, min(len(rows), OVERLAID_BOXES)).astype(int)] if len(rows) else rows
    centred = np.concatenate((np.full((len(sample), 2), 0.5), sample[:, 3:]), 1)
    for number, (left, top, right, bottom) in zip(sample[:, 0], xywh2xyxy(centred).tolist(), strict=True):
        size = (right - left, bottom - top)
        panel.add_patch(Rectangle((left, top), *size, fill=False, linewidth=0.5, edgecolor=_rgb(int(number))))
    panel.set(xlim=(0, 1), ylim=(1, 0))
    panel.axis("off")


def _histogram(panel: Axes, x: np.ndarray, y: np.ndarray, titles: tuple[str, str]) -> None:
    """Draw how often each pair of values 0 … 1 occurs."""
    counts, _, _ = np.histogram2d(x, y, bins=50, range=((0, 1), (0, 1)))
    panel.imshow(counts.T, cmap="Blues", origin="lower", extent=(0, 1, 0, 1), aspect="auto")
    panel.set(xlabel=titles[0], ylabel=titles[1])


@harmless
def _plot_correlogram(boxes: np.ndarray, path: Path) -> None:
    """Write every pair of x, y, width, height as a histogram in the plane, each alone on the diagonal."""
    titles = ("x", "y", "width", "height")
    figure, panels = _figure(4, 4, (10, 10))
    for row in range(4):
        for column in range(4):
            panel = panels[row, column]
            if column > row:
                panel.axis("off")
            elif column == row:
                panel.hist(boxes[:, row], bins=50, range=(0, 1))
                panel.set(xlabel=titles[column])
            else:
                _histogram(panel, boxes[:, column], boxes[:, row], (titles[column], titles[row]))
    _save(figure, path)


@harmless
def plot_results(file: str | Path = "results.csv", dir: str | Path = "") -> None:
    """Write results.png beside ``file`` (or in ``dir``): ten columns of a results.csv over the epochs."""
    path = Path(dir) / Path(file).name if dir else Path(file)
    with open(path, encoding="utf-8", newline="") as handle:
        table = [[cell.strip() for cell in row] for row in csv.reader(handle) if row]
    header, body = table[0], table[1:]
    if not body:
        raise ValueError(f"{path} holds no epoch yet")
    values = np.array([[float(row[column] or "nan") for column in range(max(RESULT_COLUMNS) + 1)] for row in body])
    figure, panels = _figure(2, 5, (12, 6))
    is_validated = values[:, VALIDATION_COLUMNS].any(axis=1)  # epochs without validation hold zeros there
    for panel, column in zip(panels.flat, RESULT_COLUMNS, strict=True):
        rows = values[is_validated] if column in VALIDATION_COLUMNS else values
        panel.plot(rows[:, 0], rows[:, column], marker=".", linewidth=2, markersize=8, label=path.stem)
        panel.plot(rows[:, 0], _gaussian_smooth(rows[:, column]), ":", linewidth=2, label="smooth")
        panel.set_title(header[column], fontsize=12)
    panels.flat[1].legend()
    _save(figure, path.parent / "results.png")


def _gaussian_smooth(values: np.ndarray, sigma: float = 3.0) -> np.ndarray:
    """Return ``values`` (n,) under a Gaussian window of ``sigma`` samples, its ends mirrored."""
    if not len(values):
        return values
    reach = min(int(4 * sigma), len(values) - 1)
    window = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    return np.convolve(np.pad(values, reach, mode="symmetric"), window / window.sum(), mode="valid")


@harmless
def plot_study(sizes: Sequence[int], studies: Mapping[str, np.ndarray], path: str | Path) -> None:
    """Write studies over image sizes, one line each.

    ``studies`` hold under a name (n, ≥ 10) = P, R, mAP50, mAP50-95, three losses, three times in ms.
    """
    figure, panels = _figure(2, 4, (12, 6))
    titles = {0: "P", 1: "R", 2: "mAP@.5", 3: "mAP@.5:.95", 7: "pre-process (ms)", 8: "inference (ms)", 9: "NMS (ms)"}
    for number, (name, rows) in enumerate(studies.items()):
        style = {"marker": ".", "linewidth": 2, "markersize": 8, "color": _rgb(number), "label": name}
        for panel, (column, title) in zip(panels.flat, titles.items(), strict=False):
            panel.plot(sizes, rows[:, column], **style)
            panel.set(title=title, xlabel="image size")
        panels.flat[7].plot(rows[:, 7:10].sum(1), rows[:, 3], **style)
        panels.flat[7].set(title="mAP@.5:.95", xlabel="ms per image")
    if len(studies) > 1:
        panels.flat[0].legend(fontsize=8)
    _save(figure, path)
