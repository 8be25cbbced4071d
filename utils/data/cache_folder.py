"""Folders of prepared data below the cache folder: whose they are, whether a run uses them, and when they go.

Each lies at ROOT/KIND/NAME and holds a manifest that names its data set (the folder that all its pictures lie in) and
its settings. A run keeps a shared lock on every folder it uses. Opening a folder removes those that it replaces: the
same kind and data set with other settings, such as another size. Of these only files of our own names are deleted, and
only where no run uses them; where the disk knows no locks, nothing is. All else stays as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from utils.data.listing import printable
from utils.data.memory import size_text
from utils.files import is_open_at, write_text_atomic
from utils.log import LOGGER

try:
    import fcntl
except ImportError:  # Windows: nothing is ever removed there
    fcntl = None  # type: ignore[assignment]
    SHARED = EXCLUSIVE = AT_ONCE = 0
else:
    SHARED, EXCLUSIVE, AT_ONCE = fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_NB

MADE_BY = "yolov9 prepared data"
MANIFEST, IN_USE, WRITER = "manifest.json", "in-use.lock", "writer.lock"
LOCKABLE = "a+b"  # on network disks a shared lock asks for a file that can be read, an exclusive one for writing
MAX_ATTEMPTS = 100  # to use a folder that another run is just removing
DECODED, MOSAICS = "decoded", "mosaics"  # kinds
OWN_SUFFIXES = (".pixels", ".rows", ".damaged", ".mosaics", ".tmp", ".lock")

Settings = Mapping[str, int | str]


class CutFile(NamedTuple):
    """A file of prepared data that is shorter than what was stored in it; option is what asks for such files."""

    path: Path
    size: int  # bytes; 0 as well where the file is gone
    needed: int
    option: str

    @classmethod
    def check(cls, path: Path, needed: int, option: str) -> list[CutFile]:
        """The file, where it is too short."""
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        return [cls(path, size, needed, option)] if size < needed else []


def cache_root(cache_dir: str | Path = "") -> Path:
    """Folder of prepared pictures: cache_dir, else the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    if cache_dir:
        return Path(cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "yolov9" / "pictures"


def free_disk_bytes(folder: Path) -> int:
    """Free space of the disk that a folder is on; the folder need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def data_set_of(files: Sequence[str]) -> str:
    """What a set of picture files is known by: the innermost folder that holds them all."""
    folders = {os.path.dirname(os.path.abspath(path)) for path in files}
    try:
        return os.path.commonpath(folders)
    except ValueError:  # several drives
        return min(folders)


class CacheFolder:
    """One folder of prepared data, in use as long as this object or a process that inherited it lives."""

    def __init__(self, root: Path, kind: str, data_set: str, settings: Settings) -> None:
        self.root, self.kind, self.data_set, self.settings = root, kind, data_set, dict(settings)
        digest = hashlib.sha256(json.dumps([data_set, self.settings], sort_keys=True).encode()).hexdigest()[:16]
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(data_set))[:40].lstrip(".")
        self.path = root / kind / f"{readable}-{digest}"
        self._in_use: BinaryIO | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_in_use": None}  # a started process relies on the one that started it

    @classmethod
    def open(
        cls, root: Path, kind: str, data_set: str, settings: Settings, *, beside: Sequence[str] = (), prefix: str = ""
    ) -> CacheFolder:
        """Make or find a folder, use it, and remove those that it replaces.

        Folders of one data set that differ in a setting named in ``beside`` do not replace each other. Raises OSError
        where the folder cannot be made or written.
        """
        folder = cls(root, kind, data_set, settings)
        folder._use()
        if not (folder.path / MANIFEST).exists():
            content = {"made_by": MADE_BY, "kind": kind, "data_set": data_set, "settings": folder.settings}
            write_text_atomic(folder.path / MANIFEST, json.dumps(content, indent=1) + "\n")
        folder._remove_replaced(beside, prefix)
        return folder

    def _use(self) -> None:
        """Take a shared lock; again where another run removed the folder just before."""
        for _ in range(MAX_ATTEMPTS):
            # Between any two of these calls another run may remove the folder or make it.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self.path.mkdir(parents=True, exist_ok=True)
                file = open(self.path / IN_USE, LOCKABLE)  # noqa: SIM115 - stays open as long as the folder is in use
                _lock(file, SHARED)
                if is_open_at(file.fileno(), self.path / IN_USE):
                    self._in_use = file
                    return
                file.close()
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(17, "a file is in the place of the folder", str(self.path))
        raise FileNotFoundError(2, "no folder stays there, by the kind of disk or another program", str(self.path))

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no other run uses the folder; as long as the block lasts none can begin to, where it gives True."""
        file = self._in_use
        if file is None:
            yield False
            return
        try:
            yield _lock(file, EXCLUSIVE | AT_ONCE)
        finally:
            _lock(file, SHARED)

    @contextlib.contextmanager
    def only_writer(self, prefix: str = "") -> Iterator[bool]:
        """Let one process at a time add to the folder; the lock ends with its process, however that ends.

        Gives False where the disk knows no locks: two runs then store the same pictures twice, under different names.
        """
        with open(self.path / WRITER, LOCKABLE) as file:
            try:
                is_locked = _lock(file, EXCLUSIVE | AT_ONCE, is_told=True)
            except BlockingIOError:
                LOGGER.info(f"{prefix}another run stores pictures in {self.path}, waiting until it is done")
                is_locked = _lock(file, EXCLUSIVE)
            yield is_locked

    def _remove_replaced(self, beside: Sequence[str], prefix: str) -> None:
        for path, manifest in _folders(self.root / self.kind):
            settings = manifest["settings"]
            is_other = manifest["data_set"] != self.data_set or any(
                settings.get(name) != self.settings.get(name) for name in beside
            )
            if path == self.path or is_other:
                continue
            size, is_removed = size_of(path), _remove(path)
            old, new = _text(settings), _text(self.settings)
            reason = "its pictures or labels have changed"
            if old != new:
                reason = f"now {new} is asked for; another --cache-dir would keep both"
            LOGGER.info(
                f"{prefix}prepared data of {printable(self.data_set)} ({self.kind}, {old}; {size_text(size)}) "
                f"{'removed' if is_removed else 'kept because they are in use'}: {reason}"
            )

    def total_text(self) -> str:
        """Words that tell how much all prepared data take, and how to be rid of them."""
        total = sum(size_of(path) for kind in (DECODED, MOSAICS) for path, _ in _folders(self.root / kind))
        return (
            f"all prepared data in {self.root} take {size_text(total)}; its folders {DECODED} and {MOSAICS} can be "
            "deleted while no run uses them"
        )


def size_of(folder: Path) -> int:
    """Bytes on disk of the files of a folder of prepared data."""
    total = 0
    for entry in _own_files(folder):
        with contextlib.suppress(OSError):  # deleted meanwhile
            status = entry.stat(follow_symlinks=False)
            total += getattr(status, "st_blocks", -(-status.st_size // 512)) * 512  # prepared mosaics have holes
    return total


def _folders(place: Path) -> Iterator[tuple[Path, dict[str, object]]]:
    """Folders below a place whose manifests are ours, with them; links are never followed."""
    try:
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            manifest = _read_manifest(Path(entry.path), place.name)
            if manifest is not None:
                yield Path(entry.path), manifest


def _read_manifest(folder: Path, kind: str) -> dict[str, object] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or (manifest.get("made_by"), manifest.get("kind")) != (MADE_BY, kind):
        return None
    if not isinstance(manifest.get("data_set"), str) or not isinstance(manifest.get("settings"), dict):
        return None
    return manifest


def _own_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_ours = entry.name == MANIFEST or entry.name.endswith(OWN_SUFFIXES)
            if is_ours and entry.is_file(follow_symlinks=False):
                yield entry


def _remove(folder: Path) -> bool:
    """Delete the files of ours in a folder that no run uses, and the folder where nothing else is in it."""
    with contextlib.suppress(OSError), open(folder / IN_USE, LOCKABLE) as file:
        if not _lock(file, EXCLUSIVE | AT_ONCE):
            return False
        # The manifest goes last but one: a removal that is broken off can be taken up again.
        last = {MANIFEST: 1, IN_USE: 2}
        for entry in sorted(_own_files(folder), key=lambda entry: last.get(entry.name, 0)):
            os.unlink(entry.path)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return True
    return False


def _text(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name not in ("format", "contents"))


def _lock(file: BinaryIO, mode: int, *, is_told: bool = False) -> bool:
    """Lock an open file; False where it is held by another process or the disk knows no locks.

    is_told: raise BlockingIOError for the first of these.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(file.fileno(), mode)
    except BlockingIOError:
        if is_told:
            raise
        return False
    except OSError:
        return False
    return True
