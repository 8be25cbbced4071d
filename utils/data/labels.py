"""Label files: one row per object, read row by row so that a bad row costs itself and nothing else.

A row of 5 numbers is `class x_centre y_centre width height`, 6 add a confidence, 1 + 2k (k >= 3) hold a polygon;
all coordinates are fractions of the picture's width and height.
"""

from __future__ import annotations

import codecs
import math
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SMALLEST_SIDE = 1e-6  # what six decimals can hold; thinner boxes count as empty
PIXEL_LIMIT = 2.0  # fractions beyond this cannot be overshoot any more
REFUSED = "row refused"  # how the text of a refused row begins
COUNTED_OVERSHOOT = 1e-5  # smaller overshoot is the rounding of six decimals and not worth counting
LARGEST_CLASS = 2**24 - 1  # float32, in which labels are kept, holds no larger whole numbers one by one
EXPECTED = (
    "expected numbers separated by spaces, with decimal points, as in '0 0.5 0.5 0.2 0.4' (class x y width height)"
)
_SHOWN = 40  # characters of a row or a column in a message
_DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?")
_FOREIGN = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (r"[\[\](){}<>]", "brackets"),
        (";", "semicolons"),
        ("[\"'`]", "quotation marks"),
        ("%", "percent signs"),
        (":", "colons"),
        (r"\|", "bars"),
    )
)


@dataclass(frozen=True)
class RowProblem:
    """A remark about one row of a label file; line counts from 1, 0 means the file as a whole.

    kind says in a few words what is wrong, the same words for all rows with that fault; text adds the values.
    """

    line: int
    text: str
    kind: str = ""


@dataclass
class LabelFile:
    """Parsed label file.

    boxes: (n, 5) float32 class, x, y, w, h as fractions, inside the picture; segments: one (k, 2) float32 array per
    row, k = 0 for rows that are boxes; lines: (n,) line numbers. `error` tells why the whole picture must be left out,
    `error_kind` the same without values.
    """

    boxes: np.ndarray
    segments: list[np.ndarray] = field(default_factory=list)
    lines: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    problems: list[RowProblem] = field(default_factory=list)  # every refused row; remarks once, at their first row
    refused: int = 0
    clipped: int = 0
    duplicates: int = 0
    rows: int = 0
    error: str | None = None
    error_kind: str = ""

    def remark(self, line: int, kind: str, text: str) -> None:
        """Note something odd that was understood; the same remark is kept for the first row only."""
        if all(problem.text != text for problem in self.problems):
            self.problems.append(RowProblem(line, text, kind))

    @property
    def has_polygons(self) -> bool:
        """Whether at least one row is a polygon."""
        return any(len(segment) for segment in self.segments)


class _RefusedRow(ValueError):
    """One row cannot be used: kind of fault, and a text with the values where the kind alone says too little."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(text or kind)
        self.kind = kind


class _PixelValues(ValueError):
    """Coordinates are no fractions."""


def read_label_file(path: str | Path) -> LabelFile:
    """Read a label file from disk; unreadable encodings end up in `error`. Raises OSError where it cannot be opened."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = decode_text(data)
    except UnicodeDecodeError as error:
        reason = f"encoding is neither UTF-8 nor UTF-16 ({error})"
        return LabelFile(np.zeros((0, 5), np.float32), error=reason, error_kind="encoding of the label file")
    return parse_label_text(text)


def decode_text(data: bytes) -> str:
    """Decode UTF-8 with or without byte order mark, and UTF-16; raises UnicodeDecodeError for anything else."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16")
    if data[1:2] == b"\0" or data[:1] == b"\0":
        return data.decode("utf-16-le" if data[1:2] == b"\0" else "utf-16-be")
    return data.decode("utf-8-sig")


def split_lines(text: str) -> list[str]:
    """Lines of a text with any kind of line ending, stripped of white space on both sides."""
    return [line.strip() for line in re.split(r"\r\n|\r|\n", text)]


def parse_label_text(text: str) -> LabelFile:
    """Parse the text of a label file; rows keep their order, identical rows are kept once."""
    label = LabelFile(np.zeros((0, 5), np.float32))
    rows: list[tuple[float, ...]] = []
    lines: list[int] = []
    seen: set[tuple[float, ...]] = set()
    for number, line in enumerate(split_lines(text), start=1):
        if not line or line.startswith("#"):
            continue
        label.rows += 1
        try:
            values = _row_values(line, number, label)
            box, points, is_clipped = _row_geometry(values)
        except _RefusedRow as reason:
            label.refused += 1
            label.problems.append(RowProblem(number, f"{REFUSED}: {reason}", reason.kind))
            continue
        except _PixelValues as reason:
            error = f"line {number}: {reason}"
            return LabelFile(np.zeros((0, 5), np.float32), rows=label.rows, error=error, error_kind="pixel coordinates")
        if values in seen:
            label.duplicates += 1
            continue
        seen.add(values)
        label.clipped += is_clipped
        rows.append(box)
        lines.append(number)
        label.segments.append(points)
    label.boxes = np.array(rows, np.float32).reshape(-1, 5)
    label.lines = np.array(lines, np.int64)
    if label.rows and not rows:
        label.error = f"no usable row of {label.rows}; line {label.problems[0].line}: {label.problems[0].text}"
        label.error_kind = "no usable row"
    return label


def _row_values(line: str, number: int, label: LabelFile) -> tuple[float, ...]:
    """Numbers of a row: class followed by 4 box values or by polygon coordinates; a confidence is cut off."""
    fields = _split_fields(line, number, label)
    count = len(fields)
    if count not in (5, 6) and (count < 7 or count % 2 == 0):
        columns = f"{count} column{'' if count == 1 else 's'}"
        text = f"{columns}; 5 columns are needed for a box, 7, 9, 11 ... for a polygon; {EXPECTED}"
        raise _RefusedRow("wrong number of columns", text)
    values = [_number(text, is_class=not column) for column, text in enumerate(fields)]
    if values[0] != int(values[0]) or not 0 <= values[0] <= LARGEST_CLASS:
        raise _RefusedRow("class is no whole number", f"class {_short(fields[0])} is not an integer from 0 on")
    if count == 6:
        label.remark(number, "sixth column", "6 columns: the sixth is taken for a confidence and ignored")
    return tuple(values[:5] if count == 6 else values)


def _number(text: str, *, is_class: bool) -> float:
    try:
        value = float(text.replace("_", "no number"))  # Python would take 1_0 for 10
    except ValueError:
        hint = "; names have to be replaced by the class number" if is_class and text[:1].isalpha() else ""
        raise _RefusedRow("not a number", f"{_short(text)} is not a number{hint}; {EXPECTED}") from None
    if not math.isfinite(value):
        raise _RefusedRow("not finite", f"{_short(text)} is not finite")
    return value


def _short(text: str) -> str:
    """A row or a field of one as it may stand in a message."""
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")


def _split_fields(line: str, number: int, label: LabelFile) -> list[str]:
    """Columns of a row; commas may separate columns or mark decimals, but a row that allows both is refused."""
    for pattern, what in _FOREIGN:
        if pattern.search(line):
            raise _RefusedRow(f"{what} in the row", f"found {what} in {_short(line)}; {EXPECTED}")
    fields = line.split()
    if "," not in line:
        return fields
    has_points = "." in line
    if len(fields) > 1 and not has_points and all(_DECIMAL_COMMA.fullmatch(text) for text in fields):
        label.remark(number, "commas", "decimal commas are read as points")
        return [text.replace(",", ".") for text in fields]
    is_separated = len(fields) == 1 or all(text.endswith(",") for text in fields[:-1])
    pieces = [piece.strip() for piece in line.split(",")]
    if is_separated and all(pieces) and (has_points or len(pieces) == 5):
        label.remark(number, "commas", "commas are read as separators of columns")
        return pieces
    if line.endswith(","):
        raise _RefusedRow("comma at the end", f"found a comma at the end of {_short(line)}; {EXPECTED}")
    what = "commas and points" if has_points else "commas"
    text = f"found {what} in {_short(line)}, which cannot be told apart as separators or decimals; {EXPECTED}"
    raise _RefusedRow("commas of unclear meaning", text)


def _row_geometry(values: tuple[float, ...]) -> tuple[tuple[float, ...], np.ndarray, bool]:
    """Box (class, x, y, w, h), polygon points (k, 2) or (0, 2), and whether something had to be clipped."""
    cls, coordinates = values[0], values[1:]
    largest = max(coordinates, key=abs)
    if abs(largest) > PIXEL_LIMIT:
        raise _PixelValues(f"value {largest:g} looks like pixels; coordinates must be normalised to 0..1")
    points = np.zeros((0, 2), np.float32)
    if len(coordinates) == 4:
        x, y, w, h = coordinates
        if min(w, h) < 0:
            raise _RefusedRow("negative size", f"negative size {w:g} x {h:g}")
        corners = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    else:
        polygon = np.array(coordinates, np.float64).reshape(-1, 2)
        low, high = polygon.min(0), polygon.max(0)
        corners = (float(low[0]), float(low[1]), float(high[0]), float(high[1]))
        points = polygon.clip(0.0, 1.0).astype(np.float32)
    overshoot = max(-corners[0], -corners[1], corners[2] - 1, corners[3] - 1, 0.0)
    if min(corners[2] - corners[0], corners[3] - corners[1]) < SMALLEST_SIDE:
        raise _RefusedRow("zero width or height")
    if overshoot or len(coordinates) != 4:
        left, top, right, bottom = (min(max(value, 0.0), 1.0) for value in corners)
        if min(right - left, bottom - top) < SMALLEST_SIDE:
            raise _RefusedRow("lies outside the picture")
        coordinates = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
    return (cls, *coordinates), points, overshoot > COUNTED_OVERSHOOT


def rectangle_points(box: np.ndarray) -> np.ndarray:
    """Four corners (4, 2) of a box x, y, w, h, so that a box row can stand among polygons."""
    x, y, w, h = box
    left, top, right, bottom = x - w / 2, y - h / 2, x + w / 2, y + h / 2
    return np.array(((left, top), (right, top), (right, bottom), (left, bottom)), np.float32)


def image_to_label_path(path: str | Path) -> Path:
    """Label file of a picture: the last folder `images` becomes `labels`, the suffix `.txt`."""
    path = Path(path)
    parts = list(path.parts)
    folders = [index for index, part in enumerate(parts[:-1]) if part == "images"]
    folders = folders or [index for index, part in enumerate(parts[:-1]) if part.lower() == "images"]
    if folders:
        parts[folders[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


def label_paths(images: Sequence[str]) -> list[str]:
    """`image_to_label_path` of many pictures, with the folders worked out once each."""
    folders: dict[str, str] = {}
    paths = []
    for image in images:
        folder, name = os.path.split(image)
        if folder not in folders:
            folders[folder] = str(image_to_label_path(os.path.join(folder, "x.jpg")).parent)
        paths.append(os.path.join(folders[folder], os.path.splitext(name)[0] + ".txt"))
    return paths


class LabelFinder:
    """Finds label files, also under names that differ from the expected one in case or Unicode form only.

    Folders are listed once: asking for each of 100,000 files would take minutes on a network disk.
    """

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, list[str]]] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._is_there: dict[str, bool] = {}

    def has(self, path: str) -> bool:
        """Whether the folder of a path holds an entry of exactly its name."""
        folder, name = os.path.split(path)
        if folder not in self._names:
            self._names[folder] = frozenset(_names_in(folder))
        return name in self._names[folder]

    def find(self, expected: str) -> str | None:
        """Path of the existing label file for an expected path, or None; an exact match is the business of `has`."""
        folder, name = os.path.split(expected)
        parts = [name]
        while folder and not self._is_folder(folder):
            folder, name = os.path.split(folder)
            if not name:
                return None
            parts.append(name)
        for name in reversed(parts):
            matches = self._listing(folder).get(_loose(name), [])
            if not matches:
                return None
            folder = os.path.join(folder, name if name in matches else matches[0])
        return folder if os.path.isfile(folder) else None

    def _is_folder(self, path: str) -> bool:
        if path not in self._is_there:
            self._is_there[path] = os.path.isdir(path)
        return self._is_there[path]

    def _listing(self, folder: str) -> dict[str, list[str]]:
        """Loose name -> names as they are on disk; read once per folder."""
        if folder not in self._folders:
            listing: dict[str, list[str]] = {}
            for name in sorted(_names_in(folder)):
                listing.setdefault(_loose(name), []).append(name)
            self._folders[folder] = listing
        return self._folders[folder]


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _loose(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
