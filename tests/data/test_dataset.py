"""From an index to a sample: plain, mosaic, rectangular, cached, with files that break after the scan."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.drawing import BOXES, Box, colour_faults, encode, label_text, paint, write_set
from utils.data import dataset as dataset_module
from utils.data import ram_cache
from utils.data.dataset import LoadImagesAndLabels, SampleKey
from utils.data.images import letterbox
from utils.data.mosaic_view import Window

PLACES = {"translate": 0.1, "scale": 0.3, "fliplr": 0.5, "flipud": 0.5}  # moves pixels, leaves colours alone


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Six pictures of several shapes, one of them without objects."""
    shapes = [(96, 64), (64, 96), (80, 80), (120, 30), (48, 96)]
    files = {f"{i}.png": (paint(*shape), label_text()) for i, shape in enumerate(shapes)}
    return write_set(tmp_path, {**files, "5.png": (paint(90, 60, ()), None)})


def faults_of(sample: tuple) -> list[str]:
    """Colour complaints about a sample's boxes."""
    image, labels = sample[0].numpy()[::-1].transpose(1, 2, 0), sample[1].numpy()[:, 1:]
    large = labels[(labels[:, 3] * image.shape[1] > 6) & (labels[:, 4] * image.shape[0] > 6)]
    return colour_faults(image, large, shrink=0.4)


def test_plain_sample(images: Path) -> None:
    data = LoadImagesAndLabels(images, 64, nc=3)
    image, labels, path, shapes = data[0]
    expected = letterbox(paint(64, 43, ()), 64, auto=False)[0].shape
    assert image.dtype == torch.uint8
    assert image.shape == (3, *expected[:2])
    assert image.is_contiguous()
    assert labels.dtype == torch.float32
    assert labels.shape == (3, 6)
    assert labels[:, 0].tolist() == [0, 0, 0]
    assert Path(path).name == "0.png"
    assert shapes == ((64, 96), ((42 / 64, 64 / 96), (0.0, 11.0)))
    assert faults_of(data[0]) == []
    assert faults_of(data[-2]) == []
    with pytest.raises(IndexError):
        data[6]


@pytest.mark.parametrize("mosaic", [0.0, 1.0])
def test_augmented_samples_match_their_labels(images: Path, mosaic: float) -> None:
    data = LoadImagesAndLabels(images, 64, augment=True, hyp={**PLACES, "mosaic": mosaic}, nc=3)
    boxes = 0
    for epoch in range(6):
        for index in range(len(data)):
            sample = data[(epoch, index, True)]
            assert sample[0].shape == (3, 64, 64)
            assert (sample[3] is None) == bool(mosaic)
            low = sample[1][:, 2:4] - sample[1][:, 4:6] / 2
            high = sample[1][:, 2:4] + sample[1][:, 4:6] / 2
            assert bool((low >= -1e-6).all())
            assert bool((high <= 1 + 1e-6).all())
            if not mosaic:
                assert faults_of(sample) == []
            boxes += len(sample[1])
    assert boxes > 60


def test_mosaic_samples_show_the_colours(tmp_path: Path) -> None:
    """One large object per picture, so that no warp of a mosaic leaves less than the object's colour."""
    big: list[Box] = [(1, 0.5, 0.5, 0.9, 0.9)]
    data = LoadImagesAndLabels(
        write_set(tmp_path, {"a.png": (paint(64, 64, big), label_text(big))}), 64, augment=True,
        hyp={**PLACES, "mosaic": 1.0, "mixup": 0.0}, nc=3,
    )  # fmt: skip
    samples = [data[(epoch, 0, True)] for epoch in range(20)]
    assert sum(len(sample[1]) for sample in samples) > 20
    assert all(faults_of(sample) == [] for sample in samples)


def test_switching_mosaic_off(images: Path) -> None:
    data = LoadImagesAndLabels(images, 64, augment=True, hyp={"mosaic": 1.0})
    assert data[SampleKey(0, 1, True)][3] is None
    assert data[SampleKey(0, 1, False)][3] is not None


def test_seed_epoch_and_index_decide(images: Path) -> None:
    hyp = {"mosaic": 1.0, "mixup": 0.5, "hsv_v": 0.4, "scale": 0.5, "translate": 0.1}
    one, same, other = (LoadImagesAndLabels(images, 64, augment=True, hyp=hyp, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one[(3, 2, True)][0], same[(3, 2, True)][0])
    assert torch.equal(one[(3, 2, True)][1], same[(3, 2, True)][1])
    assert not torch.equal(one[(3, 2, True)][0], other[(3, 2, True)][0])
    assert not torch.equal(one[(3, 2, True)][0], one[(4, 2, True)][0])
    assert not torch.equal(one[(3, 2, True)][0], one[(3, 3, True)][0])


def test_polygons_and_boxes_in_one_mosaic(tmp_path: Path) -> None:
    """Every row keeps its own box although only one of the pictures has polygons."""
    polygon = "0 .08 .1 .32 .1 .32 .4 .08 .4\n" + label_text(BOXES[1:])
    files = {"a.png": (paint(64, 64), polygon), "b.png": (paint(64, 64), label_text())}
    data = LoadImagesAndLabels(
        write_set(tmp_path, files), 64, augment=True, hyp={"mosaic": 1.0, "fliplr": 0.5, "copy_paste": 0.0}
    )
    counts = []
    for epoch in range(12):
        sample = data[(epoch, 0, True)]
        assert faults_of(sample) == []
        counts.append(len(sample[1]))
    assert max(counts) >= 4


def test_single_class_and_min_items(images: Path) -> None:
    data = LoadImagesAndLabels(images, 64, single_cls=True, nc=1, min_items=1)
    assert len(data) == 5
    assert set(np.concatenate(list(data.labels))[:, 0]) == {0.0}
    assert [tuple(shape) for shape in data.shapes[:2]] == [(96, 64), (64, 96)]
    with pytest.raises(ValueError, match="fullest one holds 3"):
        LoadImagesAndLabels(images, 64, min_items=4)


@pytest.mark.parametrize(
    ("pad", "shapes"),
    [(0.0, [(96, 128), (128, 128), (128, 96)]), (0.5, [(128, 160), (160, 160), (160, 128)])],
)
def test_rectangular_batches(images: Path, pad: float, shapes: list[tuple[int, int]]) -> None:
    data = LoadImagesAndLabels(images, 128, 2, rect=True, pad=pad, stride=32)
    aspect = data.shapes[:, 1] / data.shapes[:, 0]
    assert (np.diff(aspect) >= 0).all()
    assert data.batch_shapes is not None
    for i in range(6):
        assert faults_of(data[i]) == []
        assert tuple(data[i][0].shape[1:]) == tuple(data.batch_shapes[i // 2])
    assert [tuple(shape) for shape in data.batch_shapes] == shapes


def test_ram_cache_gives_the_same_samples(images: Path) -> None:
    hyp = {"mosaic": 0.5, "hsv_v": 0.4, "hsv_h": 0.1, "fliplr": 0.5}
    for augment in (True, False):
        plain = LoadImagesAndLabels(images, 64, augment=augment, hyp=hyp)
        cached = LoadImagesAndLabels(images, 64, augment=augment, hyp=hyp, cache="ram")
        for _ in range(2):  # a second pass shows whether the first one changed the kept pictures
            for index in range(len(plain)):
                assert torch.equal(plain[(1, index, True)][0], cached[(1, index, True)][0])
                assert plain[index][3] == cached[index][3]


def test_ram_cache_needs_no_files(images: Path) -> None:
    data = LoadImagesAndLabels(images, 64, cache=True)
    for path in images.iterdir():
        path.unlink()
    assert faults_of(data[0]) == []


def test_ram_cache_is_refused_without_memory(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_cache, "available_memory_bytes", lambda: 1000)
    assert faults_of(LoadImagesAndLabels(images, 64, cache="ram")[0]) == []


def test_other_caches_are_refused(images: Path) -> None:
    with pytest.raises(ValueError, match="expected 'ram', 'disk' or nothing"):
        LoadImagesAndLabels(images, 64, cache="tape")
    with pytest.raises(ValueError, match="--mosaic-cache -1"):
        LoadImagesAndLabels(images, 64, augment=True, mosaic_cache=-1)


def test_weighted_pictures_are_not_sorted_by_shape(images: Path) -> None:
    data = LoadImagesAndLabels(images, 64, rect=True, image_weights=True)
    assert data.batch_shapes is None
    assert [Path(path).name for path in data.im_files] == [f"{i}.png" for i in range(6)]


# --------------------------------------------------------------------------------------- the fast way and the plain one

SETTINGS = {
    "flat": {"scale": 0.9, "translate": 0.1},
    "turned": {"degrees": 30, "shear": 10, "scale": 0.5, "translate": 0.3, "flipud": 0.5},
    "perspective": {"perspective": 0.001, "scale": 0.5},
    "colour": {"scale": 0.9, "translate": 0.1, "hsv_h": 0.015, "hsv_s": 0.7, "hsv_v": 0.4, "fliplr": 0.5, "mixup": 0.4},
    "copies": {"copy_paste": 0.7, "scale": 0.5, "translate": 0.1},
}


@pytest.mark.parametrize("mosaic", [1.0, 0.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_fast_samples_are_those_of_the_plain_way(tmp_path: Path, name: str, mosaic: float) -> None:
    """Same labels; pixels but for rounding, which the colour change may enlarge in dark or grey places."""
    polygon = "0 .08 .1 .32 .1 .32 .4 .08 .4\n" + label_text(BOXES[1:])
    sides = [(160, 120), (100, 160), (90, 90), (200, 60)]
    noise = np.random.default_rng(0)
    files = {}
    for i, (width, height) in enumerate(sides):
        picture = cv2.resize(noise.integers(0, 256, (9, 12, 3), dtype=np.uint8), (width, height))
        files[f"{i}.png"] = (picture, polygon if name == "copies" and i % 2 else label_text())
    images = write_set(tmp_path, files)
    fast, plain = (
        LoadImagesAndLabels(images, 96, augment=True, hyp={**SETTINGS[name], "mosaic": mosaic}) for _ in "12"
    )
    plain.is_fast, fast.is_exact = False, True
    labels, far = 0, []
    for epoch in range(8):
        for index in range(4):
            one, two = fast[(epoch, index, True)], plain[(epoch, index, True)]
            torch.testing.assert_close(one[1], two[1], rtol=0, atol=1e-5)
            far.append(((one[0].int() - two[0].int()).abs() > 1).float().mean().item())
            labels += len(one[1])
    assert labels > 30
    assert max(far) < 0.005, far


def test_tiles_out_of_sight_are_not_read(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = LoadImagesAndLabels(images, 64, augment=True, hyp={"mosaic": 1.0, "scale": 0.9})
    reads = []
    load = data.load_image
    monkeypatch.setattr(data, "load_image", lambda index: reads.append(index) or load(index))
    for epoch in range(20):
        for index in range(6):
            data[(epoch, index, True)]
    assert 0.7 * 480 < len(reads) < 0.95 * 480  # of 4 x 20 x 6


def smooth_set(folder: Path, suffix: str = ".jpg") -> Path:
    """Pictures without fine detail whose long side is 96; some sides cannot be divided by 4 or 2."""
    noise, files = np.random.default_rng(0), {}
    for i, (width, height) in enumerate([(96, 72), (71, 96), (96, 96), (96, 53)]):
        picture = cv2.resize(noise.integers(60, 200, (3, 4, 3), dtype=np.uint8), (width, height))
        files[f"{i}{suffix}"] = (picture, label_text())
    return write_set(folder, files)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_shrunk_mosaics_look_like_warped_ones(tmp_path: Path, suffix: str) -> None:
    hyp = {"mosaic": 1.0, "scale": 0.9, "translate": 0.1, "degrees": 5}
    data, exact = (LoadImagesAndLabels(smooth_set(tmp_path, suffix), 96, augment=True, hyp=hyp) for _ in "12")
    exact.is_exact = True
    changed = 0
    for epoch in range(60):
        one, two = data[(epoch, epoch % 4, True)], exact[(epoch, epoch % 4, True)]
        assert torch.equal(one[1], two[1])
        difference = (one[0].int() - two[0].int()).abs().float()
        changed += bool(difference.any())
        assert difference.mean() < 1.5
        assert (difference > 20).float().mean() < 0.02  # along the borders
    assert 5 <= changed <= 30


@pytest.mark.parametrize("options", [{}, {"copy_paste": 0.7}])
def test_parts_of_jpegs_give_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    """Reading only the rows that are seen changes no bit, and neither does leaving pictures out that are not seen."""
    hyp = {"mosaic": 1.0, "scale": 0.9, "translate": 0.1, "hsv_v": 0.4, "mixup": 0.3, "fliplr": 0.5, **options}
    data = LoadImagesAndLabels(smooth_set(tmp_path), 96, augment=True, hyp=hyp)
    data.is_exact = True
    keys = [(epoch, index, True) for epoch in range(15) for index in range(4)]
    parts, whole_part = [], dataset_module.read_jpeg_part

    def counted(*arguments: object) -> np.ndarray | None:
        parts.append(whole_part(*arguments))
        return parts[-1]

    monkeypatch.setattr(dataset_module, "read_jpeg_part", counted)
    samples = [data[key] for key in keys]
    assert len(parts) > 20
    assert all(part is not None for part in parts)
    monkeypatch.setattr(dataset_module, "read_jpeg_part", lambda *_: None)
    monkeypatch.setattr(Window, "shows", lambda *_: True)
    for sample, key in zip(samples, keys, strict=True):
        expected = data[key]
        assert torch.equal(sample[0], expected[0])
        assert torch.equal(sample[1], expected[1])


# ---------------------------------------------------------------------------------------------------- kept pictures


@pytest.mark.parametrize("options", [{"cache": "disk"}, {"cache": "ram"}])
@pytest.mark.slow
def test_started_workers_see_kept_pictures(images: Path, tmp_path: Path, options: dict[str, str]) -> None:
    """Workers that are started instead of forked get the kept pictures without the files."""
    data = LoadImagesAndLabels(images, 64, cache_dir=tmp_path / "kept", **options)
    expected = [data[i][0] for i in range(6)]
    for path in images.iterdir():
        path.unlink()
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for sample, image in zip(loader, expected, strict=True):
        assert torch.equal(sample[0], image)


# ------------------------------------------------------------------------------------- files that go bad after the scan


@pytest.mark.parametrize("mosaic", [0.0, 1.0])
def test_broken_file_is_replaced_with_its_own_labels(tmp_path: Path, mosaic: float) -> None:
    files = {f"{i}.png": (paint(64, 64, [BOXES[i]]), label_text([BOXES[i]])) for i in range(3)}
    images = write_set(tmp_path, files)
    data = LoadImagesAndLabels(images, 64, augment=True, hyp={"mosaic": mosaic})
    (images / "0.png").write_bytes(b"")
    for epoch in range(8):
        for index in range(3):
            sample = data[(epoch, index, True)]
            assert faults_of(sample) == []
            assert 0 not in sample[1][:, 1].tolist()
    assert [Path(path).name for path in data.broken_files()] == ["0.png"]


def test_validation_shows_grey_instead_of_another_picture(images: Path) -> None:
    data = LoadImagesAndLabels(images, 64)
    (images / "1.png").write_bytes(encode(paint())[:50])
    image, labels, _, shapes = data[1]
    assert set(image.unique().tolist()) == {114}
    assert labels.shape == (0, 6)
    assert shapes is not None
    assert shapes[0] == (96, 64)


def test_all_files_broken_is_an_error(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = LoadImagesAndLabels(images, 64, augment=True, hyp={"mosaic": 1.0})
    attempts = []

    def fail(path: str) -> np.ndarray:
        attempts.append(path)
        raise OSError("disk is gone")

    monkeypatch.setattr(dataset_module, "imread_bgr", fail)
    with pytest.raises(RuntimeError, match="none of the 6 pictures"):
        for index in range(6):
            data[index]
    assert len(attempts) == 6  # a known bad file is not tried again


def test_pictures_that_vanish_in_great_numbers_are_counted_not_listed(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {f"{i:03d}.png": (paint(16, 16, []), None) for i in range(130)})
    data = LoadImagesAndLabels(images, 32, prefix="val: ")
    for path in sorted(images.iterdir())[:120]:
        path.unlink()
    messages.clear()
    for index in range(len(data)):
        data[index]
    told = [message for message in messages if "cannot be read, replaced" in message]
    assert len(told) == 21  # the first twenty, and the hundredth
    assert "No such file" in told[0] and "Errno" not in told[0]
    assert told[-1].startswith(f"val: {images / '099.png'}") and "100 of 130" in told[-1]
    assert len(data.broken_files()) == 120
