"""The label cache: outcomes of a scan, stored per file as plain arrays (NPZ without pickle).

An entry holds as long as size and times of change of both the picture and its label file are the same. The file lies
beside the label folder (`labels/train.scan.cache`), or in the user's cache folder where that cannot be written.
A file of another format, a damaged one, or one that contradicts itself is passed over with one line and replaced.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.data.filesystem import plain_path
from utils.data.scan_check import checksum, contradiction
from utils.data.tables import RowTable, TextTable, offsets_of
from utils.files import atomic_write
from utils.log import LOGGER

FORMAT_VERSION = 4  # raise it whenever the rules for pictures or rows change
SUFFIX = ".scan.cache"
NO_FILE, UNREACHABLE = -1, -2  # in place of a size: nothing there, or nothing that can be read
UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EIO)


NO_BOXES = np.zeros((0, 5), np.float32)  # shared by all pictures without objects
NO_POINTS = np.zeros((0, 2), np.float32)
NO_COUNTS = np.zeros(0, np.int64)
for _empty in (NO_BOXES, NO_POINTS, NO_COUNTS):
    _empty.flags.writeable = False


class Stamp(NamedTuple):
    """Size and times of change of a picture and its label file; -1 where there is no file.

    Two times each: that of the contents, and that of the entry in the folder, which copying tools cannot set back.
    """

    image_size: int
    image_time_ns: int
    image_entry_ns: int
    label_size: int
    label_time_ns: int
    label_entry_ns: int

    @classmethod
    def of(cls, image: str, label: str | None) -> Stamp:
        """Read the stamps from the file system; a label of None is known not to exist."""
        return cls(*_stat(image), *((-1, -1, -1) if label is None else _stat(label, only_files=True)))

    @property
    def has_label(self) -> bool:
        """Whether there is a label file, be it one that cannot be read."""
        return self.label_size != NO_FILE


def _stat(path: str, *, only_files: bool = False) -> tuple[int, int, int]:
    """Size and times of a file; three times NO_FILE, or UNREACHABLE where something is there that cannot be read."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return (UNREACHABLE if os.path.lexists(path) else NO_FILE,) * 3  # a dead link is there
    except OSError as error:
        return (UNREACHABLE if error.errno in UNREADABLE else NO_FILE,) * 3
    except ValueError:
        return (NO_FILE,) * 3
    if only_files and not stat.S_ISREG(status.st_mode):
        return (UNREACHABLE,) * 3
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Remark(NamedTuple):
    """Something odd about a picture ("image") or its label file ("label"); line 0 is the file as a whole."""

    line: int
    where: str
    kind: str
    text: str


@dataclass(slots=True)
class Record:
    """Outcome for one picture; error is the reason for leaving it out, '' for usable ones, error_kind its sort.

    Outcomes that may change without the file changing (permissions, a disk that is away) are not lasting: not stored.
    """

    width: int = 0
    height: int = 0
    error: str = ""
    error_kind: str = ""
    has_label: bool = True
    is_lasting: bool = True
    refused: int = 0
    clipped: int = 0
    duplicates: int = 0
    boxes: np.ndarray = field(default_factory=lambda: NO_BOXES)
    points: np.ndarray = field(default_factory=lambda: NO_POINTS)
    point_counts: np.ndarray = field(default_factory=lambda: NO_COUNTS)
    remarks: Sequence[Remark] = ()

    @classmethod
    def refusal(cls, kind: str, reason: str, *, is_lasting: bool = True) -> Record:
        """Record of a picture that is left out."""
        return cls(error=reason, error_kind=kind, has_label=False, is_lasting=is_lasting)


def cache_path(paths: str | Path | Sequence[str | Path], label_files: Sequence[str]) -> Path | None:
    """Where the cache of a data set belongs: beside its list file, else beside the folder of its first label file."""
    sources = [paths] if isinstance(paths, (str, Path)) else list(paths)
    first = Path(plain_path(sources[0]))
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
    """Entries of earlier scans, looked up by picture, label file and stamp; age_s is how long ago they were written.

    is_new: begin without the entries that are stored, and replace them.
    """

    def __init__(self, path: Path | None, prefix: str = "", *, is_new: bool = False) -> None:
        self.path, self.prefix = path, prefix
        self.age_s = 0.0
        self._index: dict[str, int] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._is_told = False
        if path is not None and not is_new:
            for place in (path, _user_path(path)):
                if self._load(place):
                    break

    def __len__(self) -> int:
        return len(self._index)

    def _load(self, path: Path) -> bool:
        """Take up a stored cache; False, with a line where there is something to say, when it cannot be used."""
        try:
            written = os.stat(path).st_mtime
            with np.load(path, allow_pickle=False) as stored:
                version = int(stored["version"])
                if version != FORMAT_VERSION:
                    raise ValueError(f"format {version} of another version, this one writes {FORMAT_VERSION}")
                arrays = {name: stored[name] for name in stored.files}
            self._take(arrays)
        except FileNotFoundError:
            return False
        except Exception as error:  # a damaged file may fail anywhere in the reader; it costs a new scan, no more
            self._index = {}
            reason = str(error) if isinstance(error, (ValueError, OSError)) and str(error) else type(error).__name__
            LOGGER.info(f"{self.prefix}label cache {path} is not used, all files are scanned again ({reason[:120]})")
            return False
        self.age_s = max(time.time() - written, 0.0)
        return True

    def _take(self, arrays: dict[str, np.ndarray]) -> None:
        """Check that the arrays can be true and keep them. Raises ValueError or KeyError where they cannot."""
        reason = contradiction(arrays)
        images, self._labels = ([], []) if reason else (_table(arrays, "images"), _table(arrays, "labels"))
        if len(set(images)) != len(images):
            reason = "it holds a picture twice"
        if reason or int(arrays["checksum"]) != checksum(arrays):
            raise ValueError(reason or "its checksum does not fit")
        self._boxes = RowTable(arrays["boxes"], arrays["box_offsets"])
        self._points = RowTable(arrays["points"], arrays["point_offsets"])
        texts = json.loads(arrays["texts"].tobytes().decode("utf-8"))
        self._texts = {int(i): (e, kind, [Remark(*remark) for remark in rest]) for i, (e, kind, rest) in texts.items()}
        self._index = {image: i for i, image in enumerate(images)}
        self._arrays = arrays

    def get(self, image: str, label: str, stamp: Stamp) -> Record | None:
        """The stored record of a picture, or None if there is none or one of the files changed."""
        i = self._index.get(image)
        if i is None or stamp.image_size < 0 or self._labels[i] != label:
            return None
        if tuple(self._arrays["stamps"][i].tolist()) != stamp:
            return None
        width, height, has_label, refused, clipped, duplicates = self._arrays["figures"][i].tolist()
        error, kind, remarks = self._texts.get(i, ("", "", ()))
        record = Record(width, height, error, kind, bool(has_label), True, refused, clipped, duplicates)
        start, stop = self._boxes.offsets[i : i + 2].tolist()
        if stop > start:
            record.boxes = self._boxes.values[start:stop]
            record.point_counts = self._arrays["point_counts"][start:stop]
            record.points = self._points[i] if record.point_counts.any() else NO_POINTS
        record.remarks = remarks
        return record

    def save(
        self,
        images: Sequence[str],
        labels: Sequence[str],
        stamps: Sequence[Stamp],
        records: Sequence[Record | None],
    ) -> None:
        """Write all records that are there (None: not scanned yet); where no place can be written one line says so."""
        if self.path is None:
            return
        kept = [i for i, record in enumerate(records) if record is not None and record.is_lasting]
        columns = ([column[i] for i in kept] for column in (images, labels, stamps, records))
        arrays = _to_arrays(*columns)
        reason = ""
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
                self._tell(f"label cache kept in {place}: {self.path.parent} cannot be written")
            return
        self._tell(f"label cache {self.path} cannot be written ({reason}); the next start scans again")

    def _tell(self, text: str) -> None:
        """Log one line about the place of the cache, once however often it is written."""
        if not self._is_told:
            LOGGER.info(f"{self.prefix}{text}")
        self._is_told = True


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
    texts = {str(i): (r.error, r.error_kind, list(r.remarks)) for i, r in enumerate(records) if r.error or r.remarks}
    figures = [(r.width, r.height, r.has_label, r.refused, r.clipped, r.duplicates) for r in records]
    arrays = {
        "version": np.array(FORMAT_VERSION),
        "stamps": np.array(stamps, np.int64).reshape(-1, len(Stamp._fields)),
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
    return {**arrays, "checksum": np.array(checksum(arrays), np.int64)}


def _table(arrays: dict[str, np.ndarray], name: str) -> list[str]:
    blob, offsets = arrays[name].tobytes(), offsets_of(arrays[f"{name}_lengths"].tolist())
    return [os.fsdecode(blob[start:stop]) for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
