"""Which picture files a data set consists of: folders, list files and single pictures."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from utils.data.filesystem import PlainPaths, plain_path
from utils.data.images import IMAGE_SUFFIXES
from utils.data.labels import decode_text, split_lines
from utils.log import LOGGER

# what lies in picture folders without being a picture or a mistake
_SILENT_SUFFIXES = frozenset((".txt", ".cache", ".yaml", ".yml", ".json", ".csv", ".xml", ".md", ".npy", ".npz"))
_SYSTEM_FILES = frozenset(("thumbs.db", "desktop.ini", ".ds_store"))
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SLIPS = tuple(
    (re.compile(pattern), hint)
    for pattern, hint in (
        ("\0", "it holds a NUL byte, is the file whole?"),
        (
            r"\$\{\w+\}|(^|/)\$\w+|%\w+%",
            "variables are not replaced: write the whole path, or ~ for the home folder",
        ),
        (r"\w:/{1,3}\S", "an address is not followed: download it, and name the folder on this machine"),
        (r"\\", "it holds a backslash, write / between folders"),
        (r"""(^|/)["'][^"']*["'](/|$)""", "write it without quotation marks"),
        (
            r"(?i)\.(jpe?g|png|bmp|webp|tiff?)(\s|[,;]\s*\d|;)",
            "a row of a list is the path of one picture and nothing else; labels lie in files of their own",
        ),
    )
)


@dataclass
class ImageList:
    """Picture paths (sorted, each once) with what was left aside on the way."""

    files: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # (path, reason)
    repeated: int = 0
    unknown: Counter[str] = field(default_factory=Counter)  # suffix -> files

    def report(self, prefix: str = "") -> None:
        """Log one line for each kind of thing that was left aside."""
        if self.unknown:
            kinds = ", ".join(f"{count} x {suffix or 'no suffix'}" for suffix, count in sorted(self.unknown.items()))
            number = sum(self.unknown.values())
            LOGGER.info(f"{prefix}{number} file(s) with an unknown suffix not looked at: {printable(kinds)}")
        if self.repeated:
            LOGGER.warning(f"{prefix}{self.repeated} picture(s) listed more than once, each is used once")


def printable(text: str) -> str:
    """Text that can be written anywhere, on one line: bytes of file names that are no text become question marks.

    Line ends and other control characters, which names may hold as well, are written as in Python's texts.
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], os.fsencode(text).decode("utf-8", "replace"))


def entry_hint(text: str) -> str:
    """What is probably wrong with the way a path is written that leads nowhere, '' where nothing is seen."""
    return next((hint for pattern, hint in _SLIPS if pattern.search(text)), "")


def is_system_file(name: str) -> bool:
    """Whether a file name belongs to an operating system (resource forks, thumbnails), not to the user."""
    return name.startswith("._") or name.lower() in _SYSTEM_FILES


def list_images(paths: str | Path | Sequence[str | Path]) -> ImageList:
    """Collect the pictures of folders (recursively), list files (.txt) and single picture files.

    Raises FileNotFoundError for a path that does not exist and ValueError when no picture is found at all.
    """
    sources = [paths] if isinstance(paths, (str, Path)) else list(paths)
    result = ImageList()
    names: list[str] = []
    for source in sources:
        path = plain_path(source)
        if os.path.isdir(path):
            names += _pictures_below(path, result)
        elif not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: no such folder, list file or picture")
        elif _suffix(path) in IMAGE_SUFFIXES:
            names.append(path)
        else:
            names += _read_list(Path(path), result)
    unique = sorted(set(names))
    result.repeated = len(names) - len(unique)
    result.files = unique
    if not unique:
        where = ", ".join(str(source) for source in sources)
        raise ValueError(f"no pictures in {where}; looked for the suffixes {', '.join(sorted(IMAGE_SUFFIXES))}")
    return result


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def walk_files(root: str, on_unreadable: Callable[[str, OSError], object]) -> Iterator[os.DirEntry[str]]:
    """Files below a folder, without those of systems; each real folder is entered once, linked folders come last.

    What cannot be read (folders, links without an end, pipes and devices) is passed to on_unreadable, and the walk goes
    on. Dead links are handed out like files.
    """
    visited: set[str] = set()
    pending, links = [root], []
    while pending or links:
        folder = pending.pop() if pending else links.pop(0)
        real = os.path.realpath(folder)
        if real in visited:
            continue
        visited.add(real)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            on_unreadable(folder, error)
            continue
        for entry in entries:
            try:
                is_folder, is_usable = entry.is_dir(), entry.is_file() or not os.path.exists(entry.path)
            except OSError as error:
                on_unreadable(entry.path, error)
                continue
            if is_folder:
                if entry.name != "__MACOSX":
                    (links if entry.is_symlink() else pending).append(entry.path)
            elif is_system_file(entry.name):
                continue
            elif is_usable:
                yield entry
            else:
                on_unreadable(entry.path, OSError(0, "a pipe, socket or device, not a file"))


def _pictures_below(root: str, result: ImageList) -> list[str]:
    def leave_out(folder: str, error: OSError) -> None:
        result.left_out.append((folder, f"cannot be read: {error.strerror}"))

    found: list[str] = []
    for entry in walk_files(root, leave_out):
        _sort_file(entry.name, entry.path, found, result)
    return found


def _sort_file(name: str, path: str, found: list[str], result: ImageList) -> None:
    suffix = _suffix(name)
    if suffix in IMAGE_SUFFIXES:
        found.append(path)
    elif suffix not in _SILENT_SUFFIXES and not name.startswith("."):
        result.unknown[suffix] += 1


def _read_list(path: Path, result: ImageList) -> list[str]:
    """Pictures named in a list file; raises ValueError where it names folders and nothing else."""
    names = list(_lines_of(path, result))
    folders = [name for name in names if _suffix(name) not in IMAGE_SUFFIXES and os.path.isdir(name)]
    if folders and len(folders) == len(names):
        raise ValueError(
            f"{path}: names only folders, such as {folders[0]}; a list file names pictures, one a line. Name the "
            "folders in the data file itself, as in train: [images/first, images/second]"
        )
    return names


def _lines_of(path: Path, result: ImageList) -> Iterator[str]:
    """Names in a list file, one a line; relative lines are taken from the list file's folder."""
    try:
        lines = split_lines(decode_text(path.read_bytes()))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: list file is neither UTF-8 nor UTF-16 text ({error})") from error
    plain = PlainPaths()
    for line in lines:
        if not line or line.startswith("#"):
            continue
        if "\0" in line:
            result.left_out.append((str(path), f"a row is no name of a file: {entry_hint(line)}"))
            continue
        name = plain.of(path.parent / line)
        if not os.path.lexists(name) and not os.path.isabs(line):
            # upstream reads such lines from the working directory
            others = (place for place in (line, os.path.expanduser(line)) if os.path.isfile(place))
            name = plain.of(next(others, name))
        yield name
