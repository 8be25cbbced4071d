"""The outcome for every picture and label file of a set: remembered, or read in threads and stored on the way."""

from __future__ import annotations

import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import numpy as np

from utils.data.headers import peek_jpeg
from utils.data.images import MIN_SIDE, ImageError, check_image, check_pixels
from utils.data.labels import LabelFile, read_label_file
from utils.data.listing import entry_hint
from utils.data.scan_cache import NO_POINTS, Record, Remark, ScanCache, Stamp
from utils.log import progress

CHUNK = 64  # files handed to a thread at once
MAX_WAITING = 64  # chunks
SAVE_INTERVAL_S = 30.0  # a long scan stores what it has this often
SAVE_SHARE = 0.05  # and spends no more than this share of its time on it

Result = TypeVar("Result")
_SIZE = re.compile(r"^\d+ x \d+ pixels, ")  # what differs between pictures that are refused for the same reason


class FileScan:
    """The scan of single files: what is remembered is looked up, the rest is read in threads and stored on the way."""

    def __init__(
        self,
        images: Sequence[str],
        labels: Sequence[str],
        cache_file: Path | None,
        prefix: str,
        *,
        is_new: bool = False,
    ) -> None:
        self.images, self.labels, self.prefix = images, labels, prefix
        self.cache = ScanCache(cache_file, prefix, is_new=is_new)
        self.stamps: list[Stamp] = []
        self.records: list[Record | None] = []
        self.remembered = 0

    def run(self, threads: int) -> list[Record]:
        """Outcome of every picture, in order."""
        with ThreadPoolExecutor(threads) as pool:
            self.stamps = [stamp for chunk in _chunked_map(pool, Stamp.of, self.images, self.labels) for stamp in chunk]
            self.records = list(map(self.cache.get, self.images, self.labels, self.stamps))
            todo = [i for i, record in enumerate(self.records) if record is None]
            self.remembered = len(self.records) - len(todo)
            if todo:
                self._read(pool, todo)
        if todo or len(self.cache) != len(self.records):
            self._save()
        return self.records  # type: ignore[return-value]

    def _read(self, pool: ThreadPoolExecutor, todo: Sequence[int]) -> None:
        """Scan the pictures of an index list; stores what is there now and then, and when the scan is broken off."""
        images = [self.images[i] for i in todo]
        labels = [self.labels[i] if self.stamps[i].has_label else None for i in todo]
        position, next_save = 0, time.monotonic() + SAVE_INTERVAL_S
        with progress(total=len(todo), desc=f"{self.prefix}scanning pictures and labels", unit="img") as bar:
            try:
                with closing(_chunked_map(pool, scan_one, images, labels)) as chunks:
                    for chunk in chunks:
                        for record in chunk:
                            self.records[todo[position]] = record
                            position += 1
                        bar.update(len(chunk))
                        if time.monotonic() >= next_save:
                            next_save = time.monotonic() + max(SAVE_INTERVAL_S, self._save() / SAVE_SHARE)
            except BaseException:
                self._save()
                raise

    def _save(self) -> float:
        """Store what is known; returns the seconds it took."""
        start = time.monotonic()
        self.cache.save(self.images, self.labels, self.stamps, self.records)
        return time.monotonic() - start


def _chunked_map(
    pool: ThreadPoolExecutor, function: Callable[..., Result], *columns: Sequence[object]
) -> Iterator[list[Result]]:
    """Results of a function over columns, CHUNK at a time and in order; few chunks wait in memory at any time."""

    def run(start: int) -> list[Result]:
        return [function(*row) for row in zip(*(column[start : start + CHUNK] for column in columns), strict=True)]

    starts = range(0, len(columns[0]), CHUNK)
    waiting: deque[Future[list[Result]]] = deque()
    try:
        for start in starts:
            waiting.append(pool.submit(run, start))
            if len(waiting) > MAX_WAITING:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def scan_one(image: str, label: str | None) -> Record:
    """Judge one picture and its label file (None: there is none); never raises for what the files contain."""
    try:
        record = _look_at(_regular(image))
    except ImageError as error:
        reason = str(error).removeprefix(f"{image}: ")
        return Record.refusal(_SIZE.sub("", reason), reason)
    except OSError as error:
        return Record.refusal("file cannot be opened", _short(error, image), is_lasting=False)
    except Exception as error:  # a decoder may fail in any way; that costs this file only
        return Record.refusal("decoder failed", f"{type(error).__name__}: {error}")
    if label is None:
        record.has_label = False
        return record
    try:
        parsed = read_label_file(_regular(label))
    except OSError as error:
        reason = f"label file {label} cannot be read: {_label_fault(label, error)}"
        return Record.refusal("file cannot be opened", reason, is_lasting=False)
    if parsed.error:
        return Record.refusal(parsed.error_kind, f"label file {label}: {parsed.error}")
    return _with_label(record, parsed)


def _look_at(image: str) -> Record:
    """Size of a picture, from its header where that is enough. Raises ImageError or OSError."""
    header = peek_jpeg(image)
    if header is not None:
        check_pixels(image, header.width, header.height)
    if header is not None and min(header.width, header.height) >= MIN_SIDE:
        return Record(width=header.width, height=header.height)
    facts = check_image(image)
    record = Record(width=facts.width, height=facts.height)
    if facts.remark:
        record.remarks = [Remark(0, "image", "odd picture", facts.remark)]
    return record


def _regular(path: str) -> str:
    """Return a path whose opening cannot hang; raises OSError for pipes, devices and what is not there."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder says so itself
        raise OSError(0, "a pipe, socket or device, not a file", path)
    return path


def _label_fault(label: str, error: OSError) -> str:
    is_dead = isinstance(error, FileNotFoundError) and os.path.islink(label)
    return "a link to a file that is not there" if is_dead else str(error.strerror)


def _short(error: OSError, path: str) -> str:
    if isinstance(error, IsADirectoryError):
        return "is a folder, not a picture; folders are named in the data file, as in train: [list.txt, folder]"
    if isinstance(error, FileNotFoundError):
        hint = entry_hint(path)
        return f"file is not there (or a dead link){f'; {hint}' if hint else ''}"
    return f"cannot be opened: {error.strerror or error}"


def _with_label(record: Record, parsed: LabelFile) -> Record:
    if len(parsed.boxes):
        record.boxes = parsed.boxes
        record.point_counts = np.array([len(points) for points in parsed.segments], np.int64)
        if parsed.has_polygons:
            record.points = np.concatenate([NO_POINTS, *parsed.segments])
    record.refused, record.clipped, record.duplicates = parsed.refused, parsed.clipped, parsed.duplicates
    if parsed.problems:
        remarks = [Remark(problem.line, "label", problem.kind, problem.text) for problem in parsed.problems]
        record.remarks = [*record.remarks, *remarks]
    return record
