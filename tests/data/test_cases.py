"""Odd pictures, labels and data files collected from users, where the collection is present beside the repository."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from tests.data.drawing import colour_faults
from utils.data.dataset import LoadImagesAndLabels
from utils.data.loader import create_dataloader
from utils.data.scan import ScanResult, scan_dataset
from utils.data.spec import DataSpec, load_data_spec


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture
def cases(shared_dir: Path) -> Path:
    folder = shared_dir / "cases" / "files"
    if not folder.is_dir():
        pytest.skip(f"no collection of cases at {folder}")
    return folder


def composed(path: str | Path, root: Path) -> str:
    return unicodedata.normalize("NFC", Path(path).relative_to(root).as_posix())


def expectations(folder: Path, name: str = "expected.json") -> dict[str, dict]:
    return {item["file"]: item for item in json.loads((folder / name).read_text(encoding="utf-8"))}


def digest(folder: Path) -> str:
    files = sorted(path for path in (folder / "images").rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_pictures_and_labels(cases: Path) -> None:
    folder = cases / "dirty"
    before = digest(folder)
    spec = load_data_spec(folder / "data.yaml")
    result = scan_dataset(spec.train, nc=spec.nc)
    used = {composed(path, folder): i for i, path in enumerate(result.im_files)}
    data = LoadImagesAndLabels(spec.train, 640, nc=spec.nc)
    for name, item in expectations(folder).items():
        if item["train"] in ("use", "background"):
            assert name in used, item
            check_used(result, data, used[name], item)
        else:
            assert name not in used, item
    said = "\n".join(map(str, result.problems))
    for name, item in expectations(folder).items():
        if "say" in item:
            lines = [line for line in said.splitlines() if Path(name).stem in unicodedata.normalize("NFC", line)]
            assert name.startswith("images/train/g49") or any(word in line for word in item["say"] for line in lines), (
                item
            )
    assert digest(folder) == before


def check_used(result: ScanResult, data: LoadImagesAndLabels, index: int, item: dict) -> None:
    """Size, boxes and colours of one picture."""
    assert result.shapes[index].tolist() == item["size_wh"], item
    wanted = np.array(item["boxes"], np.float64).reshape(-1, 5)
    assert result.labels[index].shape == wanted.shape, item
    np.testing.assert_allclose(result.labels[index], wanted, atol=2e-5, err_msg=item["file"])
    image, labels, _, _ = data[index]
    assert len(labels) == len(wanted)
    if item.get("oracle", True) and min(item["size_wh"]) > 10:
        bgr = image.numpy()[::-1].transpose(1, 2, 0)
        assert colour_faults(bgr, labels[:, 1:].numpy(), grey=item.get("grey", False)) == [], item


COUNTS = {  # data file -> training pictures and classes
    "roboflow/data.yaml": (4, 4),
    "coco/names_list.yaml": (4, 4),
    "coco/names_dict.yaml": (4, 4),
    "coco/train_list.yaml": (6, 4),
    "coco/txt_dot.yaml": (4, 4),
    "coco/txt_plain.yaml": (4, 4),
    "coco/txt_crlf.yaml": (4, 4),
    "coco/names_中文.yaml": (4, 4),
    "coco/names_strkeys.yaml": (4, 4),
    "coco/names_dup.yaml": (4, 4),
    "coco/twice_images.yaml": (1, 4),
    "coco/txt_missing.yaml": (4, 4),
    "coco/bom.yaml": (4, 4),
}
STOPS = {
    "coco/nc_mismatch.yaml": ("nc is 3", "4 names"),
    "coco/nc_too_small.yaml": (".txt, line", "class 2", "2 classes"),
    "coco/missing_val.yaml": ("images/nowhere", "missing_val.yaml"),
    "coco/names_string.yaml": ("names must be", "red"),
    "coco/empty_train.yaml": ("images/none", ".jpg"),
}


def load_both(path: Path) -> tuple[DataSpec, LoadImagesAndLabels, LoadImagesAndLabels]:
    spec = load_data_spec(path)
    train = create_dataloader(spec.train, 64, 4, augment=True, hyp={"mosaic": 1.0}, workers=0, nc=spec.nc)[1]
    return spec, train, create_dataloader(spec.val, 64, 4, workers=0, nc=spec.nc)[1]


@pytest.mark.parametrize("name", COUNTS)
def test_data_files_that_work(cases: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = cases / "mini" / name
    if not path.is_file():
        pytest.skip(f"no {path}")
    spec, train, val = load_both(path)
    assert (len(train), spec.nc) == COUNTS[name]
    assert len(val) == 2
    assert all(len(rows) for rows in train.labels)


@pytest.mark.parametrize("name", STOPS)
def test_data_files_that_stop(cases: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_both(cases / "mini" / name)
    assert all(word in str(caught.value) for word in STOPS[name]), caught.value


def test_every_data_file_is_covered(cases: Path) -> None:
    listed = expectations(cases, "expected_yaml.json")
    assert set(listed) <= {f"mini/{name}" for name in (*COUNTS, *STOPS)} | {"mini/coco/hyp_exponent.yaml"}
    for name, item in listed.items():
        if name.removeprefix("mini/") in STOPS:
            assert item["train"] == "stop"
