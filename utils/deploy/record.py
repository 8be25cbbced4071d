"""The record of a run's folder: which files detection wrote there, of which input, and how they looked.

A file is detection's own only if the record names it and it still looks as recorded. Nothing else is ever replaced or
deleted. The record grows by a line for each file, ahead of the file, so a kill leaves none that it does not know.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import threading
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from utils.deploy.naming import OutputNames
from utils.deploy.tables import naming, shown_file
from utils.files import append_line, atomic_write

RECORD_NAME = ".written.jsonl"
RECORD_FORMAT, RECORD_TITLE = 1, "yolov9 detection"
RECORD_HEADER = {
    "format": RECORD_FORMAT,
    RECORD_TITLE: "files written here, with size and CRC-32; what is not listed is never replaced",
}
MAPS, MEDIA = "maps", "media"  # kinds of files besides LABELS and CROPS
REMEDY = "choose another --project or --name"
NOT_RECORDED = "not in the record of this folder"
_numbers = itertools.count()  # of files under way

Look = tuple[int, int | None]  # size in bytes and CRC-32, which videos have none of


@dataclass(frozen=True)
class Input:
    """What is detected in.

    Attributes:
        key: what tells that it is the same input as in an earlier run.
        title: how it is named in lines and tables.
        relative: its place below the source.
        is_video: it may have several frames.
    """

    key: str
    title: str
    relative: Path
    is_video: bool


@dataclass
class _Entry:
    """What the record knows of an input: each file with all looks it may have, and how tables name it.

    ``titles`` are those of all runs, the latest at the end: each run renews only the tables that it writes.
    """

    key: str
    titles: list[str]
    names: OutputNames
    files: dict[str, tuple[str, set[Look]]] = field(default_factory=dict)  # place → kind and looks


class Record:
    """The record of a folder as earlier runs left it, to which this run adds.

    Raises:
        ValueError: a file of this name that is no record, or one of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / RECORD_NAME
        self.tables: set[str] = set()
        self._entries: dict[str, _Entry] = {}
        self._numbers: dict[str, int] = {}  # by key, in the file
        self._items: list[_Entry] = []
        self._lock = threading.Lock()  # feature maps are written by another thread than the rest
        if os.path.lexists(self.path):
            self._read()

    def _read(self) -> None:
        entries: list[_Entry] = []
        lines = _json_lines(self.path)
        header = next(lines, {})
        if RECORD_TITLE not in header:
            raise ValueError(f"--exist-ok: {self.path} is not the record of a detection; {REMEDY}")
        if header.get("format") != RECORD_FORMAT:
            told = f"is from another version (its format is {header.get('format')}, here {RECORD_FORMAT} is read)"
            raise ValueError(f"--exist-ok: {self.path} {told}; {REMEDY}")
        for content in lines:
            try:
                if "input" in content:
                    media, stem, fallback = map(Path, content["names"])
                    names = OutputNames(media, stem, bool(content["is_video"]), fallback)
                    entries.append(_Entry(content["input"], list(content["titles"]), names))
                    self._entries[content["input"]] = entries[-1]
                elif "table" in content:
                    self.tables.add(content["table"])
                elif "file" in content:
                    files = entries[content["of"]].files
                    kind, looks = files.setdefault(content["file"], (content["kind"], set()))
                    looks.add((content["size"], content["crc"]))
            except (KeyError, IndexError, TypeError, ValueError):
                continue  # half a line, or from a later version: what it names is not ours then

    def known(self, inputs: Sequence[Input]) -> list[OutputNames | None]:
        """Return the names that an earlier run gave to each input; None for one that is new."""
        found = [self._entries.get(one.key) for one in inputs]
        pairs = zip(found, inputs, strict=True)
        return [entry.names if entry and entry.names.is_video == one.is_video else None for entry, one in pairs]

    def others(self, inputs: Sequence[Input]) -> list[OutputNames]:
        """Return the names of inputs of earlier runs that are not among ``inputs``."""
        keys = {one.key for one in inputs}
        return [entry.names for entry in self._entries.values() if entry.key not in keys]

    def titles(self, inputs: Sequence[Input]) -> list[str]:
        """Return the titles of inputs for the tables: the key where another input ever had the title.

        Inputs of one title in this run (a stream that is given twice) share it.
        """
        owners: dict[str, set[str]] = {}
        for entry in self._entries.values():
            for title in entry.titles:
                owners.setdefault(shown_file(title), set()).add(entry.key)
        for one in inputs:
            owners.get(shown_file(one.title), set()).discard(one.key)
        return [one.key if owners.get(shown_file(one.title)) else one.title for one in inputs]

    def replaced_titles(self, inputs: Sequence[Input]) -> set[str]:
        """Return all names that earlier runs gave ``inputs`` in the tables."""
        return {title for one in inputs if one.key in self._entries for title in self._entries[one.key].titles}

    def earlier_files(self, inputs: Sequence[Input], kinds: Collection[str]) -> Iterator[str]:
        """Yield the places of files of ``kinds`` that earlier runs made of ``inputs`` and that are still there."""
        for one in inputs:
            entry = self._entries.get(one.key)
            for place, (kind, _) in entry.files.items() if entry else ():
                if kind in kinds and os.path.lexists(self.folder / place):
                    yield place

    def names_any_below(self, folder: str) -> bool:
        """Return whether a file in a folder below that of the run is known."""
        return any(place.startswith(f"{folder}/") for entry in self._entries.values() for place in entry.files)

    def is_of(self, key: str, place: str) -> bool:
        """Return whether an existing file was made of this input by an earlier run, and not changed since."""
        entry = self._entries.get(key)
        if entry is None or place not in entry.files:
            return False
        return _looks_like(self.folder / place, entry.files[place][1])

    def begin(self, inputs: Sequence[Input], outputs: Sequence[OutputNames], tables: Collection[str]) -> None:
        """Write the record anew, without files that are gone, with the inputs and tables of this run."""
        self.tables |= set(tables)
        for one, names in zip(inputs, outputs, strict=True):
            known = self._entries.get(one.key)
            titles = [title for title in known.titles if title != one.title] if known else []
            self._entries[one.key] = _Entry(one.key, [*titles, one.title], names, known.files if known else {})
        self._items = [self._entries[one.key] for one in inputs]
        self._numbers = {key: number for number, key in enumerate(self._entries)}
        with atomic_write(self.path) as temporary, open(temporary, "w", encoding="utf-8") as handle:
            handle.writelines(json.dumps(content) + "\n" for content in self._contents())

    def _contents(self) -> Iterator[dict[str, object]]:
        yield RECORD_HEADER
        yield from ({"table": name} for name in sorted(self.tables))
        for number, entry in enumerate(self._entries.values()):
            names = [path.as_posix() for path in (entry.names.media, entry.names.stem, entry.names.fallback)]
            yield {"input": entry.key, "titles": entry.titles, "names": names, "is_video": entry.names.is_video}
            for place, (kind, looks) in list(entry.files.items()):
                if not os.path.lexists(self.folder / place):
                    del entry.files[place]
                    continue
                yield from (_line(number, kind, place, look) for look in looks)

    def claim(self, item: int, place: Path) -> Path:
        """Return the path of a file of this run, which is not there yet or an earlier run's of the same input.

        Raises:
            OSError: another file is there.
        """
        path = self.folder / place
        if os.path.lexists(path) and not self.is_of(self._items[item].key, place.as_posix()):
            foreign = f"a file of this name is {NOT_RECORDED} as it looks now"
            reason = "a folder has this name" if path.is_dir() else foreign
            raise OSError(f"{path} could not be written: {reason}; {REMEDY}")
        return path

    def note(self, item: int, kind: str, place: Path, data: bytes | Path) -> None:
        """Add a file: what will be written, or the complete file that will get this name (a video)."""
        look = (data.stat().st_size, None) if isinstance(data, Path) else (len(data), zlib.crc32(data))
        number = self._numbers[self._items[item].key]
        with self._lock:
            append_line(self.path, json.dumps(_line(number, kind, place.as_posix(), look)))

    def put(self, item: int, kind: str, place: Path, data: bytes) -> None:
        """Note and write a file.

        Raises:
            OSError: it cannot be written, or another file is there.
        """
        path = self.claim(item, place)
        self.note(item, kind, place, data)
        replace_file(path, data)

    def remove_earlier_media(self, item: int, written: Path) -> None:
        """Delete what earlier runs wrote as annotated picture of an input under another name than ``written``."""
        files = self._items[item].files
        for place, (kind, looks) in list(files.items()):
            if kind == MEDIA and place != written.as_posix() and _looks_like(self.folder / place, looks):
                (self.folder / place).unlink()
                del files[place]


def _line(number: int, kind: str, place: str, look: Look) -> dict[str, object]:
    return {"of": number, "kind": kind, "file": place, "size": look[0], "crc": look[1]}


def _json_lines(path: Path) -> Iterator[dict[str, object]]:
    with open(path, encoding="utf-8", errors="replace") as handle:
        for line in handle:
            try:
                content = json.loads(line)
            except ValueError:
                content = None
            yield content if isinstance(content, dict) else {}


def _looks_like(path: Path, looks: set[Look]) -> bool:
    """Return whether a plain file has one of these sizes and checksums."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return False
        of_size = {crc for size, crc in looks if size == status.st_size}
        return None in of_size or (bool(of_size) and zlib.crc32(path.read_bytes()) in of_size)
    except OSError:
        return False


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a passing name and rename it.

    Not synchronised with the disk, unlike the writing of checkpoints: there may be thousands of files, and they can be
    made again. The passing name is short because the final one may be as long as the system allows, and that of no
    other file because several threads write into a folder.
    """
    partial = path.with_name(f".partial-{os.getpid()}-{next(_numbers)}")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
