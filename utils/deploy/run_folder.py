"""The folder of a detection: made, claimed for one process, and looked through before anything in it is touched.

What stands there and is not in the record of what detection wrote stays as it is; where it is in the way the run
is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from utils.deploy.naming import CROPS, LABELS, OutputNames, frame_base, plan_outputs
from utils.deploy.record import MAPS, MEDIA, NOT_RECORDED, REMEDY, Input, Record
from utils.deploy.tables import CSV_NAME, JSON_NAME, RESULTS_NAME, is_table, naming
from utils.files import increment_path, is_open_at, lock_folder

IMAGES = "images"  # folder of a data set, beside its labels
LOCK_NAME = ".lock"


@dataclass(frozen=True)
class SaveOptions:
    """What is written of each frame besides ``results.txt``; named as on the command line."""

    save_txt: bool = False
    save_conf: bool = False
    save_empty: bool = False
    save_crop: bool = False
    save_csv: bool = False
    save_json: bool = False
    visualize: bool = False
    save_media: bool = True

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of files that are written of each input."""
        asked = {LABELS: self.save_txt, CROPS: self.save_crop, MAPS: self.visualize, MEDIA: self.save_media}
        return {kind for kind, is_asked in asked.items() if is_asked}

    @property
    def tables(self) -> set[str]:
        """Return the names of the tables that are written."""
        asked = {RESULTS_NAME: True, CSV_NAME: self.save_csv, JSON_NAME: self.save_json}
        return {name for name, is_asked in asked.items() if is_asked}


@dataclass(frozen=True)
class Run:
    """A run into a folder: its inputs with their names, what is written, and the record of the folder."""

    folder: Path
    inputs: Sequence[Input]
    outputs: Sequence[OutputNames]
    options: SaveOptions
    record: Record


def make_folder(wanted: Path, *, exist_ok: bool) -> Path:
    """Make the folder of a run: ``wanted``, or with a number behind it if that exists and ``exist_ok`` is not set.

    Raises:
        OSError: it cannot be made.
    """
    try:
        return increment_path(wanted, exist_ok=exist_ok, mkdir=True)
    except FileExistsError as error:
        raise FileExistsError(f"{wanted}, the folder for the results, is a file; {REMEDY}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"folder {wanted} for the results cannot be made: {reason}; choose another --project") from error


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes that detect or train out of ``folder`` during the block.

    Raises:
        ValueError: another process is at work there, or a file of the user has the name of the lock.
        OSError: nothing can be written there.
    """
    path = folder / LOCK_NAME
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size:
            raise ValueError(f"--exist-ok: {path} is not the empty file that locks a folder; {REMEDY}")
    while True:
        with naming(path):
            lock = lock_folder(folder)
        if lock is None or is_open_at(lock.fileno(), path):
            break
        lock.close()  # it was deleted by the one who held it
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if lock is not None:
            lock.close()


def plan_run(folder: Path, inputs: Sequence[Input], options: SaveOptions, sources: Iterable[Path] = ()) -> Run:
    """Name the results of each input and make sure that they take the place of no other file.

    ``sources`` are the files that are read.

    Raises:
        ValueError: a source or another file of the user would be replaced, or the folder is a data set.
    """
    record = Record(folder)
    outputs = plan_outputs(
        [(one.relative, one.is_video) for one in inputs],
        record.known(inputs),
        record.others(inputs),
        with_maps=options.visualize,
    )
    if _is_fresh(folder):  # nothing can be in the way, and looking for each of many files takes seconds
        return Run(folder, inputs, outputs, options, record)
    earlier = {place: one for one in inputs for place in record.earlier_files([one], options.kinds)}
    planned = {place: one for one, place in _planned_places(folder, inputs, outputs, options)}
    planned = {place: one for place, one in planned.items() if os.path.lexists(folder / place)}
    tables = [name for name in sorted(options.tables) if os.path.lexists(folder / name)]
    _refuse_sources(folder, {**earlier, **planned, **dict.fromkeys(tables)}, sources)
    _refuse_data_set(record, options)
    changed = [place for place, one in earlier.items() if not record.is_of(one.key, place)]
    changed += [name for name in tables if name in record.tables and not is_table(folder / name)]
    if changed:
        raise ValueError(f"--exist-ok: {folder / changed[0]} was changed since an earlier run wrote it; {REMEDY}")
    foreign = [place for place in planned if place not in earlier]
    foreign += [name for name in tables if name not in record.tables]
    if foreign:
        reason = f"is {NOT_RECORDED} (perhaps of an older version)"
        raise ValueError(f"--exist-ok: {folder / foreign[0]} {reason}; {REMEDY}")
    titles = record.titles(inputs)
    inputs = [replace(one, title=title) for one, title in zip(inputs, titles, strict=True)]
    return Run(folder, inputs, outputs, options, record)


def _is_fresh(folder: Path) -> bool:
    try:
        return set(os.listdir(folder)) <= {LOCK_NAME}
    except OSError:  # no right to look
        return False


def _refuse_sources(folder: Path, places: dict[str, Input | None], sources: Iterable[Path]) -> None:
    """Refuse to replace a file that is read in this run; ``places`` are those where something is.

    Raises:
        ValueError: one would be.
    """
    real_sources = {os.path.realpath(path): path for path in sources} if places else {}
    for place, one in places.items():
        source = real_sources.get(os.path.realpath(folder / place))
        if source is not None:
            is_own = one is not None and os.path.abspath(source) == one.key
            whose = "its own source" if is_own else "another source,"
            raise ValueError(f"--exist-ok: the result would replace {whose} {source}; {REMEDY}")


def _refuse_data_set(record: Record, options: SaveOptions) -> None:
    """Refuse a folder that looks like that of a data set.

    Raises:
        ValueError: it holds images or labels that its record does not name.
    """
    foreign = []
    for name in (IMAGES, LABELS):
        folder = record.folder / name
        if folder.is_dir() and any(folder.iterdir()) and not record.names_any_below(name):
            foreign.append(folder)
    if len(foreign) == 2 or (foreign and options.save_txt):
        named, verb = " and ".join(map(str, foreign)), "is" if len(foreign) == 1 else "are"
        reason = f"{named} {verb} {NOT_RECORDED}: perhaps a data set, or of an older version"
        raise ValueError(f"--exist-ok: {reason}; {REMEDY}")


def _planned_places(
    folder: Path, inputs: Sequence[Input], outputs: Sequence[OutputNames], options: SaveOptions
) -> Iterator[tuple[Input, str]]:
    """Yield the places of annotated media and of label files that may be written; of videos' those that exist."""
    stems: dict[Path, dict[str, Input]] = {}  # of videos, by folder
    for one, names in zip(inputs, outputs, strict=True):
        if options.save_media:
            yield one, names.media.as_posix()
            yield one, names.fallback.as_posix()
        if options.save_txt and names.is_video:
            stems.setdefault(LABELS / names.stem.parent, {})[names.stem.name] = one
        elif options.save_txt:
            yield one, f"{LABELS}/{names.stem.as_posix()}.txt"
    for parent, videos in stems.items():
        for path in (folder / parent).iterdir() if (folder / parent).is_dir() else ():
            one = videos.get(frame_base(path.name.removesuffix(".txt")))
            if one is not None and path.name.endswith(".txt"):
                yield one, (parent / path.name).as_posix()
