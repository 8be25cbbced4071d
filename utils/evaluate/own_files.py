"""Which files of a validation's folder are its own: only these may a later run into that folder delete or replace.

``.written.json`` in the folder names them, all of them ahead of their writing, so that a run that was killed does not
stand in the way of the next one: figures and reports at the beginning, each label file by a line of its own, which the
end of the run joins. Label files, which people correct by hand, are ours only as long as they hold what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from utils.files import append_line, json_text, write_text_atomic
from utils.log import LOGGER

FILE_NAME = ".written.json"
LABELS = "labels"
TRAINING = ("opt.yaml", "hyp.yaml", "results.csv", "monitor.csv")  # of these a training's folder has some
SHOWN = 5  # names in a message


class OwnFiles:
    """The record of one validation's folder."""

    def __init__(self, folder: str | Path, claimed: Iterable[str]) -> None:
        self.folder = Path(folder)
        self._files: dict[str, str | None] = dict.fromkeys(claimed)

    def add(self, path: Path, data: bytes) -> None:
        """Record a label file that is written next.

        Raises:
            OSError: the record cannot be written, so the file should not be either.
        """
        name, value = path.relative_to(self.folder).as_posix(), digest(data)
        append_line(self.folder / FILE_NAME, _line({name: value}))
        self._files[name] = value

    def save(self) -> None:
        """Write the record anew, in one line; where that fails one line of the log says so."""
        try:
            write_text_atomic(self.folder / FILE_NAME, _line(self._files) + "\n")
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
    foreign = [name for name in names if os.path.lexists(folder / name) and name not in earlier]
    changed = [name for name, value in earlier.items() if value is not None and not _is_same(folder / name, value)]
    if with_labels:
        kept = {name for name in earlier if name not in changed}
        foreign += [name for name in _inside(folder, LABELS) if name not in kept]
    if foreign:
        raise ValueError(
            f"{folder} holds {some(foreign)}, which no earlier validation recorded as its own (one by an older version "
            "recorded nothing), or which was changed since: nothing there is deleted or replaced. Choose another "
            "--project or --name, or move it away"
        )
    _remove(folder, [name for name in earlier if name not in changed])
    staying = [name for name in changed if os.path.lexists(folder / name)]
    if staying:
        LOGGER.warning(f"{some(staying)} in {folder}, written by an earlier run, changed since: kept as they are")
    own = OwnFiles(folder, names)
    own.save()
    return own


def refuse_foreign(labels: Path) -> None:
    """Raise ValueError where a folder for label files holds anything already."""
    found = _inside(labels.parent, labels.name)
    if found:
        raise ValueError(
            f"--save-txt writes into {labels}, which holds {some(found)}: nothing there is deleted or replaced; "
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
    """Return the names recorded in ``folder`` with their digests; none of a damaged record or line."""
    recorded: dict[str, str | None] = {}
    with suppress(OSError):
        for line in (folder / FILE_NAME).read_bytes().splitlines():
            with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
                recorded |= {name: value for name, value in json.loads(line)["files"].items() if _is_inside(name)}
    return recorded


def _line(files: Mapping[str, str | None]) -> str:
    return json_text({"files": files})


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_same(path: Path, value: str) -> bool:
    try:
        return digest(path.read_bytes()) == value
    except OSError:
        return False


def _inside(folder: Path, name: str) -> list[str]:
    """Return all files below ``folder/name``, as seen from ``folder``; also that itself where it is no folder."""
    place = folder / name
    if not place.is_dir():
        return [name] if os.path.lexists(place) else []
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


def some(texts: Iterable[str]) -> str:
    """Return the first few of some names, and how many more there are, as a message lists them."""
    texts = list(map(str, texts))
    rest = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
