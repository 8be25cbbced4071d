"""Everything detection writes: annotated pictures and videos, label files, crops and the table ``results.txt``."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import cv2
import numpy as np

from utils.boxes import clip_boxes, xywh2xyxy, xyxy2xywh
from utils.deploy.mp4_size import set_frame_size
from utils.log import LOGGER

RESULTS_NAME = "results.txt"
RESULTS_HEADER = "# file\tframe\tclass\tname\tconfidence\tx1\ty1\tx2\ty2"
VIDEO_SUFFIX, VIDEO_CODEC = ".mp4", "mp4v"
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


class RunWriter:
    """Write the results of a run into ``folder``; a context manager that closes all files however the block ends.

    A repeated run over the same inputs replaces its files. Detections are (N, 6) arrays x1 y1 x2 y2 confidence class in
    pixels of the original, most confident first.
    """

    def __init__(
        self,
        folder: Path,
        outputs: Sequence[OutputNames],
        titles: Sequence[str],
        names: Mapping[int, str],
        *,
        save_txt: bool = False,
        save_conf: bool = False,
        save_crop: bool = False,
        save_media: bool = True,
        keep_open: bool = False,
    ) -> None:
        """Open ``results.txt``; ``titles`` are the inputs as it names them.

        With ``keep_open`` frames of several videos may come in turn (streams); otherwise a video is finished when
        frames of another input arrive.
        """
        self.folder, self.outputs, self.titles, self.names = folder, outputs, titles, names
        self.save_txt, self.save_conf, self.save_crop, self.save_media = save_txt, save_conf, save_crop, save_media
        self.keep_open = keep_open
        self.label_files = 0
        self._videos: dict[int, VideoWriter] = {}
        self._crops: set[str] = set()
        self._crop_counts: dict[str, int] = {}
        if save_txt:
            (folder / "labels").mkdir(parents=True, exist_ok=True)
        self._table: TextIO = open(folder / RESULTS_NAME, "w", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
        self._table.write(RESULTS_HEADER + "\n")

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish videos and the table."""
        try:
            for item in list(self._videos):
                self._videos.pop(item).release()
        finally:
            self._table.close()

    def write(
        self,
        item: int,
        frame: int,
        original: np.ndarray,
        annotated: np.ndarray | None,
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
        if self.save_txt:
            self._write_labels(item, frame, original.shape[:2], detections)
        if self.save_crop:
            for row in detections:
                self._write_crop(item, original, row)
        if self.save_media and annotated is not None:
            self._write_media(item, annotated, rate)

    def _write_rows(self, item: int, frame: int, detections: np.ndarray) -> None:
        title = _one_field(self.titles[item])
        title = f"./{title}" if title.startswith("#") else title  # '#' marks the header
        for *box, confidence, number in detections.tolist():
            name = _one_field(self.names.get(int(number), str(int(number))))
            corners = "\t".join(f"{value:.0f}" for value in box)
            self._table.write(f"{title}\t{frame}\t{int(number)}\t{name}\t{confidence:.6g}\t{corners}\n")
        if len(detections):
            self._table.flush()

    def _write_labels(self, item: int, frame: int, shape: tuple[int, int], detections: np.ndarray) -> None:
        """Write ``class x y w h [confidence]``, normalised, least confident first; no file without detections."""
        stem = self.outputs[item].label_stem(frame)
        path = self.folder / "labels" / stem.parent / f"{stem.name}.txt"
        if not len(detections):
            path.unlink(missing_ok=True)  # of an earlier run into the same folder
            return
        height, width = shape
        boxes = xyxy2xywh(detections[:, :4].astype(np.float64)) / (width, height, width, height)
        lines = []
        for box, (confidence, number) in zip(boxes[::-1].tolist(), detections[::-1, 4:].tolist(), strict=True):
            values = (int(number), *box, confidence) if self.save_conf else (int(number), *box)
            lines.append(" ".join(f"{value:g}" for value in values) + "\n")
        _replace_file(path, "".join(lines).encode())
        self.label_files += 1

    def _write_crop(self, item: int, original: np.ndarray, row: np.ndarray) -> None:
        crop = cut_out(original, row[:4])
        if not crop.size:
            return
        number = int(row[5])
        stem = self.outputs[item].stem
        base = Path("crops") / folder_name(self.names.get(number, ""), number) / stem
        key = _key(base)
        while True:
            self._crop_counts[key] = count = self._crop_counts.get(key, 0) + 1
            place = base.with_name(f"{base.name}{count if count > 1 else ''}.jpg")
            if _key(place) not in self._crops:
                break
        self._crops.add(_key(place))
        _replace_file(self.folder / place, _encode(crop, ".jpg", CROP_OPTIONS))

    def _write_media(self, item: int, annotated: np.ndarray, rate: float) -> None:
        output = self.outputs[item]
        path = self.folder / output.media
        if output.is_video:
            if item not in self._videos:
                self._videos[item] = VideoWriter(path, rate, annotated.shape[1], annotated.shape[0])
            self._videos[item].write(annotated)
            return
        try:
            data = _encode(annotated, path.suffix.lower())
        except ValueError as error:  # sides beyond what the format can hold
            LOGGER.warning(f"{path}: {error}; written as PNG")
            path, data = path.with_name(f"{shorten(path.name, MAX_NAME_BYTES - 4)}.png"), _encode(annotated, ".png")
        _replace_file(path, data)


class VideoWriter:
    """Write frames of one size to an MP4 file (MPEG-4 Part 2), which gets its name when it is complete.

    Raises:
        OSError: OpenCV cannot write videos here.
    """

    def __init__(self, path: Path, rate: float, width: int, height: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.size = path, (width, height)
        self._padding = (width % 2, height % 2)  # the writer would cut odd sides
        self._partial = path.with_name(f".partial-{os.getpid()}-{id(self)}{VIDEO_SUFFIX}")
        has_ffmpeg = cv2.CAP_FFMPEG in cv2.videoio_registry.getWriterBackends()
        self._writer = cv2.VideoWriter(
            str(self._partial.absolute()),
            cv2.CAP_FFMPEG if has_ffmpeg else cv2.CAP_ANY,
            cv2.VideoWriter_fourcc(*VIDEO_CODEC),
            rate,
            (width + self._padding[0], height + self._padding[1]),
        )
        if not self._writer.isOpened():
            self._partial.unlink(missing_ok=True)
            raise OSError(
                f"{path}: this OpenCV build cannot write {VIDEO_CODEC} videos; use --nosave, or install opencv-python"
            )

    def write(self, image: np.ndarray) -> None:
        """Add a frame; one of another size is scaled, since a video has one size."""
        if (image.shape[1], image.shape[0]) != self.size:
            image = cv2.resize(image, self.size, interpolation=cv2.INTER_LINEAR)
        if any(self._padding):
            image = cv2.copyMakeBorder(image, 0, self._padding[1], 0, self._padding[0], cv2.BORDER_REPLICATE)
        self._writer.write(image)

    def release(self) -> None:
        """Complete the file and give it its name."""
        self._writer.release()
        if not self._partial.is_file():
            raise OSError(f"{self.path}: the video was not written (disk full?)")
        if any(self._padding) and not set_frame_size(self._partial, *self.size):
            LOGGER.warning(f"{self.path}: written with a repeated last column or row, because its size is odd")
        os.replace(self._partial, self.path)


def cut_out(image: np.ndarray, box_xyxy: np.ndarray) -> np.ndarray:
    """Return the part of ``image`` inside a box that is enlarged by 2 % and 10 pixels; empty for a box outside."""
    boxes = xyxy2xywh(box_xyxy[None].astype(np.float64))
    boxes[:, 2:] = boxes[:, 2:] * CROP_GAIN + CROP_PAD
    left, top, right, bottom = clip_boxes(xywh2xyxy(boxes), image.shape[:2])[0].astype(int)
    return image[top:bottom, left:right]


def _one_field(text: str) -> str:
    """Return ``text`` as one field of a table separated by tabs."""
    return " ".join(re.split(r"[\t\r\n]+", text))


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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{os.getpid()}")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
