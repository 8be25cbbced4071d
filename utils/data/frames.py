"""Single frames of pictures, videos and streams, and the reader of video files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from utils.data.images import letterbox
from utils.log import LOGGER

FALLBACK_RATE = 30.0  # frames per second where a source does not tell its rate
HIGHEST_RATE = 1000.0  # above it is the time base of a container, not a rate
HEAD_BYTES = 512  # of a file, enough to tell what it holds
# How containers of videos begin: Matroska and WebM, Flash, Ogg, ASF, MPEG program streams and bare MPEG, GIF.
_VIDEO_HEADS = (b"\x1aE\xdf\xa3", b"FLV\x01", b"OggS", b"0&\xb2u\x8ef\xcf\x11", b"\0\0\1\xba", b"\0\0\1\xb3", b"GIF8")
_TS_PACKET_BYTES = 188  # each packet of an MPEG transport stream begins with the letter G


@dataclass(frozen=True)
class Frame:
    """One picture to look at, and where it comes from.

    Attributes:
        image_bgr: (H, W, 3) uint8, upright.
        item: index of the input (file or stream) it belongs to.
        number: 0 for a picture; frames of a video or stream count from 1, left-out ones not included.
        total: frames this video will give; 0 for pictures, streams and videos that do not tell.
        rate: frames per second of the result, already divided by the stride; 0 for pictures.
        capture: OpenCV's reader of a video file, None otherwise.
    """

    image_bgr: np.ndarray
    item: int
    number: int = 0
    total: int = 0
    rate: float = 0.0
    capture: cv2.VideoCapture | None = None


@dataclass(frozen=True)
class Unreadable:
    """An input that gave nothing, with the reason."""

    item: int
    reason: str


def usable_rate(value: float) -> float:
    """Return frames per second as reported, or 30 where the report is no rate (0, not finite, above 1000)."""
    return float(value) if math.isfinite(value) and 0 < value <= HIGHEST_RATE else FALLBACK_RATE


def is_video_head(head: bytes) -> bool:
    """Return whether the first ``HEAD_BYTES`` of a file are those of a container of videos."""
    is_mp4 = head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide")
    is_avi = head[:4] == b"RIFF" and head[8:12] == b"AVI "
    is_ts = len(head) > 2 * _TS_PACKET_BYTES and set(head[::_TS_PACKET_BYTES]) == {ord("G")}
    return is_mp4 or is_avi or is_ts or head.startswith(_VIDEO_HEADS)


def to_network(image_bgr: np.ndarray, size: int | Sequence[int], stride: int, auto: bool) -> np.ndarray:
    """Letterbox a picture and return it as contiguous RGB uint8 (3, H, W)."""
    boxed = letterbox(image_bgr, size, auto=auto, stride=stride)[0]
    return np.ascontiguousarray(boxed[..., ::-1].transpose(2, 0, 1))


def network_shape(height: int, width: int, size: int | Sequence[int], stride: int, auto: bool) -> tuple[int, int]:
    """Return height and width of a picture after letterboxing, without doing it."""
    target = (size, size) if isinstance(size, int) else (size[0], size[1])
    if not auto:
        return target
    ratio = min(target[0] / height, target[1] / width)
    scaled = (max(round(height * ratio), 1), max(round(width * ratio), 1))
    rows, columns = (side + (limit - side) % stride for side, limit in zip(scaled, target, strict=True))
    return rows, columns


def open_capture(address: str | int, settings: Sequence[int] = ()) -> cv2.VideoCapture:
    """Open a video file, address or camera; ask ``isOpened`` of the result.

    ``settings`` are pairs of OpenCV's property numbers and values that hold from the start; FFmpeg only.

    Files go straight to FFmpeg where OpenCV has it: its guessing takes a ``%`` in a name for a pattern of pictures.
    """
    if isinstance(address, int):
        return cv2.VideoCapture(address)
    has_ffmpeg = cv2.CAP_FFMPEG in cv2.videoio_registry.getBackends()
    if has_ffmpeg:
        capture = cv2.VideoCapture(address, cv2.CAP_FFMPEG, list(settings))
    else:
        capture = cv2.VideoCapture(address, cv2.CAP_ANY)
    capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 1)  # phones store pictures lying down and note the turn
    return capture


class VideoFile:
    """Frames of one video file, upright; of every ``stride`` frames the last one.

    Attributes:
        rate: frames per second after the stride.
        total: frames that iteration will give, 0 where the container does not tell.
        capture: the OpenCV reader.

    Raises:
        ValueError: the file cannot be opened as a video.
    """

    def __init__(self, path: str | Path, stride: int = 1, *, title: str = "") -> None:
        """``title`` is what a warning calls the file instead of its path."""
        self.path, self.stride, self.title = Path(path), stride, title or str(path)
        if not self.path.stat().st_size:
            raise ValueError(f"{path}: empty file (0 bytes)")
        # absolute, because a colon in a relative name reads like the protocol of an address
        self.capture = open_capture(str(self.path.absolute()))
        if not self.capture.isOpened():
            self.capture.release()
            raise ValueError(f"{path}: cannot be opened as a video (cut off, damaged or of an unknown format)")
        self.rate = usable_rate(self.capture.get(cv2.CAP_PROP_FPS)) / stride
        stored = self.capture.get(cv2.CAP_PROP_FRAME_COUNT)
        self.stored_frames = int(stored) if math.isfinite(stored) and stored > 0 else 0
        self.total = self.stored_frames // stride

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number from 1, image BGR) and release the file at the end.

        Raises:
            ValueError: no frame could be decoded.
        """
        number = grabbed = 0
        try:
            while self.capture.grab():
                grabbed += 1
                if grabbed % self.stride:
                    continue
                done, image = self.capture.retrieve()
                if not done or image is None:
                    break
                number += 1
                yield number, image
        finally:
            self.capture.release()
        if not number:
            short = f"{grabbed} frame(s), fewer than --vid-stride {self.stride}"
            raise ValueError(f"{self.path}: {short if grabbed else 'no frame can be decoded'}")
        if grabbed + 1 < self.stored_frames:  # containers are often wrong by one
            LOGGER.warning(
                f"{self.title}: ended after {grabbed} of {self.stored_frames} frames, the rest cannot be decoded"
            )
