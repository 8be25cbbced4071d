"""Sources of detection: what a name stands for, frames of videos, live streams."""

from __future__ import annotations

import http.server
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.deploy.fakes import picture, write_picture, write_video
from utils.data.frames import Frame, Unreadable, VideoFile, is_video_head, network_shape, to_network, usable_rate
from utils.data.sources import LoadImages, LoadStreams, read_frames, resolve_source
from utils.data.streams import without_password
from utils.log import LOGGER


def names_of(source: str | Path) -> list[str]:
    return [file.relative.as_posix() for file in resolve_source(source).files]


# --- files, folders, patterns ---


def test_folder_is_entered_and_pictures_come_first(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.PNG", "cam2/frame.jpg", "cam1/frame.jpg"):
        write_picture(tmp_path / name)
    write_video(tmp_path / "a.mp4", 1)
    for name in ("notes.docx", "._b.jpg", "Thumbs.db", "__MACOSX/c.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    source = resolve_source(tmp_path)
    found = [file.relative.as_posix() for file in source.files]
    assert found == ["a.PNG", "b.jpg", "cam1/frame.jpg", "cam2/frame.jpg", "a.mp4"]
    assert [file.is_video for file in source.files] == [False] * 4 + [True]
    assert dict(source.unknown) == {".docx": 1}


def test_linked_folders_are_entered_once(tmp_path: Path) -> None:
    write_picture(tmp_path / "real" / "a.jpg")
    (tmp_path / "a_link").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "real" / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert names_of(tmp_path) == ["real/a.jpg"]
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "link.jpg").symlink_to(tmp_path / "real" / "a.jpg")
    assert names_of(tmp_path / "single") == ["link.jpg"]


@pytest.mark.parametrize("source", ["data/images", "./data/images/", "./data/images/horses.jpg", "data/images/*.jpg"])
def test_pictures_that_are_not_shipped_come_with_the_way_to_some(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        resolve_source(source)
    message = str(caught.value)
    assert message.startswith(f"--source '{source}' ") and "no pictures come with this repository" in message
    assert "python scripts/make_shapes.py --folder ../datasets/shapes" in message
    assert "--source ../datasets/shapes/images/test" in message
    (tmp_path / "data" / "images").mkdir(parents=True)
    with pytest.raises((FileNotFoundError, ValueError), match="no pictures come with this repository"):
        resolve_source(source)
    for other in ("datas/images", "images", "mine/data/images/a.jpg"):
        with pytest.raises(FileNotFoundError) as caught:
            resolve_source(other)
        assert "make_shapes" not in str(caught.value)


@pytest.mark.parametrize("folder", ["set [1]", "a*b", "50%d #1", "图像 一"])
def test_odd_folder_names_are_literal(tmp_path: Path, folder: str) -> None:
    write_picture(tmp_path / folder / "a (1).jpg")
    write_picture(tmp_path / folder / "b.png")
    assert names_of(tmp_path / folder) == ["a (1).jpg", "b.png"]
    assert names_of(f"{tmp_path / folder}/*.jpg") == ["a (1).jpg"]
    assert names_of(tmp_path / folder / "a (1).jpg") == ["a (1).jpg"]


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cam1/a.jpg", "cam2/a.jpg", "other/b.jpg", "c1.jpg"):
        write_picture(tmp_path / name)
    assert names_of(f"{tmp_path}/cam*") == ["cam1/a.jpg", "cam2/a.jpg"]
    assert names_of(f"{tmp_path}/**/*.jpg") == ["c1.jpg", "cam1/a.jpg", "cam2/a.jpg", "other/b.jpg"]
    monkeypatch.chdir(tmp_path)
    assert names_of("c[12].jpg") == ["c1.jpg"]
    with pytest.raises(FileNotFoundError, match="matches nothing"):
        resolve_source("d*.jpg")


def test_content_decides_for_a_file_of_unknown_suffix(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg").rename(tmp_path / "upload.bin")
    assert names_of(tmp_path / "upload.bin") == ["upload.bin"]
    (tmp_path / "text.bin").write_text("no picture")
    with pytest.raises(ValueError, match="holds no picture or video"):
        resolve_source(tmp_path / "text.bin")
    for name in ("clip", "clip.webm"):
        write_video(tmp_path / "a.mp4", 1).rename(tmp_path / name)
        (file,) = resolve_source(tmp_path / name).files
        assert file.is_video and file.relative.as_posix() == name
        assert [event.number for event in read_frames([file])] == [1]


@pytest.mark.parametrize(
    "head",
    [
        b"\0\0\0\x20ftypisom",
        b"\x1aE\xdf\xa3",
        b"RIFF\0\0\0\0AVI LIST",
        b"FLV\x01\x05",
        b"GIF89a",
        (b"G" + bytes(187)) * 3,
    ],
    ids=["mp4", "mkv", "avi", "flv", "gif", "ts"],
)
def test_beginnings_of_videos(head: bytes) -> None:
    assert is_video_head(head)
    assert not is_video_head(b"x" + head[:-1]) and not is_video_head(b"Good morning" * 50) and not is_video_head(b"")


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes among files there")
@pytest.mark.parametrize("name", ["device", "device.jpg", "device.mp4", "device.txt"])
def test_pipes_and_devices_are_named_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    device = tmp_path / "in" / name
    device.symlink_to(os.devnull)
    with pytest.raises(
        ValueError, match=f"holds nothing that can be read: .*{name}: a pipe, socket or device, not a file"
    ):
        resolve_source(device)
    write_picture(tmp_path / "in" / "a.jpg")
    os.mkfifo(tmp_path / "in" / "pipe.jpg")
    (tmp_path / "list.txt").write_text(f"in/{name}\nin/a.jpg\nin/pipe.jpg\n")
    for source in (tmp_path / "in", tmp_path / "list.txt", tmp_path / "in" / "*"):
        found = resolve_source(source)
        assert [file.path.name for file in found.files] == ["a.jpg"]
        assert {Path(path).name for path, _ in found.missing} == {name, "pipe.jpg"}


def test_missing_and_empty_sources(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        resolve_source(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        resolve_source("")
    with pytest.raises(ValueError, match="holds no picture or video; looked for the suffixes .*jpg.*mp4"):
        resolve_source(tmp_path)
    with pytest.raises(ValueError, match="write 'screen'"):
        resolve_source("screen left half")
    (tmp_path / "list.txt").write_text("gone.jpg\nlost.jpg\n")
    with pytest.raises(ValueError, match=r"nothing that can be read: see above\. Name a picture"):
        resolve_source(tmp_path / "list.txt")


def told(source: str | Path, messages: list[str]) -> str:
    """What is printed for a source that is refused: the lines before and the error."""
    with pytest.raises((FileNotFoundError, ValueError)) as caught:
        resolve_source(source)
    return "\n".join([*messages, str(caught.value)])


@pytest.mark.parametrize("is_whole", [False, True], ids=["relative", "whole"])
@pytest.mark.parametrize("name", ["gone.jpg", "in/gone.mp4", "gone*.jpg", "in/*.jpg", "nowhere/*", "in", "lost.txt"])
def test_a_source_that_leads_nowhere_is_told_once_and_with_what_to_type(
    name: str, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "lost.txt").write_text("gone.jpg\n")
    source = str(tmp_path / name) if is_whole else name
    text = told(source, messages)
    assert text.startswith(f"--source '{source}' ") and "--source 'shots/*.jpg'" in text
    assert text.count("gone") == name.count("gone") + (name == "lost.txt")
    assert text.count(str(tmp_path)) <= 1 or is_whole and name == "lost.txt"


def test_rows_of_a_list_that_are_missing_are_told_once_each(tmp_path: Path, messages: list[str]) -> None:
    rows = ["gone.jpg", "lost.jpg", f"{tmp_path}/whole.jpg"]
    (tmp_path / "list.txt").write_text("\n".join(rows))
    text = told(tmp_path / "list.txt", messages)
    assert all(text.count(Path(row).name) == 1 for row in rows)
    assert f"looked from {tmp_path} and {Path.cwd()}" in text
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.docx").write_bytes(b"x")
    (tmp_path / "in" / "pipe.jpg").symlink_to(os.devnull)
    messages.clear()
    text = told(tmp_path / "in", messages)
    assert text.count("pipe.jpg") == 1 and "1 x .docx" in text


# --- lists ---


def test_list_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_picture(tmp_path / "sets" / "one" / "a.jpg")
    write_picture(tmp_path / "elsewhere" / "b 一.jpg")
    listing = tmp_path / "sets" / "list.txt"
    lines = ["./one/a.jpg", "", "# comment", "one/a.jpg ", f"{tmp_path}/elsewhere/b 一.jpg", "gone.jpg"]
    listing.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    monkeypatch.chdir(tmp_path)
    source = resolve_source("sets/list.txt")
    assert sorted(file.relative.as_posix() for file in source.files) == ["b 一.jpg", "one/a.jpg"]
    assert [name for name, _ in source.missing] == ["gone.jpg"]


def test_list_of_streams_is_told_apart_by_its_lines(tmp_path: Path) -> None:
    listing = tmp_path / "cams.txt"
    listing.write_text("rtsp://u:p@cam1/live\n# the second one\n0\nhttp://cam2:8080/video?q=.mp4\n")
    source = resolve_source(listing)
    assert source.streams == ["rtsp://u:p@cam1/live", "0", "http://cam2:8080/video?q=.mp4"]
    assert not source.files
    write_picture(tmp_path / "a.jpg")
    listing.write_text("0\na.jpg\n")
    with pytest.raises(ValueError, match="mixed"):
        resolve_source(listing)
    listing.write_bytes(b"\xff\x80\xe9caf\xe9")
    with pytest.raises(ValueError, match="neither UTF-8"):
        resolve_source(listing)


@pytest.mark.parametrize("address", ["0", "12", "rtsp://cam/1.mp4", "RTMP://host/app", "https://host/live"])
def test_stream_addresses(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_source(address).streams == [address]
    if address == "0":
        write_picture(tmp_path / "0" / "a.jpg")  # a folder of that name comes first
        assert names_of("0") == ["a.jpg"]


@pytest.mark.parametrize("host", ["www.youtube.com", "youtu.be"])
def test_pages_of_videos_are_told_from_streams(host: str) -> None:
    with pytest.raises(ValueError, match=rf"https://{host}/watch\?v=1 is a web page.*: yt-dlp 'https://{host}"):
        resolve_source(f"https://{host}/watch?v=1")


@pytest.mark.parametrize("stride", [0, -1])
def test_strides_below_one_are_refused(tmp_path: Path, stride: int) -> None:
    write_video(tmp_path / "a.mp4", 2)
    for read in (lambda: list(LoadImages(tmp_path, vid_stride=stride)), lambda: LoadStreams("0", vid_stride=stride)):
        with pytest.raises(ValueError, match=f"vid_stride {stride}: should be at least 1"):
            read()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; what lies in ``short`` is announced with more bytes than come."""

    def send_header(self, keyword: str, value: str) -> None:
        is_short = keyword == "Content-Length" and self.path.startswith("/short")
        super().send_header(keyword, str(int(value) + 10) if is_short else value)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_pictures_behind_an_address_are_downloaded_and_removed(tmp_path: Path, web: str) -> None:
    write_picture(tmp_path / "shot 1.jpg").rename(tmp_path / "shot 1.JPG")
    before = sorted(tmp_path.iterdir())
    source = resolve_source(f"{web}/shot%201.JPG?token=1")
    assert [file.relative.as_posix() for file in source.files] == ["shot 1.JPG"]
    downloaded = source.files[0].path
    assert downloaded.read_bytes() == (tmp_path / "shot 1.JPG").read_bytes()
    source.close()
    assert not downloaded.exists() and sorted(tmp_path.iterdir()) == before
    with pytest.raises(ConnectionError, match="gone.jpg cannot be downloaded: .*404"):
        resolve_source(f"{web}/gone.jpg")


def test_addresses_are_taken_as_they_are_typed(tmp_path: Path, web: str) -> None:
    write_picture(tmp_path / "图 1 [a].jpg")
    (file,) = resolve_source(f"{web}/图 1 [a].jpg").files
    assert file.relative.as_posix() == "图 1 [a].jpg"
    with pytest.raises(ConnectionError, match="cannot be downloaded"):
        resolve_source("http://127.0.0.1:port/a.jpg")


def test_downloads_that_fail_are_named_and_the_rest_of_a_list_goes_on(tmp_path: Path, web: str) -> None:
    write_picture(tmp_path / "a.jpg")
    write_picture(tmp_path / "short" / "b.jpg")
    (tmp_path / "list.txt").write_text(f"{web}/gone.jpg\n{web}/a.jpg\n{web}/short/b.jpg\n")
    source = resolve_source(tmp_path / "list.txt")
    assert [file.path.name for file in source.files] == ["a.jpg"]
    (gone, no_such), (short, broken) = source.missing
    assert gone == f"{web}/gone.jpg" and "404" in no_such
    assert short == f"{web}/short/b.jpg" and "broke 10 bytes before the end" in broken
    source.close()


# --- frames ---


def test_unreadable_files_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    (tmp_path / "b.jpg").write_bytes(b"")
    (tmp_path / "c.png").write_text("text")
    (tmp_path / "d.jpg").symlink_to(tmp_path / "gone.jpg")
    write_picture(tmp_path / "e.jpg")
    (tmp_path / "f.mp4").write_bytes(b"")
    (tmp_path / "g.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(100))
    write_video(tmp_path / "h.mp4", 2)
    events = list(read_frames(resolve_source(tmp_path).files))
    bad = {event.item: event.reason for event in events if isinstance(event, Unreadable)}
    assert sorted(bad) == [1, 2, 3, 5, 6]
    assert "0 bytes" in bad[1] and "no picture" in bad[2] and "No such file" in bad[3] and "0 bytes" in bad[5]
    assert not any(str(tmp_path) in reason for reason in bad.values())
    good = [(event.item, event.number) for event in events if isinstance(event, Frame)]
    assert good == [(0, 0), (4, 0), (7, 1), (7, 2)]


def test_pictures_are_decoded_ahead_in_their_order(tmp_path: Path, new_threads: Callable[[], list[str]]) -> None:
    for number in range(20):
        write_picture(tmp_path / f"{number:02d}.png", picture(96, 64, (number, 0, number + 8, 8)))
    (tmp_path / "07.png").write_bytes(b"")
    write_video(tmp_path / "v.mp4", 3)
    files = resolve_source(tmp_path).files
    plain, ahead = list(read_frames(files)), list(read_frames(files, decoders=4))
    assert [(event.item, getattr(event, "number", -1)) for event in ahead] == [
        (event.item, getattr(event, "number", -1)) for event in plain
    ]
    assert all(
        np.array_equal(one.image_bgr, other.image_bgr)
        for one, other in zip(plain, ahead, strict=True)
        if isinstance(one, Frame)
    )
    events = read_frames(files, decoders=4)
    next(events)
    events.close()
    assert new_threads() == []


@pytest.mark.parametrize("size", [(640, 640), (96, 64), (320, 640)])
@pytest.mark.parametrize("auto", [True, False])
def test_shape_for_the_network_is_known_without_letterboxing(size: tuple[int, int], auto: bool) -> None:
    random = np.random.default_rng(0)
    sides = [*random.integers(1, 1500, (60, 2)).tolist(), [1, 1], [1, 900], [900, 1], [640, 640], [480, 640]]
    for height, width in sides:
        image = np.zeros((height, width, 3), np.uint8)
        wanted = to_network(image, size, 32, auto).shape[1:]
        assert network_shape(height, width, size, 32, auto) == wanted, (height, width)


@pytest.mark.parametrize(("stride", "wanted"), [(1, 12), (3, 4), (5, 2)])
def test_video_stride_takes_the_last_of_each_group(tmp_path: Path, stride: int, wanted: int) -> None:
    path = write_video(tmp_path / "50%02d #一.mp4", 12, 30.0)
    video = VideoFile(path, stride)
    assert (video.total, round(video.rate, 3)) == (wanted, round(30 / stride, 3))
    frames = list(video)
    assert [number for number, _ in frames] == list(range(1, wanted + 1))
    for number, image in frames:
        columns = np.flatnonzero((image[25, :, 2] > 150) & (image[25, :, 1] < 100))
        assert abs(columns.min() - (10 + 2 * (number * stride - 1))) <= 1
    assert not video.capture.isOpened()


def test_video_shorter_than_the_stride_says_so(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", 2)
    with pytest.raises(ValueError, match="2 frame.s., fewer than --vid-stride 5"):
        list(VideoFile(path, 5))


def test_rates() -> None:
    assert [usable_rate(value) for value in (25, 29.97, 240, 1000)] == [25, 29.97, 240, 1000]
    assert [usable_rate(value) for value in (0, -1, float("nan"), float("inf"), 90000)] == [30] * 5


def test_turned_and_fast_videos(shared_dir: Path) -> None:
    folder = shared_dir / "cases" / "files" / "sources"
    if not folder.is_dir():
        pytest.skip(f"no input cases at {folder}")
    for name, rate in (("turned90.mp4", None), ("turned180.mp4", None), ("fps240.mp4", 240), ("motion.avi", 25)):
        video = VideoFile(folder / name)
        frames = [image for _, image in video]
        assert len(frames) == 10 and frames[0].shape == (64, 96, 3), name
        assert rate is None or video.rate == rate
    with pytest.raises(ValueError, match=r"cut\.mp4: cannot be opened"):
        VideoFile(folder / "cut.mp4")


def test_load_images_gives_the_known_tuples(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    (tmp_path / "b.jpg").write_bytes(b"")
    write_video(tmp_path / "c.mp4", 2)
    loader = LoadImages(tmp_path, img_size=64, stride=32)
    assert len(loader) == 3
    rows = list(loader)
    assert [Path(path).name for path, *_ in rows] == ["a.jpg", "c.mp4", "c.mp4"]
    _, image, original, capture, text = rows[0]
    assert image.shape == (3, 64, 64) and image.dtype == np.uint8 and original.shape == (64, 96, 3)
    assert image[:, 25, 25].tolist() == pytest.approx([255, 0, 0], abs=12)  # RGB
    assert capture is None and text.startswith("image 1/3 ")
    assert isinstance(rows[1][3], cv2.VideoCapture) and rows[2][4].startswith("video 3/3 (2/2) ")
    with pytest.raises(ValueError, match="transforms"):
        LoadImages(tmp_path, transforms=object())


# --- streams ---


class FakeCapture:
    """A camera that gives ``frames`` pictures and then fails."""

    def __init__(self, frames: int, shape: tuple[int, int] = (64, 96), rate: float = 25.0, length: int = -1) -> None:
        self.left, self.shape, self.rate, self.length = frames, shape, rate, length
        self.is_released = False

    def isOpened(self) -> bool:  # noqa: N802
        return self.left > 0

    def grab(self) -> bool:
        time.sleep(0.002)
        self.left -= 1
        return self.left >= 0

    def retrieve(self) -> tuple[bool, np.ndarray]:
        return True, picture(self.shape[1], self.shape[0])

    def get(self, key: int) -> float:
        return {cv2.CAP_PROP_FPS: self.rate, cv2.CAP_PROP_FRAME_COUNT: self.length}.get(key, 0.0)

    def release(self) -> None:
        self.is_released = True


class FakeNetwork:
    """Opens the captures listed for an address one after the other; afterwards the address is dead."""

    def __init__(self, **captures: list[FakeCapture]) -> None:
        self.waiting, self.opened = captures, []

    def __call__(self, address: str) -> FakeCapture:
        capture = self.waiting[address].pop(0) if self.waiting[address] else FakeCapture(0)
        self.opened.append(capture)
        return capture


def open_streams(network: FakeNetwork, **keywords: object) -> LoadStreams:
    settings = {"pause_s": 0.01, "tries": 2} | keywords
    return LoadStreams(list(network.waiting), open_source=network, **settings)


def test_lost_stream_comes_back_and_the_others_go_on() -> None:
    network = FakeNetwork(a=[FakeCapture(5), FakeCapture(5)], b=[FakeCapture(20, (48, 128), 240.0)])
    frames = [frame for group in open_streams(network).rounds() for frame in group]
    by_item = {item: [frame for frame in frames if frame.item == item] for item in (0, 1)}
    for item, shape in ((0, (64, 96, 3)), (1, (48, 128, 3))):
        assert {frame.image_bgr.shape for frame in by_item[item]} == {shape}
        assert [frame.number for frame in by_item[item]] == list(range(1, len(by_item[item]) + 1))
    assert 1 <= len(by_item[0]) <= 10  # frames that came while nobody asked are left out
    assert by_item[1][0].rate == 240
    assert all(capture.is_released for capture in network.opened if capture.isOpened())
    assert len(network.opened) >= 4  # a was opened again


def test_recording_is_read_in_full_and_once() -> None:
    network = FakeNetwork(a=[FakeCapture(12, length=12)])
    frames = [frame for group in open_streams(network, vid_stride=3).rounds() for frame in group]
    assert [frame.number for frame in frames] == [1, 2, 3, 4]
    assert frames[0].rate == pytest.approx(25 / 3)
    assert len(network.opened) == 1


def test_no_stream_at_all_is_an_error_without_the_password() -> None:
    network = FakeNetwork(**{"rtsp://me:secret@cam/1": [], "b": []})
    with pytest.raises(
        ConnectionError, match=r"opened: 0, 7; check .*camera is plugged in, not in use and of this number"
    ):
        LoadStreams(["0", "7"], open_source=lambda address: FakeCapture(0), tries=0)
    with pytest.raises(
        ConnectionError, match=r"no stream could be opened: rtsp://\*\*\*@cam/1, b; .* sending"
    ) as caught:
        open_streams(network)
    assert "secret" not in str(caught.value)


def test_closed_streams_are_not_told_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    streams = LoadStreams("a", open_source=lambda address: FakeCapture(10**9))
    rounds = streams.rounds()
    next(rounds)
    with caplog.at_level(logging.INFO, logger=LOGGER.name):
        LOGGER.addHandler(caplog.handler)
        rounds.close()
        LOGGER.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_one_dead_stream_does_not_end_the_run() -> None:
    network = FakeNetwork(dead=[], alive=[FakeCapture(6)])
    frames = [frame for group in open_streams(network).rounds() for frame in group]
    assert frames and {frame.item for frame in frames} == {1}


def test_streams_stop_when_the_consumer_leaves() -> None:
    network = FakeNetwork(a=[FakeCapture(10**6)])
    streams = open_streams(network)
    for _ in streams.rounds():
        break
    streams.close()
    assert all(not thread.is_alive() for thread in streams._threads)
    assert network.opened[0].is_released


def test_load_streams_gives_the_known_tuples() -> None:
    network = FakeNetwork(a=[FakeCapture(3, length=3)])
    for sources, images, originals, capture, text in open_streams(network, img_size=64):
        assert sources == ["a"] and images.shape == (1, 3, 64, 64) and originals[0].shape == (64, 96, 3)
        assert capture is None and text == ""


def test_passwords_are_not_shown() -> None:
    assert without_password("rtsp://u:p@ss@host:554/live@1") == "rtsp://***@host:554/live@1"
    assert without_password("http://host/a@b") == "http://host/a@b"
