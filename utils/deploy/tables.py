"""Tables of all detections of a run: ``results.txt`` always, ``detections.csv`` and ``detections.json`` on demand.

Rows are written as they come, so memory does not grow with a run, and what is on disk can be read at any time, also
after there was no more room.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from utils.files import FULL

RESULTS_NAME, CSV_NAME, JSON_NAME = "results.txt", "detections.csv", "detections.json"
COLUMNS = ("file", "frame", "class", "name", "confidence", "x1", "y1", "x2", "y2")
RESULTS_HEADER = "# " + "\t".join(COLUMNS)


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
    """The tables of one run; close them at the end.

    Of tables that are there already the rows stay, but for those of the inputs ``replaced`` (as they name them).

    Raises:
        ValueError: a table cannot be read; then all are as they were.
        OSError: one cannot be written.
    """

    def __init__(
        self, folder: Path, *, save_csv: bool = False, save_json: bool = False, replaced: Collection[str] = ()
    ) -> None:
        kinds: list[type[_Table]] = [_JsonTable] if save_json else []
        kinds += [_CsvTable] if save_csv else []
        self._tables: list[_Table] = []
        with ExitStack() as stack:
            for kind in (*kinds, _TextTable):  # the one that is most particular about what is there comes first
                self._tables.append(kind(folder, frozenset(replaced)))
                stack.callback(self._tables[-1].close)
            stack.pop_all()

    def add(self, rows: list[Row]) -> None:
        """Append the detections of a frame to every table, or to none.

        Raises:
            OSError: there is no room; the tables hold whole frames, the same ones.
        """
        ends = [table.end for table in self._tables]
        try:
            for table in self._tables if rows else ():
                table.add(rows)
        except BaseException:
            for table, end in zip(self._tables, ends, strict=True):
                table.cut(end)
            raise

    def close(self) -> None:
        """Close all tables, even where one fails."""
        with ExitStack() as stack:
            for table in self._tables:
                stack.callback(table.close)


class _Table:
    """A table in a file that is complete after every frame: ``head``, rows, ``tail``."""

    name, head, tail = "", b"", b""

    def __init__(self, folder: Path, replaced: Collection[str]) -> None:
        self.path = folder / self.name
        partial = folder / f".partial-{os.getpid()}-{self.name}"
        with naming(self.path):
            try:
                with open(partial, "wb") as handle:
                    handle.write(self.head)
                    if self.path.is_file():
                        handle.writelines(self.kept(replaced))
                    self.end = handle.tell()  # of the rows
                    handle.write(self.tail)
                os.replace(partial, self.path)
            finally:
                partial.unlink(missing_ok=True)
            self._handle = open(self.path, "r+b", buffering=0)  # noqa: SIM115 - closed by close()

    def kept(self, replaced: Collection[str]) -> Iterator[bytes]:
        """Yield the rows that are in the file, without those of the inputs ``replaced``."""
        raise NotImplementedError

    def encoded(self, rows: list[Row]) -> bytes:
        """Return ``rows`` as they are written behind those that are there."""
        raise NotImplementedError

    def add(self, rows: list[Row]) -> None:
        """Write over the tail, which comes again behind the rows."""
        data = self.encoded(rows)
        with naming(self.path):
            self._handle.seek(self.end)
            rest = memoryview(data + self.tail)
            while rest:  # where a part found room, the next try tells why the others did not
                rest = rest[self._handle.write(rest) :]
        self.end += len(data)

    def cut(self, end: int) -> None:
        """Take back what was written behind ``end``, also a part of it."""
        with suppress(OSError):
            self._handle.truncate(end)
            self._handle.seek(end)
            self._handle.write(self.tail)
        self.end = end

    def close(self) -> None:
        """Close the file, which is complete."""
        with naming(self.path):
            self._handle.close()


class _TextTable(_Table):
    name, head = RESULTS_NAME, (RESULTS_HEADER + "\n").encode()

    def kept(self, replaced: Collection[str]) -> Iterator[bytes]:
        titles = {_encoded(shown_file(title)) for title in replaced}
        with open(self.path, "rb") as handle:
            for line in handle:
                whole = line.rstrip(b"\n") + b"\n"
                if whole != self.head and line.split(b"\t")[0] not in titles:
                    yield whole

    def encoded(self, rows: list[Row]) -> bytes:
        return _encoded("".join(map(_text_line, rows)))


class _CsvTable(_Table):
    name, head = CSV_NAME, (",".join(COLUMNS) + "\n").encode()

    def kept(self, replaced: Collection[str]) -> Iterator[bytes]:
        with open(self.path, encoding="utf-8", errors="surrogateescape", newline="") as handle:
            try:
                for fields in csv.reader(handle):
                    if fields and tuple(fields) != COLUMNS and fields[0] not in replaced:
                        yield _encoded(_csv_line(fields))
            except csv.Error as error:
                raise ValueError(f"--exist-ok: {self.path}: {error}; choose another --project or --name") from error

    def encoded(self, rows: list[Row]) -> bytes:
        fields = ((r.file, r.frame, r.number, r.name, f"{r.confidence:.6g}", *r.box) for r in rows)
        return _encoded("".join(map(_csv_line, fields)))


class _JsonTable(_Table):
    name, head, tail = JSON_NAME, b"[", b"\n]\n"

    def kept(self, replaced: Collection[str]) -> Iterator[bytes]:
        lead = b"\n"
        with open(self.path, encoding="utf-8", errors="surrogateescape") as handle:
            for number, line in enumerate(handle, start=1):
                text = line.strip().removesuffix(",")
                if text in ("", "[", "]"):
                    continue
                try:
                    file = json.loads(text)["file"]
                except (ValueError, TypeError, KeyError) as error:
                    told = f"--exist-ok: {self.path} line {number} is not as detection writes it"
                    raise ValueError(f"{told}; choose another --project or --name") from error
                if file not in replaced:
                    yield lead + _encoded(text, in_json=True)
                    lead = b",\n"

    def encoded(self, rows: list[Row]) -> bytes:
        lines = ",\n".join(json.dumps(_as_object(row), ensure_ascii=False) for row in rows)
        return (b",\n" if self.end > len(self.head) else b"\n") + _encoded(lines, in_json=True)


def is_table(path: Path) -> bool:
    """Return whether a file begins like the table whose name it has."""
    heads = {table.name: table.head for table in (_TextTable, _CsvTable, _JsonTable)}
    if path.is_symlink() or not path.is_file():
        return False
    with naming(path), open(path, "rb") as handle:
        return handle.read(len(heads[path.name])) == heads[path.name]


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


def _csv_line(fields: Sequence[object]) -> str:
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
