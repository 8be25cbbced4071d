"""Paths, YAML and atomic writing: what every other module needs from the file system."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import traceback
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TextIO

import yaml

from utils.yaml_keys import refuse_repeated_keys

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room on the disk, in the quota, for a file of that size
NOT_ROOM = (errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST)
MAX_NAME_BYTES = 255  # of one name in a path, on all common file systems
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


def shorten(name: str, room: int) -> str:
    """Return ``name``, cut to ``room`` bytes with a digest of the whole at its end where it is longer."""
    encoded = os.fsencode(name)
    if len(encoded) <= room:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:8]
    return encoded[: room - 9].decode("utf-8", "ignore") + "_" + digest


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; rename it to ``path`` when the block ends well, delete it otherwise.

    A reader sees either the old file or the complete new one, also after a kill or a full disk.

    Raises:
        OSError: the disk is full, or the block's writing failed without telling where; the message names ``path``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(
        f".{zlib.crc32(os.fsencode(path.name)):08x}.{os.getpid()}.tmp"
    )  # never longer than allowed
    try:
        try:
            yield temporary
            with open(temporary, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        is_ours = error.filename is None or Path(str(error.filename)) == temporary
        if error.errno in FULL or (error.errno is not None and is_ours):
            raise write_error(path, error) from error
        raise


def write_error(path: Path, cause: Exception) -> OSError:
    """Return the error that says which file could not be written, why, and how much room there is.

    To be called after the temporary file was removed: the room is that without it. What ``cause`` still holds open is
    let go for that, as a removed file keeps its room while it is open.
    """
    linked: BaseException | None = cause
    while linked is not None:
        traceback.clear_frames(linked.__traceback__)
        linked = linked.__context__
    code = getattr(cause, "errno", None)
    reason = f": {os.strerror(code)}" if code is not None else ""
    try:
        room = f" ({shutil.disk_usage(path.parent).free / 1e6:.0f} MB are free there)"
    except OSError:  # the folder is gone
        room = ""
    step = "Look at what stands there" if code in NOT_ROOM else "Make room"
    told = OSError(
        f"{path} could not be written{reason}{room}; the file of that name, if any, is unchanged. "
        f"{step}, or choose another disk (of a new run with --project)"
    )
    told.errno = code
    return told


_LOCKS: weakref.WeakSet[TextIO] = weakref.WeakSet()


def _drop_locks() -> None:
    """Close inherited lock files: a worker that outlives a killed run for some seconds must not hold its folder."""
    for handle in list(_LOCKS):
        with suppress(OSError):
            handle.close()
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_locks)


def lock_folder(folder: Path) -> TextIO | None:
    """Claim ``folder`` for this process until the returned file is closed or the process ends.

    Returns None where the system offers no such locks.

    Raises:
        ValueError: another process has claimed it.
    """
    if fcntl is None:
        return None
    handle = open(folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - stays open as long as the lock is held
    _LOCKS.add(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise ValueError(
            f"{folder} is being written by another process; wait for it, or begin a run with another --name"
        ) from error
    except OSError:  # network file systems may not know locks
        handle.close()
        return None
    return handle


def write_text_atomic(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8 through :func:`atomic_write`.

    Bytes of file names that are no text (lone surrogates in Python) are escaped (``\\udce9``), as JSON and YAML do it.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_whole(handle: FileIO, data: bytes) -> None:
    """Write ``data``; raise OSError, ENOSPC where only a part of it found room."""
    if handle.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(handle.name))


def is_open_at(descriptor: int, path: str | Path) -> bool:
    """Return whether ``path`` is still the file that is open as ``descriptor``, and not deleted or another one."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def append_line(path: str | Path, line: str) -> None:
    """Add a line to a UTF-8 text file, whole or not at all.

    Raises:
        OSError: it could not be written; the message names ``path``, which is as it was before.
    """
    path, data = Path(path), (line + "\n").encode("utf-8")
    try:
        with open(path, "ab", buffering=0) as handle:
            end = handle.seek(0, os.SEEK_END)
            try:
                write_whole(handle, data)
            except OSError:
                with suppress(OSError):  # a device has no length
                    handle.truncate(end)
                raise
    except OSError as error:
        raise write_error(path, error) from error


def json_text(content: Any) -> str:
    """Return ``content`` as compact JSON that every reader takes; see :func:`plain_data`."""
    text = json.dumps(plain_data(content), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates, of file names that are no text


def plain_data(content: Any) -> Any:
    """Return a copy of ``content`` as JSON can hold it.

    Numbers that are not finite, for which JSON has no word, become None; what is neither text, number, list nor
    mapping (YAML knows dates) becomes text.
    """
    if content is None or isinstance(content, (str, bool, int)):
        return content
    if isinstance(content, Integral):  # of NumPy
        return int(content)
    if isinstance(content, Real):
        return float(content) if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {str(key): plain_data(value) for key, value in content.items()}
    return [plain_data(value) for value in content] if isinstance(content, (list, tuple)) else str(content)


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


def check_file(file: str | Path, suffix: str | Sequence[str] = "") -> str:
    """Return the path that :func:`find_file` finds, as text, searching as upstream's function of that name does.

    Nothing (``""``) stays nothing. Addresses are not fetched.
    """
    suffixes = [suffix] if isinstance(suffix, str) and suffix else suffix
    return str(find_file(file, roots=("data", "hyp", "models", "utils"), suffixes=suffixes)) if str(file) else ""


def check_yaml(file: str | Path, suffix: str | Sequence[str] = (".yaml", ".yml")) -> str:
    """Return what :func:`check_file` finds, a YAML file unless ``suffix`` says otherwise."""
    return check_file(file, suffix)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping (UTF-8, with or without byte order mark) with the safe loader.

    Raises:
        OSError: not there, a folder, or without permission.
        ValueError: not UTF-8, not YAML, a key twice, or no mapping; the message names the file and the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        refuse_repeated_keys(text, path)
        content = yaml.safe_load(text)
    except OSError as error:
        raise type(error)(f"{path}, a YAML file, could not be read: {error.strerror}; give the path of one") from error
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
