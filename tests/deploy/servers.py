"""Live streams on this machine's loopback address, for tests: MJPEG by Python, MPEG-TS by an ffmpeg program."""

from __future__ import annotations

import http.server
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest

BOUNDARY = "frame"


class MjpegServer:
    """A camera that sends JPEG pictures over HTTP, drops the connection after ``frames`` of them and takes new ones.

    Who asks for a part, to learn a length, is told none and is not counted.
    """

    def __init__(self, image: np.ndarray, frames: int, connections: int, rate: float = 50.0) -> None:
        self.data = cv2.imencode(".jpg", image)[1].tobytes()
        self.frames, self.connections, self.rate = frames, connections, rate
        self.served = 0
        camera = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802 - http.server's name
                if re.fullmatch(r"bytes=0-\d+", self.headers.get("Range", "")):
                    camera.begin(self)
                else:
                    camera.serve(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}/live"

    @staticmethod
    def begin(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", f"multipart/x-mixed-replace; boundary={BOUNDARY}")
        request.end_headers()

    def serve(self, request: http.server.BaseHTTPRequestHandler) -> None:
        if self.served >= self.connections:
            request.send_error(503)
            return
        self.served += 1
        self.begin(request)
        try:
            for _ in range(self.frames):
                head = f"--{BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(self.data)}\r\n\r\n"
                request.wfile.write(head.encode() + self.data + b"\r\n")
                time.sleep(1 / self.rate)
        except OSError:  # the reader has gone
            return

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ffmpeg_program() -> str:
    """Path of ffmpeg; the test is skipped without one."""
    program = shutil.which("ffmpeg")
    if program is None:
        pytest.skip("no ffmpeg program on the PATH to serve a stream (Debian: apt-get install ffmpeg)")
    return program


@contextmanager
def served_by_ffmpeg(video: Path, port: int, seconds: float = 20) -> Iterator[str]:
    """Serve a video at its own speed, over and over, to one reader over HTTP; gives the address."""
    address = f"http://127.0.0.1:{port}/live"
    command = [ffmpeg_program(), "-hide_banner", "-loglevel", "error", "-nostdin", "-re", "-stream_loop", "-1"]
    command += ["-t", str(seconds), "-i", str(video), "-c:v", "mpeg2video", "-f", "mpegts", "-listen", "1", address]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        process.kill()
        process.wait()
