"""Which files of a validation's folder are its own: only these may a later run into that folder delete or replace.

``.written.json`` in the folder names them. Figures and reports are claimed before they are written, so that a run that
was killed does not stand in the way of the next one. Label files, which people correct by hand, are ours only as long
as they hold what was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from utils.files import json_text, write_text_atomic
from utils.log import LOGGER, counted

FILE_NAME = ".written.json"
LABELS = "labels"
TRAINING = ("opt.yaml", "hyp.yaml", "results.csv", "monitor.csv")  # of these a training's folder has some
SHOWN_FILES = 3  # names in a message


class OwnFiles:
    """The record of one validation's folder."""

    def __init__(self, folder: str | Path, claimed: Iterable[str]) -> None:
        self.folder = Path(folder)
        self._files: dict[str, str | None] = dict.fromkeys(claimed)

    def add(self, path: Path, data: bytes) -> None:
        """Take a label file that was just written."""
        self._files[path.relative_to(self.folder).as_posix()] = digest(data)

    def save(self) -> None:
        """Write the record; where that fails one line says so."""
        try:
            write_text_atomic(self.folder / FILE_NAME, json_text({"files": self._files}) + "\n")
        except OSError as error:
            LOGGER.warning(f"{error}. A later run with --exist-ok will not replace what this one writes")


def take_folder(folder: Path, names: Iterable[str], *, with_labels: bool) -> OwnFiles:
    """Remove what an earlier validation recorded as its own in ``folder``, claim ``names`` for this one.

    ``with_labels`` says that label files are to be written, for which their folder has to be free. Label files that
    were changed since stay.

    Raises:
        ValueError: the folder is that of a training, or holds files in the way that no earlier validation wrote;
            nothing was removed then.
    """
    names = list(names)
    _refuse_training(folder)
    earlier = _read(folder)
    foreign = [name for name in names if _is_there(folder / name) and name not in earlier]
    changed = [name for name, value in earlier.items() if value is not None and not _is_same(folder / name, value)]
    if with_labels:
        kept = {name for name in earlier if name not in changed}
        foreign += [name for name in _inside(folder, LABELS) if name not in kept]
    if foreign:
        raise ValueError(
            f"{folder} holds {_some(foreign)}, which no earlier validation recorded as its own, or which was changed "
            "since: nothing there is deleted or replaced. Choose another --project or --name, or move it away"
        )
    _remove(folder, [name for name in earlier if name not in changed])
    staying = [name for name in changed if _is_there(folder / name)]
    if staying:
        LOGGER.warning(f"{_some(staying)} in {folder}, written by an earlier run, changed since: kept as they are")
    own = OwnFiles(folder, names)
    own.save()
    return own


def refuse_foreign(labels: Path) -> None:
    """Raise ValueError where a folder for label files holds anything already."""
    found = _inside(labels.parent, labels.name)
    if found:
        raise ValueError(
            f"--save-txt writes into {labels}, which holds {_some(found)}: nothing there is deleted or replaced; "
            "choose another --project or --name"
        )


def digest(data: bytes) -> str:
    """Return what tells a file's content from any other."""
    return hashlib.sha256(data).hexdigest()[:32]


def _refuse_training(folder: Path) -> None:
    found = [name for name in TRAINING if (folder / name).exists()]
    if found:
        raise ValueError(
            f"{folder} is the folder of a training (it holds {', '.join(found)}): a validation in it would replace "
            "its figures and its report. Choose another --name, or leave --project out for runs/val"
        )


def _read(folder: Path) -> Mapping[str, str | None]:
    """Return the names recorded in ``folder`` with their digests; nothing where the record is absent or damaged."""
    try:
        files = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))["files"]
        return {name: value for name, value in files.items() if _is_inside(name)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_same(path: Path, value: str) -> bool:
    try:
        return digest(path.read_bytes()) == value
    except OSError:
        return False


def _inside(folder: Path, name: str) -> list[str]:
    """Return all files below ``folder/name``, as seen from ``folder``; also that itself where it is no folder."""
    place = folder / name
    if not place.is_dir():
        return [name] if _is_there(place) else []
    found = (path for path in place.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _remove(folder: Path, names: Iterable[str]) -> None:
    """Delete files, and the folders of label files that are empty then."""
    parents = set()
    for name in names:
        path = folder / name
        if path.is_file() or path.is_symlink():
            path.unlink()
        parents |= {folder.joinpath(*parent.parts) for parent in PurePosixPath(name).parents if parent.parts}
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        with suppress(OSError):  # not empty, or a link
            parent.rmdir()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN_FILES])
    rest = len(names) - SHOWN_FILES
    return f"{shown} and {counted(rest, 'more file')}" if rest > 0 else shown
