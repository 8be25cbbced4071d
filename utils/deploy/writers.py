"""Everything detection writes: annotated pictures and videos, label files, crops and tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from utils.boxes import clip_boxes, xywh2xyxy, xyxy2xywh
from utils.deploy.naming import CROPS, FALLBACK_SUFFIX, LABELS, folder_name, plan_outputs
from utils.deploy.record import MAPS, MEDIA, replace_file
from utils.deploy.run_folder import Run
from utils.deploy.tables import Row, Tables
from utils.deploy.video import Codec, VideoWriter, choose_codec
from utils.files import increment_path
from utils.log import LOGGER
from utils.threads import interrupts_wait

__all__ = ["Picture", "RunWriter", "cut_out", "plan_outputs", "save_one_box"]

CROP_GAIN, CROP_PAD = 1.02, 10  # crops are a little larger than their box: factor and pixels
CROP_OPTIONS = (
    cv2.IMWRITE_JPEG_QUALITY,
    95,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
)


@dataclass(frozen=True)
class Picture:
    """An annotated picture, encoded, and its place below the run's folder."""

    place: Path
    data: bytes


class RunWriter:
    """Write the results of a run; a context manager that closes all files however the block ends.

    What earlier runs into the folder made of the same inputs is replaced, where this run writes files of that kind;
    everything else there stays. Detections are (N, 6) arrays x1 y1 x2 y2 confidence class in whole pixels of the
    original, most confident first.
    """

    def __init__(
        self, run: Run, names: Mapping[int, str], *, keep_open: bool = False, codec: Codec | None = None
    ) -> None:
        """Open the tables and delete labels, crops and feature maps of the same inputs.

        With ``keep_open`` frames of several videos may come in turn (streams); otherwise a video is finished when
        frames of another input arrive. Without ``codec`` the best one is looked for when the first video comes.
        """
        self.folder, self.outputs, self.names = run.folder, run.outputs, names
        self.titles = [one.title for one in run.inputs]
        self.options, self.keep_open, self.codec = run.options, keep_open, codec
        self.record = run.record
        self.label_files = 0
        self._videos: dict[int, VideoWriter] = {}
        self._crop_counts: dict[str, int] = {}  # by folder and stem, so it does not grow with the frames of a video
        replaced = self.record.replaced_titles(run.inputs)
        self.record.begin(run.inputs, run.outputs, run.options.tables)
        self._tables = Tables(
            run.folder, save_csv=self.options.save_csv, save_json=self.options.save_json, replaced=replaced
        )
        for place in self.record.earlier_files(run.inputs, run.options.kinds - {MEDIA}):
            (run.folder / place).unlink(missing_ok=True)
        if self.options.save_txt:
            (run.folder / LABELS).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish videos and tables, all of them even where one fails."""
        with interrupts_wait(), contextlib.ExitStack() as stack:
            stack.callback(self._tables.close)
            for item in list(self._videos):
                stack.callback(self._finish_video, item)

    def encode(self, item: int, annotated: np.ndarray) -> Picture | None:
        """Encode an annotated picture, which may be done in another thread than the writing.

        Returns:
            None for one that fits into no format; then a warning was logged.
        """
        names = self.outputs[item]
        return self._encode_somehow(annotated, (names.media, names.fallback))

    def _encode_somehow(self, image: np.ndarray, places: Sequence[Path], options: Sequence[int] = ()) -> Picture | None:
        """Encode a picture for the first place whose format can hold it; a single one never ends the run."""
        reason = ""
        for place in dict.fromkeys(places):
            try:
                picture = Picture(place, _encode(image, place.suffix.lower(), options))
            except ValueError as error:  # sides beyond what the format can hold
                reason, options = reason or str(error), ()
                continue
            if reason:
                LOGGER.warning(f"{self.folder / places[0]}: {reason}; written as {place.name}")
            return picture
        LOGGER.warning(f"{self.folder / places[0]}: {reason}, left out")
        return None

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
                self._finish_video(other)
        self._write_rows(item, frame, detections)
        if self.options.save_txt:
            self._write_labels(item, frame, original.shape[:2], detections)
        if self.options.save_crop:
            for row in detections:
                self._write_crop(item, original, row)
        if self.options.save_media and annotated is not None:
            self._write_media(item, annotated, rate)

    def write_maps(self, item: int, folder: Path, place: Path) -> None:
        """Copy the files of a folder with feature maps, which is not there if no row has any, to ``place``."""
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            self.record.put(item, MAPS, place / path.name, path.read_bytes())

    def _name_of(self, number: int) -> str:
        return self.names.get(number, str(number))

    def _write_rows(self, item: int, frame: int, detections: np.ndarray) -> None:
        rows = []
        for *box, confidence, number in detections.tolist():
            corners = tuple(round(value) for value in box)
            rows.append(Row(self.titles[item], frame, int(number), self._name_of(int(number)), confidence, corners))
        self._tables.add(rows)

    def _write_labels(self, item: int, frame: int, shape: tuple[int, int], detections: np.ndarray) -> None:
        """Write ``class x y w h [confidence]``, normalised, least confident first."""
        if not len(detections) and not self.options.save_empty:
            return
        height, width = shape
        boxes = xyxy2xywh(detections[:, :4].astype(np.float64)) / (width, height, width, height)
        lines = []
        for box, (confidence, number) in zip(boxes[::-1].tolist(), detections[::-1, 4:].tolist(), strict=True):
            values = (int(number), *box, confidence) if self.options.save_conf else (int(number), *box)
            lines.append(" ".join(f"{value:g}" for value in values) + "\n")
        stem = self.outputs[item].label_stem(frame)
        place = LABELS / stem.parent / f"{stem.name}.txt"
        self.record.put(item, LABELS, place, "".join(lines).encode())
        self.label_files += 1

    def _write_crop(self, item: int, original: np.ndarray, row: np.ndarray) -> None:
        crop = cut_out(original, row[:4])
        if crop.size:
            picture = self._encode_somehow(crop, self._next_crop(item, int(row[5])), CROP_OPTIONS)
            if picture is not None:
                self.record.put(item, CROPS, picture.place, picture.data)

    def _next_crop(self, item: int, number: int) -> tuple[Path, Path]:
        """Return places of the next crop: stem.jpg, stem2.jpg, …, without those that are taken; and the same as PNG."""
        base = Path(CROPS) / folder_name(self.names.get(number, ""), number) / self.outputs[item].stem
        key = base.as_posix()
        while True:
            self._crop_counts[key] = count = self._crop_counts.get(key, 0) + 1
            name = f"{base.name}{count if count > 1 else ''}"
            places = base.with_name(f"{name}.jpg"), base.with_name(name + FALLBACK_SUFFIX)
            if not any(os.path.lexists(self.folder / place) for place in places):
                return places

    def _write_media(self, item: int, annotated: np.ndarray | Picture, rate: float) -> None:
        output = self.outputs[item]
        if not output.is_video:
            picture = annotated if isinstance(annotated, Picture) else self.encode(item, annotated)
            if picture is not None:
                self.record.put(item, MEDIA, picture.place, picture.data)
                self.record.remove_earlier_media(item, picture.place)
            return
        if item not in self._videos:
            self.codec = self.codec or choose_codec()
            height, width = annotated.shape[:2]
            self._videos[item] = self.codec.open(self.record.claim(item, output.media), rate, width, height)
        self._videos[item].write(annotated)

    def _finish_video(self, item: int) -> None:
        place = self.outputs[item].media
        self._videos.pop(item).release(lambda complete: self.record.note(item, MEDIA, place, complete))
        self.record.remove_earlier_media(item, place)


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
        replace_file(path, _encode(np.ascontiguousarray(crop), ".jpg", CROP_OPTIONS))
    return crop


def _encode(image: np.ndarray, suffix: str, options: Sequence[int] = ()) -> bytes:
    try:
        done, data = cv2.imencode(suffix, image, list(options))
    except cv2.error as error:
        raise ValueError(f"{image.shape[1]} x {image.shape[0]} pixels do not fit into {suffix}") from error
    if not done:
        raise ValueError(f"{image.shape[1]} x {image.shape[0]} pixels do not fit into {suffix}")
    return data.tobytes()
