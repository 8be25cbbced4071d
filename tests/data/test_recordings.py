"""Recordings among streams: read in full and once, whatever they tell of their length; cameras are opened again."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.data.test_sources import FakeCapture, FakeNetwork, QuietHandler, open_streams
from tests.deploy.fakes import picture, write_video
from utils.data.sources import LoadStreams

NO_LENGTH = -2562047788015215.0  # what OpenCV makes of a duration that FFmpeg does not know


class Moving(FakeCapture):
    """Each picture has a number; with ``start`` those of another connection to a camera."""

    def __init__(self, frames: int, start: int = 0, length: float = NO_LENGTH) -> None:
        super().__init__(frames, length=length)
        self.number = start

    def retrieve(self) -> tuple[bool, np.ndarray]:
        self.number += 1
        image = picture()
        image[:, :] = divmod(self.number, 256) + (0,)
        return True, image


def numbers_of(streams: LoadStreams, pause_s: float = 0.0) -> list[int]:
    """Numbers of the pictures handed on, to a network that takes ``pause_s`` for each."""
    seen = []
    for (frame,) in streams.rounds():
        time.sleep(pause_s)
        seen.append(int(frame.image_bgr[0, 0, 0]) * 256 + int(frame.image_bgr[0, 0, 1]))
    return seen


def test_a_recording_whose_server_knows_its_length_is_read_in_full_and_once() -> None:
    network, asked = FakeNetwork(a=[Moving(12), Moving(12)]), []
    streams = open_streams(network, is_file=lambda address: asked.append(address) or True)
    assert numbers_of(streams, 0.01) == list(range(1, 13))
    assert len(network.opened) == 1 and asked == ["a"]


def test_a_length_that_the_recording_tells_needs_no_server() -> None:
    network = FakeNetwork(a=[Moving(5, length=5), Moving(5, length=5)])

    def refuse(address: str) -> bool:
        raise AssertionError(address)

    assert numbers_of(open_streams(network, is_file=refuse), 0.01) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("stride", [1, 3])
def test_the_same_pictures_twice_are_a_recording(messages: list[str], stride: int) -> None:
    """Nothing tells a length, so the end is known when the second connection has ended like the first."""
    network = FakeNetwork(a=[Moving(9) for _ in range(5)])
    assert numbers_of(open_streams(network, vid_stride=stride))
    assert len(network.opened) == 2
    (line,) = (line for line in messages if "recording of unknown length" in line)
    assert f"its {9 // stride} pictures" in line and "rows, labels and video hold it twice" in line


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Moving(9), Moving(9, start=1)),  # a camera goes on
        (Moving(9), Moving(8)),  # it begins with pictures that are known, as servers keep the latest
        (Moving(9), Moving(10)),
        (FakeCapture(9), FakeCapture(9)),  # nothing moves
        (FakeCapture(1), FakeCapture(1)),
        (Moving(1), Moving(1)),
    ],
)
def test_cameras_are_opened_again(first: FakeCapture, second: FakeCapture) -> None:
    network, asked = FakeNetwork(a=[first, second, Moving(4, start=100)]), []
    streams = open_streams(network, is_file=lambda address: bool(asked.append(address)))
    assert numbers_of(streams) and len(network.opened) == 3 + 1 + 2  # and as many tries as were asked for
    assert len(asked) == 1  # not at each connection


def test_a_recording_that_gives_nothing_at_first_is_asked_about_again() -> None:
    network = FakeNetwork(a=[Moving(0), Moving(4), Moving(4)])
    network.waiting["a"][0].isOpened = lambda: True
    answers = iter([False, True])
    assert numbers_of(open_streams(network, is_file=lambda address: next(answers)), 0.01) == [1, 2, 3, 4]


# --- real ones over HTTP ---


@pytest.fixture
def folder_server(tmp_path: Path) -> Iterator[Callable[[type], str]]:
    servers: list[http.server.ThreadingHTTPServer] = []

    def serve(handler: Callable) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


class Locked(QuietHandler):
    """Gives files to those who log in."""

    def do_GET(self) -> None:  # noqa: N802
        if self.headers.get("Authorization") == "Basic dTpwQHNz":  # u:p@ss
            super().do_GET()
        else:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="clips"')
            self.send_header("Content-Length", "0")
            self.end_headers()


@pytest.mark.parametrize("login", ["", "u:p%40ss@"])
def test_a_file_without_length_behind_an_address(
    tmp_path: Path, folder_server: Callable[[Callable], str], login: str
) -> None:
    """MPEG-TS tells no duration where it is not read to its end, so OpenCV gives no number of frames."""
    path = tmp_path / "clip.ts"
    writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*"mpg2"), 25.0, (96, 64))
    for number in range(20):
        writer.write(picture(box=(10 + 2 * number, 10, 40 + 2 * number, 40)))
    writer.release()
    path.rename(tmp_path / "clip")  # a suffix would have it downloaded
    web = folder_server(partial(Locked if login else QuietHandler, directory=str(tmp_path)))
    address = f"{web}/clip".replace("://", f"://{login}")
    capture = cv2.VideoCapture(address, cv2.CAP_FFMPEG)
    assert capture.isOpened() and capture.get(cv2.CAP_PROP_FRAME_COUNT) <= 0
    capture.release()
    streams, frames = LoadStreams(address, pause_s=0.01, tries=1), []
    for (frame,) in streams.rounds():
        time.sleep(0.01)
        frames.append(frame)
    assert 19 <= len(frames) <= 20 and [frame.number for frame in frames] == list(range(1, len(frames) + 1))


def test_pictures_in_parts_that_come_to_an_end(folder_server: Callable[[Callable], str]) -> None:
    """MJPEG of a fixed set of pictures, without any length: ended after the second time."""
    parts = [cv2.imencode(".jpg", picture(box=(10 + number, 10, 50, 40)))[1].tobytes() for number in range(20)]
    served = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=B")
            self.end_headers()
            served.append(self.headers.get("Range"))
            for part in parts if self.headers.get("Range") in (None, "bytes=0-") else ():
                self.wfile.write(b"--B\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(part))
                self.wfile.write(part + b"\r\n")

        def log_message(self, *_: object) -> None:
            pass

    streams = LoadStreams(f"{folder_server(Handler)}/live", pause_s=0.01, tries=1)
    assert list(streams.rounds()) and len(served) == 2 + 1  # one of them asked for the length


def test_a_video_with_a_length_needs_no_question(tmp_path: Path, folder_server: Callable[[Callable], str]) -> None:
    write_video(tmp_path / "clip.mp4", 8).rename(tmp_path / "clip")
    web = folder_server(partial(QuietHandler, directory=str(tmp_path)))
    frames = [frame for frames in LoadStreams(f"{web}/clip", is_file=None).rounds() for frame in frames]
    assert len(frames) == 8
