"""Live streams: one reading thread for each, always the newest frame, reconnected when lost."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import cv2
import numpy as np

from utils.data.addresses import has_known_length, without_password
from utils.data.frames import Frame, open_capture, to_network, usable_rate
from utils.data.screen import ScreenCapture, is_screen
from utils.log import LOGGER

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0  # pauses double up to this: a camera that is off for an hour must not be asked every second
RECONNECT_TRIES = 20  # in a row without a frame; with these pauses about eight minutes
NETWORK_TIMEOUT_MS = 10_000  # OpenCV's own are 30 s, in which nobody learns that a camera is gone


class Capture(Protocol):
    """What a stream is read from; ``cv2.VideoCapture`` is one."""

    def isOpened(self) -> bool: ...  # noqa: N802 - OpenCV's name

    def grab(self) -> bool: ...

    def retrieve(self) -> tuple[bool, np.ndarray | None]: ...

    def get(self, propId: int) -> float: ...  # noqa: N803 - OpenCV's name

    def release(self) -> None: ...


def pause_before(attempt: int, first_s: float = FIRST_PAUSE_S) -> float:
    """Return the seconds to wait before the given attempt (from 1) to reconnect: doubled each time, up to 30."""
    return min(first_s * 2.0 ** min(attempt - 1, 30), LONGEST_PAUSE_S)


def open_stream(address: str) -> Capture:
    """Open a camera number, an address or the screen."""
    if is_screen(address):
        return ScreenCapture(address)
    if address.isdecimal():
        capture = open_capture(int(address))
    else:
        limits = (cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, cv2.CAP_PROP_READ_TIMEOUT_MSEC)
        capture = open_capture(address, [value for limit in limits for value in (limit, NETWORK_TIMEOUT_MS)])
    capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # old frames waiting in a driver are delay
    return capture


@dataclass
class _Pass:
    """What one connection gave, in few numbers; equal to another one that gave the very same pictures.

    Of a picture a 64th of the pixels is looked at: the noise of a camera changes these as well.
    """

    frames: int = 0
    first: int = 0  # checksum of the first picture
    whole: int = 0  # of all
    is_moving: bool = False  # not all pictures are the same, as they may be of a camera without a signal

    def add(self, image: np.ndarray) -> None:
        pixels = np.ascontiguousarray(image[::8, ::8])
        checksum = zlib.crc32(pixels)
        self.first = self.first if self.frames else checksum
        self.is_moving |= checksum != self.first
        self.whole = zlib.crc32(pixels, self.whole)
        self.frames += 1


class _Stream:
    """State of one stream; everything that changes is guarded by the condition all streams share."""

    def __init__(self, item: int, address: str, news: threading.Condition) -> None:
        self.item, self.address, self.news = item, address, news
        self.newest: np.ndarray | None = None
        self.taken = 0  # frames handed on
        self.rate = 0.0
        self.is_tried = self.is_opened = self.has_ended = False
        self.latest = _Pass()

    @property
    def shown(self) -> str:
        return without_password(self.address)

    def take(self) -> Frame | None:
        """Return the newest frame if it was not handed on before."""
        if self.newest is None:
            return None
        image, self.newest = self.newest, None
        self.taken += 1
        self.news.notify_all()
        return Frame(image, self.item, self.taken, 0, self.rate)


class LoadStreams:
    """Read several streams at once.

    A stream that is lost is opened again after a pause, which grows with each attempt, while the others go on; the run
    of frames ends when all streams have ended for good. A recording behind an address (it or its server tells a length)
    is read in full and not started again. What tells no length is read like a camera, and is taken for a recording when
    a second connection has given the same pictures as the one before, from the first to the last.

    Iterating gives upstream's tuples ``(addresses, images (n, 3, H, W) RGB uint8, originals, None, "")`` of the streams
    with a new frame; :meth:`rounds` gives the same frames as :class:`Frame` lists.

    Args:
        sources: address or list of addresses; digits are camera numbers.
        img_size, stride, auto: letterboxing of the tuples.
        transforms: accepted for compatibility, has to be None.
        vid_stride: hand on every n-th frame.
        open_source: opens an address; another one is used by tests.
        is_file: asks a server whether it knows the length of what is behind an address.
        pause_s, tries: wait before the first attempt to reconnect; how many attempts in a row may fail.

    Raises:
        ConnectionError: no stream could be opened.
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        img_size: int | Sequence[int] = 640,
        stride: int = 32,
        auto: bool = True,
        transforms: None = None,
        vid_stride: int = 1,
        *,
        open_source: Callable[[str], Capture] = open_stream,
        is_file: Callable[[str], bool] = has_known_length,
        pause_s: float = FIRST_PAUSE_S,
        tries: int = RECONNECT_TRIES,
    ) -> None:
        if transforms is not None:
            raise ValueError("LoadStreams: transforms are not supported, pass None")
        if vid_stride < 1:
            raise ValueError(f"vid_stride {vid_stride}: should be at least 1")
        self.img_size, self.stride, self.auto, self.vid_stride = img_size, stride, auto, vid_stride
        self.sources = [sources] if isinstance(sources, str) else list(sources)
        self._open, self._is_file, self._pause_s, self._tries = open_source, is_file, pause_s, tries
        self._news, self._stop = threading.Condition(), threading.Event()
        self._streams = [_Stream(item, address, self._news) for item, address in enumerate(self.sources)]
        self._threads = [threading.Thread(target=self._watch, args=(s,), daemon=True) for s in self._streams]
        for thread in self._threads:
            thread.start()
        with self._news:
            self._news.wait_for(lambda: all(stream.is_tried for stream in self._streams))
        if not any(stream.is_opened for stream in self._streams):
            self.close()
            shown = ", ".join(stream.shown for stream in self._streams)
            is_camera = all(stream.address.isdecimal() for stream in self._streams)
            cause = "check address, network and that it is sending"
            if is_camera:
                cause = "check that the camera is plugged in, not in use and of this number (Linux: ls /dev/video*)"
            raise ConnectionError(f"no stream could be opened: {shown}; {cause}")

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[tuple[list[str], np.ndarray, list[np.ndarray], None, str]]:
        for frames in self.rounds():
            originals = [frame.image_bgr for frame in frames]
            auto = self.auto and len({image.shape for image in originals}) == 1
            images = np.stack([to_network(image, self.img_size, self.stride, auto) for image in originals])
            yield [self.sources[frame.item] for frame in frames], images, originals, None, ""

    def rounds(self) -> Iterator[list[Frame]]:
        """Yield the new frames of all streams, one of each at most, whenever there are any, until all have ended."""
        try:
            while True:
                with self._news:
                    self._news.wait_for(self._has_news, timeout=1.0)  # a timeout lets Ctrl+C through on every system
                    frames = [frame for stream in self._streams if (frame := stream.take()) is not None]
                    is_over = self._stop.is_set() or not frames and all(stream.has_ended for stream in self._streams)
                if is_over:
                    return
                if frames:
                    yield frames
        finally:
            self.close()

    def close(self) -> None:
        """Stop the reading threads and release the streams."""
        self._stop.set()
        with self._news:
            self._news.notify_all()
        for thread in self._threads:
            thread.join(timeout=2.0)  # one that hangs in a network call must not hold the program

    def _has_news(self) -> bool:
        streams = self._streams
        is_over = self._stop.is_set() or all(stream.has_ended for stream in streams)
        return is_over or any(stream.newest is not None for stream in streams)

    def _watch(self, stream: _Stream) -> None:
        """Thread of one stream: open, read until it is lost, wait, open again."""
        failed = 0
        while not self._stop.is_set():
            frames, is_finished = self._read_once(stream)
            failed = 0 if frames else failed + 1
            if is_finished or failed > self._tries or self._stop.is_set():
                break
            pause_s = pause_before(max(failed, 1), self._pause_s)
            LOGGER.warning(
                f"stream {stream.shown}: no {'more ' if frames else ''}frames, trying again in {pause_s:g} s"
            )
            if self._stop.wait(pause_s):
                break
        with self._news:
            stream.has_ended = stream.is_tried = True
            self._news.notify_all()
        if not self._stop.is_set():
            LOGGER.info(f"stream {stream.shown}: ended")

    def _read_once(self, stream: _Stream) -> tuple[int, bool]:
        """Read one connection to its end; return its frames and whether that was the end of a recording."""
        try:
            capture = self._open(stream.address)
        except Exception as error:  # a broken driver or address must not take the other streams along
            LOGGER.warning(f"stream {stream.shown}: {type(error).__name__}: {without_password(str(error))}")
            capture = None
        is_open = capture is not None and capture.isOpened()
        is_recording = is_open and self._is_recording(stream, capture)
        with self._news:
            stream.is_tried, stream.is_opened = True, is_open
            if is_open:
                stream.rate = usable_rate(capture.get(cv2.CAP_PROP_FPS)) / self.vid_stride
            self._news.notify_all()
        if not is_open:
            return 0, False
        this = _Pass()
        try:
            frames = self._pump(stream, capture, is_recording, this)
        except Exception as error:  # as above
            LOGGER.warning(f"stream {stream.shown}: {type(error).__name__}: {without_password(str(error))}")
            frames = 0
        finally:
            capture.release()
        is_repeated, stream.latest = this.is_moving and this == stream.latest, this
        if is_repeated:
            LOGGER.warning(
                f"stream {stream.shown}: a recording of unknown length, told by its {this.frames} pictures having come "
                "twice, so rows, labels and video hold it twice"
            )
        return frames, is_recording and frames > 0 or is_repeated

    def _is_recording(self, stream: _Stream, capture: Capture) -> bool:
        """Return whether a stream that is open has an end, by what it tells or else its server, asked once.

        The server is asked when the stream is open, so that one of a single reader has served it.
        """
        if capture.get(cv2.CAP_PROP_FRAME_COUNT) > 0:  # OpenCV gives negative numbers where it is told none
            return True
        return not stream.latest.frames and self._is_file(stream.address)

    def _pump(self, stream: _Stream, capture: Capture, is_recording: bool, this: _Pass) -> int:
        grabbed = 0
        while not self._stop.is_set() and capture.grab():
            grabbed += 1
            if grabbed % self.vid_stride:
                continue
            done, image = capture.retrieve()
            if not done or image is None:
                break
            this.add(image)
            with self._news:
                if is_recording:  # it waits for us, unlike a camera
                    self._news.wait_for(lambda: stream.newest is None or self._stop.is_set())
                stream.newest = image
                self._news.notify_all()
        return grabbed
