"""What detection looks at: files, folders, patterns, lists and streams, resolved and checked before a model is loaded.

Folders are entered with their sub-folders. A name that exists is taken literally before it is taken as a pattern.
"""

from __future__ import annotations

import glob
import os
import re
import tempfile
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import cv2
import numpy as np

from utils.data.addresses import download, without_password
from utils.data.filesystem import plain_path
from utils.data.frames import HEAD_BYTES, Frame, Unreadable, VideoFile, is_video_head, to_network
from utils.data.headers import image_kind
from utils.data.images import IMAGE_SUFFIXES, imread_bgr
from utils.data.labels import decode_text, split_lines
from utils.data.listing import is_system_file, walk_files
from utils.data.screen import check_screen
from utils.data.streams import LoadStreams
from utils.log import LOGGER
from utils.threads import ordered_map

__all__ = ["LoadImages", "LoadStreams", "MediaFile", "Source", "read_frames", "resolve_source"]

VIDEO_SUFFIXES = frozenset(
    (".asf", ".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".wmv")  # as upstream
)
STREAM_SCHEMES = ("rtsp://", "rtmp://", "http://", "https://")
VIDEO_PAGES = ("youtube.com", "m.youtube.com", "youtu.be")
USUAL_FOLDER = ("data", "images")  # the default of --source, in which upstream's guides have a picture
PICTURES_HINT = (
    "; no pictures come with this repository. Name some of your own, or make some: python scripts/make_shapes.py "
    "--folder ../datasets/shapes, then type --source ../datasets/shapes/images/test"
)
SOURCES_HINT = (
    "Name a picture, a video, a folder, a list (.txt), an address, the number of a camera, or a pattern in quotes such "
    "as --source 'shots/*.jpg'"
)
DECODERS = min(4, os.cpu_count() or 1)  # threads that decode pictures; more would only fill the memory


@dataclass(frozen=True)
class MediaFile:
    """A picture or video.

    Attributes:
        path: where it lies; of what was downloaded a temporary place.
        relative: its place below the source, which the results repeat.
        address: where it was downloaded from, without login; otherwise empty.
    """

    path: Path
    relative: Path
    is_video: bool
    address: str = ""

    @property
    def title(self) -> str:
        """What lines and tables call it: the same in every run over the same input."""
        return self.address or str(self.path)


@dataclass
class Source:
    """Outcome of :func:`resolve_source`: files or stream addresses, and what was left aside.

    Attributes:
        files: pictures in order, then videos in order.
        streams: addresses and camera numbers; not mixed with files.
        missing: (name, reason) of listed things that are not there.
        unknown: suffix → files with it that were not looked at.
    """

    files: list[MediaFile] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    _downloads: tempfile.TemporaryDirectory | None = None
    _fetched: set[str] = field(default_factory=set)

    def close(self) -> None:
        """Delete what was downloaded."""
        if self._downloads is not None:
            self._downloads.cleanup()
            self._downloads = None

    def report(self) -> None:
        """Log what was left aside, one line for each kind."""
        for name, reason in self.missing:
            LOGGER.warning(f"{name}: {reason}, left out")
        if self.unknown:
            kinds = ", ".join(f"{count} x {suffix or 'no suffix'}" for suffix, count in sorted(self.unknown.items()))
            LOGGER.info(f"{self.unknown.total()} file(s) with an unknown suffix not looked at: {kinds}")

    def add_file(self, path: Path, root: Path | None, *, by_content: bool = False, address: str = "") -> None:
        """Take a file up by its suffix or, where that says nothing and ``by_content`` is set, by its first bytes.

        ``address`` is where it was downloaded from, as it may be shown.
        """
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for its writer for ever
            self.missing.append((str(path), _what_else(path)))
            return
        suffix = path.suffix.lower()
        is_video, is_picture = suffix in VIDEO_SUFFIXES, suffix in IMAGE_SUFFIXES
        if by_content and not is_video and not is_picture:
            head = _first_bytes(path)
            is_video, is_picture = is_video_head(head), bool(image_kind(head))
        if is_video or is_picture:
            self.files.append(MediaFile(path, _below(path, root), is_video, address))
        else:
            self.unknown[suffix] += 1

    def add_folder(self, folder: Path, root: Path | None) -> None:
        """Take up the files of a folder and its sub-folders, each real folder once, linked folders last."""

        def note(unreadable: str, error: OSError) -> None:
            self.missing.append((unreadable, f"cannot be read ({error.strerror})"))

        for entry in walk_files(str(folder), note):
            self.add_file(Path(entry.path), root)

    def add_address(self, address: str) -> None:
        """Download a picture or video; everything else behind an address is a stream.

        Raises:
            ValueError: the page of a video, which holds neither.
            ConnectionError: it cannot be downloaded.
        """
        parts = urllib.parse.urlsplit(address)
        if (parts.hostname or "").removeprefix("www.") in VIDEO_PAGES:
            shown = without_password(address)
            raise ValueError(f"{shown} is a web page, not a stream; download its video first: yt-dlp '{shown}'")
        name = urllib.parse.unquote(parts.path.rsplit("/", 1)[-1])
        suffix = Path(name).suffix.lower()
        if not parts.scheme.lower().startswith("http") or suffix not in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
            self.streams.append(address)
            return
        if address in self._fetched:
            return
        self._fetched.add(address)
        if self._downloads is None:
            self._downloads = tempfile.TemporaryDirectory(prefix="yolov9-detect-")
        folder = Path(tempfile.mkdtemp(dir=self._downloads.name))  # two addresses may end in one name
        target = folder / name.replace("/", "_").replace("\\", "_")
        download(address, target)
        self.add_file(target, folder, address=without_password(address))

    def arrange(self) -> None:
        """Drop repeated files and put pictures before videos, each in the order of their names."""
        unique = {os.path.abspath(file.path): file for file in reversed(self.files)}
        self.files = sorted(unique.values(), key=lambda file: (file.is_video, file.title))


def resolve_source(source: str | Path | Sequence[str | Path]) -> Source:
    """Find out what ``source`` means and check that it is there.

    Example::

        resolve_source("shots/*.jpg").files  # also: a file, folder, list.txt, rtsp://…, "0" for the first camera

    Raises:
        FileNotFoundError: no such file, folder or match.
        ValueError: nothing in it that can be looked at, or a kind of source that is not supported.
        OSError: a download failed.
    """
    result = Source()
    try:
        for text in [source] if isinstance(source, (str, Path)) else source:
            _resolve_one(str(text).strip(), result)
        result.arrange()
        if result.files and result.streams:
            raise ValueError(f"{_shown(source)}: streams and files are mixed; run them separately")
        if not result.files and not result.streams:
            _refuse_empty(_shown(source), result)
    except BaseException:
        result.close()
        raise
    return result


def _shown(source: str | Path | Sequence[str | Path]) -> str:
    """Return a source as it may be shown."""
    return " ".join(without_password(str(text)) for text in ([source] if isinstance(source, (str, Path)) else source))


def _resolve_one(text: str, result: Source) -> None:
    path = Path(text)
    if text and os.path.lexists(path):
        _add_existing(path, result)
    elif text.isdecimal():
        result.streams.append(text)
    elif text.lower().startswith(STREAM_SCHEMES):
        result.add_address(text)
    elif text.lower().split()[:1] == ["screen"]:
        check_screen(text)
        result.streams.append(text)
    elif glob.has_magic(text):
        _add_matches(text, result)
    else:
        raise FileNotFoundError(f"--source '{without_password(text)}' does not exist{_seen_from(path)}{_hint(text)}")


def _add_existing(path: Path, result: Source) -> None:
    if path.is_dir():
        result.add_folder(path, path)
    elif path.suffix.lower() == ".txt" and os.path.isfile(path):
        _add_list(path, result)
    else:
        result.add_file(path, path.parent, by_content=True)


def _add_matches(pattern: str, result: Source) -> None:
    """Take up what a pattern matches; leading folders that exist are literal, whatever brackets they hold."""
    literal, rest = Path(), list(Path(pattern).parts)
    while rest and os.path.lexists(literal / rest[0]):
        literal /= rest.pop(0)
    matches = sorted(glob.glob(os.path.join(glob.escape(str(literal)), *rest), recursive=True))
    if not matches:
        raise FileNotFoundError(
            f"--source '{without_password(pattern)}' matches nothing{_seen_from(literal)}{_hint(pattern)}"
        )
    for match in map(Path, matches):
        if match.is_dir():
            result.add_folder(match, literal)
        elif not is_system_file(match.name):
            result.add_file(match, literal)


def _add_list(path: Path, result: Source) -> None:
    """Take up the lines of a list: streams, pictures and videos (relative to the list's folder), told apart by text."""
    try:
        lines = [line for line in split_lines(decode_text(path.read_bytes())) if line and not line.startswith("#")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the list is neither UTF-8 nor UTF-16 text ({error})") from error
    for line in lines:
        places = [path.parent / line, Path(line)]
        place = next((place for place in places if os.path.lexists(place)), None)
        if place is not None and place.is_dir():
            result.add_folder(place, path.parent)
        elif place is not None:
            result.add_file(Path(plain_path(place)), path.parent, by_content=True)
        elif line.isdecimal():
            result.streams.append(line)
        elif line.lower().startswith(STREAM_SCHEMES):
            try:
                result.add_address(line)
            except (ConnectionError, ValueError) as error:
                result.missing.append((without_password(line), str(error)))
        else:
            result.missing.append(
                (without_password(line), f"named in {path} but not found{_seen_from(Path(line), path.parent)}")
            )


def _refuse_empty(source: str, result: Source) -> None:
    is_reported = len(result.missing) > 1 or bool(result.unknown)
    if is_reported:
        result.report()
    if result.missing:
        which = "see above" if is_reported else ": ".join(result.missing[0])
        raise ValueError(f"--source '{source}' holds nothing that can be read: {which}. {SOURCES_HINT}")
    suffixes = " ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES | VIDEO_SUFFIXES))
    raise ValueError(
        f"--source '{source}' holds no picture or video; looked for the suffixes {suffixes}{_hint(source)}"
    )


def _hint(source: str) -> str:
    """Return what to name instead; where pictures can be had, for a source in the folder with some upstream."""
    return PICTURES_HINT if Path(os.path.normpath(source)).parts[:2] == USUAL_FOLDER else f". {SOURCES_HINT}"


def _seen_from(path: Path, *folders: Path) -> str:
    """Return from which folders (also the working one) a relative path was looked for; a whole path tells it all."""
    if path.is_absolute():
        return ""
    return f" (looked from {' and '.join(dict.fromkeys(str(folder.absolute()) for folder in (*folders, Path())))})"


def _below(path: Path, root: Path | None) -> Path:
    """Return where ``path`` lies below ``root``; its bare name if it lies elsewhere."""
    try:
        relative = Path(os.path.abspath(path)).relative_to(os.path.abspath(root)) if root is not None else None
    except ValueError:
        relative = None
    return relative if relative is not None and relative.name else Path(path.name)


def _first_bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as handle:
            return handle.read(HEAD_BYTES)
    except OSError:
        return b""


def _what_else(path: Path) -> str:
    """Return what a thing is that is neither a file nor a folder."""
    camera = re.fullmatch(r"/dev/video(\d+)", str(path))
    return f"a camera; type --source {camera[1]}" if camera else "a pipe, socket or device, not a file"


def read_frames(files: Sequence[MediaFile], vid_stride: int = 1, *, decoders: int = 0) -> Iterator[Frame | Unreadable]:
    """Yield the frames of all files in order; a file that cannot be read gives one ``Unreadable`` instead.

    With ``decoders`` that many threads decode pictures ahead.

    Raises:
        ValueError: a stride below 1.
    """
    if vid_stride < 1:
        raise ValueError(f"vid_stride {vid_stride}: should be at least 1")
    for is_video, numbered in groupby(enumerate(files), key=lambda pair: pair[1].is_video):
        if is_video:
            for item, file in numbered:
                yield from _read_video(item, file, vid_stride)
        elif decoders:
            with ThreadPoolExecutor(decoders, thread_name_prefix="decode") as pool:
                yield from ordered_map(pool, _read_picture, numbered, 2 * decoders)
        else:
            yield from map(_read_picture, numbered)


def _read_picture(numbered: tuple[int, MediaFile]) -> Frame | Unreadable:
    item, file = numbered
    try:
        return Frame(imread_bgr(file.path), item)
    except (ValueError, OSError, MemoryError, cv2.error) as error:
        return Unreadable(item, _reason(error, file.path))


def _read_video(item: int, file: MediaFile, vid_stride: int) -> Iterator[Frame | Unreadable]:
    try:
        video = VideoFile(file.path, vid_stride, title=file.title)
        for number, image in video:
            yield Frame(image, item, number, video.total, video.rate, video.capture)
    except (ValueError, OSError, MemoryError, cv2.error) as error:
        yield Unreadable(item, _reason(error, file.path))


def _reason(error: Exception, path: Path) -> str:
    """Return what went wrong without the path, which the reader of the line knows already."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).removeprefix(f"{path}: ")


class LoadImages:
    """Pictures and videos as upstream's tuples ``(path, image (3, H, W) RGB uint8, original BGR, capture, text)``.

    ``capture`` is OpenCV's reader for a frame of a video and None for a picture. Unreadable files are logged and left
    out. ``transforms`` is accepted for compatibility and has to be None.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        img_size: int | Sequence[int] = 640,
        stride: int = 32,
        auto: bool = True,
        transforms: None = None,
        vid_stride: int = 1,
    ) -> None:
        if transforms is not None:
            raise ValueError("LoadImages: transforms are not supported, pass None")
        source = resolve_source(path)
        if source.streams:
            raise ValueError(f"{_shown(path)} is a stream; use LoadStreams")
        source.report()
        self._source = source  # keeps downloads alive
        self.files = [str(file.path) for file in source.files]
        self._titles = [file.title for file in source.files]
        self.nf = len(self.files)
        self.img_size, self.stride, self.auto, self.vid_stride = img_size, stride, auto, vid_stride

    def __len__(self) -> int:
        return self.nf

    def __iter__(self) -> Iterator[tuple[str, np.ndarray, np.ndarray, cv2.VideoCapture | None, str]]:
        for event in read_frames(self._source.files, self.vid_stride):
            path, title = self.files[event.item], self._titles[event.item]
            if isinstance(event, Unreadable):
                LOGGER.warning(f"{title}: {event.reason}, left out")
                continue
            kind, position = ("video", f" ({event.number}/{event.total or '?'})") if event.number else ("image", "")
            text = f"{kind} {event.item + 1}/{self.nf}{position} {title}: "
            image = to_network(event.image_bgr, self.img_size, self.stride, self.auto)
            yield path, image, event.image_bgr, event.capture, text
