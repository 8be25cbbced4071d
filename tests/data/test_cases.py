"""Odd pictures, labels, data files and sources collected from users: one test for each expectation of the collection.

Training, validation and detection see the same pixels and the same boxes. The tests are skipped where the collection
is absent; the rules themselves are tested on generated files in the other modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data.cases_kit import CASES, Case, DirtySet, case_name, contents, load_cases, read_rows, run_detector
from tests.data.drawing import colour_faults
from tests.deploy.fakes import read_video
from utils.data.dataset import LoadImagesAndLabels
from utils.data.images import imread_bgr
from utils.data.loader import create_dataloader
from utils.data.scan import scan_dataset
from utils.data.spec import load_data_spec
from utils.options import Hyp

PICTURES = load_cases("dirty/expected.json")
DATA_FILES = load_cases("expected_yaml.json")
SOURCES = load_cases("sources/expected_sources.json")
NOTHING_TO_SAY = ("g49_utf16",)  # read in full, so the words that a refusal would need are not there
FOUND_CLASSES = (0, 1, 2)  # what the stand-in for a model finds


@pytest.fixture(scope="module", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="module")
def dirty(tmp_path_factory: pytest.TempPathFactory, user_cache: None) -> DirtySet:
    return DirtySet.load(CASES / "dirty", tmp_path_factory.mktemp("detect"))


# ------------------------------------------------------------------------------------------- pictures and labels


@pytest.mark.parametrize("case", PICTURES, ids=case_name)
def test_training_and_validation(dirty: DirtySet, case: Case) -> None:
    name = case["file"]
    if case["train"] in ("use", "background"):
        check_used(dirty, dirty.index[name], case)
    else:
        assert name not in dirty.index
    if case["train"] == "skip" and not (dirty.folder / name).is_dir():
        assert any("left out" in line for line in dirty.said(name)), "left out without a word"
    if case["train"] == "ignore":
        assert not dirty.said(name)
    if "say" in case and Path(name).stem not in NOTHING_TO_SAY:
        assert any(word in line for word in case["say"] for line in dirty.said(name)), dirty.said(name)


def check_used(dirty: DirtySet, index: int, case: Case) -> None:
    """Size, boxes and colours of one picture, the same in training and validation."""
    wanted = np.array(case["boxes"], np.float64).reshape(-1, 5)
    assert (len(wanted) == 0) == (case["train"] == "background")
    assert dirty.scan.shapes[index].tolist() == case["size_wh"]
    np.testing.assert_allclose(np.asarray(dirty.scan.labels[index]).reshape(-1, 5), wanted, atol=2e-5)
    samples = [data[index] for data in (dirty.train, dirty.val)]
    if max(case["size_wh"]) == dirty.val.img_size:  # others are scaled, by different methods
        assert (samples[0][0] == samples[1][0]).all()
        np.testing.assert_allclose(samples[0][1], samples[1][1], atol=1e-5)
    if case.get("oracle", True) and min(case["size_wh"]) > 10:
        for image, labels, _, _ in samples:
            bgr = image.numpy()[::-1].transpose(1, 2, 0)
            assert colour_faults(bgr, labels[:, 1:].numpy(), grey=case.get("grey", False)) == []
            assert len(labels) == len(wanted)


@pytest.mark.parametrize("case", PICTURES, ids=case_name)
def test_detection(dirty: DirtySet, case: Case) -> None:
    name, detected = case["file"], dirty.detected
    is_named = any(text.endswith(name) for text in detected.named)
    if case["detect"] == "either":
        assert (name in detected.frames) != is_named
        return
    if case["detect"] == "skip":
        assert name not in detected.frames
        is_silent = case["train"] == "ignore" or (dirty.folder / name).is_dir()
        assert is_named != is_silent
        return
    assert detected.media[name].is_file()
    frame = detected.frames[name]
    assert (frame == imread_bgr(dirty.folder / name)).all()
    if name in dirty.index and case["size_wh"] == [128, 96]:
        image, _, _, _ = dirty.val[dirty.index[name]]
        assert (image.numpy()[::-1, 16:112].transpose(1, 2, 0) == frame).all()  # 16 rows of border on both sides
    if case.get("oracle", True) and not case.get("grey") and case["train"] == "use":
        check_found(detected.rows[name], case)


def check_found(rows: np.ndarray, case: Case) -> None:
    """Detections lie on the labelled boxes, to within two pixels."""
    wanted = np.array([box for box in case["boxes"] if box[0] in FOUND_CLASSES], np.float64).reshape(-1, 5)
    if min(case["size_wh"]) <= 10:
        return  # a strip that is one pixel wide when scaled
    rows = rows[np.argsort(rows[:, 0])]
    assert rows[:, 0].tolist() == wanted[:, 0].tolist()
    width, height = case["size_wh"]
    for sign in (-0.5, 0.5):
        corners = rows[:, 1:3] + sign * rows[:, 3:] - wanted[:, 1:3] - sign * wanted[:, 3:]
        assert np.abs(corners * (width, height)).max(initial=0) <= 2.5


@pytest.mark.skipif(not PICTURES, reason="no collection of cases beside the repository")
def test_the_folder_is_as_before_and_the_counts_add_up(dirty: DirtySet) -> None:
    assert contents(dirty.folder) == dirty.before
    outcomes = [case["train"] for case in PICTURES if not (dirty.folder / case["file"]).is_dir()]
    counts = dirty.scan.counts
    assert counts.used == outcomes.count("use") + outcomes.count("background")
    assert counts.background == outcomes.count("background")
    assert counts.left_out == outcomes.count("skip")
    assert (counts.rows_refused, counts.duplicates) == (4, 2)
    assert [Path(path).name for path in dirty.scan.notes.shared] == ["g48_twin.txt"]
    assert dirty.detected.summary.exit_code == 0


# ----------------------------------------------------------------------------------------------- data set files

COUNTS = {"coco/train_list.yaml": 6, "coco/twice_images.yaml": 1}  # training pictures, 4 elsewhere
STOPS = {
    "coco/nc_mismatch.yaml": ("nc is 3", "4 names"),
    "coco/nc_too_small.yaml": (".txt, line 3", "class 2", "2 classes"),
    "coco/missing_val.yaml": ("images/nowhere", "missing_val.yaml"),
    "coco/names_string.yaml": ("names must be", "red"),
    "coco/empty_train.yaml": ("images/none", ".jpg"),
}
NAMES = {
    "coco/names_中文.yaml": ["红", "绿", "蓝", "黄"],
    "coco/names_dup.yaml": ["red", "green", "blue", "red"],
}
WORDS = {
    "coco/names_dup.yaml": "used more than once: red",
    "coco/txt_missing.yaml": "file is not there",
}


@pytest.mark.parametrize("case", DATA_FILES, ids=case_name)
def test_data_file(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    monkeypatch.chdir(tmp_path)  # nothing depends on the working directory
    path, name = CASES / case["file"], case_name(case)
    before = contents(path.parent)
    if name == "coco/hyp_exponent.yaml":
        hyp = Hyp.from_yaml(path)
        assert (hyp.lr0, hyp.lrf, hyp.weight_decay) == (0.001, 0.01, 0.0005)
        assert hyp.box == Hyp().box
    elif case["train"] == "stop":
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            load_both(path)
        assert all(word in str(caught.value) for word in STOPS[name]), caught.value
    else:
        check_data_file(path, name)
        assert WORDS.get(name, "") in "\n".join(messages)
    assert contents(path.parent) == before


def check_data_file(path: Path, name: str) -> None:
    """Number of pictures and classes, and that pictures and labels belong together."""
    train, val = load_both(path)
    spec = load_data_spec(path)
    assert spec.nc == 4
    assert list(spec.names.values()) == NAMES.get(name, list(spec.names.values()))
    assert len(train) == COUNTS.get(name, 4)
    assert len(val) == 2
    for data in (train, val):
        for image, labels, _, _ in (data[i] for i in range(len(data))):
            assert len(labels)
            assert colour_faults(image.numpy()[::-1].transpose(1, 2, 0), labels[:, 1:].numpy()) == []


def load_both(path: Path) -> tuple[LoadImagesAndLabels, LoadImagesAndLabels]:
    spec = load_data_spec(path)
    sets = [
        create_dataloader(spec.split(split), SIDE, 4, augment=split == "train", hyp={}, workers=0, nc=spec.nc)[1]
        for split in ("train", "val")
    ]
    return sets[0], sets[1]


SIDE = 128


@pytest.mark.skipif(not DATA_FILES, reason="no collection of cases beside the repository")
def test_a_class_beyond_nc_stops_the_validation_part_too() -> None:
    spec = load_data_spec(CASES / "mini" / "coco" / "nc_too_small.yaml")
    with pytest.raises(ValueError, match=r"val0\.txt, line 3: class 2"):
        scan_dataset(CASES / "mini" / "coco" / "images" / "val", nc=spec.nc)


# ------------------------------------------------------------------------------------------------------- sources

PROCESSED = {"nested": 2, "mixed": 2, "set [1]": 1, "list.txt": 2}  # pictures that give a result


@pytest.mark.parametrize("case", SOURCES, ids=case_name)
def test_source(case: Case, tmp_path: Path) -> None:
    source = CASES / "sources" / case["file"]
    summary = run_detector(source, tmp_path)
    if case["detect"] == "skip":
        assert summary.exit_code != 0
        assert [Path(name).name for name, _ in summary.unreadable] == [source.name]
        return
    assert summary.exit_code == 0
    if "frames" not in case:
        media = [path for path in summary.save_dir.rglob("*.jpg") if path.is_file()]
        assert len(summary.processed) == len(media) == PROCESSED[case["file"]]
        named = sorted(Path(name).name for name, _ in summary.unreadable)
        assert named == (["m_zero.jpg", "n_text.png"] if case["file"] == "mixed" else [])
        return
    (video,) = summary.save_dir.glob("*.mp4")
    check_video(video, summary.save_dir / "labels", case)
    if case["file"] == "seven.mp4":
        single = run_detector(source, tmp_path / "single", batch_size=1)
        assert contents_by_name(single.save_dir / "labels") == contents_by_name(summary.save_dir / "labels")


def check_video(video: Path, labels: Path, case: Case) -> None:
    """Frames, rate and size of the written video; the red box slides to the right in the upper half."""
    frames, rate = read_video(video)
    assert len(frames) == case["frames"]
    assert rate == pytest.approx(case.get("fps", rate), rel=1e-3)
    assert [*frames[0].shape[1::-1]] == case["size_wh"]
    files = sorted(labels.glob("*.txt"), key=lambda path: int(path.stem.rsplit("_", 1)[1]))
    assert len(files) == case["frames"]
    for number, file in enumerate(files):
        (row,) = read_rows(file)
        wanted = (0, 0.2 + 0.6 * number / max(case["frames"] - 1, 1), 0.35, 0.22, 0.3)
        np.testing.assert_allclose(row, wanted, atol=0.035)


def contents_by_name(folder: Path) -> dict[str, bytes]:
    return {Path(name).name: data for name, data in contents(folder).items()}


def test_the_collection_is_complete() -> None:
    if not PICTURES:
        pytest.skip(f"no collection of cases at {CASES}")
    assert (len(PICTURES), len(DATA_FILES), len(SOURCES)) == (56, 19, 14)
