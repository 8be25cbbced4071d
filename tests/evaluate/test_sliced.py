"""Validation in slices: exact figures of a finder whose limits are known, agreement with detection, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import val_dual
from bench.slicing import compose
from models.checkpoint import Checkpoint, save_checkpoint
from tests.evaluate.fakes import FakeLoader, FakeModel, prediction, shape_entry
from tests.reference.tiny import tiny_dual
from utils.boxes import xyxy2xywhn
from utils.data.images import imread_bgr
from utils.data.loader import create_dataloader
from utils.deploy.predictor import Predictor
from utils.evaluate import plots, tasks
from utils.evaluate.scene import Scene
from utils.evaluate.sliced import READ_AHEAD, Slicing, WholeImageLoader, WholeImagesAndLabels
from utils.evaluate.validator import Validator
from utils.files import write_yaml
from utils.options import DetectOptions, ValOptions

SIDE, INPUT = 512, 128  # pixels of a canvas, and of the network's input: a canvas is shrunk to a quarter
SMALLEST = 4  # pixels that the finder needs: 16 of a canvas seen whole
SPOT, BLOCK = 0, 1  # classes: red spots of 8 to 12 pixels, green blocks of 160, larger than a slice
NAMES = {SPOT: "spot", BLOCK: "block"}


class Finder(nn.Module):
    """A backend that finds each connected red or green area of at least ``SMALLEST`` pixels, exactly."""

    names, stride, pt, static_shape, batch_size, built_in_nms = NAMES, 32, True, None, None, None

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def warmup(self, imgsz: tuple[int, ...]) -> None:
        pass

    def forward(self, images: Tensor, augment: bool = False) -> Tensor:
        self.shapes.append(tuple(images.shape))
        found = torch.zeros(len(images), 6, 64)
        for image, rows in zip(images, found, strict=True):
            place = 0
            for number in NAMES:
                areas = (image[number] > 0.6) & (image[1 - number] < 0.4)
                for x, y, width, height, _ in cv2.connectedComponentsWithStats(areas.numpy().astype(np.uint8))[2][1:]:
                    if min(width, height) >= SMALLEST:
                        rows[:4, place] = torch.tensor([x + width / 2, y + height / 2, width, height])
                        rows[4 + number, place] = 0.9
                        place += 1
        return found


def write_set(folder: Path, pictures: dict[str, tuple[np.ndarray, np.ndarray]], names: dict[int, str] = NAMES) -> Path:
    """Write pictures with labels (n, 5) class x1 y1 x2 y2 in pixels as a data set; return its YAML."""
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    for name, (image, labels) in pictures.items():
        cv2.imwrite(str(folder / "images" / f"{name}.png"), image)
        boxes = xyxy2xywhn(labels[:, 1:].astype(np.float64), w=image.shape[1], h=image.shape[0])
        lines = [f"{int(row[0])} " + " ".join(f"{value:.9f}" for value in box) for row, box in zip(labels, boxes)]  # noqa: B905
        (folder / "labels" / f"{name}.txt").write_text("\n".join(lines))
    write_yaml(folder / "data.yaml", {"path": str(folder), "train": "images", "val": "images", "names": names})
    return folder / "data.yaml"


def small_picture(random: np.random.Generator, is_block: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture with one spot that touches no border, or one with a block on the grid of the shrunk canvas."""
    side = 192 if is_block else 64
    image = np.full((side, side, 3), 30, np.uint8)
    width, height = (160, 160) if is_block else random.integers(8, 13, 2)
    x, y = (16, 16) if is_block else random.integers(2, 50, 2)
    image[y : y + height, x : x + width] = (0, 255, 0) if is_block else (0, 0, 255)
    return image, np.array([[BLOCK if is_block else SPOT, x, y, x + width, y + height]])


@pytest.fixture(scope="module")
def canvases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data YAML of two canvases composed of small pictures, with 72 spots and 4 blocks or so."""
    folder, random = tmp_path_factory.mktemp("sliced"), np.random.default_rng(0)
    write_set(folder / "small", {str(number): small_picture(random, number == 0) for number in range(12)})
    small = sorted(str(path) for path in (folder / "small" / "images").iterdir())
    whole = [compose(small, SIDE, seed) for seed in range(2)]
    no_labels = np.zeros((0, 5))
    write_set(
        folder / "wide", {f"wide{i}": (canvas.image[: 5 * SIDE // 8], no_labels) for i, canvas in enumerate(whole)}
    )
    return write_set(folder / "large", {f"canvas{i}": (canvas.image, canvas.labels) for i, canvas in enumerate(whole)})


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> Finder:
    """Have ``val_dual.py`` use the finder whatever weights it is given; draw small."""
    monkeypatch.setattr(plots, "DPI", 30)
    finder = Finder()
    monkeypatch.setattr(tasks, "DetectMultiBackend", lambda *_, **__: finder)
    return finder


def measure(data: Path, folder: Path, weights: object = "none.pt", **keywords: object):
    small = {"imgsz": INPUT, "batch_size": 8, "workers": 0, "device": "cpu", "project": str(folder), "exist_ok": True}
    return val_dual.run(data=str(data), weights=str(weights), **{**small, **keywords})


def label_rows(folder: Path) -> dict[str, list[tuple[float, ...]]]:
    return {
        file.name: sorted(tuple(round(float(word), 4) for word in line.split()) for line in file.open())
        for file in folder.glob("*.txt")
    }


def test_small_objects_count_with_slices_only(canvases: Path, finder: Finder, tmp_path: Path) -> None:
    """Whole pictures show the blocks alone; slices show every spot, also on their borders, and each object once."""
    plain = measure(canvases, tmp_path / "plain")
    recall = dict(zip(plain.per_class["classes"].tolist(), plain.per_class["r"].tolist(), strict=True))
    assert recall == {SPOT: 0, BLOCK: pytest.approx(1)}
    assert plain.sizes.total.ap_small == 0 and plain.sizes.total.ap_large == pytest.approx(1)
    finder.shapes.clear()

    sliced = measure(canvases, tmp_path / "sliced", slice_size=-1, save_txt=True)
    assert (sliced.images, sliced.instances) == (2, plain.instances) and sliced.instances > 40
    assert sliced.per_class["r"].tolist() == pytest.approx([1, 1]) and sliced.precision == pytest.approx(1)
    assert sliced.map == pytest.approx(0.995, abs=1e-3)
    assert (sliced.sizes.total.ap_small, sliced.sizes.total.ap_large) == pytest.approx((1, 1))
    counts = np.diag([(plain.curves.labels[number]) for number in NAMES])
    assert sliced.confusion[:2, :2].tolist() == counts.tolist() and sliced.confusion.sum() == sliced.instances
    assert label_rows(tmp_path / "sliced" / "exp" / "labels") == label_rows(canvases.parent / "labels")
    assert set(finder.shapes) == {(8, 3, INPUT, INPUT), (1, 3, INPUT, INPUT)}
    assert sum(shape[0] for shape in finder.shapes) == 2 * (25 + 1)


def test_everything_is_written_and_told(canvases: Path, finder: Finder, tmp_path: Path, log) -> None:
    result = measure(canvases, tmp_path, slice_size=256, slice_overlap=0.25, save_json=True, save_txt=True, max_det=20)
    folder = tmp_path / "exp"
    files = {file.name for file in folder.iterdir()}
    assert {"val_batch0_pred.jpg", "confusion_matrix.png", "PR_curve.png", "report.html", "data_report.json"} <= files
    settings = json.loads((folder / "evaluation.json").read_text())["settings"]
    assert (settings["slice size"], settings["slice overlap"], settings["rectangular"]) == (256, 0.25, False)
    assert all(time > 0 for time in result.speed_ms)
    rows = json.loads((folder / "none_predictions.json").read_text())
    assert {row["image_id"] for row in rows} == {"canvas0", "canvas1"} and len(rows) <= 40
    assert "Slices of 256 px that share 25% of their side" in log.text and "--rect and --no-rect have no" in log.text
    assert "but --max-det 20 keeps no more boxes" in log.text
    assert f"{'spot':>22s}{2:>11d}" in log.text and "AP small" in log.text


def test_one_class(canvases: Path, finder: Finder, tmp_path: Path) -> None:
    result = measure(canvases, tmp_path, slice_size=-1, single_cls=True)
    assert len(result.maps) == 1 and result.map == pytest.approx(0.995, abs=1e-3)


@pytest.mark.parametrize(("keywords", "count"), [({}, 2), ({"single_cls": True}, 1), ({"max_det": 1}, 1)])
def test_what_two_slices_call_differently(tmp_path: Path, keywords: dict[str, object], count: int) -> None:
    """One place, pixels 100 to 120, in two slices of 128 that begin at 0 and 96: two objects where classes count."""
    slices = prediction([[(110, 64, 20, 20, SPOT, 0.9)], [(14, 64, 20, 20, BLOCK, 0.8)]], 2)
    model = FakeModel([slices, prediction([[]], 2)])
    image, label = torch.zeros(1, 3, 128, 224, dtype=torch.uint8), torch.tensor([[0, SPOT, 0.5, 0.5, 0.1, 0.1]])
    loader = FakeLoader([(image, label, ("wide.png",), (shape_entry((128, 224)),))])
    slicing = Slicing(size=128, overlap=0.2, imgsz=128)
    options = {"names": NAMES, "device": torch.device("cpu"), "save_dir": tmp_path, "save_txt": True, **keywords}
    result = Validator(loader, slicing=slicing, **options).run(model)
    assert len((tmp_path / "labels" / "wide.txt").read_text().splitlines()) == count
    assert result.images == 1 and [call["shape"][0] for call in model.calls] == [2, 1]


def test_pictures_as_large_as_a_slice_are_looked_at_once(canvases: Path, finder: Finder, tmp_path: Path) -> None:
    small = canvases.parents[1] / "small" / "data.yaml"
    result = measure(small, tmp_path, slice_size=192)
    assert result.images == len(finder.shapes) == 12
    assert result.map50 == pytest.approx(0.995, abs=1e-3)


@pytest.mark.parametrize("kind", ["pt", pytest.param("torchscript", marks=pytest.mark.slow)])
def test_boxes_are_those_of_detection(canvases: Path, tmp_path: Path, kind: str) -> None:
    """A network, from its file and exported for two images at a time, which slices do not fill evenly.

    The pictures are wide: from its file the network sees the whole of one without a square's padding.
    """
    wide = canvases.parents[1] / "wide"
    model = tiny_dual(nc=1)
    weights = tmp_path / "tiny.pt"
    save_checkpoint(weights, Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=1, names={0: "it"}))
    if kind == "torchscript":
        from utils.deploy.exporter import export
        from utils.options import ExportOptions

        (weights, *_), _ = export(ExportOptions(weights=[str(weights)], include=[kind], imgsz=[INPUT], batch_size=2))
    sliced = {"slice_size": 160, "slice_overlap": 0.3, "conf_thres": 0.01, "iou_thres": 0.6}
    measure(wide / "data.yaml", tmp_path, weights, single_cls=True, save_json=True, **sliced)
    written = json.loads(next((tmp_path / "exp").glob("*_predictions.json")).read_text())
    predictor = Predictor(weights, imgsz=INPUT, device="cpu", **sliced)
    assert len(written) > 20
    for path in sorted((wide / "images").iterdir()):
        rows = [(*row["bbox"], row["score"]) for row in written if row["image_id"] == path.stem]
        found = predictor(path)
        boxes = np.column_stack((found.boxes[:, :2], found.boxes[:, 2:] - found.boxes[:, :2], found.scores))
        np.testing.assert_allclose(np.array(rows), boxes, atol=2e-2)


def test_labels_are_those_of_the_usual_loader(canvases: Path) -> None:
    """In pixels of the picture, in the same order of pictures."""
    images = str(canvases.parent / "images")
    usual, _ = create_dataloader(images, INPUT, 1, 32, workers=0, nc=2)
    for ours, other in zip(WholeImageLoader(WholeImagesAndLabels(images, INPUT)), usual, strict=True):
        assert ours[2] == tuple(other[2]) and ours[0].shape == (1, 3, SIDE, SIDE)
        first, second = (
            Scene.build([torch.zeros(0, 6)], targets, shapes, batch.shape[2:])
            for batch, targets, _, shapes in (ours, other)
        )
        assert first.shapes == second.shapes == [(SIDE, SIDE)]
        torch.testing.assert_close(first.labels, second.labels, atol=5e-3, rtol=0)
        image = imread_bgr(ours[2][0])
        assert np.array_equal(ours[0][0].permute(1, 2, 0).numpy()[..., ::-1], image)


def test_a_picture_that_went_bad_is_named_and_not_measured(canvases: Path, tmp_path: Path) -> None:
    image = np.full((40, 60, 3), 30, np.uint8)
    write_set(tmp_path / "set", {name: (image, np.array([[0, 8, 8, 20, 20]])) for name in "abc"})
    dataset = WholeImagesAndLabels(str(tmp_path / "set" / "images"), 32)
    (tmp_path / "set" / "images" / "b.png").write_bytes(b"")
    batches = list(WholeImageLoader(dataset))
    assert [Path(paths[0]).stem for _, _, paths, _ in batches] == ["a", "b", "c"]
    assert [len(targets) for _, targets, *_ in batches] == [1, 0, 1]
    assert [shapes[0][0] for *_, shapes in batches] == [(40, 60)] * 3
    assert [Path(path).name for path in dataset.broken_files()] == ["b.png"]


def test_few_pictures_are_held_at_a_time() -> None:
    read: list[int] = []

    class Source(list):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor, str, None]:
            read.append(index)
            return torch.zeros(3, 4, 4), torch.zeros(0, 6), str(index), None

    for number, (_, _, paths, _) in enumerate(WholeImageLoader(Source(range(9)))):
        assert paths == (str(number),)
        assert len(read) <= number + 1 + READ_AHEAD
    assert sorted(read) == list(range(9))
    assert not list(WholeImageLoader(Source()))


def test_losses_and_augmentation_are_refused() -> None:
    slicing = Slicing(size=64, overlap=0.2, imgsz=64)
    for keywords in ({"augment": True}, {"loss_fn": lambda *_: None}):
        with pytest.raises(ValueError, match="slices are measured without"):
            Validator([], names=NAMES, device=torch.device("cpu"), slicing=slicing, **keywords)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--slice 8", "at least 32"),
        ("--slice --slice-overlap 1", "between 0 and 0.9"),
        ("--slice --task speed", "--slice with --task speed"),
        ("--slice 640 --task study", "--slice with --task study"),
        ("--slice --augment", "--slice with --augment"),
    ],
)
def test_what_makes_no_sense_is_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ValOptions.from_cli(line.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ["", "--slice", "--slice 512 --slice-overlap 0.3"])
def test_flags_are_those_of_detection(line: str) -> None:
    ours, other = (options.from_cli(line.split()) for options in (ValOptions, DetectOptions))
    assert (ours.slice_size, ours.slice_overlap) == (other.slice_size, other.slice_overlap)
