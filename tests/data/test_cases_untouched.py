"""Training, validation and detection change nothing in the user's folders, and stop at classes that cannot be.

Every file of a data set is hashed before and after; the label cache is the only file that may appear.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import detect_dual
import val_dual
from models.checkpoint import Checkpoint, save_checkpoint
from tests.data.drawing import encode, label_text, paint
from tests.reference.tiny import TINY_DUAL, tiny_dual
from utils.data import images
from utils.data.dataset import LoadImagesAndLabels
from utils.data.scan import scan_dataset
from utils.data.scan_cache import SUFFIX
from utils.files import write_yaml
from utils.options import TrainOptions
from utils.train.trainer import Trainer

NAMES = {0: "red", 1: "green", 2: "blue"}
JPEG = encode(paint(), ".jpg")


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("user-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def write_files(root: Path, names: dict[int, str] = NAMES) -> Path:
    """A data set with sound and odd files; its YAML."""
    odd = {
        "no_end.jpg": (JPEG[:-2], label_text()),
        "trailing.jpg": (JPEG + bytes(64), label_text()),
        "zero.jpg": (b"", label_text()),
        "cut.jpg": (JPEG[: len(JPEG) // 2], label_text()),
        "rows.jpg": (JPEG, label_text() + "0 .5 .5 nan .1\r\n" + label_text() + "1 .5 .5 1.002 .1\n"),
        "polygon.png": (encode(paint()), "0 .1 .1 .3 .1 .3 .4\n1 .5 .5 .2 .2\n"),
        "none.jpg": (JPEG, None),
        "empty.jpg": (JPEG, ""),
    }
    good = {f"{number}.jpg": (JPEG, label_text()) for number in range(4)}
    for split, files in (("train", good | odd), ("val", good | odd)):
        for name, (data, text) in files.items():
            image, label = root / "images" / split / name, (root / "labels" / split / name).with_suffix(".txt")
            for path, content in ((image, data), (label, None if text is None else text.encode())):
                path.parent.mkdir(parents=True, exist_ok=True)
                if content is not None:
                    path.write_bytes(content)
    write_yaml(root / "data.yaml", {"path": ".", "train": "images/train", "val": "images/val", "names": names})
    return root / "data.yaml"


def fingerprint(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Hash, time of change and permissions of every file and folder below a folder."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder",
            path.stat().st_mtime_ns if path.is_file() else 0,
            path.stat().st_mode,
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A weights file of a very small network with three classes."""
    model = tiny_dual()
    path = tmp_path / "weights" / "tiny.pt"
    path.parent.mkdir()
    content = Checkpoint(model=model.state_dict(), yaml=copy.deepcopy(TINY_DUAL), nc=3, names=NAMES, kind="stripped")
    save_checkpoint(path, content)
    return path


def train(data: Path, folder: Path, **changes: object) -> Trainer:
    """A trainer of the very small network, ready to fit."""
    write_yaml(folder / "tiny.yaml", TINY_DUAL)
    options = {
        "data": str(data),
        "cfg": str(folder / "tiny.yaml"),
        "hyp": "hyp/hyp.scratch-high.yaml",
        "epochs": 1,
        "batch_size": 4,
        "imgsz": 64,
        "workers": 0,
        "device": "cpu",
        "project": str(folder / "runs"),
    }
    return Trainer(TrainOptions(**{**options, **changes}))


def run_everything(data: Path, folder: Path, weights: Path) -> None:
    """Train, validate and detect."""
    train(data, folder, noplots=True, cache="ram").fit()
    common = {"device": "cpu", "project": str(folder / "runs")}
    val_dual.run(data=str(data), weights=str(weights), imgsz=64, batch_size=4, workers=0, **common)
    summary = detect_dual.run(
        weights=[str(weights)], source=str(data.parent / "images" / "val"), imgsz=[64], save_txt=True, **common
    )
    assert summary.exit_code == 0


@pytest.mark.slow
def test_every_file_is_as_before(tmp_path: Path, weights: Path, messages: list[str]) -> None:
    data = write_files(tmp_path / "set")
    before = fingerprint(data.parent)
    run_everything(data, tmp_path, weights)
    after = fingerprint(data.parent)
    assert {name: after.get(name) for name in before} == before
    assert set(after) - set(before) == {f"labels/{split}{SUFFIX}" for split in ("train", "val")}


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A data set that nobody may write to."""
    data = write_files(tmp_path / "set")
    paths = [data.parent, *data.parent.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield data
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.slow
@pytest.mark.parametrize("has_user_cache", [True, False])
def test_read_only_folder(
    locked: Path, tmp_path: Path, weights: Path, messages: list[str], user_cache: Path, has_user_cache: bool
) -> None:
    if not has_user_cache:
        (user_cache / "yolov9").write_text("a file in the way")
    before = fingerprint(locked.parent)
    run_everything(locked, tmp_path, weights)
    assert fingerprint(locked.parent) == before
    words = "label cache kept in" if has_user_cache else "cannot be written"
    assert sum(words in message and message.startswith("train: ") for message in messages) == 1


# -------------------------------------------------------------------------------------------- classes beyond nc


def declare_two_classes(data: Path, offending: str) -> Path:
    """Leave class 2 in the label files of one split only and declare two classes; the first file that has it."""
    for split in ("train", "val"):
        for path in (data.parent / "labels" / split).glob("*.txt"):
            lines = path.read_bytes().decode().splitlines()
            if split != offending:
                path.write_text("".join(f"{line}\n" for line in lines if not line.startswith("2 ")))
    write_yaml(data, {"path": ".", "train": "images/train", "val": "images/val", "names": ["red", "green"]})
    return data.parent / "labels" / offending / "0.txt"


@pytest.mark.parametrize("offending", ["train", "val"])
def test_training_stops_before_the_first_epoch(tmp_path: Path, offending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_files(tmp_path / "set")
    label = declare_two_classes(data, offending)
    monkeypatch.setattr(Trainer, "begin_epoch", lambda *_: pytest.fail("an epoch began"))
    for _ in range(2):  # from the files, then from the label cache
        with pytest.raises(ValueError, match="class 2, but .* 2 classes") as caught:
            train(data, tmp_path).fit()
        assert f"{label}, line 3: " in str(caught.value)


def test_validation_stops_before_the_first_batch(tmp_path: Path) -> None:
    data = write_files(tmp_path / "set")
    label = declare_two_classes(data, "val")
    model = tiny_dual(nc=2)
    path = tmp_path / "two.pt"
    names = {0: "red", 1: "green"}
    save_checkpoint(path, Checkpoint(model=model.state_dict(), yaml={**TINY_DUAL, "nc": 2}, nc=2, names=names))
    with pytest.raises(ValueError, match="class 2, but .* 2 classes") as caught:
        val_dual.run(
            data=str(data), weights=str(path), imgsz=64, batch_size=4, workers=0, device="cpu",
            project=str(tmp_path / "runs"),
        )  # fmt: skip
    assert f"{label}, line 3: " in str(caught.value)


# -------------------------------------------------------------------------------------------------- links, giants


def test_linked_pictures_and_dead_links(tmp_path: Path) -> None:
    real, linked = tmp_path / "real", tmp_path / "linked"
    for folder in (real / "images", linked / "images", real / "labels", linked / "labels"):
        folder.mkdir(parents=True)
    (real / "images" / "a.jpg").write_bytes(JPEG)
    (real / "labels" / "a.txt").write_text("1 .5 .5 .1 .1\n")
    (linked / "labels" / "a.txt").write_text(label_text())
    os.symlink(real / "images" / "a.jpg", linked / "images" / "a.jpg")
    os.symlink(real / "images" / "gone.jpg", linked / "images" / "gone.jpg")
    result = scan_dataset(linked / "images")
    assert result.counts.objects == 3  # the labels of the linked set, not those beside the real picture
    assert (result.counts.used, result.counts.left_out) == (1, 1)
    assert "dead link" in str(result.problems[0])


@pytest.mark.slow
def test_huge_picture_is_scanned_without_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = np.full((9000, 12000), 45, np.uint8)
    picture[900:3600, 960:3840] = 225
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "huge.png").write_bytes(encode(picture))
    del picture
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "huge.txt").write_text("0 .2 .25 .24 .3\n")
    decode = images.decode
    with monkeypatch.context() as patch:
        patch.setattr(images, "decode", lambda *_: pytest.fail("the scan decoded the picture"))
        data = LoadImagesAndLabels(folder, 320)
    assert data.shapes.tolist() == [[12000, 9000]]
    assert images.decode is decode
    image, labels, _, _ = data[0]
    _, _, x, y, w, h = labels[0].tolist()
    left, top, right, bottom = (round(v * 320) for v in (x - w / 2, y - h / 2, x + w / 2, y + h / 2))
    assert image[:, top + 2 : bottom - 2, left + 2 : right - 2].float().mean() > 220
