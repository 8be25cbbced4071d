"""How the files of a detection are named: no two inputs share one, and no file stands where a folder has to.

Files end in one of ``WRITTEN_SUFFIXES`` and folders in none of them, so these never meet. Names that several inputs
want get numbers, of which there are more than names that are taken, so the search for one ends.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.deploy.video import VIDEO_SUFFIX
from utils.files import MAX_NAME_BYTES, shorten

LABELS, CROPS = "labels", "crops"  # folders below that of the run
WRITABLE_SUFFIXES = frozenset((".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
WRITTEN_SUFFIXES = (*sorted(WRITABLE_SUFFIXES), VIDEO_SUFFIX, ".txt", ".csv", ".json")
FALLBACK_SUFFIX = ".png"  # of pictures beyond what their own format holds
MAPS_END = "_features"  # of the files that --visualize writes
NAME_RESERVE = 24  # bytes kept free behind a stem for a running number, the frame number and the suffix
NUMBER_BYTES = 8  # of a running number with the sign before it
_STREAM_NAME_CUTS = re.compile(r"[|@#!¡·$€%&()=?¿^*;:,¨´><+\s/\\]+")
_FOLDER_NAME_CUTS = re.compile(r'[\x00-\x1f/\\:*?"<>|]')
_FRAME_NUMBER = re.compile(r"_[0-9]+\Z")
_NO_MAPS_FOLDER = re.compile(rf"part[0-9]+|{LABELS}|{CROPS}|.*{MAPS_END}", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class OutputNames:
    """Where the results of one input go, below the run's folder.

    Attributes:
        media: annotated picture or video.
        stem: label files, crops and feature maps, without suffix.
        is_video: label files carry the number of the frame.
        fallback: annotated picture that does not fit into the format of ``media``.
    """

    media: Path
    stem: Path
    is_video: bool
    fallback: Path

    def label_stem(self, frame: int) -> Path:
        """Return the stem for one frame (0 for a picture)."""
        return self.stem.with_name(f"{self.stem.name}_{frame}") if self.is_video else self.stem

    def maps_folder(self, frame: int) -> Path:
        """Return the folder of the feature maps of one frame, which is that of no other and never named like a file."""
        stem = self.label_stem(frame)
        is_other = stem.name.lower().endswith(WRITTEN_SUFFIXES) or _NO_MAPS_FOLDER.fullmatch(stem.name)
        return stem.with_name(stem.name + MAPS_END) if is_other else stem


def plan_outputs(
    inputs: Sequence[tuple[Path, bool]],
    known: Sequence[OutputNames | None] = (),
    others: Iterable[OutputNames] = (),
    *,
    with_maps: bool = False,
) -> list[OutputNames]:
    """Give each input (place below the source, is video) names that no other input has.

    The first one of a name keeps it; the next ones get their suffix (``a.png`` → ``labels/a_png.txt``) or a number.

    Args:
        inputs: what needs names.
        known: names that an earlier run into this folder gave to the same inputs, which keep them.
        others: names of inputs of earlier runs, which nobody else gets.
        with_maps: feature maps will be written, too.
    """
    known = list(known) or [None] * len(inputs)
    register = _Register(with_maps=with_maps)
    for names in (*others, *filter(None, known)):
        register.reserve(names)
    planned: list[OutputNames | None] = list(known)
    for index, (relative, is_video) in enumerate(inputs):
        if planned[index] is None:
            media, stem = register.media_for(relative, is_video), register.stem_for(relative, is_video)
            planned[index] = OutputNames(media, stem, is_video, media)
    for index, names in enumerate(planned):  # at last, so they take no name away
        if known[index] is None and not names.is_video and names.media.suffix.lower() != FALLBACK_SUFFIX:
            planned[index] = OutputNames(names.media, names.stem, False, register.fallback_for(names.media))
    return planned


class _Register:
    """Names that are taken.

    Stems of videos also own every name of the form stem_number, so running numbers stand behind a ``-`` there.
    """

    def __init__(self, *, with_maps: bool) -> None:
        self._with_maps = with_maps
        self._media: set[str] = set()
        self._stems: set[str] = set()
        self._videos: set[str] = set()
        self._numbered: set[str] = set()  # taken stems that end in _number, without it
        self._next: dict[tuple[str, str], int] = {}  # running number, by its purpose and what stands before it

    def reserve(self, names: OutputNames) -> None:
        """Take the names of an input of an earlier run."""
        self._media |= {_key(names.media), _key(names.fallback)}
        self._take_stem(names.stem, names.is_video)

    def media_for(self, relative: Path, is_video: bool) -> Path:
        """Take a name for an annotated picture or video."""
        suffix = VIDEO_SUFFIX if is_video else relative.suffix
        if not is_video and suffix.lower() not in WRITABLE_SUFFIXES:
            suffix = ".jpg"
        folder = safe_folder(relative.parent)
        mark = "-" if is_video else "_"
        for name in self._choices(relative, folder, MAX_NAME_BYTES - len(suffix), mark, suffix):
            path = folder / (name + suffix)
            is_map = self._with_maps and path.name.lower().endswith(MAPS_END + ".png")
            if not is_map and _key(path) not in self._media:
                break
        self._media.add(_key(path))
        return path

    def fallback_for(self, media: Path) -> Path:
        """Take a name for the PNG that is written where ``media`` cannot hold a picture."""
        name = Path(media.name + FALLBACK_SUFFIX)
        room = MAX_NAME_BYTES - len(FALLBACK_SUFFIX)
        for stem in self._choices(name, media.parent, room, "-", FALLBACK_SUFFIX):
            path = media.with_name(stem + FALLBACK_SUFFIX)
            if _key(path) not in self._media:
                break
        self._media.add(_key(path))
        return path

    def stem_for(self, relative: Path, is_video: bool) -> Path:
        """Take a stem whose label files will meet no other's."""
        folder = safe_folder(relative.parent)
        room = MAX_NAME_BYTES - NAME_RESERVE
        base = folder / shorten(_without_dots(relative.stem), room - NUMBER_BYTES)
        mark = "-" if is_video or _key(base) in self._videos else "_"
        for name in self._choices(relative, folder, room, mark, "stem"):
            stem = folder / _without_dots(name)
            if self._is_free(stem, is_video):
                break
        self._take_stem(stem, is_video)
        return stem

    def _is_free(self, stem: Path, is_video: bool) -> bool:
        key = _key(stem)
        base = frame_base(key)
        is_frame = base != key and base in self._videos
        return key not in self._stems and not is_frame and not (is_video and key in self._numbered)

    def _take_stem(self, stem: Path, is_video: bool) -> None:
        key = _key(stem)
        self._stems.add(key)
        if is_video:
            self._videos.add(key)
        base = frame_base(key)
        if base != key:
            self._numbered.add(base)

    def _choices(self, file: Path, folder: Path, room: int, mark: str, purpose: str) -> Iterator[str]:
        """Yield the stem of a file, then with its suffix, then with rising numbers, in ``room`` bytes."""
        yield shorten(file.stem, room)
        if file.suffix:
            yield shorten(f"{file.stem}_{file.suffix[1:]}", room)
        base = _without_dots(shorten(file.stem, room - NUMBER_BYTES))
        counter = (purpose, _key(folder / base))
        for number in itertools.count(self._next.get(counter, 2)):
            self._next[counter] = number + 1
            yield f"{base}{mark}{number}"


def frame_base(stem: str) -> str:
    """Return the stem of a label file without the number of a frame at its end."""
    return _FRAME_NUMBER.sub("", stem)


def _key(path: Path) -> str:
    return os.path.normcase(path.as_posix())


def _without_dots(name: str) -> str:
    """Return ``name``, but not as one that means a folder (``.`` and ``..``, which a file ``..jpg`` leads to)."""
    return name if name.strip(".") else "_" * len(name)


def safe_folder(folder: Path) -> Path:
    """Return a folder below a source as it is named below that of the run.

    What ends like a file gets ``_`` for the dot; ``labels`` and ``crops`` are taken there, and get one behind.
    """
    parts = []
    for part in map(_without_dots, folder.parts):
        cut = part.rfind(".")
        parts.append(f"{part[:cut]}_{part[cut + 1 :]}" if part.lower().endswith(WRITTEN_SUFFIXES) else part)
    if parts and parts[0].lower() in (LABELS, CROPS):
        parts[0] += "_"
    return Path(*parts)


def stream_name(address: str) -> str:
    """Return a file name for a stream: its address without scheme, user and password, odd characters as ``_``."""
    shown = re.sub(r"^[a-zA-Z]+://([^/]*@)?", "", address)
    return _STREAM_NAME_CUTS.sub("_", shown).strip("_.") or "stream"


def folder_name(class_name: str, number: int) -> str:
    """Return a class name as one safe folder name, the class number where nothing is left of it."""
    cleaned = _FOLDER_NAME_CUTS.sub("_", class_name).strip(" .")
    return shorten(cleaned, MAX_NAME_BYTES) if cleaned else str(number)
