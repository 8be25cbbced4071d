"""Everything detection writes: annotated pictures and videos, label files, crops and tables, and how they are named."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from utils.boxes import clip_boxes, xywh2xyxy, xyxy2xywh
from utils.deploy.tables import RESULTS_NAME, Row, Tables, naming, read_results, shown_file
from utils.deploy.video import VIDEO_SUFFIX, Codec, VideoWriter, choose_codec
from utils.files import increment_path
from utils.log import LOGGER
from utils.threads import interrupts_wait

WRITABLE_SUFFIXES = frozenset((".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
MAX_NAME_BYTES = 255  # of one name in a path, on all common file systems
NAME_RESERVE = 24  # bytes kept free behind a stem for the frame number, a running number and the suffix
CROP_GAIN, CROP_PAD = 1.02, 10  # crops are a little larger than their box: factor and pixels
CROP_OPTIONS = (
    cv2.IMWRITE_JPEG_QUALITY,
    95,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
)
_STREAM_NAME_CUTS = re.compile(r"[|@#!¡·$€%&()=?¿^*;:,¨´><+\s/\\]+")
_FOLDER_NAME_CUTS = re.compile(r'[\x00-\x1f/\\:*?"<>|]')


@dataclass(frozen=True)
class OutputNames:
    """Where the results of one input go, below the run's folder.

    Attributes:
        media: annotated picture or video.
        stem: label files, crops and feature maps, without suffix.
        is_video: label files carry the number of the frame.
    """

    media: Path
    stem: Path
    is_video: bool

    def label_stem(self, frame: int) -> Path:
        """Return the stem for one frame (0 for a picture)."""
        return self.stem.with_name(f"{self.stem.name}_{frame}") if self.is_video else self.stem


def plan_outputs(inputs: Sequence[tuple[Path, bool]]) -> list[OutputNames]:
    """Give each input (place below the source, is video) names that no other input has.

    The first one of a name keeps it; the next ones get their suffix (``a.png`` → ``labels/a_png.txt``) or a number.
    """
    media_taken: set[str] = set()
    stems = _StemRegister()
    planned = []
    for relative, is_video in inputs:
        suffix = VIDEO_SUFFIX if is_video else relative.suffix
        if not is_video and suffix.lower() not in WRITABLE_SUFFIXES:
            suffix = ".jpg"
        fitted = (
            relative.with_name(shorten(name, MAX_NAME_BYTES - len(suffix)) + suffix) for name in _name_choices(relative)
        )
        media = next(path for path in fitted if _key(path) not in media_taken)
        media_taken.add(_key(media))
        fitted = (relative.with_name(shorten(name, MAX_NAME_BYTES - NAME_RESERVE)) for name in _name_choices(relative))
        stem = next(path for path in fitted if stems.claim(path, is_video))
        planned.append(OutputNames(media, stem, is_video))
    return planned


def _name_choices(path: Path) -> Iterator[str]:
    """Yield the stem of a file, then with its suffix, then with rising numbers."""
    yield path.stem
    if path.suffix:
        yield f"{path.stem}_{path.suffix[1:]}"
    yield from (f"{path.stem}_{number}" for number in itertools.count(2))


class _StemRegister:
    """Stems of label files: those of videos also own every name of the form stem_number."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._videos: set[str] = set()
        self._numbered: set[str] = set()  # taken stems that end in _number, without it

    def claim(self, stem: Path, is_video: bool) -> bool:
        """Take ``stem`` if its label files will meet no other's."""
        key = _key(stem)
        base = re.sub(r"_\d+$", "", key)
        is_free = key not in self._taken and not (base != key and base in self._videos)
        if not is_free or (is_video and key in self._numbered):
            return False
        self._taken.add(key)
        if is_video:
            self._videos.add(key)
        if base != key:
            self._numbered.add(base)
        return True


def _key(path: Path) -> str:
    return os.path.normcase(path.as_posix())


def shorten(name: str, room: int) -> str:
    """Return ``name``, cut to ``room`` UTF-8 bytes with a digest of the whole at its end where it is longer."""
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) <= room:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:8]
    return encoded[: room - 9].decode("utf-8", "ignore") + "_" + digest


def stream_name(address: str) -> str:
    """Return a file name for a stream: its address without scheme, user and password, odd characters as ``_``."""
    shown = re.sub(r"^[a-zA-Z]+://([^/]*@)?", "", address)
    return _STREAM_NAME_CUTS.sub("_", shown).strip("_.") or "stream"


def folder_name(class_name: str, number: int) -> str:
    """Return a class name as one safe folder name, the class number where nothing is left of it."""
    cleaned = _FOLDER_NAME_CUTS.sub("_", class_name).strip(" .")
    return shorten(cleaned, MAX_NAME_BYTES) if cleaned else str(number)


@dataclass(frozen=True)
class SaveOptions:
    """What is written of each frame besides ``results.txt``; named as on the command line."""

    save_txt: bool = False
    save_conf: bool = False
    save_empty: bool = False
    save_crop: bool = False
    save_csv: bool = False
    save_json: bool = False
    save_media: bool = True


@dataclass(frozen=True)
class Picture:
    """An annotated picture, encoded, and its place below the run's folder."""

    place: Path
    data: bytes


class RunWriter:
    """Write the results of a run into ``folder``; a context manager that closes all files however the block ends.

    A repeated run over the same inputs replaces its files. Detections are (N, 6) arrays x1 y1 x2 y2 confidence class in
    whole pixels of the original, most confident first.
    """

    def __init__(
        self,
        folder: Path,
        outputs: Sequence[OutputNames],
        titles: Sequence[str],
        names: Mapping[int, str],
        options: SaveOptions = SaveOptions(),  # noqa: B008 - it cannot change
        *,
        keep_open: bool = False,
        codec: Codec | None = None,
    ) -> None:
        """Open the tables; ``titles`` are the inputs as they name them.

        With ``keep_open`` frames of several videos may come in turn (streams); otherwise a video is finished when
        frames of another input arrive. Without ``codec`` the best one is looked for when the first video comes.
        """
        self.folder, self.outputs, self.titles, self.names = folder, outputs, titles, names
        self.options, self.keep_open, self.codec = options, keep_open, codec
        self.label_files = 0
        self._videos: dict[int, VideoWriter] = {}
        self._crop_counts: dict[str, int] = {}  # by folder and stem, so it does not grow with the frames of a video
        self._forget_earlier_run()
        if options.save_txt:
            (folder / "labels").mkdir(parents=True, exist_ok=True)
        self._tables = Tables(folder, save_csv=options.save_csv, save_json=options.save_json)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish videos and tables, all of them even where one fails."""
        with interrupts_wait(), contextlib.ExitStack() as stack:
            stack.callback(self._tables.close)
            for video in self._videos.values():
                stack.callback(video.release)
            self._videos = {}

    def encode(self, item: int, annotated: np.ndarray) -> Picture:
        """Encode an annotated picture, which may be done in another thread than the writing."""
        place = self.outputs[item].media
        try:
            return Picture(place, _encode(annotated, place.suffix.lower()))
        except ValueError as error:  # sides beyond what the format can hold
            LOGGER.warning(f"{self.folder / place}: {error}; written as PNG")
            name = f"{shorten(place.name, MAX_NAME_BYTES - 4)}.png"
            return Picture(place.with_name(name), _encode(annotated, ".png"))

    def write(
        self,
        item: int,
        frame: int,
        original: np.ndarray,
        annotated: np.ndarray | Picture | None,
        detections: np.ndarray,
        rate: float,
    ) -> None:
        """Write all that was asked for of one frame (0 for a picture) of input ``item``.

        ``annotated`` may be None where no pictures are saved. ``rate`` is that of the written video.
        """
        if not self.keep_open:
            for other in [other for other in self._videos if other != item]:
                self._videos.pop(other).release()
        self._write_rows(item, frame, detections)
        if self.options.save_txt:
            self._write_labels(item, frame, original.shape[:2], detections)
        if self.options.save_crop:
            for row in detections:
                self._write_crop(item, original, row)
        if self.options.save_media and annotated is not None:
            self._write_media(item, annotated, rate)

    def _name_of(self, number: int) -> str:
        return self.names.get(number, str(number))

    def _write_rows(self, item: int, frame: int, detections: np.ndarray) -> None:
        rows = []
        for *box, confidence, number in detections.tolist():
            corners = tuple(round(value) for value in box)
            rows.append(Row(self.titles[item], frame, int(number), self._name_of(int(number)), confidence, corners))
        self._tables.add(rows)

    def _label_path(self, item: int, frame: int) -> Path:
        stem = self.outputs[item].label_stem(frame)
        return self.folder / "labels" / stem.parent / f"{stem.name}.txt"

    def _write_labels(self, item: int, frame: int, shape: tuple[int, int], detections: np.ndarray) -> None:
        """Write ``class x y w h [confidence]``, normalised, least confident first."""
        path = self._label_path(item, frame)
        if not len(detections) and not self.options.save_empty:
            path.unlink(missing_ok=True)  # of an earlier run into the same folder
            return
        height, width = shape
        boxes = xyxy2xywh(detections[:, :4].astype(np.float64)) / (width, height, width, height)
        lines = []
        for box, (confidence, number) in zip(boxes[::-1].tolist(), detections[::-1, 4:].tolist(), strict=True):
            values = (int(number), *box, confidence) if self.options.save_conf else (int(number), *box)
            lines.append(" ".join(f"{value:g}" for value in values) + "\n")
        _replace_file(path, "".join(lines).encode())
        self.label_files += 1

    def _write_crop(self, item: int, original: np.ndarray, row: np.ndarray) -> None:
        crop = cut_out(original, row[:4])
        if crop.size:
            place = self._next_crop(item, int(row[5]))
            _replace_file(self.folder / place, _encode(crop, ".jpg", CROP_OPTIONS))

    def _next_crop(self, item: int, number: int) -> Path:
        """Return the place of the next crop: stem.jpg, stem2.jpg, …, without those that another input has taken."""
        base = _crop_base(self.outputs[item].stem, self.names.get(number, ""), number)
        key = _key(base)
        while True:
            self._crop_counts[key] = count = self._crop_counts.get(key, 0) + 1
            if not self._is_crop_of_another(key, count):
                return base.with_name(f"{base.name}{count if count > 1 else ''}.jpg")

    def _is_crop_of_another(self, key: str, count: int) -> bool:
        """Return whether ``stem`` + ``count`` is also another stem, or another stem + its count, in use."""
        name = f"{key}{count if count > 1 else ''}"
        digits = len(name) - len(name.rstrip("0123456789"))
        for length in range(digits + 1):
            other, number = (name[:-length], name[-length:]) if length else (name, "1")
            if other != key and number[0] != "0" and self._crop_counts.get(other, 0) >= int(number) > (length > 0):
                return True
        return False

    def _write_media(self, item: int, annotated: np.ndarray | Picture, rate: float) -> None:
        output = self.outputs[item]
        if not output.is_video:
            picture = annotated if isinstance(annotated, Picture) else self.encode(item, annotated)
            _replace_file(self.folder / picture.place, picture.data)
            return
        if item not in self._videos:
            self.codec = self.codec or choose_codec()
            height, width = annotated.shape[:2]
            self._videos[item] = self.codec.open(self.folder / output.media, rate, width, height)
        self._videos[item].write(annotated)

    def _forget_earlier_run(self) -> None:
        """Delete labels and crops that an earlier run made of the same inputs, where this run writes new ones.

        The earlier ``results.txt`` tells which they are; files of other inputs stay.
        """
        path = self.folder / RESULTS_NAME
        if not path.is_file() or not (self.options.save_txt or self.options.save_crop):
            return
        items = {shown_file(title): item for item, title in enumerate(self.titles)}
        counts: dict[Path, int] = {}
        for row in read_results(path):
            item = items.get(row.file)
            if item is None:
                continue
            if self.options.save_txt:
                self._label_path(item, row.frame).unlink(missing_ok=True)
            if self.options.save_crop:
                base = _crop_base(self.outputs[item].stem, row.name, row.number)
                counts[base] = count = counts.get(base, 0) + 1
                crop = base.with_name(f"{base.name}{count if count > 1 else ''}.jpg")
                (self.folder / crop).unlink(missing_ok=True)


def _crop_base(stem: Path, name: str, number: int) -> Path:
    return Path("crops") / folder_name(name, number) / stem


def cut_out(
    image: np.ndarray,
    box_xyxy: np.ndarray,
    gain: float = CROP_GAIN,
    pad: float = CROP_PAD,
    *,
    is_square: bool = False,
) -> np.ndarray:
    """Return the part of ``image`` inside a box that is enlarged by 2 % and 10 pixels; empty for a box outside.

    With ``is_square`` the box grows to a square of its longer side first.
    """
    boxes = xyxy2xywh(box_xyxy[None].astype(np.float64))
    if is_square:
        boxes[:, 2:] = boxes[:, 2:].max()
    boxes[:, 2:] = boxes[:, 2:] * gain + pad
    left, top, right, bottom = clip_boxes(xywh2xyxy(boxes), image.shape[:2])[0].astype(int)
    return image[top:bottom, left:right]


def save_one_box(
    xyxy: Sequence[float],
    im: np.ndarray,
    file: str | Path = "im.jpg",
    gain: float = CROP_GAIN,
    pad: float = CROP_PAD,
    square: bool = False,
    BGR: bool = False,  # noqa: N803 - upstream's name
    save: bool = True,
) -> np.ndarray:
    """Cut a box (x1, y1, x2, y2 in pixels) out of an image and write it beside those that ``file`` names already.

    The suffix becomes ``.jpg``. Without ``BGR`` the channels of ``im`` are turned round, which brings RGB to BGR.

    Returns:
        What was cut out, in BGR; empty for a box outside, which is not written.
    """
    crop = cut_out(im, np.array([float(value) for value in xyxy]), gain, pad, is_square=square)
    crop = crop if BGR else crop[..., ::-1]
    if save and crop.size:
        path = increment_path(Path(file).with_suffix(".jpg"))
        _replace_file(path, _encode(np.ascontiguousarray(crop), ".jpg", CROP_OPTIONS))
    return crop


def _encode(image: np.ndarray, suffix: str, options: Sequence[int] = ()) -> bytes:
    try:
        done, data = cv2.imencode(suffix, image, list(options))
    except cv2.error as error:
        raise ValueError(f"{image.shape[1]} x {image.shape[0]} pixels do not fit into {suffix}") from error
    if not done:
        raise ValueError(f"{image.shape[1]} x {image.shape[0]} pixels do not fit into {suffix}")
    return data.tobytes()


def _replace_file(path: Path, data: bytes) -> None:
    """Write a file under a passing name and rename it.

    Not synchronised with the disk, unlike the writing of checkpoints: there may be thousands of files, and they can be
    made again. The passing name is short because the final one may be as long as the system allows.
    """
    partial = path.with_name(f".partial-{os.getpid()}")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
