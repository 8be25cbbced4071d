"""Files that detection writes: their names, their content, and that they are complete however a run ends."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.deploy.fakes import NAMES, picture, read_video, write_video
from utils.deploy import naming, record
from utils.deploy.mp4_size import set_frame_size
from utils.deploy.naming import plan_outputs
from utils.deploy.record import RECORD_NAME, Input
from utils.deploy.run_folder import SaveOptions, plan_run
from utils.deploy.tables import RESULTS_HEADER
from utils.deploy.video import Codec
from utils.deploy.writers import RunWriter

ROWS = np.array([[20, 10, 60, 40, 0.9, 0], [0, 0, 96, 64, 0.5, 2]], np.float32)
NOTHING = np.zeros((0, 6), np.float32)


def plan(*names: str) -> list[tuple[str, str]]:
    inputs = [(Path(name), name.endswith((".mp4", ".avi"))) for name in names]
    return [(output.media.as_posix(), output.stem.as_posix()) for output in plan_outputs(inputs)]


def make_writer(folder: Path, *names: str, keep_open: bool = False, **options: bool) -> RunWriter:
    folder.mkdir(exist_ok=True)
    inputs = [Input(name, name, Path(name), name.endswith((".mp4", ".avi", ".ts"))) for name in names]
    run = plan_run(folder, inputs, SaveOptions(**options))
    return RunWriter(run, NAMES, keep_open=keep_open, codec=Codec(note=""))


def files_of(folder: Path) -> list[str]:
    """Files below a folder, without the record."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != RECORD_NAME]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def table_of(folder: Path) -> list[list[str]]:
    lines = (folder / "results.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == RESULTS_HEADER
    return [line.split("\t") for line in lines[1:]]


# --- names ---


@pytest.mark.parametrize(
    ("inputs", "media", "stems"),
    [
        (["a.jpg", "a.png"], ["a.jpg", "a.png"], ["a", "a_png"]),
        (["a.avi", "a.mp4"], ["a.mp4", "a_mp4.mp4"], ["a", "a_mp4"]),
        (["x/f.jpg", "y/f.jpg"], ["x/f.jpg", "y/f.jpg"], ["x/f", "y/f"]),
        (["f.jpg", "f.jpg", "f.jpg"], ["f.jpg", "f_jpg.jpg", "f_2.jpg"], ["f", "f_jpg", "f_2"]),
        (["a_3.jpg", "a.mp4"], ["a_3.jpg", "a.mp4"], ["a_3", "a_mp4"]),  # frame 3 of the video
        (["b.mp4", "b_7.jpg"], ["b.mp4", "b_7.jpg"], ["b", "b_7_jpg"]),
        (["raw.dng", "raw.jpg", "deep.mpo"], ["raw.jpg", "raw_jpg.jpg", "deep.jpg"], ["raw", "raw_jpg", "deep"]),
        (["two.dots.v2.JPG"], ["two.dots.v2.JPG"], ["two.dots.v2"]),
    ],
)
def test_no_two_inputs_share_a_name(inputs: list[str], media: list[str], stems: list[str]) -> None:
    assert plan(*inputs) == list(zip(media, stems, strict=True))


def test_names_as_long_as_the_system_allows(tmp_path: Path) -> None:
    names = ["长" * 83 + ".jpg", "a" * 250 + ".png", "a" * 251 + ".ts", "a" * 250 + "b.ts"]
    writer = make_writer(tmp_path, *names, save_txt=True, save_crop=True)
    outputs = writer.outputs
    assert len({output.stem for output in outputs}) == len({output.media for output in outputs}) == 4
    with writer:
        for item in range(4):
            writer.write(item, 123456 if item > 1 else 0, picture(), picture(), ROWS, 25.0)
    assert {output.media.name for output in outputs} <= set(files_of(tmp_path))
    assert len(list((tmp_path / "labels").iterdir())) == 4


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("0", "0"),
        ("rtsp://user:pa#ss@cam.local:554/live/ch1?x=1&y=2", "cam.local_554_live_ch1_x_1_y_2"),
        ("http://host/", "host"),
        ("rtsp://@", "stream"),
    ],
)
def test_stream_names(address: str, name: str) -> None:
    assert naming.stream_name(address) == name


@pytest.mark.parametrize(
    ("name", "folder"), [("traffic light", "traffic light"), ("a/b:c", "a_b_c"), ("..", "4"), ("車", "車"), ("", "4")]
)
def test_class_names_become_safe_folders(name: str, folder: str) -> None:
    assert naming.folder_name(name, 4) == folder


# --- content ---


def test_label_files_and_table(tmp_path: Path) -> None:
    with make_writer(tmp_path / "run", "a.jpg", "v.mp4", save_txt=True, save_conf=True, save_media=False) as writer:
        writer.write(0, 0, picture(), None, ROWS, 0)
        writer.write(1, 1, picture(), None, NOTHING, 25)
        writer.write(1, 2, picture(), None, ROWS[:1], 25)
    assert files_of(tmp_path / "run") == ["labels/a.txt", "labels/v_2.txt", "results.txt"]
    # least confident first, normalised
    assert (tmp_path / "run/labels/a.txt").read_text() == (
        "2 0.5 0.5 1 1 0.5\n0 0.416667 0.390625 0.416667 0.46875 0.9\n"
    )
    assert table_of(tmp_path / "run") == [
        ["a.jpg", "0", "0", "red", "0.9", "20", "10", "60", "40"],
        ["a.jpg", "0", "2", "blue", "0.5", "0", "0", "96", "64"],
        ["v.mp4", "2", "0", "red", "0.9", "20", "10", "60", "40"],
    ]
    assert writer.label_files == 2


def test_without_confidence_and_without_detections(tmp_path: Path) -> None:
    with make_writer(tmp_path / "run", "a.jpg", "b.jpg", save_txt=True) as writer:
        writer.write(0, 0, picture(), None, ROWS[:1], 0)
    assert (tmp_path / "run/labels/a.txt").read_text() == "0 0.416667 0.390625 0.416667 0.46875\n"
    # a second run into the same folder replaces what the first one wrote, also by nothing
    with make_writer(tmp_path / "run", "a.jpg", "b.jpg", save_txt=True) as writer:
        writer.write(0, 0, picture(), None, NOTHING, 0)
    assert files_of(tmp_path / "run") == ["results.txt"] and (tmp_path / "run/labels").is_dir()
    assert table_of(tmp_path / "run") == []


def test_odd_names_cannot_break_the_table(tmp_path: Path) -> None:
    run = plan_run(tmp_path, [Input("a.jpg", "#a\tb\n.jpg", Path("a.jpg"), False)], SaveOptions())
    with RunWriter(run, {0: "x\ty"}) as writer:
        writer.write(0, 0, picture(), None, ROWS, 0)
    assert [row[0::3] for row in table_of(tmp_path)] == [["./#a b .jpg", "x y", "10"], ["./#a b .jpg", "2", "0"]]


def test_crops_are_cut_from_the_original_and_numbered(tmp_path: Path) -> None:
    rows = np.array([[20, 10, 60, 40, 0.9, 0], [25, 15, 50, 35, 0.8, 0], [90, 60, 96, 64, 0.7, 1]], np.float32)
    with make_writer(tmp_path / "run", "a.jpg", "a2.jpg", "x/a.png", save_crop=True) as writer:
        for item in range(3):
            writer.write(item, 0, picture(), np.zeros_like(picture()), rows, 0)
    crops = sorted(name for name in files_of(tmp_path / "run") if name.startswith("crops"))
    assert crops == sorted(
        f"crops/{name}.jpg"
        for name in ("green/a", "green/a2", "green/x/a", "red/a", "red/a2", "red/a22", "red/a23", "red/x/a", "red/x/a2")
    )
    crop = cv2.imread(str(tmp_path / "run/crops/red/a.jpg"))
    assert crop.shape == (41, 51, 3)  # 4.7 ... 45.3 and 9.5 ... 60.5 without their fractions
    assert np.abs(crop[20, 25].astype(int) - (0, 0, 255)).max() < 5
    assert cv2.imread(str(tmp_path / "run/crops/green/a.jpg")).shape == (10, 12, 3)  # clipped to the picture


@pytest.mark.parametrize("names", [("a.jpg", "a2.jpg", "a22.jpg"), ("a22.jpg", "a2.jpg", "a.jpg")])
def test_crops_of_no_two_inputs_share_a_name(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Numbers behind a stem may look like another stem; 30 crops of each input have to be there at the end."""
    with make_writer(tmp_path / "run", *names, save_crop=True, save_media=False) as writer:
        for _ in range(15):
            for item in range(3):
                writer.write(item, 0, picture(), None, ROWS[[0, 0]], 0)
    assert len(list((tmp_path / "run/crops/red").iterdir())) == 90


def test_what_is_remembered_of_crops_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "replace_file", lambda path, data: None)
    with make_writer(tmp_path / "run", "v.mp4", save_crop=True, save_media=False) as writer:
        for frame in range(1, 200):
            writer.write(0, frame, picture(), None, ROWS, 25)
        assert len(writer._crop_counts) == 2  # one for each class


def test_an_earlier_run_leaves_nothing_that_this_one_did_not_find(tmp_path: Path) -> None:
    """Fewer frames (a larger stride) and fewer boxes (a higher threshold); files of other inputs stay."""
    options = {"save_txt": True, "save_crop": True, "save_media": False}
    with make_writer(tmp_path / "run", "v.mp4", "b.jpg", **options) as writer:
        for frame in (1, 2, 3):
            writer.write(0, frame, picture(), None, ROWS[[0, 0]], 25)
        writer.write(1, 0, picture(), None, ROWS[:1], 0)
    assert len(files_of(tmp_path / "run")) == 4 + 7 + 1
    with make_writer(tmp_path / "run", "v.mp4", **options) as writer:
        writer.write(0, 1, picture(), None, ROWS[:1], 25)
    assert files_of(tmp_path / "run") == [
        "crops/red/b.jpg",
        "crops/red/v.jpg",
        "labels/b.txt",
        "labels/v_1.txt",
        "results.txt",
    ]
    with make_writer(tmp_path / "run", "v.mp4", "b.jpg", save_media=False) as writer:  # asks for neither
        writer.write(0, 1, picture(), None, NOTHING, 25)
    assert len(files_of(tmp_path / "run")) == 5


def test_empty_label_files_on_demand(tmp_path: Path) -> None:
    with make_writer(tmp_path / "run", "a.jpg", "v.mp4", save_txt=True, save_empty=True, save_media=False) as writer:
        writer.write(0, 0, picture(), None, NOTHING, 0)
        writer.write(1, 1, picture(), None, NOTHING, 25)
    assert [(tmp_path / "run/labels" / name).read_bytes() for name in ("a.txt", "v_1.txt")] == [b"", b""]
    assert writer.label_files == 2


def test_box_outside_the_picture_gives_no_crop(tmp_path: Path) -> None:
    rows = np.array([[200, 200, 220, 220, 0.9, 0]], np.float32)
    with make_writer(tmp_path / "run", "a.jpg", save_crop=True, save_media=False) as writer:
        writer.write(0, 0, picture(), None, rows, 0)
    assert files_of(tmp_path / "run") == ["results.txt"]


def test_pictures_keep_name_size_and_folder(tmp_path: Path) -> None:
    names = ["图 一.jpg", "x/a.PNG", "b.tiff", "c.webp", "d.mpo"]
    with make_writer(tmp_path / "run", *names) as writer:
        for item in range(5):
            writer.write(item, 0, picture(95, 63), picture(95, 63), ROWS, 0)
    assert files_of(tmp_path / "run") == sorted([*names[:4], "d.jpg", "results.txt"])
    for name in [*names[:4], "d.jpg"]:
        image = cv2.imdecode(np.fromfile(tmp_path / "run" / name, np.uint8), cv2.IMREAD_COLOR)
        assert image.shape == (63, 95, 3)


def test_picture_beyond_its_format_becomes_png(tmp_path: Path) -> None:
    long = np.zeros((4, 16500, 3), np.uint8)  # WebP ends at 16383 pixels
    with make_writer(tmp_path / "run", "a.webp") as writer:
        writer.write(0, 0, long, long, NOTHING, 0)
    assert files_of(tmp_path / "run") == ["a.webp.png", "results.txt"]


# --- videos ---


def test_videos_in_turn_and_side_by_side(tmp_path: Path) -> None:
    for keep_open in (False, True):
        folder = tmp_path / str(keep_open)
        with make_writer(folder, "a.mp4", "b.avi", keep_open=keep_open) as writer:
            order = [0, 1, 0, 1] if keep_open else [0, 0, 1, 1]
            for number, item in enumerate(order):
                writer.write(item, number, picture(96 + 32 * item), picture(96 + 32 * item), NOTHING, 25)
                assert len(writer._videos) == (min(number + 1, 2) if keep_open else 1)
        for name, width in (("a.mp4", 96), ("b.mp4", 128)):
            frames, _ = read_video(folder / name)
            assert [image.shape[1] for image in frames] == [width, width]


def test_everything_is_closed_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), make_writer(tmp_path / "run", "a.mp4") as writer:
        writer.write(0, 1, picture(), picture(), ROWS, 25)
        raise RuntimeError
    assert len(read_video(tmp_path / "run/a.mp4")[0]) == 1
    assert files_of(tmp_path / "run") == ["a.mp4", "results.txt"]
    assert len(table_of(tmp_path / "run")) == 2


def test_one_video_that_fails_does_not_keep_the_others_open(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="disk full"),
        make_writer(tmp_path / "run", "a.mp4", "b.mp4", "c.mp4", keep_open=True) as writer,
    ):
        for item in range(3):
            writer.write(item, 1, picture(), picture(), ROWS, 25)
        video, complete = writer._videos[1], writer._videos[1].release

        def fail(on_complete: object) -> None:
            complete()
            raise OSError("disk full")

        video.release = fail
    for name in ("a.mp4", "c.mp4"):
        assert len(read_video(tmp_path / "run" / name)[0]) == 1
    assert len(table_of(tmp_path / "run")) == 6


def test_frame_size_of_other_files_is_left_alone(tmp_path: Path) -> None:
    for name, data in (("a.mp4", b""), ("b.mp4", b"\0\0\0\x10moov" + bytes(8)), ("c.mp4", b"\0\0\0\0moov" + bytes(99))):
        (tmp_path / name).write_bytes(data)
        assert not set_frame_size(tmp_path / name, 5, 5)
        assert (tmp_path / name).read_bytes() == data
    video = write_video(tmp_path / "d.avi", 2)
    before = video.read_bytes()
    assert not set_frame_size(video, 5, 5)
    assert video.read_bytes() == before


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with make_writer(tmp_path, "a.png", save_txt=True) as writer:
        (tmp_path / "labels" / "a.txt").mkdir()
        with pytest.raises(OSError, match=r"labels/a\.txt could not be written: a folder has this name; choose"):
            writer.write(0, 0, picture(), None, ROWS, 0)
    assert [path.name for path in (tmp_path / "labels").iterdir()] == ["a.txt"]
