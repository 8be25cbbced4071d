"""Detection from source to files, with a stand-in for the model and, at the end, with real weights."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import detect_dual
from models.checkpoint import Checkpoint, save_checkpoint
from models.graph import DetectionModel
from tests.deploy.fakes import BOX, NAMES, ColourBackend, picture, read_video, write_picture, write_video
from tests.deploy.runs import contents, detect, files_of, table_of
from tests.reference.tiny import tiny_dual
from utils.deploy import detector as detector_module
from utils.deploy.detector import Detector
from utils.deploy.display import count_text, display_problem
from utils.deploy.exporter import export
from utils.deploy.pipeline import line_width
from utils.deploy.writers import RunWriter
from utils.options import DetectOptions, ExportOptions

REPO_ROOT = Path(detector_module.__file__).resolve().parents[2]


def find_red_box(image: np.ndarray) -> list[int]:
    """Envelope of red in a BGR image."""
    ys, xs = np.nonzero((image[..., 2] > 150) & (image[..., 1] < 90) & (image[..., 0] < 90))
    return [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]


# --- pictures ---


@pytest.mark.parametrize("imgsz", [[96], [64], [192], [64, 128]])
def test_boxes_are_those_of_the_original_picture(tmp_path: Path, imgsz: list[int]) -> None:
    write_picture(tmp_path / "in" / "a.png", picture(192, 128, (40, 20, 120, 80)))
    summary = detect(tmp_path, tmp_path / "in", imgsz=imgsz)
    assert summary.save_dir == tmp_path / "runs" / "exp" and summary.exit_code == 0
    (row,) = table_of(summary.save_dir)
    assert row[:4] == [str(tmp_path / "in" / "a.png"), "0", "0", "red"] and float(row[4]) == pytest.approx(0.9)
    assert [int(value) for value in row[5:]] == pytest.approx([40, 20, 120, 80], abs=2)


def test_annotated_picture_labels_and_lines(tmp_path: Path, lines: list[str]) -> None:
    write_picture(tmp_path / "in" / "a.png", picture(green=True))
    write_picture(tmp_path / "in" / "b.png", picture(box=None))
    summary = detect(tmp_path, tmp_path / "in", save_txt=True, save_conf=True, save_crop=True)
    run = summary.save_dir
    assert files_of(run) == [
        "a.png",
        "b.png",
        "crops/green/a.jpg",
        "crops/red/a.jpg",
        "labels/a.txt",
        "results.txt",
    ]
    image = cv2.imread(str(run / "a.png"))
    assert image.shape == (64, 96, 3) and not np.array_equal(image, picture(green=True))
    assert np.array_equal(cv2.imread(str(run / "b.png")), picture(box=None))
    rows = [line.split() for line in (run / "labels/a.txt").read_text().splitlines()]
    assert [row[0] for row in rows] == ["1", "0"] and rows[1][5] == "0.9"
    left, top, right, bottom = BOX
    wanted = [(left + right) / 2 / 96, (top + bottom) / 2 / 64, (right - left) / 96, (bottom - top) / 64]
    assert [float(value) for value in rows[1][1:5]] == pytest.approx(wanted, abs=1e-5)
    text = "\n".join(lines)
    assert f"image 1/2 {tmp_path / 'in' / 'a.png'}: 64x96 1 red, 1 green, " in text
    assert f"image 2/2 {tmp_path / 'in' / 'b.png'}: 64x96 (no detections), " in text
    assert "ms inference" in text and "at shape (1, 3, 64, 96)" in text
    assert f"1 label file(s) in {run / 'labels'}" in text
    assert (summary.frames, summary.detections, len(summary.processed)) == (2, 2, 2)


def test_options_reach_the_suppression(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", picture(green=True))

    def classes(**options: object) -> list[str]:
        return [row[3] for row in table_of(detect(tmp_path, tmp_path / "a.png", **options).save_dir)]

    assert classes() == ["red", "green"]  # best first
    assert classes(classes=[1]) == ["green"]
    assert classes(max_det=1) == ["red"]
    assert classes(conf_thres=0.85) == ["red"]
    with pytest.raises(ValueError, match="--classes 7: the weights know classes 0 to 2"):
        classes(classes=[7])


def test_a_folder_that_cannot_be_made_is_told_with_what_to_type(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    with pytest.raises(OSError, match=r"folder .*a\.png/runs/exp for the results cannot be made: .*another --project"):
        detect(tmp_path, tmp_path / "a.png", project=str(tmp_path / "a.png" / "runs"))


def test_nosave_writes_the_table_only(tmp_path: Path) -> None:
    write_picture(tmp_path / "in" / "a.png")
    write_video(tmp_path / "in" / "b.mp4", 2)
    summary = detect(tmp_path, tmp_path / "in", nosave=True)
    assert files_of(summary.save_dir) == ["results.txt"] and len(table_of(summary.save_dir)) == 3


@pytest.mark.parametrize("option", ["save_conf", "save_empty"])
def test_options_of_label_files_are_told_to_do_nothing_without_them(
    tmp_path: Path, lines: list[str], option: str
) -> None:
    write_picture(tmp_path / "a.png")
    warning = f"--{option.replace('_', '-')} has no effect without --save-txt"
    detect(tmp_path, tmp_path / "a.png", save_txt=True, **{option: True})
    assert warning not in lines
    detect(tmp_path, tmp_path / "a.png", **{option: True})
    assert warning in lines


@pytest.mark.skipif(sys.platform == "win32", reason="no such names there")
def test_a_name_of_several_lines_stays_on_one(tmp_path: Path, lines: list[str]) -> None:
    write_picture(tmp_path / "in" / "a\nERROR: b.png")
    (tmp_path / "in" / "c\nd.png").write_bytes(b"")
    summary = detect(tmp_path, tmp_path / "in")
    assert summary.frames == 1 and (summary.save_dir / "a\nERROR: b.png").is_file()
    assert any("a ERROR: b.png: 64x96 1 red" in line for line in lines)
    assert any("c d.png: empty file" in line for line in lines)
    assert not any("\n" in line for line in lines if ".png" in line)


def test_thickness_of_lines_has_a_limit(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    assert detect(tmp_path, tmp_path / "a.png", line_thickness=255).detections == 1
    with pytest.raises(ValueError, match="--line-thickness 256: should be at most 255"):
        DetectOptions(line_thickness=256)


def test_hidden_labels_change_the_drawing(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", picture(192, 128, (40, 60, 120, 100)))
    images = [
        cv2.imread(str(detect(tmp_path, tmp_path / "a.png", **options).save_dir / "a.png"))
        for options in ({}, {"hide_conf": True}, {"hide_labels": True})
    ]
    assert len({image.tobytes() for image in images}) == 3
    assert np.array_equal(images[2][:50], picture(192, 128, (40, 60, 120, 100))[:50])  # no strip above the box


def test_lines_are_thinner_on_small_pictures_unless_a_thickness_was_typed() -> None:
    typed = DetectOptions.from_cli(["--line-thickness", "3"])
    pictures = [np.zeros((side, side, 3), np.uint8) for side in (64, 320, 480, 2000)]
    assert [line_width(DetectOptions(), image) for image in pictures] == [1, 2, 3, 3]
    assert [line_width(typed, image) for image in pictures] == [3, 3, 3, 3]


def test_structure_of_folders_is_kept(tmp_path: Path) -> None:
    for name in ("cam1/frame.jpg", "cam2/frame.jpg", "frame.jpg", "frame.png"):
        write_picture(tmp_path / "in" / name)
    run = detect(tmp_path, tmp_path / "in", save_txt=True).save_dir
    assert files_of(run) == [
        "cam1/frame.jpg",
        "cam2/frame.jpg",
        "frame.jpg",
        "frame.png",
        "labels/cam1/frame.txt",
        "labels/cam2/frame.txt",
        "labels/frame.txt",
        "labels/frame_png.txt",
        "results.txt",
    ]


def test_bad_files_are_named_and_counted(tmp_path: Path, lines: list[str]) -> None:
    write_picture(tmp_path / "in" / "a.jpg")
    (tmp_path / "in" / "m.jpg").write_bytes(b"")
    (tmp_path / "in" / "n.png").write_text("text")
    write_picture(tmp_path / "in" / "z.jpg")
    summary = detect(tmp_path, tmp_path / "in")
    assert summary.exit_code == 0 and files_of(summary.save_dir) == ["a.jpg", "results.txt", "z.jpg"]
    assert [Path(name).name for name, _ in summary.unreadable] == ["m.jpg", "n.png"]
    text = "\n".join(lines)
    assert f"image 2/4 {tmp_path / 'in' / 'm.jpg'}: empty file" in text and "2 input(s) could not be read" in text


@pytest.mark.parametrize("name", ["a.jpg", "a.mp4"])
def test_nothing_processed_is_no_success(tmp_path: Path, name: str, lines: list[str]) -> None:
    (tmp_path / name).write_bytes(b"")
    assert detect(tmp_path, tmp_path / name).exit_code == 1
    text = "\n".join(lines)
    assert "nothing was processed: no input could be read" in text and "ffmpeg -i" in text and "--source" in text


@pytest.mark.parametrize(("count", "batch_size", "seen"), [(1, 1, 1), (3, 1, 1), (5, 2, 2), (3, 8, 3)])
def test_the_shape_told_at_the_end_is_that_of_the_largest_batch(
    tmp_path: Path, lines: list[str], count: int, batch_size: int, seen: int
) -> None:
    for number in range(count):
        write_picture(tmp_path / "in" / f"{number}.jpg")
    detect(tmp_path, tmp_path / "in", batch_size=batch_size)
    assert f"at shape ({seen}, 3, 64, 96)" in "\n".join(lines)


def test_source_is_checked_before_anything_else(tmp_path: Path) -> None:
    options = DetectOptions(weights=["gone.pt"], source=str(tmp_path / "gone"), project=str(tmp_path / "runs"))
    with pytest.raises(FileNotFoundError, match="--source"):
        Detector(options).run()
    write_picture(tmp_path / "a.jpg")
    options = DetectOptions(weights=["gone.pt"], source=str(tmp_path / "a.jpg"), project=str(tmp_path / "runs"))
    with pytest.raises(FileNotFoundError, match="gone.pt"):
        Detector(options).run()
    assert not (tmp_path / "runs").exists()


# --- repeated runs ---


def test_repeated_run_replaces_its_files(tmp_path: Path) -> None:
    write_picture(tmp_path / "in" / "a.jpg", picture(green=True))
    write_video(tmp_path / "in" / "v.mp4", 3)
    options = {"save_txt": True, "save_crop": True, "exist_ok": True}
    first = detect(tmp_path, tmp_path / "in", **options).save_dir
    before = contents(first)
    second = detect(tmp_path, tmp_path / "in", **options).save_dir
    assert second == first and contents(second) == before
    assert detect(tmp_path, tmp_path / "in").save_dir.name == "exp2"


def test_files_of_the_user_are_never_replaced(tmp_path: Path) -> None:
    write_picture(tmp_path / "set" / "a.jpg")
    before = contents(tmp_path / "set")
    with pytest.raises(ValueError, match="would replace its own source"):
        detect(tmp_path, tmp_path / "set", project=str(tmp_path), name="set", exist_ok=True)
    write_picture(tmp_path / "data" / "images" / "a.jpg")
    (tmp_path / "data" / "labels").mkdir()
    (tmp_path / "data" / "labels" / "a.txt").write_text("0 0.5 0.5 1 1\n")
    with pytest.raises(ValueError, match="data/labels are not in the record of this folder: perhaps a data set"):
        detect(tmp_path, tmp_path / "data/images", project=str(tmp_path), name="data", exist_ok=True, save_txt=True)
    assert contents(tmp_path / "set") == before and (tmp_path / "data/labels/a.txt").read_text() == "0 0.5 0.5 1 1\n"


# --- videos ---


def test_video_keeps_size_rate_and_frames(tmp_path: Path, lines: list[str]) -> None:
    write_video(tmp_path / "in" / "v.mp4", 10, 25, 96, 64)
    write_video(tmp_path / "in" / "v.avi", 10, 25, 96, 64)
    run = detect(tmp_path, tmp_path / "in", save_txt=True).save_dir
    assert [name for name in files_of(run) if "/" not in name] == ["results.txt", "v.mp4", "v_mp4.mp4"]
    for name in ("v.mp4", "v_mp4.mp4"):
        frames, rate = read_video(run / name)
        assert len(frames) == 10 and rate == 25 and frames[0].shape == (64, 96, 3)
    assert len(list((run / "labels").iterdir())) == 20
    first = [int(row[5]) for row in table_of(run)[:10]]
    assert first == pytest.approx([10 + 2 * number for number in range(10)], abs=1)
    text = "\n".join(lines)
    assert f"video 1/2 (10/10) {tmp_path / 'in' / 'v.avi'}: 64x96 1 red, " in text


def test_stride_divides_the_rate(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", 12, 30)
    run = detect(tmp_path, tmp_path / "v.mp4", vid_stride=3, save_txt=True).save_dir
    frames, rate = read_video(run / "v.mp4")
    assert len(frames) == 4 and rate == pytest.approx(10)
    assert files_of(run / "labels") == [f"v_{number}.txt" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("batch_size", [2, 4, 16])
def test_batches_give_what_single_frames_give(tmp_path: Path, batch_size: int) -> None:
    write_picture(tmp_path / "in" / "a.jpg")
    write_picture(tmp_path / "in" / "b.jpg", picture(128, 64))
    write_picture(tmp_path / "in" / "c.jpg", picture(128, 64, green=True))
    (tmp_path / "in" / "d.jpg").write_bytes(b"")
    write_video(tmp_path / "in" / "seven.mp4", 7)
    write_video(tmp_path / "in" / "one.mp4", 1)
    options = {"save_txt": True, "save_conf": True, "save_crop": True}
    single = detect(tmp_path, tmp_path / "in", **options)
    model = ColourBackend()
    many = detect(tmp_path, tmp_path / "in", batch_size, model, **options)
    assert contents(many.save_dir) == contents(single.save_dir)
    assert many.unreadable == single.unreadable and many.frames == 11
    assert max(shape[0] for shape in model.shapes) == min(batch_size, 11)  # all of them are 64 x 96 for the network


@pytest.mark.parametrize("batch_size", [1, 3])
def test_steps_in_turn_give_what_steps_side_by_side_give(tmp_path: Path, batch_size: int) -> None:
    for number in range(12):
        size = ((96, 64), (64, 96), (128, 64))[number % 3]
        write_picture(tmp_path / "in" / f"{number:02d}.png", picture(*size, green=number % 2 == 0))
    (tmp_path / "in" / "05b.png").write_bytes(b"")
    write_video(tmp_path / "in" / "v.mp4", 7)
    options = {"save_txt": True, "save_crop": True, "save_csv": True, "save_json": True}
    side_by_side = detect(tmp_path, tmp_path / "in", batch_size, **options)
    in_turn = detect(tmp_path, tmp_path / "in", batch_size, sequential=True, **options)
    assert contents(side_by_side.save_dir) == contents(in_turn.save_dir)
    assert {"detections.csv", "detections.json"} < set(files_of(in_turn.save_dir))
    assert side_by_side.unreadable == in_turn.unreadable and in_turn.frames == 19
    shares = in_turn.clock.per_image_ms(19)
    assert sum(shares.values()) == pytest.approx(1000 * in_turn.clock.wall_s / 19, abs=0.1)
    assert all(shares[step] > 0 for step in ("read", "pre-process", "network", "NMS", "draw", "write"))


def test_pictures_are_batched_by_shape_whatever_their_order(tmp_path: Path) -> None:
    for number in range(12):
        write_picture(tmp_path / "in" / f"{number:02d}.png", picture(*((96, 64), (64, 96))[number % 2]))
    model = ColourBackend()
    summary = detect(tmp_path, tmp_path / "in", 4, model, save_txt=True)
    assert sorted(model.shapes) == sorted([(4, 3, 64, 96), (4, 3, 96, 64), (2, 3, 64, 96), (2, 3, 96, 64)])
    order = [Path(row[0]).stem for row in table_of(summary.save_dir)]
    assert order == [f"{number:02d}" for number in range(12)]


def test_crops_and_labels_come_from_what_was_not_drawn_on(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png", picture(192, 128, (40, 20, 120, 80)))
    run = detect(tmp_path, tmp_path / "a.png", save_crop=True, line_thickness=8).save_dir
    crop = cv2.imread(str(run / "crops/red/a.jpg")).astype(int)
    clean = picture(192, 128, (40, 20, 120, 80))[14:85, 34:125].astype(int)
    assert crop.shape == clean.shape and np.abs(crop - clean).mean() < 4


@pytest.mark.slow
def test_memory_does_not_grow_with_the_length_of_a_video(tmp_path: Path, lines: list[str]) -> None:
    """Resident memory after a fifth of the frames and at the end, with every output on."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("the system does not tell the resident memory in /proc")
    write_video(tmp_path / "v.mp4", 1500)
    resident: dict[int, float] = {}

    class Watching(ColourBackend):
        frames = 0

        def __call__(self, images: torch.Tensor, augment: bool = False) -> torch.Tensor:
            self.shapes.clear()
            self.augmented.clear()
            lines.clear()
            self.frames += len(images)
            resident[self.frames] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            return super().__call__(images, augment)

    outputs = {"save_txt": True, "save_crop": True, "save_csv": True, "save_json": True}
    assert detect(tmp_path, tmp_path / "v.mp4", 4, Watching(), **outputs).frames == 1500
    early = max(value for frames, value in resident.items() if frames <= 300)
    assert resident[1500] - early < 12  # MiB; the frames alone would take 26


def test_interrupted_run_leaves_complete_files(tmp_path: Path, lines: list[str]) -> None:
    write_video(tmp_path / "v.mp4", 10)
    summary = detect(tmp_path, tmp_path / "v.mp4", model=ColourBackend(fail_on_call=4))
    assert summary.is_interrupted and summary.exit_code == 130
    assert len(read_video(summary.save_dir / "v.mp4")[0]) == 3 and len(table_of(summary.save_dir)) == 3
    assert files_of(summary.save_dir) == ["results.txt", "v.mp4"]


def test_interrupt_in_the_middle_of_a_frame_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables and label files come before the frame of the video; all of them hold the same frames."""
    write_labels = RunWriter._write_labels

    def interrupted(self: RunWriter, item: int, frame: int, *rest: object) -> None:
        if frame == 3:
            signal.raise_signal(signal.SIGINT)
        write_labels(self, item, frame, *rest)

    monkeypatch.setattr(RunWriter, "_write_labels", interrupted)
    write_video(tmp_path / "v.mp4", 10)
    summary = detect(tmp_path, tmp_path / "v.mp4", save_txt=True)
    assert summary.exit_code == 130 and (summary.frames, summary.detections) == (3, 3)
    assert [row[1] for row in table_of(summary.save_dir)] == ["1", "2", "3"]
    assert len(read_video(summary.save_dir / "v.mp4")[0]) == 3
    assert sorted(path.name for path in (summary.save_dir / "labels").iterdir()) == [f"v_{n}.txt" for n in (1, 2, 3)]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["gpu", "cpu"],
)
def test_too_little_memory_is_told_with_what_to_change(tmp_path: Path, error: Exception, batch_size: int) -> None:
    class Large(ColourBackend):
        def __call__(self, images: torch.Tensor, augment: bool = False) -> torch.Tensor:
            raise error

    write_video(tmp_path / "v.mp4", 5)
    smaller = "--imgsz" if batch_size == 1 else "--batch-size"
    wanted = rf"out of memory for {batch_size} picture\(s\) of 64 x 96; choose a smaller {smaller}"
    with pytest.raises(MemoryError, match=wanted):
        detect(tmp_path, tmp_path / "v.mp4", batch_size, Large())
    error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        detect(tmp_path, tmp_path / "v.mp4", batch_size, Large())


def test_failing_model_leaves_complete_files(tmp_path: Path) -> None:
    class Broken(ColourBackend):
        def __call__(self, images: torch.Tensor, augment: bool = False) -> torch.Tensor:
            if len(self.shapes) == 3:
                raise RuntimeError("out of memory")
            return super().__call__(images, augment)

    write_video(tmp_path / "v.mp4", 10)
    with pytest.raises(RuntimeError, match="out of memory"):
        detect(tmp_path, tmp_path / "v.mp4", model=Broken())
    assert len(read_video(tmp_path / "runs/exp/v.mp4")[0]) == 3


# --- options that depend on the machine or the weights ---


def test_window_needs_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(cv2, "getBuildInformation", lambda: "  GUI:                           QT5\n")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    write_picture(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="--view-img: there is no display"):
        detect(tmp_path, tmp_path / "a.jpg", view_img=True)
    monkeypatch.setenv("DISPLAY", ":0")
    assert display_problem() is None
    monkeypatch.setattr(cv2, "getBuildInformation", lambda: "  GUI:                           NONE\n")
    assert "headless" in str(display_problem())


def test_window_shows_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(detector_module, "display_problem", lambda: None)
    monkeypatch.setattr(cv2, "imshow", lambda title, image: shown.append((title, image.shape)))
    monkeypatch.setattr(cv2, "waitKey", lambda delay: -1)
    monkeypatch.setattr(cv2, "destroyAllWindows", lambda: None)
    write_picture(tmp_path / "a.jpg")
    detect(tmp_path, tmp_path / "a.jpg", view_img=True, nosave=True)
    assert shown == [(str(tmp_path / "a.jpg"), (64, 96, 3))]


def test_exported_files(tmp_path: Path, lines: list[str]) -> None:
    write_picture(tmp_path / "a.jpg")
    model = ColourBackend(static_shape=(128, 128))
    model.pt = False
    detect(tmp_path, tmp_path / "a.jpg", model=model)
    assert model.shapes == [(1, 3, 128, 128)] and any("made for 128x128" in line for line in lines)
    for flag in ("augment", "visualize"):
        with pytest.raises(ValueError, match=f"--{flag} needs a .pt file"):
            detect(tmp_path, tmp_path / "a.jpg", model=model, **{flag: True})
    square = ColourBackend()
    square.pt = False  # free size: padded to the full square, as exported files are used
    detect(tmp_path, tmp_path / "a.jpg", model=square)
    assert square.shapes == [(1, 3, 96, 96)]


def test_augmentation_is_handed_to_the_model(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    model = ColourBackend()
    detect(tmp_path, tmp_path / "a.jpg", model=model, augment=True)
    assert model.augmented == [True]


def test_update_is_refused() -> None:
    with pytest.raises(ValueError, match="strip_optimizer"):
        DetectOptions(update=True)
    with pytest.raises(ValueError, match="batch size 0"):
        Detector(DetectOptions(), batch_size=0)


# --- slices ---


@pytest.mark.parametrize("batch_size", [1, 16])
def test_small_objects_in_a_large_picture(tmp_path: Path, batch_size: int, lines: list[str]) -> None:
    """Squares of 12 pixels in 2000: shrunk to 320 they vanish, slices show them, also on the slices' borders."""
    image = np.full((1500, 2000, 3), 20, np.uint8)
    wanted = [(x, y, x + 12, y + 12) for x in range(10, 1980, 394) for y in range(10, 1480, 291)]
    for x1, y1, x2, y2 in wanted:
        image[y1:y2, x1:x2] = (0, 0, 255)
    write_picture(tmp_path / "a.png", image)
    model = ManyBoxes()
    options = {"imgsz": [320], "iou_thres": 0.3, "nosave": True}
    assert len(table_of(detect(tmp_path, tmp_path / "a.png", model=model, **options).save_dir)) == 0
    model.shapes.clear()
    run = detect(tmp_path, tmp_path / "a.png", batch_size, model, slice_size=-1, slice_overlap=0.1, **options).save_dir
    found = sorted(tuple(int(value) for value in row[5:]) for row in table_of(run))
    assert found == sorted(wanted)
    assert {shape[2:] for shape in model.shapes} == {(320, 320), (256, 320)}
    assert sum(shape[0] for shape in model.shapes) == 6 * 7 + 1
    assert any("320x320 in 43 parts" in line for line in lines)


class ManyBoxes(ColourBackend):
    """Finds each connected red area that is at least four pixels wide."""

    def __call__(self, images: torch.Tensor, augment: bool = False) -> torch.Tensor:
        self.shapes.append(tuple(images.shape))
        rows = torch.zeros(len(images), 7, 200)
        for index, image in enumerate(images):
            is_red = ((image[0] > 0.6) & (image[1] < 0.4)).numpy().astype(np.uint8)
            _, _, areas, centres = cv2.connectedComponentsWithStats(is_red)
            for place, (x, y, width, height, _) in enumerate(areas[1:]):
                if min(width, height) >= 4:
                    rows[index, :4, place] = torch.tensor([x + width / 2, y + height / 2, width, height])
                    rows[index, 4, place] = 0.9
        return rows


def test_slices_leave_small_pictures_alone(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.png")
    model = ColourBackend()
    detect(tmp_path, tmp_path / "a.png", model=model, slice_size=96)
    assert model.shapes == [(1, 3, 64, 96)]


@pytest.mark.parametrize(
    ("line", "message"), [("--slice 8", "at least 32"), ("--slice --slice-overlap 1", "between 0 and 0.9")]
)
def test_impossible_slices_are_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        DetectOptions.from_cli(line.split())
    assert message in capsys.readouterr().err


def test_slice_without_a_number_is_the_size_of_the_input() -> None:
    assert DetectOptions.from_cli(["--slice"]).slice_size == -1
    assert DetectOptions.from_cli(["--slice", "512", "--slice-overlap", "0.3"]).slice_size == 512
    assert DetectOptions.from_cli([]).slice_size == 0


# --- small parts ---


def test_count_text() -> None:
    rows = np.array([[0, 0, 0, 0, 0.5, number] for number in (2, 0, 2, 9)], np.float32)
    assert count_text(rows, NAMES) == "1 red, 2 blues, 1 9"
    assert count_text(np.zeros((0, 6), np.float32), NAMES) == ""


@pytest.mark.parametrize("name", ["Platelets", "BUS", "type 2", "汽车", "(other)"])
def test_no_plural_is_made_of_a_name_that_has_one_or_takes_none(name: str) -> None:
    rows = np.zeros((2, 6), np.float32)
    assert count_text(rows, {0: name}) == f"2 {name}"
    assert count_text(rows[:1], {0: name}) == f"1 {name}"


# --- whole ---


@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize(("name", "is_woken"), [("best.pt", True), ("best.onnx", False), ("a_openvino_model", False)])
def test_the_card_is_woken_for_weights_of_torch_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_woken: bool, is_script: bool
) -> None:
    """Other formats may not run on it at all, and then it keeps its memory."""
    steps: list[str] = []
    begun: list[str] = []

    class Started(Exception):
        """The detector is about to work."""

    def run(_: Detector) -> None:
        raise Started

    monkeypatch.setattr("utils.runtime.foreseen_device", lambda device: f"cuda:{device}")
    monkeypatch.setattr("utils.runtime.wake", lambda device, rehearse: steps.append(device))
    monkeypatch.setattr(detect_dual, "begin_context", lambda device: begun.append(device))
    monkeypatch.setattr(Detector, "run", run)
    gc.unfreeze()  # what a training in this process has left
    with pytest.raises(Started):
        detect_dual.main(["--weights", str(tmp_path / name), "--device", "1"], is_script=is_script)
    assert steps == (["cuda:1"] if is_woken else [])
    assert begun == (["1"] if is_woken and is_script else [])  # in a program that calls it torch is loaded already
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert gc.isenabled() and bool(frozen) == is_script  # the garbage of a program that calls it is its own


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained yolov9-t with three classes, whose confidences are about 0.001."""
    torch.manual_seed(0)
    model = DetectionModel("yolov9-t.yaml", nc=3)
    path = tmp_path_factory.mktemp("weights") / "best.pt"
    save_checkpoint(path, Checkpoint(model=model.state_dict(), yaml=dict(model.yaml), nc=3, names=NAMES))
    return path


@pytest.mark.slow
def test_script_with_real_weights(tmp_path: Path, weights: Path) -> None:
    write_picture(tmp_path / "in" / "a.jpg")
    write_video(tmp_path / "in" / "v.mp4", 3)
    command = f"--weights {weights} --source {tmp_path / 'in'} --imgsz 64 --conf 0.0001 --max-det 5 --device cpu"
    command += f" --project {tmp_path} --name out --save-txt --visualize"
    assert detect_dual.main(command.split()) == 0
    out = tmp_path / "out"
    rows = table_of(out)
    assert {(Path(row[0]).name, row[1]) for row in rows} == {("a.jpg", "0"), *(("v.mp4", str(n)) for n in (1, 2, 3))}
    assert {"a.jpg", "v.mp4"} <= set(files_of(out)) and len(rows) <= 20
    maps = sorted(path.name for path in (out / "a").iterdir())
    assert maps[0].endswith("_features.npy") and len(maps) == 2 * len({name.rsplit(".", 1)[0] for name in maps})
    assert (out / "v_3").is_dir()
    summary = detect_dual.run(
        weights=[str(weights)],
        source=str(tmp_path / "in"),
        imgsz=[64],
        conf_thres=0.0001,
        project=str(tmp_path),
        name="tta",
        augment=True,
        max_det=5,
        device="cpu",
    )
    assert summary.frames == 4 and 4 <= summary.detections <= 20


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".torchscript", ".onnx"])
def test_exported_weights_give_the_same_boxes(tmp_path: Path, weights: Path, suffix: str) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    copied = Path(shutil.copy(weights, tmp_path))
    files, _ = export(ExportOptions(weights=[str(copied)], include=[suffix[1:]], imgsz=[64, 96]))
    write_picture(tmp_path / "in" / "a.png")
    options = {"source": str(tmp_path / "in"), "imgsz": [64, 96], "conf_thres": 0.0001, "device": "cpu"}
    tables = [
        table_of(Detector(DetectOptions(weights=[str(file)], project=str(tmp_path / "runs"), **options)).run().save_dir)
        for file in (copied, files[0])
    ]
    assert tables[0] and [row[5:] for row in tables[0]] == [row[5:] for row in tables[1]]


@pytest.mark.slow
def test_batched_video_with_real_weights(tmp_path: Path, weights: Path) -> None:
    write_video(tmp_path / "v.mp4", 7)
    options = {"source": str(tmp_path / "v.mp4"), "imgsz": [64], "conf_thres": 0.0001, "device": "cpu"}
    options |= {"weights": [str(weights)], "project": str(tmp_path / "runs"), "save_txt": True}
    one, four = (Detector(DetectOptions(**options), batch_size=size).run().save_dir for size in (1, 4))
    assert len(files_of(one / "labels")) == 7
    assert contents(one / "labels") == contents(four / "labels")


@pytest.fixture(scope="module")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_dual()
    path = tmp_path_factory.mktemp("tiny") / "tiny.pt"
    save_checkpoint(path, Checkpoint(model=model.state_dict(), yaml=dict(model.yaml), nc=3, names=NAMES))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cpu", id="cpu"), pytest.param("0", id="cuda", marks=pytest.mark.gpu)])
def test_batches_of_a_real_video_give_what_single_frames_give(
    tmp_path: Path, shared_dir: Path, tiny_weights: Path, device: str
) -> None:
    """Boxes, classes, frames and their order are the same; kernels may sum up a batch in another order.

    On a GPU that may turn the rounding of a coordinate, so there one row in a hundred may differ.
    """
    video = shared_dir / "datasets" / "videos" / "car-detection.mp4"
    if not video.exists():
        pytest.skip(f"no video {video}")
    options = {
        "source": str(video),
        "vid_stride": 12,
        "imgsz": [320],
        "conf_thres": 0.5,
        "max_det": 20,
        "device": device,
    }
    options |= {"weights": [str(tiny_weights)], "project": str(tmp_path), "save_txt": True, "video_codec": "mp4v"}
    first = Detector(DetectOptions(sequential=True, **options)).run()
    wanted = table_of(first.save_dir)
    assert first.frames == 31 and len(wanted) > 300
    for batch_size in (1, 7, 16):
        run = Detector(DetectOptions(batch_size=batch_size, **options)).run().save_dir
        found = table_of(run)
        assert files_of(run) == files_of(first.save_dir) and len(read_video(run / "car-detection.mp4")[0]) == 31
        assert [int(row[1]) for row in found] == sorted(int(row[1]) for row in found)
        if device == "cpu":
            assert [row[:4] + row[5:] for row in found] == [row[:4] + row[5:] for row in wanted]
            np.testing.assert_allclose([float(row[4]) for row in found], [float(row[4]) for row in wanted], atol=1e-4)
            assert contents(run / "labels") == contents(first.save_dir / "labels")
        rows = [Counter(tuple(row[:4] + row[5:]) for row in table) for table in (found, wanted)]
        assert (rows[0] - rows[1]).total() <= len(wanted) // 100


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_side_by_side_on_a_gpu_gives_what_steps_in_turn_give(
    tmp_path: Path, tiny_weights: Path, batch_size: int, half: bool
) -> None:
    """Copies, network and suppression have streams of their own there; a missing wait would show in some run."""
    write_video(tmp_path / "v.mp4", 90, width=320, height=192)
    options = {"source": str(tmp_path / "v.mp4"), "imgsz": [320], "conf_thres": 0.5, "max_det": 20, "device": "0"}
    options |= {"weights": [str(tiny_weights)], "project": str(tmp_path), "nosave": True, "half": half}
    options |= {"batch_size": batch_size}
    wanted = table_of(Detector(DetectOptions(sequential=True, **options)).run().save_dir)
    assert len(wanted) > 90
    for _ in range(4):
        summary = Detector(DetectOptions(**options)).run()
        found = table_of(summary.save_dir)
        assert [row[:4] + row[5:] for row in found] == [row[:4] + row[5:] for row in wanted]
        np.testing.assert_allclose([float(row[4]) for row in found], [float(row[4]) for row in wanted], atol=1e-5)
        assert summary.clock.warmup_s > 0 and summary.clock.seconds["network"] > 0


@pytest.mark.slow
def test_exit_status_of_the_script(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"")
    arguments = [sys.executable, str(REPO_ROOT / "detect_dual.py"), "--weights", str(weights), "--device", "cpu"]
    arguments += ["--project", str(tmp_path / "runs"), "--source"]
    environment = {key: value for key, value in os.environ.items() if key != "DISPLAY"}
    for source, message in ((tmp_path / "bad.jpg", "empty file"), (tmp_path / "gone.jpg", "does not exist")):
        done = subprocess.run([*arguments, str(source)], capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 1 and message in done.stdout + done.stderr, done.stdout + done.stderr
        assert "Traceback" not in done.stderr


SOURCE_CASES = {
    "nested": 2,
    "mixed": 2,
    "set [1]": 1,
    "plain.mp4": 10,
    "motion.avi": 10,
    "turned90.mp4": 10,
    "turned180.mp4": 10,
    "fps240.mp4": 10,
    "视频 一.mp4": 10,
    "one_frame.mp4": 1,
    "seven.mp4": 7,
    "list.txt": 2,
    "cut.mp4": 0,
    "zero.mp4": 0,
}


@pytest.mark.parametrize("name", SOURCE_CASES)
def test_source_cases(tmp_path: Path, shared_dir: Path, name: str) -> None:
    source = shared_dir / "cases" / "files" / "sources" / name
    if not source.exists():
        pytest.skip(f"no input case {source}")
    summary = detect(tmp_path, source, batch_size=4, save_txt=True)
    assert summary.frames == SOURCE_CASES[name] and summary.exit_code == (0 if summary.frames else 1)
    videos = list(summary.save_dir.rglob("*.mp4"))
    if source.suffix in (".mp4", ".avi") and summary.frames:
        frames, rate = read_video(videos[0])
        assert len(frames) == summary.frames and frames[0].shape == (64, 96, 3)
        assert rate == (240 if "240" in name else 25)
        wanted = [find_red_box(frame) for frame in _frames_of(source)]
        found = {int(row[1]): [int(value) for value in row[5:]] for row in table_of(summary.save_dir) if row[2] == "0"}
        assert sorted(found) == list(range(1, summary.frames + 1))
        for number, box in enumerate(wanted, start=1):
            assert found[number] == pytest.approx(box, abs=3)
    else:
        pictures = [path for path in summary.save_dir.rglob("*") if path.suffix in (".jpg", ".png")]
        assert len(pictures) == summary.frames


def _frames_of(path: Path) -> list[np.ndarray]:
    return read_video(path)[0]
