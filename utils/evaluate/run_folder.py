"""A run's folder read back as plain data, for the report. What is absent is left out, what is damaged is named."""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from utils.data.report import hints
from utils.evaluate.advice import LOSSES, advise, best_row, validated
from utils.evaluate.evaluation_parts import without_damage
from utils.evaluate.record import FILE_NAME as EVALUATION
from utils.evaluate.warning_file import FILE_NAME as WARNINGS
from utils.evaluate.warning_file import load_warnings
from utils.files import read_yaml
from utils.options import TrainOptions

# What reading files of any content may raise.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
MAX_ROWS = 1200  # of a table; more points than a screen has columns
ACCURACY = (  # columns of results.csv that tell which epochs were validated, and which was best
    *(f"metrics/{name}" for name in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")),
    *(f"{kind}/{loss}" for kind in ("train", "val") for loss in LOSSES),
)
IRRELEVANT = {"save_dir", "resume", "hyp"}  # in opt.yaml, and no part of the command that repeats the run
FILES = {  # what a folder may hold, in the order of a reader's interest
    "weights/best.pt": "weights of the best epoch",
    "weights/last.pt": "last epoch, for --resume",
    "results.csv": "one row per epoch",
    "monitor.csv": "one row every few steps",
    "results.png": "curves of the epochs",
    "monitor.png": "curves of the steps",
    "lr.png": "learning rates",
    "confusion_matrix.png": "which class is taken for which",
    "confusion_matrix.csv": "the same as counts",
    "PR_curve.png": "precision over recall",
    "F1_curve.png": "F1 over confidence",
    "P_curve.png": "precision over confidence",
    "R_curve.png": "recall over confidence",
    "evaluation.json": "all figures of the last validation",
    "data_report.json": "what the scan of the data found",
    "data_train.jpg": "training pictures with their labels",
    "data_val.jpg": "validation pictures with their labels",
    "labels.jpg": "how many objects, where, how large",
    "labels_correlogram.jpg": "position and size of objects, in pairs",
    "opt.yaml": "all options",
    "hyp.yaml": "hyper-parameters",
    "warnings.json": "all warnings",
}
GROUPS = {  # files with numbers in their names
    "train_batch*.jpg": "batch as the network sees it",
    "val_batch*_labels.jpg": "validation pictures with labels",
    "val_batch*_pred.jpg": "validation pictures with detections",
    "*_predictions.json": "detections in COCO's form",
}


def read_run(folder: str | Path, page_folder: str | Path | None = None) -> dict[str, Any]:
    """Return everything the report shows of a run; links are relative to ``page_folder``, by default the run's.

    Raises:
        FileNotFoundError: no such folder, or nothing in it that a run leaves.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; give the folder of a run, for example runs/train/exp")
    read = _Reader(folder)
    options, results = read.file("opt.yaml", read_yaml), read.file("results.csv", _read_results)
    evaluation = read.evaluation()
    if not (options or results or evaluation):
        raise FileNotFoundError(
            f"{folder} holds neither opt.yaml, results.csv nor {EVALUATION} that can be read: not a run's folder; "
            "give one that train_dual.py or val_dual.py wrote, for example runs/train/exp"
        )
    data, monitor = read.file("data_report.json", _read_json), read.file("monitor.csv", read_columns)
    hyp = options.pop("hyp", {})
    epochs = _read(int, options.get("epochs")) or 0
    complete = results if read.has_columns("results.csv", results, ACCURACY) else {}
    return {
        "name": folder.resolve().name,
        "kind": "Training" if options or results else "Validation",
        "folder": str(folder),
        "command": command(options, folder) if options else "",
        "options": {name: _plain(value) for name, value in options.items()},
        "hyp": hyp if isinstance(hyp, Mapping) else {},
        "epochs": epochs,
        "results": {name: _known(column) for name, column in without_zeros(results).items()},
        "best": best_row(complete),
        "train_s": _read(partial(training_seconds, results), data),
        "monitor": {name: _known(column) for name, column in monitor.items()},
        "evaluation": evaluation,
        "data": read.part("data_report.json", partial(summarise_data, data)) or {},
        "warnings": read.file(WARNINGS, load_warnings) or [],
        "unread": read.problems,
        "advice": [
            *(_read(_data_hints, data) or []),
            *(
                _read(partial(advise, complete, epochs=epochs, last=str(folder / "weights" / "last.pt")), evaluation)
                or []
            ),
        ],
        "files": list_files(folder, Path(page_folder or folder)),
    }


class _Reader:
    """Reads files of a folder and notes in ``problems`` which of them are damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def file(self, name: str, reader: Callable[[Path], Any]) -> Any:
        """Return what ``reader`` makes of a file; an empty mapping where it is absent, empty, or damaged."""
        path = self.folder / name
        try:
            return reader(path) if path.is_file() and path.stat().st_size else {}
        except UNREADABLE as error:
            self.problems.append(f"{name} could not be read and is left out: {error}")
            return {}

    def part(self, name: str, reader: Callable[[], Any]) -> Any:
        """Return what ``reader`` makes of what was read of a file; None where that is of another form."""
        try:
            return reader()
        except UNREADABLE as error:
            self.problems.append(f"{name} is of an unexpected form and is left out ({type(error).__name__}: {error})")
            return None

    def evaluation(self) -> dict[str, Any]:
        """Return what evaluation.json holds, without damaged parts."""
        evaluation, damaged = without_damage(self.file(EVALUATION, _read_json))
        if damaged:
            self.problems.append(f"{EVALUATION} holds parts of an unexpected form, left out: {', '.join(damaged)}")
        return evaluation

    def has_columns(self, name: str, table: Mapping[str, Any], wanted: Sequence[str]) -> bool:
        """Return whether a table that holds something has all of some columns."""
        absent = [column for column in wanted if table and column not in table]
        if absent:
            self.problems.append(f"{name} has no column {', '.join(absent)}: no epoch's accuracy is told")
        return not absent


def _read(reader: Callable[[Any], Any], source: Any) -> Any:
    """Return what ``reader`` makes of ``source``; None where that is absent, half written or of another program."""
    try:
        return reader(source)
    except UNREADABLE:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object")
    return content


def read_columns(path: str | Path, max_rows: int = MAX_ROWS) -> dict[str, list[float]]:
    """Read a CSV table of numbers; of long tables every k-th row and the last one. Unknown cells are NaN.

    Rows are chosen before they are parsed, so a table of any length takes a fraction of a second.
    """
    lines = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    header = [name.strip() for name in lines[0].split(",")]
    body = lines[1:]
    step = math.ceil(len(body) / max_rows)
    chosen = body[:: max(step, 1)]
    if body and chosen[-1] is not body[-1]:
        chosen.append(body[-1])
    rows = [[*row, *[""] * (len(header) - len(row))] for row in csv.reader(chosen)]
    return {name: [_number(row[column]) for row in rows] for column, name in enumerate(header)}


def _read_results(path: Path) -> dict[str, list[float]]:
    """Read results.csv; a header without rows is nothing.

    Raises:
        ValueError: there is no column of epochs.
    """
    columns = read_columns(path)
    if "epoch" not in columns:
        raise ValueError("its first line should name a column 'epoch'")
    return columns if columns["epoch"] else {}


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def without_zeros(results: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return the columns with NaN in place of the zeros that stand for epochs without validation."""
    rows = set(validated(results))
    return {
        name: [value if row in rows else math.nan for row, value in enumerate(column)]
        if name.startswith(("metrics/", "val/", "coco/"))
        else column
        for name, column in results.items()
    }


def _known(column: Sequence[float]) -> list[float | None]:
    """Return the column as JSON can hold it: None for what is not a finite number."""
    return [value if math.isfinite(value) else None for value in column]


def _plain(value: Any) -> Any:
    """Return an option as the report shows it: as it is, a list as its words, what JSON cannot hold as text."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    is_known = (
        value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_known else str(value)


def command(options: Mapping[str, Any], folder: Path) -> str:
    """Return the command line that repeats a run: the options that differ from their defaults."""
    words = ["python", "train_dual.py"]
    for item in fields(TrainOptions):
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        value = options.get(item.name, default)
        if item.name in IRRELEVANT or value == default:
            continue
        flag = "--" + item.name.replace("_", "-")
        if isinstance(value, bool) and isinstance(default, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, *(map(str, value) if isinstance(value, list) else [str(value)])]
    if not options.get("weights"):
        words += ["--weights", ""]
    return shlex.join([*words, "--hyp", str(folder / "hyp.yaml")])


def training_seconds(results: Mapping[str, Sequence[float]], data: Mapping[str, Any]) -> float | None:
    """Return the time that went into training, validation not counted: pictures of an epoch through their speed."""
    pictures = (data.get("train") or {}).get("used")
    speeds = [speed for speed in results.get("train/img_per_s", ()) if speed > 0]
    return sum(pictures / speed for speed in speeds) if pictures and speeds else None


def summarise_data(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of data_report.json without its lists of files."""
    splits = {}
    for split in ("train", "val", "test"):
        entry = report.get(split)
        if not isinstance(entry, Mapping):
            continue
        splits[split] = {
            "pictures": entry.get("used"),
            "objects": entry.get("objects"),
            "background": sum((entry.get("background") or {}).values()),
            "left out by --min-items": (entry.get("left_out_by_min_items") or {}).get("count") or None,
            "left out": (entry.get("left_out") or {}).get("count"),
            "rows refused": (entry.get("rows_refused") or {}).get("count"),
            "rows clipped": (entry.get("rows_clipped") or {}).get("count"),
            "duplicate rows": (entry.get("duplicate_rows") or {}).get("count"),
            "small objects": (entry.get("object_sizes") or {}).get("small"),
            "medium objects": (entry.get("object_sizes") or {}).get("medium"),
            "large objects": (entry.get("object_sizes") or {}).get("large"),
            "classes": [[c.get("id"), c.get("name"), c.get("objects")] for c in entry.get("classes") or []],
        }
    return {"imgsz": report.get("imgsz"), "splits": splits} if splits else {}


def _data_hints(report: Mapping[str, Any]) -> list[str]:
    return hints({split: entry for split, entry in report.items() if isinstance(entry, Mapping)})


def list_files(folder: Path, page_folder: Path) -> list[dict[str, Any]]:
    """Return the files of a run that are there: relative link, size in bytes, and what each is."""
    found = [(name, text) for name, text in FILES.items() if (folder / name).is_file()]
    for pattern, text in GROUPS.items():
        found += [(path.name, text) for path in sorted(folder.glob(pattern)) if path.is_file()]
    found += [(path.relative_to(folder).as_posix(), "checkpoint") for path in sorted(folder.glob("weights/epoch*.pt"))]
    base = Path(os.path.relpath(folder.resolve(), page_folder.resolve()))
    link = partial(quote, errors="surrogateescape")  # bytes of names that are no text too
    return [
        {"name": name, "link": link((base / name).as_posix()), "bytes": (folder / name).stat().st_size, "text": text}
        for name, text in found
    ]
