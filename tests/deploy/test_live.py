"""Live sources: streams that come and go, real ones over HTTP on the loopback address, the screen."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.deploy.fakes import ColourBackend, picture, read_video, write_video
from tests.deploy.servers import MjpegServer, ffmpeg_program, free_port, served_by_ffmpeg
from tests.deploy.test_detector import detect, files_of, table_of
from utils.data import streams as streams_module
from utils.data.screen import ScreenArea, parse_screen
from utils.data.sources import LoadStreams, resolve_source
from utils.data.streams import pause_before
from utils.deploy import detector as detector_module
from utils.deploy.pipeline import Pipeline


@pytest.fixture(autouse=True)
def no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)


def shorten_pauses(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """Let detection read streams with other settings than its own."""
    monkeypatch.setattr(
        detector_module,
        "LoadStreams",
        lambda sources, vid_stride: LoadStreams(sources, vid_stride=vid_stride, **settings),
    )


def test_streams_need_no_display_and_get_their_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    small = write_video(tmp_path / "small.mp4", 6, 240)
    large = write_video(tmp_path / "large.mp4", 4, 10, 128, 96)
    recordings = {"rtsp://me:secret@cam1/live": small, "rtsp://cam2/live": large}
    monkeypatch.setattr(
        detector_module.LoadStreams,
        "__init__",
        lambda self, sources, vid_stride=1, original=detector_module.LoadStreams.__init__: original(
            self, sources, vid_stride=vid_stride, open_source=lambda address: cv2.VideoCapture(str(recordings[address]))
        ),
    )
    listing = tmp_path / "cams.txt"
    listing.write_text("\n".join(recordings))
    summary = detect(tmp_path, listing, save_txt=True)
    assert summary.exit_code == 0 and summary.frames == 10
    for name, count, rate, shape in (("cam1_live.mp4", 6, 240, (64, 96, 3)), ("cam2_live.mp4", 4, 10, (96, 128, 3))):
        frames, written_rate = read_video(summary.save_dir / name)
        assert (len(frames), written_rate, frames[0].shape) == (count, rate, shape)
    assert len(files_of(summary.save_dir / "labels")) == 10
    assert {line.split(" ")[0] for line in lines if "1 red" in line} == {"0:", "1:"}
    assert not any("secret" in line for line in lines)
    assert "secret" not in (summary.save_dir / "results.txt").read_text()


def test_pauses_grow_up_to_a_limit() -> None:
    assert [pause_before(attempt) for attempt in (1, 2, 3, 4, 5, 6, 7, 1000)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert [pause_before(attempt, 0.01) for attempt in (1, 2, 3)] == [0.01, 0.02, 0.04]


def test_pauses_start_anew_after_a_connection_that_worked(lines: list[str]) -> None:
    camera = MjpegServer(picture(), frames=3, connections=2, rate=1000)
    try:
        streams = LoadStreams(camera.address, pause_s=0.01, tries=3)
        assert sum(len(frames) for frames in streams.rounds()) >= 2
    finally:
        camera.close()
    pauses = [float(line.split(" in ")[1].split(" s")[0]) for line in lines if "trying again" in line]
    assert pauses == [0.01, 0.01, 0.01, 0.02, 0.04]


def test_a_real_stream_that_breaks_off_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    """Two cameras of different size and length; each has a file of its own, whose rate and size are the camera's."""
    cameras = [
        MjpegServer(picture(), frames=10, connections=3, rate=100),
        MjpegServer(picture(128, 96), frames=12, connections=1, rate=100),
    ]
    shorten_pauses(monkeypatch, pause_s=0.02, tries=2)
    (tmp_path / "cams.txt").write_text("\n".join(camera.address for camera in cameras))
    try:
        summary = detect(tmp_path, tmp_path / "cams.txt")
    finally:
        for camera in cameras:
            camera.close()
    assert summary.exit_code == 0 and [camera.served for camera in cameras] == [3, 1]
    ports = [camera.address.split(":")[2].split("/")[0] for camera in cameras]
    counts = []
    for port, shape in zip(ports, ((64, 96, 3), (96, 128, 3)), strict=True):
        frames, rate = read_video(summary.save_dir / f"127.0.0.1_{port}_live.mp4")
        assert frames[0].shape == shape and rate == 25
        counts.append(len(frames))
    # frames that came while the network was busy are left out, so the last of each camera is all that is certain
    assert 1 <= counts[0] <= 30 and 1 <= counts[1] <= 12
    assert sum(counts) == summary.frames == len(table_of(summary.save_dir))
    assert any("trying again" in line for line in lines)


@pytest.mark.slow
def test_a_stream_of_an_ffmpeg_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """MPEG-TS over HTTP; the server is killed in the middle and started again at the same address."""
    ffmpeg_program()
    video, port = write_video(tmp_path / "in.mp4", 50, 25.0), free_port()
    shorten_pauses(monkeypatch, pause_s=0.1, tries=5)
    stop = threading.Event()

    def serve() -> None:
        for _ in range(2):
            with served_by_ffmpeg(video, port, 20):
                stop.wait(2)

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    for _ in range(100):  # until it listens; connecting would use up its one reader
        if f":{port:04X} " in Path("/proc/net/tcp").read_text():
            break
        time.sleep(0.05)
    try:
        summary = detect(tmp_path, f"http://127.0.0.1:{port}/live")
    finally:
        stop.set()
        server.join(10)
    frames, rate = read_video(summary.save_dir / f"127.0.0.1_{port}_live.mp4")
    assert summary.exit_code == 0 and rate == pytest.approx(25) and frames[0].shape == (64, 96, 3)
    assert len(frames) == summary.frames and "trying again" in "\n".join(lines)
    first = next(number for number, line in enumerate(lines) if "trying again" in line)
    assert any("1 red" in line for line in lines[:first]) and any("1 red" in line for line in lines[first:])


class SlowBackend(ColourBackend):
    """Takes longer than the camera between two pictures."""

    def __call__(self, images, augment: bool = False):  # noqa: ANN001, ANN204
        time.sleep(0.05)
        return super().__call__(images, augment)


def test_a_slow_network_looks_at_the_newest_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture carries its number; what is looked at was made no more than a few rounds of the network ago."""
    made, looked_at = [], []  # how many the camera had made at the start of each round, the number seen in it

    class Camera:
        frames = 0

        def isOpened(self) -> bool:  # noqa: N802
            return len(looked_at) < 12

        def grab(self) -> bool:
            time.sleep(0.01)
            self.frames += 1
            return self.isOpened() and self.frames < 60_000

        def retrieve(self) -> tuple[bool, np.ndarray]:
            image = picture()
            image[48:, :48], image[48:, 48:] = divmod(self.frames, 250)
            return True, image

        def get(self, propId: int) -> float:  # noqa: N803
            return 100.0 if propId == cv2.CAP_PROP_FPS else 0.0

        def release(self) -> None:
            pass

    camera = Camera()

    class Watching(SlowBackend):
        def __call__(self, images, augment: bool = False):  # noqa: ANN001, ANN204
            high, low = (round(images[0, 0, 56, column].item() * 255) for column in (24, 72))
            made.append(camera.frames)
            looked_at.append(high * 250 + low)
            return super().__call__(images, augment)

    opened = iter([camera])
    shorten_pauses(
        monkeypatch,
        pause_s=0.01,
        tries=0,
        open_source=lambda address: next(opened, types.SimpleNamespace(isOpened=bool)),
    )
    summary = detect(tmp_path, "rtsp://cam/live", model=Watching())
    assert summary.frames == len(looked_at) >= 12 and camera.frames > 2 * summary.frames  # the others were left out
    assert looked_at == sorted(set(looked_at))
    # Two pictures may be under way between the camera and the network.
    assert all(number >= earlier for number, earlier in zip(looked_at[3:], made, strict=False))


def test_streams_end_when_the_user_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_threads: Callable[[], list[str]], lines: list[str]
) -> None:
    """Ctrl+C comes while the stream pauses for ever; what was seen is written."""
    camera = MjpegServer(picture(), frames=3, connections=1, rate=20)
    shorten_pauses(monkeypatch, pause_s=1e6)
    monkeypatch.setattr("utils.data.streams.LONGEST_PAUSE_S", 1e6)
    servers = new_threads()
    finish = Pipeline._finish

    def press_in_the_pause(self: Pipeline, drawn: object) -> None:
        finish(self, drawn)
        while not any("trying again" in line for line in lines):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "_finish", press_in_the_pause)
    try:
        summary = detect(tmp_path, camera.address)
    finally:
        camera.close()
    assert summary.is_interrupted and summary.exit_code == 130
    assert len(read_video(next(summary.save_dir.glob("*.mp4")))[0]) == summary.frames == 1
    assert [name for name in new_threads() if name not in servers and "process_request_thread" not in name] == []


# --- the screen ---


@pytest.mark.parametrize(
    ("text", "area"),
    [
        ("screen", ScreenArea()),
        ("screen 1", ScreenArea(1)),
        ("screen 10 20 300 200", ScreenArea(0, (10, 20, 300, 200))),
        ("SCREEN 2 10 20 300 200", ScreenArea(2, (10, 20, 300, 200))),
    ],
)
def test_words_behind_screen(text: str, area: ScreenArea) -> None:
    assert parse_screen(text) == area


@pytest.mark.parametrize("text", ["screen one", "screen 1 2", "screen 1 2 3 4 5 6", "screen 0 0 0 0", "screen -1"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write 'screen'"):
        parse_screen(text)


def test_the_screen_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mss", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install mss"):
        resolve_source("screen 0")


def test_the_screen_is_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    shots: list[dict[str, int]] = []

    class Grabber:
        monitors = [{"left": 0, "top": 0, "width": 96, "height": 64}, {"left": 5, "top": 6, "width": 90, "height": 58}]

        def grab(self, place: dict[str, int]) -> np.ndarray:
            shots.append(place)
            if len(shots) > 3:
                raise OSError("window system gone")
            return cv2.cvtColor(picture(), cv2.COLOR_BGR2BGRA)[: place["height"], : place["width"]]

        def close(self) -> None:
            pass

    package = types.ModuleType("mss")
    package.mss = Grabber
    package.__spec__ = types.SimpleNamespace(name="mss")
    monkeypatch.setitem(sys.modules, "mss", package)
    shorten_pauses(monkeypatch, pause_s=0.01, tries=1)
    summary = detect(tmp_path, "screen 1 1 2 80 50")
    assert summary.frames >= 1 and shots[0] == {"left": 6, "top": 8, "width": 80, "height": 50}
    frames, rate = read_video(summary.save_dir / "screen_1_1_2_80_50.mp4")
    assert frames[0].shape == (50, 80, 3) and rate == 30
    assert any("window system gone" in line for line in lines)
    with pytest.raises(ConnectionError, match="no stream could be opened: screen 7; .* sending"):
        detect(tmp_path, "screen 7")


def test_timeouts_are_given_to_addresses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Capture:
        def set(self, *_: object) -> bool:
            return True

    monkeypatch.setattr(streams_module, "open_capture", lambda *arguments: calls.append(arguments) or Capture())
    streams_module.open_stream("0")
    streams_module.open_stream("rtsp://cam")
    assert calls[0] == (0,) and calls[1][0] == "rtsp://cam" and calls[1][1][1::2] == [10_000, 10_000]
