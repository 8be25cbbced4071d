"""Look at every picture and label file of a data set once, report what is wrong, remember the outcome.

One bad file never ends the scan: it is named, counted and left out. Results are remembered per file (size and time of
change), so that a second scan only looks at what changed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from utils.data.images import ImageError, check_image
from utils.data.labels import LabelFile, LabelFinder, image_to_label_path, read_label_file
from utils.data.listing import ImageList, list_images
from utils.data.scan_cache import Record, ScanCache, Stamp, cache_path
from utils.data.tables import RowTable, TextTable
from utils.log import LOGGER, progress

MAX_NAMED = 100  # problem lines printed; all are kept in the result
SCAN_THREADS = 8
LEFT_OUT = "left out"


def printable(text: str) -> str:
    """Text that can be written anywhere: bytes of file names that are no valid text become question marks."""
    return os.fsencode(text).decode("utf-8", "replace")


@dataclass(frozen=True)
class Problem:
    """Something wrong with a file; line is 0 where it concerns the whole file."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else self.path
        return printable(f"{where}: {self.text}")


@dataclass
class ScanCounts:
    """Figures of a scan."""

    used: int = 0  # pictures that take part, backgrounds included
    empty: int = 0  # backgrounds with an empty label file
    missing: int = 0  # backgrounds without a label file
    left_out: int = 0
    rows_refused: int = 0
    rows_clipped: int = 0
    duplicates: int = 0
    objects: int = 0

    @property
    def background(self) -> int:
        """Pictures without objects."""
        return self.empty + self.missing

    def __str__(self) -> str:
        return (
            f"{self.used} pictures used with {self.objects} objects, "
            f"{self.background} background ({self.empty} empty label file, {self.missing} no label file), "
            f"{self.left_out} left out, rows: {self.rows_refused} refused, {self.rows_clipped} clipped, "
            f"{self.duplicates} duplicates"
        )


@dataclass
class ScanResult:
    """What a data set holds. The i-th entries of all tables belong together.

    labels: (n_i, 5) float32 class, x, y, w, h as fractions. points: (p_i, 2) polygon points of a picture, one label row
    after the other; point_counts: (sum n_i,) points of each label row, 0 for box rows. shapes: (N, 2) width, height.
    """

    im_files: TextTable
    label_files: TextTable
    labels: RowTable
    points: RowTable
    point_counts: np.ndarray
    shapes: np.ndarray
    counts: ScanCounts = field(default_factory=ScanCounts)
    problems: list[Problem] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.im_files)

    def segments(self, index: int) -> list[np.ndarray]:
        """Polygons of one picture as fractions, one per label row; (0, 2) for rows that are boxes."""
        start, stop = self.labels.offsets[index : index + 2]
        ends = np.cumsum(self.point_counts[start:stop])
        return np.split(self.points[index], ends[:-1]) if len(ends) else []

    def select(self, index: np.ndarray) -> ScanResult:
        """The same result reduced to the pictures of an index array, in its order; counts and problems stay."""
        counts = RowTable(self.point_counts[:, None], self.labels.offsets).select(index)
        return ScanResult(
            TextTable(self.im_files[int(i)] for i in index),
            TextTable(self.label_files[int(i)] for i in index),
            self.labels.select(index),
            self.points.select(index),
            counts.values[:, 0].astype(np.int64),
            self.shapes[index],
            self.counts,
            self.problems,
        )


def scan_dataset(
    paths: str | Path | Sequence[str | Path], *, prefix: str = "", use_cache: bool = True, nc: int | None = None
) -> ScanResult:
    """Scan the pictures and labels below paths (folders, list files, pictures).

    With nc, a class id beyond nc - 1 raises ValueError with file, line and value. Raises ValueError when no picture is
    usable, FileNotFoundError for a path that is not there.
    """
    start = time.perf_counter()
    listing = list_images(paths)
    label_files = _find_labels(listing.files, prefix)
    cache = ScanCache(cache_path(paths, label_files)) if use_cache else ScanCache(None)
    stamps = [Stamp.of(image, label) for image, label in zip(listing.files, label_files, strict=True)]
    remembered = [
        cache.get(image, label, stamp) for image, label, stamp in zip(listing.files, label_files, stamps, strict=True)
    ]
    todo = [i for i, record in enumerate(remembered) if record is None]
    fresh = iter(_scan_files([listing.files[i] for i in todo], [label_files[i] for i in todo], prefix))
    records = [record or next(fresh) for record in remembered]
    if todo or len(cache) != len(records):
        cache.save(listing.files, label_files, stamps, records, prefix)
    result = _assemble(listing, label_files, records)
    _report(result, listing, prefix, time.perf_counter() - start, len(records) - len(todo))
    if not len(result):
        where = ", ".join(map(str, [paths] if isinstance(paths, (str, Path)) else paths))
        raise ValueError(f"{prefix}none of the {len(listing.files)} pictures in {where} is usable, see the lines above")
    if nc is not None:
        check_classes(result, nc)
    return result


def check_classes(result: ScanResult, nc: int) -> None:
    """Raise ValueError naming file, line and class when a label holds a class id beyond nc - 1."""
    beyond = np.flatnonzero(result.labels.values[:, 0] >= nc)
    if not len(beyond):
        return
    picture = int(np.searchsorted(result.labels.offsets, beyond[0], side="right")) - 1
    path = result.label_files[picture]
    label = read_label_file(path)
    row = int(np.flatnonzero(label.boxes[:, 0] >= nc)[0])
    raise ValueError(
        f"{path}, line {label.lines[row]}: class {int(label.boxes[row, 0])}, but the data file declares {nc} classes "
        f"(0 to {nc - 1}); {len(beyond)} row(s) are affected. Correct the labels, or names and nc in the data file"
    )


def _find_labels(images: Sequence[str], prefix: str) -> list[str]:
    """Label file of each picture: the expected one, one spelt alike, or the expected path where there is none."""
    expected = [str(image_to_label_path(image)) for image in images]
    exact = {path for path in set(expected) if os.path.isfile(path)}
    finder, found, variants = LabelFinder(), [], []
    for path in expected:
        variant = finder.find(path) if path not in exact else None
        if variant is not None and variant not in exact:  # else it is the label of another picture
            variants.append(variant)
            found.append(variant)
        else:
            found.append(path)
    if variants:
        LOGGER.warning(
            f"{prefix}{len(variants)} label file(s) found under a name that differs in case or Unicode form from the "
            f"picture's, such as {printable(variants[0])}"
        )
    return found


def _scan_files(images: Sequence[str], labels: Sequence[str], prefix: str) -> list[Record]:
    """Scan pictures with their label files in threads; the outcomes keep the order."""
    if not images:
        return []
    records = []
    threads = max(1, min(SCAN_THREADS, (os.cpu_count() or 1)))
    with (
        ThreadPoolExecutor(threads) as pool,
        progress(total=len(images), desc=f"{prefix}scanning pictures and labels", unit="img") as bar,
    ):
        for record in pool.map(scan_one, images, labels):
            bar.update()
            records.append(record)
    return records


def scan_one(image: str, label: str) -> Record:
    """Judge one picture and its label file; never raises for what the files contain."""
    try:
        facts = check_image(image)
    except ImageError as error:
        return Record.refusal(str(error).removeprefix(f"{image}: "))
    except OSError as error:
        return Record.refusal(_short(error), is_lasting=False)
    except Exception as error:  # a decoder may fail in any way; that costs this file only
        return Record.refusal(f"{type(error).__name__}: {error}")
    record = Record(width=facts.width, height=facts.height)
    if facts.remark:
        record.remarks.append((0, "image", facts.remark))
    if not os.path.isfile(label):
        record.has_label = False
        return record
    try:
        parsed = read_label_file(label)
    except OSError as error:
        return Record.refusal(f"label file {label} cannot be read: {error.strerror}", is_lasting=False)
    if parsed.error:
        return Record.refusal(f"label file {label}: {parsed.error}")
    return _with_label(record, parsed)


def _short(error: OSError) -> str:
    if isinstance(error, IsADirectoryError):
        return "is a folder, not a picture"
    if isinstance(error, FileNotFoundError):
        return "file is not there (or a dead link)"
    return f"cannot be opened: {error.strerror or error}"


def _with_label(record: Record, parsed: LabelFile) -> Record:
    record.boxes = parsed.boxes
    record.point_counts = np.array([len(points) for points in parsed.segments], np.int64)
    record.points = np.concatenate([np.zeros((0, 2), np.float32), *parsed.segments])
    record.refused, record.clipped, record.duplicates = parsed.refused, parsed.clipped, parsed.duplicates
    record.remarks += [(problem.line, "label", problem.text) for problem in parsed.problems]
    return record


def _assemble(listing: ImageList, label_files: list[str], records: Sequence[Record]) -> ScanResult:
    """Join the records of the usable pictures into tables and add up the counts."""
    counts, problems = ScanCounts(), [Problem(path, 0, f"{LEFT_OUT}: {reason}") for path, reason in listing.left_out]
    usable: list[int] = []
    for index, record in enumerate(records):
        image, label = listing.files[index], label_files[index]
        if record.error:
            problems.append(Problem(image, 0, f"{LEFT_OUT}: {record.error}"))
            continue
        usable.append(index)
        counts.missing += not record.has_label
        counts.empty += record.has_label and not len(record.boxes)
        counts.rows_refused += record.refused
        counts.rows_clipped += record.clipped
        counts.duplicates += record.duplicates
        problems += [Problem(image if where == "image" else label, line, text) for line, where, text in record.remarks]
    kept = [record for record in records if not record.error]
    problems.sort(key=lambda problem: not problem.text.startswith(LEFT_OUT))  # the printed part is limited
    labels = RowTable.from_pieces([record.boxes for record in kept], 5)
    counts.used, counts.objects = len(kept), len(labels.values)
    counts.left_out = len(records) - len(kept) + len(listing.left_out)
    return ScanResult(
        TextTable(listing.files[i] for i in usable),
        TextTable(label_files[i] for i in usable),
        labels,
        RowTable.from_pieces([record.points for record in kept], 2),
        np.concatenate([np.zeros(0, np.int64), *(record.point_counts for record in kept)]),
        np.array([(record.width, record.height) for record in kept], np.int64).reshape(-1, 2),
        counts,
        problems,
    )


def _report(result: ScanResult, listing: ImageList, prefix: str, seconds: float, remembered: int) -> None:
    """Log every problem (up to a limit), remarks on the whole set, and one summary line."""
    listing.report(prefix)
    for problem in result.problems[:MAX_NAMED]:
        LOGGER.warning(f"{prefix}{problem}")
    if len(result.problems) > MAX_NAMED:
        LOGGER.warning(f"{prefix}... and {len(result.problems) - MAX_NAMED} more of this kind")
    twins = [path for path, count in Counter(result.label_files).items() if count > 1 and os.path.isfile(path)]
    if twins:
        LOGGER.warning(
            f"{prefix}{len(twins)} label file(s) shared by pictures of the same stem, such as {printable(twins[0])}"
        )
    counts = result.counts
    if counts.missing and counts.missing == counts.used:
        LOGGER.warning(f"{prefix}no label file found at all; the first one was expected at {result.label_files[0]}")
    source = f", {remembered} from the label cache" if remembered else ""
    LOGGER.info(f"{prefix}{counts} ({seconds:.1f} s{source})")
