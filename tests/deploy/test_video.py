"""Videos: size, rate and frames are kept by every way of writing, and the way is told."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.deploy.fakes import picture, read_video
from utils.deploy import video as video_module
from utils.deploy.video import Codec, FfmpegWriter, OpenCvWriter, choose_codec, find_h264

PROGRAM = shutil.which("ffmpeg")
needs_ffmpeg = pytest.mark.skipif(PROGRAM is None, reason="no ffmpeg program on the PATH (Debian: ffmpeg)")
X264 = Codec((PROGRAM or "", "libx264"), note="")


@pytest.fixture(autouse=True)
def fresh_search() -> None:
    find_h264.cache_clear()


def frames_of(width: int, height: int, count: int = 6) -> list[np.ndarray]:
    """Frames that get brighter, with a light last column and row."""
    frames = [picture(width, height, None) + np.uint8(20 * number) for number in range(count)]
    for image in frames:
        image[:, -1:] = image[-1:] = 200
    return frames


@pytest.mark.parametrize("codec", [Codec(note=""), pytest.param(X264, marks=needs_ffmpeg)], ids=["mp4v", "h264"])
@pytest.mark.parametrize(("width", "height"), [(96, 64), (95, 63), (33, 64), (641, 359), (16, 16)])
def test_videos_keep_size_rate_and_frames(tmp_path: Path, codec: Codec, width: int, height: int) -> None:
    frames = frames_of(width, height)
    path = tmp_path / "50%d #一: x.mp4"
    writer = codec.open(path, 25 / 3, width, height)
    for image in frames:
        writer.write(image)
    assert [file.name for file in tmp_path.glob("[!.]*")] == []  # the name appears when the file is complete
    writer.release()
    written, rate = read_video(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert len(written) == 6 and rate == pytest.approx(25 / 3, abs=0.01)
    for image, wanted in zip(written, frames, strict=True):
        assert image.shape == wanted.shape
        difference = np.abs(image.astype(int) - wanted)
        assert difference[-1].mean() < 30 and difference.mean() < 12


@needs_ffmpeg
def test_h264_is_chosen_where_it_can_be_written(tmp_path: Path) -> None:
    codec = choose_codec("auto")
    assert codec == choose_codec("h264") and not codec.note
    writer = codec.open(tmp_path / "a.mp4", 240, 96, 64)
    writer.write(picture())
    writer.release()
    capture = cv2.VideoCapture(str(tmp_path / "a.mp4"), cv2.CAP_FFMPEG)
    code = int(capture.get(cv2.CAP_PROP_FOURCC))
    assert code.to_bytes(4, "little").lower() in (b"h264", b"avc1")
    assert capture.get(cv2.CAP_PROP_FPS) == 240
    assert stat.S_IMODE((tmp_path / "a.mp4").stat().st_mode) == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_without_an_encoder_the_codec_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(video_module, "_packaged_ffmpeg", lambda: None)
    monkeypatch.setattr(video_module, "_opencv_encodes", lambda: False)
    codec = choose_codec("auto")
    assert codec.ffmpeg is None and codec.opencv == "mp4v"
    assert "browsers do not" in codec.note and "apt-get install ffmpeg" in codec.note
    with pytest.raises(ValueError, match="--video-codec h264: no H.264 encoder was found"):
        choose_codec("h264")
    assert choose_codec("mp4v") == Codec(note="")


def test_encoders_are_tried_out_before_they_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name that cannot encode is passed over, and so is one that knows only a later encoder."""
    program = tmp_path / "ffmpeg"
    program.write_text('#!/bin/sh\ncat > /dev/null\ncase "$*" in *libopenh264*) exit 0;; *) exit 1;; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(video_module.shutil, "which", lambda name: str(program))
    if sys.platform == "win32":
        pytest.skip("the stand-in is a shell script")
    assert find_h264() == Codec((str(program), "libopenh264"), note="")
    assert isinstance(find_h264().open(tmp_path / "odd.mp4", 25, 95, 64), OpenCvWriter)  # it has no full colour
    find_h264.cache_clear()
    program.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(video_module, "_packaged_ffmpeg", lambda: None)
    monkeypatch.setattr(video_module, "_opencv_encodes", lambda: False)
    assert find_h264() is None


def test_looking_for_an_encoder_in_opencv_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    assert video_module._opencv_encodes() in (True, False)
    assert capfd.readouterr().err == ""


@needs_ffmpeg
def test_a_program_that_stops_is_told_with_its_last_words(tmp_path: Path) -> None:
    writer = FfmpegWriter((PROGRAM, "libx264"), tmp_path / "a.mp4", 25, 95, 64)
    writer.size = (95, 64)
    writer._process.kill()
    writer._process.wait()
    with pytest.raises(OSError, match=r"a\.mp4: ffmpeg stopped"):
        for _ in range(100):
            writer.write(picture(95, 64))
    with pytest.raises(OSError, match="the video was not written"):
        writer.release()
    assert list(tmp_path.iterdir()) == []


@needs_ffmpeg
def test_names_are_never_options_or_commands(tmp_path: Path) -> None:
    for name in ("-y.mp4", "$(touch x);.mp4", "pipe:1.mp4"):
        writer = X264.open(tmp_path / name, 25, 96, 64)
        writer.write(picture())
        writer.release()
        assert len(read_video(tmp_path / name)[0]) == 1
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("codec", [Codec(note=""), pytest.param(X264, marks=needs_ffmpeg)], ids=["mp4v", "h264"])
def test_frames_of_another_size_are_scaled(tmp_path: Path, codec: Codec) -> None:
    writer = codec.open(tmp_path / "a.mp4", 25, 96, 64)
    for size in ((96, 64), (48, 32), (200, 100)):
        writer.write(picture(*size))
    writer.write(picture(192, 128)[::2, ::2])  # not one piece of memory
    writer.release()
    assert [image.shape for image in read_video(tmp_path / "a.mp4")[0]] == [(64, 96, 3)] * 4


@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_a_video_cut_by_a_full_disk_is_told_and_gets_no_name(tmp_path: Path, kept: float) -> None:
    """OpenCV's writer goes on without a word when the disk is full, and the index at the end of the file is lost."""
    writer = OpenCvWriter(tmp_path / "a.mp4", 25, 96, 64)
    for image in frames_of(96, 64):
        writer.write(image)
    writer._writer.release()
    os.truncate(writer._partial, int(kept * writer._partial.stat().st_size))
    with pytest.raises(OSError, match=r"a\.mp4: the video was not written; make room"):
        writer.release()
    assert list(tmp_path.iterdir()) == []
