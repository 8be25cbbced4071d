"""Published weights are fetched from where the program is told to, completely or not at all."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from models import published
from models.backend import DetectMultiBackend
from models.checkpoint import Checkpoint, save_checkpoint
from models.published import PUBLISHED, find_weights
from models.safe_reader import WeightsFileError
from tests.reference.tiny import tiny_dual
from utils.deploy.exporter import export
from utils.options import ExportOptions, TrainOptions
from utils.train.setup import load_start

NAME = "yolov9-s.pt"


class Release:
    """A server on this machine that answers one path with what the test wants."""

    def __init__(self) -> None:
        self.content, self.announced, self.status = b"", None, 200
        self.requests: list[str] = []
        release = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                release.requests.append(self.path)
                if self.path.startswith("/moved/"):
                    self.send_response(302)
                    self.send_header("Location", self.path.removeprefix("/moved"))
                    self.end_headers()
                    return
                self.send_response(release.status)
                self.send_header("Content-Length", str(release.announced or len(release.content)))
                self.end_headers()
                self.wfile.write(release.content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Release]:
    release = Release()
    thread = threading.Thread(target=release.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setenv("YOLO_WEIGHTS_URL", release.address)
    monkeypatch.delenv("YOLO_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    yield release
    release.server.shutdown()
    release.server.server_close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = tiny_dual()
    path = tmp_path_factory.mktemp("weights") / "some.pt"
    save_checkpoint(path, Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, names={0: "a", 1: "b", 2: "c"}))
    return path.read_bytes()


def test_missing_published_file_is_fetched_once(release: Release, weights: bytes, tmp_path: Path) -> None:
    release.content = weights
    assert find_weights(NAME) == Path(NAME)
    assert (tmp_path / NAME).read_bytes() == weights
    assert [file.name for file in tmp_path.iterdir()] == [NAME]
    find_weights(NAME)
    assert release.requests == [f"/{NAME}"]


def test_it_goes_where_it_was_looked_for(
    release: Release, weights: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release.content = weights
    monkeypatch.setenv("YOLO_WEIGHTS_URL", f"{release.address}/moved/")
    assert find_weights(tmp_path / "kept" / NAME).read_bytes() == weights
    assert release.requests == [f"/moved/{NAME}", f"/{NAME}"]


def test_every_script_fetches(release: Release, weights: bytes) -> None:
    release.content = weights
    assert DetectMultiBackend("yolov9-c.pt").names[0] == "a"
    assert load_start(TrainOptions(weights="gelan-c.pt")).nc == 3
    files, failures = export(ExportOptions(weights=["yolov9-e-converted.pt"], imgsz=[64, 64]))
    assert not failures and files
    assert release.requests == ["/yolov9-c.pt", "/gelan-c.pt", "/yolov9-e-converted.pt"]


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_offline_mode_asks_nobody(release: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str) -> None:
    if how == "environment":
        monkeypatch.setenv("YOLO_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=f"offline mode.*{release.address}/{NAME}.*{tmp_path / NAME}"):
        find_weights(NAME, offline=how == "argument")
    if how == "argument":
        with pytest.raises(FileNotFoundError, match="offline"):
            load_start(TrainOptions(weights=NAME, offline=True))
        assert "offline" in export(ExportOptions(weights=[NAME], offline=True))[1][0]
        with pytest.raises(FileNotFoundError, match="offline"):
            DetectMultiBackend(NAME, offline=True)
    assert not release.requests


@pytest.mark.parametrize("name", ["best.pt", "yolov9-x.pt", "yolov9-s.onnx", "yolo.pt", "gelan-c.pth"])
def test_other_names_are_not_asked_for(release: Release, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        find_weights(name)
    assert not release.requests


def test_web_page_is_not_kept(release: Release, tmp_path: Path) -> None:
    release.content = b"<!DOCTYPE html><html>sign in</html>"
    with pytest.raises(WeightsFileError, match=f"{release.address}/{NAME}: what came is a web page.*put it there as"):
        find_weights(NAME)
    assert not list(tmp_path.iterdir())


def test_interrupted_transfer_is_not_kept(release: Release, weights: bytes, tmp_path: Path) -> None:
    release.content, release.announced = weights[:1000], len(weights)
    with pytest.raises(OSError, match="ended after 1,000 of|IncompleteRead"):
        find_weights(NAME)
    assert not list(tmp_path.iterdir())


def test_cut_content_is_not_kept(release: Release, weights: bytes, tmp_path: Path) -> None:
    release.content = weights[:-1000]
    with pytest.raises(WeightsFileError, match="cut off"):
        find_weights(NAME)
    assert not list(tmp_path.iterdir())


def test_checksum_is_compared_where_it_is_known(
    release: Release, weights: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release.content = weights
    digest = hashlib.sha256(weights).hexdigest()
    monkeypatch.setattr(published, "PUBLISHED", {**PUBLISHED, NAME: "0" * 64})
    with pytest.raises(WeightsFileError, match=f"SHA-256 {digest}, expected 000"):
        find_weights(NAME)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(published, "PUBLISHED", {**PUBLISHED, NAME: digest})
    assert find_weights(NAME).is_file()


def test_missing_release_says_what_to_do(release: Release, tmp_path: Path) -> None:
    release.status = 404
    with pytest.raises(OSError, match=f"Not Found.*{release.address}/{NAME}.*{tmp_path / NAME}"):
        find_weights(NAME)


def test_without_network_the_answer_comes_within_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: Release
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed_port = probe.getsockname()[1]
    monkeypatch.setenv("YOLO_WEIGHTS_URL", f"http://127.0.0.1:{closed_port}")
    started = time.perf_counter()
    with pytest.raises(OSError, match="could not be fetched.*refused.*put it there as"):
        find_weights(NAME)
    assert time.perf_counter() - started < published.TIMEOUT_S
    monkeypatch.setenv("YOLO_WEIGHTS_URL", "file:///etc")
    with pytest.raises(ValueError, match="https://"):
        find_weights(NAME)


def test_missing_file_names_what_is_there(tmp_path: Path) -> None:
    for name in ("best.pt", "last.pt", "best.onnx"):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=r"bets\.pt does not exist .*there is best\.pt; check --weights"):
        find_weights(tmp_path / "bets.pt")
    with pytest.raises(FileNotFoundError, match=r"zzzz\.pt does not exist .*; check --weights"):
        find_weights(tmp_path / "zzzz.pt")
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist either"):
        find_weights(tmp_path / "nowhere" / "best.pt")


@pytest.mark.parametrize("suffix", [".pt", ".onnx", ".torchscript", ".engine"])
def test_pipe_is_not_waited_for(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"best{suffix}")
    with pytest.raises(WeightsFileError, match="is a pipe or a device"):
        DetectMultiBackend(tmp_path / f"best{suffix}")
