"""Tables of all detections of a run: ``results.txt`` always, ``detections.csv`` and ``detections.json`` on demand.

Rows are written as they come, so memory does not grow with a run, and what is on disk can be read at any time.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from utils.files import FULL

RESULTS_NAME, CSV_NAME, JSON_NAME = "results.txt", "detections.csv", "detections.json"
COLUMNS = ("file", "frame", "class", "name", "confidence", "x1", "y1", "x2", "y2")
RESULTS_HEADER = "# " + "\t".join(COLUMNS)
JSON_END = b"\n]\n"


@dataclass(frozen=True)
class Row:
    """One detection: input, frame (0 for a picture), class number and name, confidence, x1 y1 x2 y2 in whole pixels."""

    file: str
    frame: int
    number: int
    name: str
    confidence: float
    box: tuple[int, int, int, int]


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let an OSError of the block, which often tells no file, say which one could not be written and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "make room, or choose another disk with --project" if error.errno in FULL else "choose another --name"
        told = OSError(f"{path} could not be written: {reason}; {remedy}")
        told.errno = error.errno
        raise told from error


class Tables:
    """The tables of one run, replaced if they exist; close them at the end."""

    def __init__(self, folder: Path, *, save_csv: bool = False, save_json: bool = False) -> None:
        self._text = open(folder / RESULTS_NAME, "wb")  # noqa: SIM115 - closed by close()
        self._csv = open(folder / CSV_NAME, "wb") if save_csv else None  # noqa: SIM115
        self._json = open(folder / JSON_NAME, "wb") if save_json else None  # noqa: SIM115
        self._has_json_rows = False
        self._text.write(_encoded(RESULTS_HEADER + "\n"))
        if self._csv:
            self._csv.write(_encoded(_csv_line(COLUMNS)))
        if self._json:
            self._json.write(b"[" + JSON_END)

    def add(self, rows: list[Row]) -> None:
        """Append the detections of a frame to every table."""
        if not rows:
            return
        with naming(self._text.name):
            self._text.write(_encoded("".join(_text_line(row) for row in rows)))
            self._text.flush()
        if self._csv:
            fields = ((r.file, r.frame, r.number, r.name, f"{r.confidence:.6g}", *r.box) for r in rows)
            with naming(self._csv.name):
                self._csv.write(_encoded("".join(map(_csv_line, fields))))
                self._csv.flush()
        if self._json:
            lines = ",\n".join(json.dumps(_as_object(row), ensure_ascii=False) for row in rows)
            with naming(self._json.name):
                self._json.seek(-len(JSON_END), io.SEEK_CUR)  # the list is closed behind every frame, in case of a kill
                self._json.write((b",\n" if self._has_json_rows else b"\n") + _encoded(lines, in_json=True) + JSON_END)
                self._json.flush()
            self._has_json_rows = True

    def close(self) -> None:
        """Close all tables, even where one fails."""
        with ExitStack() as stack:
            for handle in self._handles():
                stack.callback(_close, handle)

    def _handles(self) -> list[BinaryIO]:
        return [handle for handle in (self._text, self._csv, self._json) if handle]


def _close(handle: BinaryIO) -> None:
    with naming(handle.name):
        handle.close()


def read_results(path: Path) -> Iterator[Row]:
    """Yield the rows of a ``results.txt``; lines that are not of its form are passed over."""
    with open(path, encoding="utf-8", errors="surrogateescape") as handle:
        for line in handle:
            file, *fields = line.rstrip("\n").split("\t")
            if line.startswith("#") or len(fields) != len(COLUMNS) - 1:
                continue
            try:
                frame, number, name, confidence, *box = fields
                yield Row(file, int(frame), int(number), name, float(confidence), tuple(map(int, box)))
            except ValueError:
                continue


def shown(text: str) -> str:
    """Return ``text`` as one field of ``results.txt``, whose fields are separated by tabs."""
    return " ".join(re.split(r"[\t\r\n]+", text))


def shown_file(title: str) -> str:
    """Return the name of an input as ``results.txt`` gives it; '#' at the beginning marks the header there."""
    title = shown(title)
    return f"./{title}" if title.startswith("#") else title


def _text_line(row: Row) -> str:
    fields = (shown_file(row.file), row.frame, row.number, shown(row.name), f"{row.confidence:.6g}", *row.box)
    return "\t".join(map(str, fields)) + "\n"


def _csv_line(fields: tuple[object, ...]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue()


def _as_object(row: Row) -> dict[str, object]:
    return {
        "file": row.file,
        "frame": row.frame,
        "class": row.number,
        "name": row.name,
        "confidence": float(f"{row.confidence:.6g}"),
        "box": list(row.box),
    }


def _encoded(text: str, *, in_json: bool = False) -> bytes:
    """Return UTF-8; bytes of a file name that are none are kept, in JSON as an escape, which has to be valid text."""
    return text.encode("utf-8", "backslashreplace" if in_json else "surrogateescape")
