"""The label cache: outcomes of a scan, stored per file as plain arrays (NPZ without pickle).

An entry holds as long as size and time of change of both the picture and its label file are the same. The file lies
beside the label folder (`labels/train.scan.cache`), or in the user's cache folder where that cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.data.tables import RowTable, TextTable, offsets_of
from utils.files import atomic_write
from utils.log import LOGGER

FORMAT_VERSION = 1  # raise it whenever the rules for pictures or rows change
SUFFIX = ".scan.cache"


class Stamp(NamedTuple):
    """Size and time of change of a picture and its label file; -1 where there is no file."""

    image_size: int
    image_time_ns: int
    label_size: int
    label_time_ns: int

    @classmethod
    def of(cls, image: str, label: str) -> Stamp:
        """Read the stamps from the file system."""
        return cls(*_stat(image), *_stat(label))


def _stat(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return -1, -1
    return status.st_size, status.st_mtime_ns


@dataclass
class Record:
    """Outcome for one picture; error is the reason for leaving it out, '' for usable ones.

    Outcomes that may change without the file changing (permissions, a disk that is away) are not lasting: not stored.
    """

    width: int = 0
    height: int = 0
    error: str = ""
    has_label: bool = True
    is_lasting: bool = True
    refused: int = 0
    clipped: int = 0
    duplicates: int = 0
    boxes: np.ndarray = field(default_factory=lambda: np.zeros((0, 5), np.float32))
    points: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.float32))
    point_counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    remarks: list[tuple[int, str, str]] = field(default_factory=list)  # (line, "image" or "label", text)

    @classmethod
    def refusal(cls, reason: str, *, is_lasting: bool = True) -> Record:
        """Record of a picture that is left out."""
        return cls(error=reason, has_label=False, is_lasting=is_lasting)


def cache_path(paths: str | Path | Sequence[str | Path], label_files: Sequence[str]) -> Path | None:
    """Where the cache of a data set belongs: beside its list file, else beside the folder of its first label file."""
    sources = [paths] if isinstance(paths, (str, Path)) else list(paths)
    first = Path(os.path.abspath(sources[0]))
    if first.is_file():
        return first.with_name(first.stem + SUFFIX)
    if not label_files:
        return None
    folder = Path(label_files[0]).parent
    return folder.with_name(folder.name + SUFFIX)


def _user_path(path: Path) -> Path:
    """Substitute in the user's cache folder; the name is derived from the wanted path."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return Path(base) / "yolov9" / f"{path.name.removesuffix(SUFFIX)}-{digest}{SUFFIX}"


class ScanCache:
    """Entries of earlier scans, looked up by picture, label file and stamp."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._index: dict[str, int] = {}
        self._arrays: dict[str, np.ndarray] = {}
        if path is not None:
            for place in (path, _user_path(path)):
                if self._load(place):
                    break

    def __len__(self) -> int:
        return len(self._index)

    def _load(self, path: Path) -> bool:
        try:
            with np.load(path, allow_pickle=False) as stored:
                if "version" not in stored.files or int(stored["version"]) != FORMAT_VERSION:
                    return False
                arrays = {name: stored[name] for name in stored.files}
            images = _table(arrays, "images")
            self._labels = _table(arrays, "labels")
            self._boxes = RowTable(arrays["boxes"], arrays["box_offsets"])
            self._points = RowTable(arrays["points"], arrays["point_offsets"])
            self._texts = json.loads(arrays["texts"].tobytes().decode("utf-8"))
            self._index = {image: i for i, image in enumerate(images)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, json.JSONDecodeError):
            self._index = {}
            return False
        self._arrays = arrays
        return True

    def get(self, image: str, label: str, stamp: Stamp) -> Record | None:
        """The stored record of a picture, or None if there is none or one of the files changed."""
        i = self._index.get(image)
        if i is None or stamp.image_size < 0 or self._labels[i] != label:
            return None
        if tuple(self._arrays["stamps"][i]) != stamp:
            return None
        width, height, has_label, refused, clipped, duplicates = (int(v) for v in self._arrays["figures"][i])
        error, remarks = self._texts.get(str(i), ("", []))
        start, stop = self._boxes.offsets[i : i + 2]
        return Record(
            width, height, error, bool(has_label), True, refused, clipped, duplicates,
            self._boxes[i], self._points[i], self._arrays["point_counts"][start:stop],
            [tuple(remark) for remark in remarks],
        )  # fmt: skip

    def save(
        self,
        images: Sequence[str],
        labels: Sequence[str],
        stamps: Sequence[Stamp],
        records: Sequence[Record],
        prefix: str = "",
    ) -> None:
        """Write all records; where no place can be written one line says so."""
        if self.path is None:
            return
        kept = [i for i, record in enumerate(records) if record.is_lasting]
        columns = ([column[i] for i in kept] for column in (images, labels, stamps, records))
        arrays = _to_arrays(*columns)
        for place in (self.path, _user_path(self.path)):
            try:
                if place != self.path:
                    place.parent.mkdir(parents=True, exist_ok=True)
                _refuse_locked(place.parent)
                with atomic_write(place) as temporary, open(temporary, "wb") as file:
                    np.savez(file, **arrays)
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            if place != self.path:
                LOGGER.info(f"{prefix}label cache kept in {place}: {self.path.parent} cannot be written")
            return
        LOGGER.info(f"{prefix}label cache {self.path} cannot be written ({reason}); the next start scans again")


def _refuse_locked(folder: Path) -> None:
    """Raise PermissionError for a folder that nobody may write to; a superuser would not notice by trying."""
    if not os.stat(folder).st_mode & 0o222:
        raise PermissionError(13, "folder is read-only")


def _to_arrays(
    images: Sequence[str], labels: Sequence[str], stamps: Sequence[Stamp], records: Sequence[Record]
) -> dict[str, np.ndarray]:
    """Flat arrays of all records, by the names that `ScanCache._load` reads."""
    boxes = RowTable.from_pieces([record.boxes for record in records], 5)
    points = RowTable.from_pieces([record.points for record in records], 2)
    texts = {str(i): (r.error, r.remarks) for i, r in enumerate(records) if r.error or r.remarks}
    figures = [(r.width, r.height, r.has_label, r.refused, r.clipped, r.duplicates) for r in records]
    arrays = {
        "version": np.array(FORMAT_VERSION),
        "stamps": np.array(stamps, np.int64).reshape(-1, 4),
        "figures": np.array(figures, np.int64).reshape(-1, 6),
        "boxes": boxes.values,
        "box_offsets": boxes.offsets,
        "points": points.values,
        "point_offsets": points.offsets,
        "point_counts": np.concatenate([np.zeros(0, np.int64), *(r.point_counts for r in records)]),
        "texts": np.frombuffer(json.dumps(texts).encode("utf-8"), np.uint8),
    }
    for name, values in (("images", images), ("labels", labels)):
        table = TextTable(values)
        arrays[name] = table.blob
        arrays[f"{name}_lengths"] = np.diff(table.offsets)
    return arrays


def _table(arrays: dict[str, np.ndarray], name: str) -> list[str]:
    blob, offsets = arrays[name].tobytes(), offsets_of(arrays[f"{name}_lengths"].tolist())
    return [os.fsdecode(blob[start:stop]) for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
