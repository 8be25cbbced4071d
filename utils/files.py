"""Paths, YAML and atomic writing: what every other module needs from the file system."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import yaml

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

REPO_ROOT = Path(__file__).resolve().parents[1]


def increment_path(path: str | Path, exist_ok: bool = False, sep: str = "", mkdir: bool = False) -> Path:
    """Return ``path``, or the first free ``path2``, ``path3``, … when it exists and ``exist_ok`` is false.

    A file keeps its suffix (``a.txt`` → ``a2.txt``). With ``mkdir`` the folder is made, and made by nobody else:
    two programs that start together get two folders.
    """
    path = Path(path)
    stem, suffix = (path.with_suffix(""), path.suffix) if path.is_file() else (path, "")
    candidate, number = path, 2
    while True:
        if exist_ok or not candidate.exists():
            if not mkdir:
                return candidate
            try:
                candidate.mkdir(parents=True, exist_ok=exist_ok)
                return candidate
            except FileExistsError as error:
                if exist_ok:
                    raise FileExistsError(f"{candidate} is a file; choose another --project or --name") from error
        candidate = Path(f"{stem}{sep}{number}{suffix}")
        number += 1


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; rename it to ``path`` when the block ends well, delete it otherwise.

    A reader sees either the old file or the complete new one, also after a kill or a full disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{zlib.crc32(path.name.encode()):08x}.{os.getpid()}.tmp")  # never longer than allowed
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def lock_folder(folder: Path) -> TextIO | None:
    """Claim ``folder`` for this process until the returned file is closed or the process ends.

    Returns None where the system offers no such locks.

    Raises:
        ValueError: another process has claimed it.
    """
    if fcntl is None:
        return None
    handle = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - stays open as long as the lock is held
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise ValueError(
            f"{folder} is being written by another process; wait for it or choose another --name"
        ) from error
    except OSError:  # network file systems may not know locks
        handle.close()
        return None
    return handle


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8 through :func:`atomic_write`."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def find_file(name: str | Path, *, roots: Sequence[str | Path] = (), suffixes: Sequence[str] = ()) -> Path:
    """Return the existing file ``name``, else the only file of that base name below ``roots``.

    Relative roots are taken from the repository's folder. ``suffixes`` restricts what is accepted (``.yaml``).

    Raises:
        FileNotFoundError: nothing of that name; the message lists the places that were searched.
        ValueError: several files of that name, or a suffix that is not allowed.
    """
    path = Path(name)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"'{name}' should end in {' or '.join(suffixes)}")
    if path.is_file():
        return path
    if (REPO_ROOT / path).is_file():
        return REPO_ROOT / path
    folders = [Path(root) if Path(root).is_absolute() else REPO_ROOT / root for root in roots]
    matches = sorted({match for folder in folders for match in folder.rglob(path.name) if match.is_file()})
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(str(match) for match in matches)
        raise ValueError(f"'{name}' is ambiguous: {listed}. Give the full path of the one you mean")
    searched = ", ".join(str(folder) for folder in [Path.cwd(), *folders])
    raise FileNotFoundError(f"'{name}' not found. Searched: {searched}")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping (UTF-8, with or without byte order mark) with the safe loader.

    Raises:
        ValueError: not UTF-8, not YAML, or no mapping; the message names the file and the line.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold 'key: value' lines, found {type(content).__name__}")
    return content


def write_yaml(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write ``mapping`` as YAML in its own order, names of any script kept readable."""
    write_text_atomic(path, yaml.safe_dump(dict(mapping), sort_keys=False, allow_unicode=True))
