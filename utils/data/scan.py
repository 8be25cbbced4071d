"""Look at every picture and label file of a data set once, say what is wrong, remember the outcome.

One bad file never ends the scan: it is named, counted and left out. Results are remembered per file (size and times of
change), so that a second scan only looks at what changed, and one that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from utils.data.file_scan import FileScan
from utils.data.filesystem import network_mount
from utils.data.labels import REFUSED, LabelFinder, label_paths, read_label_file
from utils.data.listing import ImageList, list_images, printable
from utils.data.scan_cache import Record, cache_path
from utils.data.tables import RowTable, TextTable
from utils.log import LOGGER

MAX_NAMED = 20  # problem lines printed; all are kept in the result and in the data report
SCAN_THREADS, NETWORK_THREADS = 8, 32  # on a network disk threads wait for answers and need no processor
LEFT_OUT = "left out"
BACKGROUND_SHARE = 0.3  # a larger share of pictures without objects is worth a question

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class Problem:
    """Something wrong with a file; line is 0 where it concerns the whole file, kind its sort in a few words."""

    path: str
    line: int
    text: str
    kind: str = ""

    @property
    def is_left_out(self) -> bool:
        """Whether the picture does not take part."""
        return self.text.startswith(LEFT_OUT)

    @property
    def is_refused_row(self) -> bool:
        """Whether one row of a label file does not take part."""
        return self.text.startswith(REFUSED)

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
class ScanNotes:
    """What a scan noticed about the set as a whole.

    unknown: suffix -> files that were not looked at; repeated: pictures listed more than once; respelt: (expected,
    found) label files whose names differ in case or Unicode form only; shared: label files of several pictures;
    first_missing: where the first label that is missing was expected; network: type of a network disk, or '', which is
    mounted at network_point.
    min_items: pictures with fewer objects do not take part (--min-items).
    """

    unknown: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    respelt: list[tuple[str, str]] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    first_missing: str = ""
    network: str = ""
    network_point: str = ""
    min_items: int = 0
    seconds: float = 0.0
    from_cache: int = 0


@dataclass
class ScanResult:
    """What a data set holds. The i-th entries of all tables belong together.

    labels: (n_i, 5) float32 class, x, y, w, h as fractions. points: (p_i, 2) polygon points of a picture, one label row
    after the other; point_counts: (sum n_i,) points of each label row, 0 for box rows. shapes: (N, 2) width, height.
    row_counts: (N, 3) rows of each label file that were refused, clipped, and left out as duplicates. file_bytes: (N,)
    sizes of the picture files.
    """

    im_files: TextTable
    label_files: TextTable
    labels: RowTable
    points: RowTable
    point_counts: np.ndarray
    shapes: np.ndarray
    counts: ScanCounts = field(default_factory=ScanCounts)
    problems: list[Problem] = field(default_factory=list)
    row_counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    notes: ScanNotes = field(default_factory=ScanNotes)
    file_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.im_files)

    def segments(self, index: int) -> list[np.ndarray]:
        """Polygons of one picture as fractions, one per label row; (0, 2) for rows that are boxes."""
        start, stop = self.labels.offsets[index : index + 2]
        ends = np.cumsum(self.point_counts[start:stop])
        return np.split(self.points[index], ends[:-1]) if len(ends) else []

    def taking_part(self) -> ScanResult:
        """The same result reduced to the pictures that hold as many objects as --min-items asks for."""
        least = self.notes.min_items
        return self.select(np.flatnonzero(self.labels.lengths() >= least)) if least > 0 else self

    def select(self, index: np.ndarray) -> ScanResult:
        """The same result reduced to the pictures of an index array, in its order; counts, problems and notes stay."""
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
            self.row_counts[index] if len(self.row_counts) else self.row_counts,
            self.notes,
            self.file_bytes[index] if len(self.file_bytes) else self.file_bytes,
        )


def with_min_items(result: ScanResult, min_items: int, prefix: str = "") -> ScanResult:
    """Leave out pictures with fewer than min_items labels; 0 keeps all, backgrounds included.

    Raises ValueError where no picture is left.
    """
    if min_items <= 0:
        return result
    result.notes.min_items = min_items
    kept = result.taking_part()
    LOGGER.info(
        f"{prefix}--min-items {min_items}: {len(kept)} of {len(result)} pictures kept, "
        f"{len(result) - len(kept)} left out, {result.counts.background} of them background"
    )
    if not len(kept):
        most = int(result.labels.lengths().max())
        raise ValueError(f"{prefix}--min-items {min_items} leaves no picture; the fullest one holds {most} objects")
    return kept


def scan_dataset(
    paths: str | Path | Sequence[str | Path],
    *,
    prefix: str = "",
    use_cache: bool = True,
    nc: int | None = None,
    is_new: bool = False,
    told: ScanResult | None = None,
) -> ScanResult:
    """Scan the pictures and labels below paths (folders, list files, pictures); is_new looks at every file again.

    told: the scan of another set; what its log lines said about files of both is not said again.
    With nc, a class id beyond nc - 1 raises ValueError with file, line and value. Raises ValueError when no picture is
    usable, FileNotFoundError for a path that is not there.
    """
    start = time.perf_counter()
    listing = list_images(paths)
    notes = ScanNotes(dict(listing.unknown), listing.repeated)
    earlier = ScanNotes() if told is None else told.notes
    _note_network(listing.files[0], notes, earlier, prefix)
    label_files = _find_labels(listing.files, notes, earlier, prefix)
    cache = cache_path(paths, label_files) if use_cache else None
    scan = FileScan(listing.files, label_files, cache, prefix, is_new=is_new)
    records = scan.run(NETWORK_THREADS if notes.network else min(SCAN_THREADS, os.cpu_count() or 1))
    result = _assemble(listing, label_files, records, notes, [stamp.image_size for stamp in scan.stamps])
    notes.seconds, notes.from_cache = time.perf_counter() - start, scan.remembered
    _report(result, listing, prefix, scan.cache.age_s, told)
    if not len(result):
        where = ", ".join(map(str, [paths] if isinstance(paths, (str, Path)) else paths))
        raise ValueError(f"{prefix}none of the {len(listing.files)} pictures in {where} is usable, see the lines above")
    beyond = None if nc is None else class_beyond(result, nc)
    if beyond is not None and not beyond.line and scan.remembered:
        LOGGER.info(
            f"{prefix}label cache {cache} is not used, all files are scanned again (class {beyond.cls} in it is not in "
            f"{printable(beyond.path)})"
        )
        return scan_dataset(paths, prefix=prefix, nc=nc, is_new=True, told=told)
    if nc is not None:
        check_classes(result, nc)
    return result


class ClassBeyond(NamedTuple):
    """A class number that the data file does not declare; line is 0 where the file (now) holds none such."""

    path: str
    line: int
    cls: int
    rows: int  # with such classes in the whole set


def class_beyond(result: ScanResult, nc: int) -> ClassBeyond | None:
    """The first class number beyond nc - 1 of a set, or None."""
    classes = result.labels.values[:, 0]
    beyond = np.flatnonzero(classes >= nc)
    if not len(beyond):
        return None
    path = result.label_files[int(np.searchsorted(result.labels.offsets, beyond[0], side="right")) - 1]
    line, cls = 0, int(classes[beyond[0]])
    with contextlib.suppress(OSError):
        label = read_label_file(path)
        line = next((int(number) for number in label.lines[label.boxes[:, 0] == cls]), 0)
    return ClassBeyond(path, line, cls, len(beyond))


def check_classes(result: ScanResult, nc: int) -> None:
    """Raise ValueError naming file, line and class when a label holds a class id beyond nc - 1."""
    beyond = class_beyond(result, nc)
    if beyond is None:
        return
    where = f"{beyond.path}, line {beyond.line}" if beyond.line else beyond.path
    raise ValueError(
        f"{where}: class {beyond.cls}, but the data file declares {nc} classes "
        f"(0 to {nc - 1}); {beyond.rows} row(s) are affected. Correct the labels, or names and nc in the data file"
    )


def require_objects(result: ScanResult, prefix: str = "") -> None:
    """Raise ValueError when no picture has an object: nothing could be learnt. Says where labels were looked for."""
    counts = result.counts
    if counts.objects:
        return
    if counts.missing:
        found = f"no label file found for {counts.missing} of {counts.used} pictures, the others are empty"
        if counts.missing == counts.used:
            found = f"no label file found for any of the {counts.used} pictures"
        raise ValueError(
            f"{prefix}{found}; the first one was expected at {printable(result.notes.first_missing)}. A label file has "
            "the name of its picture with the suffix .txt, in the folder 'labels' in place of the last folder 'images'"
        )
    raise ValueError(f"{prefix}the label files of all {counts.used} pictures are empty, nothing could be learnt")


def _note_network(path: str, notes: ScanNotes, earlier: ScanNotes, prefix: str) -> None:
    """Note the network disk that a picture lies on; warn of it once."""
    mount = network_mount(path)
    if mount is None:
        return
    notes.network, notes.network_point = mount.kind, mount.point
    if notes.network_point != earlier.network_point:
        LOGGER.warning(
            f"{prefix}the pictures lie on a network disk ({mount.kind} at {printable(mount.point)}): reading them may "
            "take longer than training; copy them to a local disk, or keep them in memory with --cache ram"
        )


def _find_labels(images: Sequence[str], notes: ScanNotes, earlier: ScanNotes, prefix: str) -> list[str]:
    """Label file of each picture: the expected one, one spelt alike, or the expected path where there is none."""
    expected = label_paths(images)
    finder = LabelFinder()
    exact = {path for path in set(expected) if finder.has(path)}
    found = []
    for path in expected:
        variant = finder.find(path) if path not in exact else None
        if variant is not None and variant not in exact:  # else it is the label of another picture
            notes.respelt.append((path, variant))
            found.append(variant)
        else:
            found.append(path)
            if path not in exact and not notes.first_missing:
                notes.first_missing = path
    if fresh := _without(notes.respelt, earlier.respelt):
        LOGGER.warning(
            f"{prefix}{len(fresh)} label file(s) found under a name that differs in case or Unicode form from "
            f"the picture's, such as {printable(fresh[0][1])}"
        )
    return found


def _without(items: Sequence[Item], told: Sequence[Item]) -> list[Item]:
    """The items that were not told, in their order."""
    known = set(told)
    return [item for item in items if item not in known]


def _assemble(
    listing: ImageList, label_files: list[str], records: Sequence[Record], notes: ScanNotes, sizes: Sequence[int]
) -> ScanResult:
    """Join the records of the usable pictures into tables and add up the counts."""
    problems = [Problem(path, 0, f"{LEFT_OUT}: {reason}", "cannot be read") for path, reason in listing.left_out]
    usable: list[int] = []
    for index, record in enumerate(records):
        image, label = listing.files[index], label_files[index]
        if record.error:
            problems.append(Problem(image, 0, f"{LEFT_OUT}: {record.error}", record.error_kind))
            continue
        usable.append(index)
        for line, where, kind, text in record.remarks:
            problems.append(Problem(image if where == "image" else label, line, text, kind))
    problems.sort(key=lambda problem: not problem.is_left_out)  # the printed part is limited
    kept = [records[index] for index in usable]
    labels = RowTable.from_pieces([record.boxes for record in kept], 5)
    row_counts = np.array([(r.refused, r.clipped, r.duplicates) for r in kept], np.int64).reshape(-1, 3)
    refused, clipped, duplicates = row_counts.sum(0).tolist()
    missing = sum(not record.has_label for record in kept)
    counts = ScanCounts(
        used=len(kept),
        empty=sum(not len(record.boxes) for record in kept) - missing,
        missing=missing,
        left_out=len(records) - len(kept) + len(listing.left_out),
        rows_refused=refused,
        rows_clipped=clipped,
        duplicates=duplicates,
        objects=len(labels.values),
    )
    uses = Counter(label_files[i] for i in usable if records[i].has_label)
    notes.shared = sorted(path for path, count in uses.items() if count > 1)
    return ScanResult(
        TextTable(listing.files[i] for i in usable),
        TextTable(label_files[i] for i in usable),
        labels,
        RowTable.from_pieces([record.points for record in kept], 2),
        np.concatenate([np.zeros(0, np.int64), *(record.point_counts for record in kept)]),
        np.array([(record.width, record.height) for record in kept], np.int64).reshape(-1, 2),
        counts,
        problems,
        row_counts,
        notes,
        np.array([sizes[i] for i in usable], np.int64),
    )


def _report(result: ScanResult, listing: ImageList, prefix: str, cache_age_s: float, told: ScanResult | None) -> None:
    """Log every problem (up to a limit), remarks on the whole set, and one summary line."""
    is_same = told is not None and result.im_files.is_equal(told.im_files)
    if not is_same:
        listing.report(prefix)
    problems = _without(result.problems, told.problems if told is not None else ())
    if len(problems) < len(result.problems):
        LOGGER.info(f"{prefix}{len(result.problems) - len(problems)} problem(s) with files of both sets are told above")
    for problem in problems[:MAX_NAMED]:
        LOGGER.warning(f"{prefix}{problem}")
    if len(problems) > MAX_NAMED:
        hidden = len(problems) - MAX_NAMED
        LOGGER.warning(f"{prefix}... and {hidden} more, all named in data_report.json of the run's folder")
    if shared := _without(result.notes.shared, told.notes.shared if told is not None else ()):
        LOGGER.warning(
            f"{prefix}{len(shared)} label file(s) shared by pictures of the same stem, such as {printable(shared[0])}"
        )
    if not is_same:
        _say_background(result.counts, result.notes, prefix)
    notes = result.notes
    source = f", {notes.from_cache} from the label cache of {_age(cache_age_s)} ago" if notes.from_cache else ""
    LOGGER.info(f"{prefix}{result.counts} ({notes.seconds:.1f} s{source})")


def _say_background(counts: ScanCounts, notes: ScanNotes, prefix: str) -> None:
    """Warn where there are no labels, or few."""
    if counts.missing and counts.missing == counts.used:
        LOGGER.warning(
            f"{prefix}no label file found at all; the first one was expected at {printable(notes.first_missing)}"
        )
    elif counts.background > BACKGROUND_SHARE * counts.used:
        first = f", the first one expected at {printable(notes.first_missing)}" if counts.missing else ""
        LOGGER.warning(
            f"{prefix}{counts.background} of {counts.used} pictures hold no object: {counts.empty} empty label files, "
            f"{counts.missing} without a label file{first}; is that meant?"
        )


def _age(seconds: float) -> str:
    """A time span in its largest fitting unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
