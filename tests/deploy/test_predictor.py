"""Detection from Python: the forms of input, arrays as results, the same boxes as the command writes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.deploy.fakes import BOX, ColourBackend, picture, write_picture, write_video
from utils.deploy.detector import Detector
from utils.deploy.predictor import Predictor
from utils.deploy.tables import read_results
from utils.options import DetectOptions


@pytest.fixture
def detector() -> Predictor:
    return Predictor(ColourBackend(), imgsz=96)


def test_one_picture_gives_one_result_of_arrays(detector: Predictor, tmp_path: Path) -> None:
    path = write_picture(tmp_path / "图 一.png", picture(green=True))
    for image in (path, str(path), picture(green=True)):
        found = detector(image)
        assert len(found) == 2 and found.shape == (64, 96)
        assert found.boxes.dtype == found.scores.dtype == np.float32 and found.classes.dtype == np.int64
        assert found.boxes[0].tolist() == pytest.approx(BOX, abs=1)
        assert found.scores.tolist() == pytest.approx([0.9, 0.8])
        assert found.classes.tolist() == [0, 1] and found.names.tolist() == ["red", "green"]
        assert found.path == (None if isinstance(image, np.ndarray) else path)


def test_several_pictures_give_a_list_in_their_order(detector: Predictor, tmp_path: Path) -> None:
    images = [picture(), picture(64, 96, None), write_picture(tmp_path / "a.png", picture(128, 64)), picture(box=None)]
    found = detector(images)
    assert [len(one) for one in found] == [1, 0, 1, 0]
    assert [one.shape for one in found] == [(64, 96), (96, 64), (64, 128), (64, 96)]
    nothing = found[1]
    assert nothing.boxes.shape == (0, 4) and nothing.names.shape == (0,)
    batch = detector(np.stack([picture(), picture(box=None), picture()]))
    assert [len(one) for one in batch] == [1, 0, 1] and detector.engine.model.shapes[-1][0] == 3
    assert detector([]) == []


def test_an_array_is_neither_changed_nor_kept(detector: Predictor) -> None:
    image = picture()
    before = image.copy()
    found = detector(image)
    assert np.array_equal(image, before) and not np.shares_memory(found.boxes, image)


@pytest.mark.parametrize("shape", [(64, 96), (64, 96, 1)])
def test_grey_pictures_are_taken(detector: Predictor, shape: tuple[int, ...]) -> None:
    assert len(detector(np.full(shape, 200, np.uint8))) == 0


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8), 7]
)
def test_other_things_are_refused_by_name(detector: Predictor, image: object) -> None:
    with pytest.raises(ValueError, match="a picture is a path or a uint8 array"):
        detector([image])


@pytest.mark.parametrize("image", [None, 7, b"a.jpg", {"a.jpg": 1}, Image.new("RGB", (4, 4)), np.uint8(3)])
def test_single_things_are_refused_by_their_type(detector: Predictor, image: object) -> None:
    with pytest.raises(ValueError, match=f"a picture is a path or a uint8 array .*, not .*{type(image).__name__}"):
        detector(image)


def test_a_pil_image_is_refused_with_the_way_to_turn_it(detector: Predictor) -> None:
    image = Image.fromarray(picture()[..., ::-1].copy())
    with pytest.raises(ValueError, match=r"np\.asarray\(image\.convert\('RGB'\)\)\[\.\.\., ::-1\]"):
        detector(image)
    (red,) = detector(np.asarray(image.convert("RGB"))[..., ::-1]).names
    assert red == "red"


def test_folders_and_videos_are_left_to_stream(detector: Predictor, tmp_path: Path) -> None:
    for path in (tmp_path, write_video(tmp_path / "v.mp4", 1)):
        with pytest.raises(ValueError, match=r"is no picture; stream\('.*'\) takes folders and videos"):
            detector(path)


def test_unreadable_files_raise(detector: Predictor, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="empty file"):
        detector(tmp_path / "a.jpg")
    with pytest.raises(FileNotFoundError):
        detector(tmp_path / "gone.jpg")


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_source_streams_through(tmp_path: Path, batch_size: int) -> None:
    write_picture(tmp_path / "in" / "a.jpg")
    (tmp_path / "in" / "b.jpg").write_bytes(b"")
    write_video(tmp_path / "in" / "v.mp4", 7)
    found = list(Predictor(ColourBackend(), batch_size=batch_size, imgsz=96).stream(tmp_path / "in"))
    assert [(one.path.name, one.frame) for one in found] == [("a.jpg", 0), *(("v.mp4", n) for n in range(1, 8))]
    assert [round(float(one.boxes[0, 0])) for one in found[1:]] == pytest.approx([10 + 2 * n for n in range(7)], abs=1)


def test_live_streams_are_left_to_the_command(detector: Predictor) -> None:
    with pytest.raises(ValueError, match="live stream"):
        next(detector.stream("rtsp://cam/live"))


@pytest.mark.parametrize("slicing", [{}, {"slice_size": 64}])
def test_results_are_those_of_the_command(tmp_path: Path, slicing: dict[str, int]) -> None:
    path = write_picture(tmp_path / "a.png", picture(192, 128, (40, 20, 60, 50), green=True))
    options = {"imgsz": [64], "max_det": 5, **slicing}
    summary = Detector(DetectOptions(source=str(path), project=str(tmp_path), **options), model=ColourBackend()).run()
    written = list(read_results(summary.save_dir / "results.txt"))
    found = Predictor(ColourBackend(), **options)(path)
    assert [row.box for row in written] == [tuple(int(value) for value in box.round()) for box in found.boxes]
    assert [row.name for row in written] == found.names.tolist() == ["red", "green"]


def test_options_are_those_of_the_command() -> None:
    assert len(Predictor(ColourBackend(), imgsz=96, classes=[1])(picture(green=True))) == 1
    assert len(Predictor(ColourBackend(), imgsz=96, conf_thres=0.85)(picture(green=True))) == 1
    assert len(Predictor(ColourBackend(), imgsz=96, classes=1)(picture(green=True))) == 1
    for name in ("confidence", "save_txt", "line_thickness"):
        with pytest.raises(TypeError, match=f"{name} has no effect here; options are agnostic_nms, .*conf_thres"):
            Predictor(ColourBackend(), **{name: 1})
    with pytest.raises(TypeError, match="weights None: expected a file such as best.pt, or a loaded model"):
        Predictor(None)
    with pytest.raises(ValueError, match="--classes 9"):
        Predictor(ColourBackend(), classes=[9])


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("imgsz", "160", "a side in pixels, or height and width, such as 640"),
        ("imgsz", 160.5, "a side in pixels"),
        ("imgsz", ["160", "128"], "a side in pixels"),
        ("imgsz", None, "a side in pixels"),
        ("imgsz", True, "a side in pixels"),
        ("conf_thres", "0.5", "a number such as 0.25"),
        ("conf_thres", None, "a number such as 0.25"),
        ("conf_thres", [0.5], "a number such as 0.25"),
        ("iou_thres", True, "a number such as 0.45"),
        ("max_det", "300", "a whole number such as 1000"),
        ("max_det", 2.5, "a whole number such as 1000"),
        ("max_det", float("nan"), "a whole number such as 1000"),
        ("max_det", float("inf"), "a whole number such as 1000"),
        ("batch_size", "4", "a whole number such as 1"),
        ("slice_size", True, "a whole number such as 0"),
        ("classes", "red", "numbers of classes such as [0, 2]"),
        ("classes", ["red"], "numbers of classes such as [0, 2]"),
        ("classes", 0.5, "numbers of classes such as [0, 2]"),
        ("half", "False", "True or False"),
        ("agnostic_nms", None, "True or False"),
        ("augment", 2, "True or False"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(option: str, value: object, expected: str) -> None:
    wrong = value[0] if isinstance(value, list) and option != "conf_thres" else value
    told = re.escape(f"{option} {wrong!r} ({type(wrong).__name__}): expected {expected}")
    with pytest.raises(TypeError, match=told):
        Predictor(ColourBackend(), **{option: value})


@pytest.mark.parametrize(
    ("option", "value", "taken"),
    [
        ("imgsz", 160.0, (160, 160)),
        ("imgsz", np.int64(160), (160, 160)),
        ("imgsz", np.array([96.0, 160.0]), (96, 160)),
        ("imgsz", (96, 160), (96, 160)),
        ("conf_thres", 1, 1.0),
        ("conf_thres", np.float32(0.5), 0.5),
        ("max_det", 5.0, 5),
        ("max_det", np.uint8(5), 5),
        ("classes", 1, (1,)),
        ("classes", np.array([0, 2]), (0, 2)),
        ("classes", (0,), (0,)),
        ("classes", None, None),
        ("agnostic_nms", 1, True),
        ("agnostic_nms", np.bool_(True), True),
    ],
)
def test_numbers_of_any_kind_are_taken(option: str, value: object, taken: object) -> None:
    found = getattr(Predictor(ColourBackend(), **{option: value}).engine.settings, option)
    assert found == taken and type(found) is type(taken)
