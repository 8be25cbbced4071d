"""Videos written frame by frame: H.264, which every browser plays, where an encoder is there, else MPEG-4 Part 2.

An encoder is an ffmpeg program on the PATH (or that of the package imageio-ffmpeg), or one built into OpenCV. Files get
their names when they are complete.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np

from utils.deploy.mp4_size import has_index, set_frame_size
from utils.log import LOGGER

VIDEO_SUFFIX = ".mp4"
PLAIN_CODEC, H264_CODEC = "mp4v", "avc1"  # OpenCV's names
CODEC_NOTE = (
    "no H.264 encoder was found, so videos are written as MPEG-4 Part 2 (mp4v), which players show but browsers do "
    "not; for H.264: apt-get install ffmpeg, or pip install imageio-ffmpeg"
)
# Encoders of ffmpeg in order of preference, with settings that keep up with a detector at a size like that of mp4v.
FFMPEG_ENCODERS = {
    "libx264": ("-preset", "ultrafast", "-crf", "23"),
    "h264_nvenc": ("-preset", "p4", "-cq", "26"),
    "h264_videotoolbox": ("-q:v", "60"),
    "libopenh264": ("-b:v", "6M"),
}
PROBE_S = 20  # for an encoder to write two tiny frames
_numbers = itertools.count()  # of files under way
OnComplete = Callable[[Path], object]


class VideoWriter(Protocol):
    """A video being written."""

    def write(self, image: np.ndarray) -> None:
        """Add a frame (H, W, 3) BGR; one of another size is scaled, since a video has one size."""

    def release(self, on_complete: OnComplete | None = None) -> None:
        """Complete the file, call ``on_complete`` with its passing name, and give it its own."""


@dataclass(frozen=True)
class Codec:
    """How videos are written.

    Attributes:
        ffmpeg: program and its encoder; None writes through OpenCV.
        opencv: OpenCV's name of the codec, used where ``ffmpeg`` is None or cannot write a size.
        note: what a user should know about it, may be empty.
    """

    ffmpeg: tuple[str, str] | None = None
    opencv: str = PLAIN_CODEC
    note: str = CODEC_NOTE

    def open(self, path: Path, rate: float, width: int, height: int) -> VideoWriter:
        """Start a video of ``rate`` frames per second.

        Raises:
            OSError: it cannot be written here.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        is_odd = width % 2 or height % 2
        # H.264 stores colour at half the size, so odd sides need its form with full colour, which only x264 writes
        if self.ffmpeg and not (is_odd and self.ffmpeg[1] != "libx264"):
            return FfmpegWriter(self.ffmpeg, path, rate, width, height)
        return OpenCvWriter(path, rate, width, height, PLAIN_CODEC if is_odd else self.opencv)


def choose_codec(wanted: str = "auto") -> Codec:
    """Return the way to write ``auto`` (H.264 where possible), ``h264`` or ``mp4v``.

    Raises:
        ValueError: H.264 is asked for and no encoder was found.
    """
    if wanted == "mp4v":
        return Codec(note="")
    found = find_h264()
    if found is None and wanted == "h264":
        raise ValueError(f"--video-codec h264: {CODEC_NOTE}")
    return found or Codec()


@functools.lru_cache(maxsize=1)
def find_h264() -> Codec | None:
    """Return a way to write H.264 that works on this machine, tried out on two frames; None without one."""
    for program in filter(None, (shutil.which("ffmpeg"), _packaged_ffmpeg())):
        for encoder in FFMPEG_ENCODERS:
            if _ffmpeg_encodes(program, encoder):
                return Codec((program, encoder), note="")
    return Codec(opencv=H264_CODEC, note="") if _opencv_encodes() else None


def _packaged_ffmpeg() -> str | None:
    """Return the program that the Python package imageio-ffmpeg carries, without importing it."""
    package = importlib.util.find_spec("imageio_ffmpeg")
    if package is None or package.origin is None:
        return None
    programs = sorted((Path(package.origin).parent / "binaries").glob("ffmpeg-*"))
    return next((str(program) for program in programs if os.access(program, os.X_OK)), None)


def _ffmpeg_encodes(program: str, encoder: str) -> bool:
    command = [program, "-hide_banner", "-loglevel", "quiet", "-f", "rawvideo", "-pix_fmt", "bgr24", "-s", "256x256"]
    command += ["-i", "pipe:0", "-c:v", encoder, *FFMPEG_ENCODERS[encoder], "-pix_fmt", "yuv420p", "-f", "null", "-"]
    try:
        return not subprocess.run(command, input=bytes(2 * 3 * 256**2), timeout=PROBE_S, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def _opencv_encodes() -> bool:
    with tempfile.TemporaryDirectory() as folder, _quiet_stderr():
        try:
            writer = OpenCvWriter(Path(folder) / f"probe{VIDEO_SUFFIX}", 25, 256, 256, H264_CODEC)
            writer.write(np.zeros((256, 256, 3), np.uint8))
            writer.release()
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keep what C libraries write about an encoder that is not there from the user, who asked for none."""
    try:
        saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # a process without standard error
        yield
        return
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)


def _partial_path(path: Path) -> Path:
    """Return a passing name beside ``path``, short because the final one may be as long as the system allows."""
    return path.with_name(f".partial-{os.getpid()}-{next(_numbers)}{VIDEO_SUFFIX}")


def _give_name(partial: Path, path: Path, on_complete: OnComplete | None) -> None:
    try:
        if on_complete is not None:
            on_complete(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _fitted(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if (image.shape[1], image.shape[0]) == size:
        return image
    return cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)


class FfmpegWriter:
    """Write frames into the standard input of an ffmpeg program."""

    def __init__(self, ffmpeg: tuple[str, str], path: Path, rate: float, width: int, height: int) -> None:
        program, encoder = ffmpeg
        self.path, self.size = path, (width, height)
        self._partial = _partial_path(path)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by release; a pipe could fill up and block
        colour = "yuv444p" if width % 2 or height % 2 else "yuv420p"
        command = [program, "-hide_banner", "-loglevel", "error", "-y"]
        command += ["-f", "rawvideo", "-pix_fmt", "bgr24", "-s", f"{width}x{height}", "-r", f"{rate:.6f}"]
        command += ["-i", "pipe:0", "-an", "-c:v", encoder, *FFMPEG_ENCODERS[encoder], "-pix_fmt", colour]
        command += ["-movflags", "+faststart", f"file:{self._partial.absolute()}"]
        # in a session of its own: Ctrl+C is for the detector, which then completes the file
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True
        )

    def write(self, image: np.ndarray) -> None:
        """Add a frame.

        Raises:
            OSError: the program has ended, with its last words.
        """
        try:
            self._process.stdin.write(np.ascontiguousarray(_fitted(image, self.size)).data)
        except OSError as error:
            raise OSError(f"{self.path}: ffmpeg stopped: {self._last_words()}") from error

    def release(self, on_complete: OnComplete | None = None) -> None:
        """Complete the file, call ``on_complete`` with its passing name, and give it its own."""
        with contextlib.suppress(OSError):  # it has ended before; its status tells
            self._process.stdin.close()
        try:
            if self._process.wait():
                raise OSError(f"{self.path}: the video was not written, ffmpeg says: {self._last_words()}")
            _give_name(self._partial, self.path, on_complete)
        finally:
            self._partial.unlink(missing_ok=True)
            self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode("utf-8", "replace").strip()
        return text[-500:] or f"status {self._process.poll()}"


class OpenCvWriter:
    """Write frames through OpenCV.

    Raises:
        OSError: OpenCV cannot write this codec.
    """

    def __init__(self, path: Path, rate: float, width: int, height: int, codec: str = PLAIN_CODEC) -> None:
        self.path, self.size = path, (width, height)
        self._padding = (width % 2, height % 2)  # the writer would cut odd sides
        self._partial = _partial_path(path)
        has_ffmpeg = cv2.CAP_FFMPEG in cv2.videoio_registry.getWriterBackends()
        self._writer = cv2.VideoWriter(
            str(self._partial.absolute()),
            cv2.CAP_FFMPEG if has_ffmpeg else cv2.CAP_ANY,
            cv2.VideoWriter_fourcc(*codec),
            rate,
            (width + self._padding[0], height + self._padding[1]),
        )
        if not self._writer.isOpened():
            self._partial.unlink(missing_ok=True)
            raise OSError(f"{path}: this OpenCV build cannot write {codec} videos; use --nosave, or install ffmpeg")

    def write(self, image: np.ndarray) -> None:
        """Add a frame."""
        image = _fitted(image, self.size)
        if any(self._padding):
            image = cv2.copyMakeBorder(image, 0, self._padding[1], 0, self._padding[0], cv2.BORDER_REPLICATE)
        self._writer.write(image)

    def release(self, on_complete: OnComplete | None = None) -> None:
        """Complete the file, call ``on_complete`` with its passing name, and give it its own."""
        self._writer.release()
        if not self._partial.is_file() or not has_index(self._partial):  # the writer itself does not tell
            self._partial.unlink(missing_ok=True)
            raise OSError(f"{self.path}: the video was not written; make room, or choose another disk with --project")
        if any(self._padding) and not set_frame_size(self._partial, *self.size):
            LOGGER.warning(f"{self.path}: written with a repeated last column or row, because its size is odd")
        _give_name(self._partial, self.path, on_complete)
