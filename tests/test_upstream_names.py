"""Import paths and signatures that users' scripts rely on."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tests.reference.tiny import TINY_DUAL, tiny_dual

SIGNATURES = {
    "utils.general.non_max_suppression": "prediction conf_thres iou_thres classes agnostic multi_label labels max_det",
    "utils.general.scale_boxes": "img1_shape boxes img0_shape ratio_pad",
    "utils.general.xywh2xyxy": "x",
    "utils.general.xyxy2xywh": "x",
    "utils.general.xywhn2xyxy": "x w h padw padh",
    "utils.general.clip_boxes": "boxes shape",
    "utils.general.increment_path": "path exist_ok sep mkdir",
    "utils.general.strip_optimizer": "",
    "utils.general.check_file": "file suffix",
    "utils.general.check_yaml": "file suffix",
    "utils.general.colorstr": "",
    "utils.general.labels_to_class_weights": "labels nc",
    "utils.augmentations.letterbox": "im new_shape color auto scaleFill scaleup stride",
    "utils.augmentations.random_perspective": "im targets segments degrees translate scale shear perspective border",
    "utils.dataloaders.create_dataloader": "path imgsz batch_size stride",
    "utils.dataloaders.LoadImages": "path img_size stride auto transforms vid_stride",
    "utils.dataloaders.LoadStreams": "sources img_size stride auto transforms vid_stride",
    "utils.dataloaders.img2label_paths": "",
    "utils.dataloaders.LoadImagesAndLabels": "path img_size batch_size augment hyp rect",
    "utils.metrics.ap_per_class": "tp conf pred_cls target_cls plot save_dir names eps prefix",
    "utils.metrics.bbox_iou": "box1 box2 xywh GIoU DIoU CIoU",
    "utils.metrics.fitness": "x",
    "utils.metrics.ConfusionMatrix": "nc conf iou_thres",
    "utils.torch_utils.ModelEMA": "model decay tau updates",
    "utils.torch_utils.smart_optimizer": "model name lr momentum decay",
    "utils.torch_utils.EarlyStopping": "patience",
    "utils.torch_utils.select_device": "device batch_size",
    "utils.loss_tal_dual.ComputeLoss": "model use_dfl",
    "utils.loss_tal.ComputeLoss": "model use_dfl",
    "utils.tal.assigner.TaskAlignedAssigner": "topk num_classes alpha beta eps",
    "utils.tal.anchor_generator.make_anchors": "feats strides grid_cell_offset",
    "utils.tal.anchor_generator.dist2bbox": "distance anchor_points xywh dim",
    "utils.tal.anchor_generator.bbox2dist": "anchor_points bbox reg_max",
    "utils.plots.save_one_box": "xyxy im file gain pad square BGR save",
    "utils.plots.Annotator": "im line_width",
    "models.yolo.DetectionModel": "cfg ch nc anchors",
    "models.yolo.Model": "cfg ch nc anchors",
    "models.common.Conv": "c1 c2 k s p g d act",
    "models.common.DetectMultiBackend": "weights device dnn data fp16 fuse",
    "models.common.RepNCSPELAN4": "c1 c2 c3 c4 c5",
    "models.experimental.attempt_load": "weights device inplace fuse",
}


def resolve(path: str) -> object:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", SIGNATURES)
def test_names_take_the_arguments_users_give_them_in_that_order(path: str) -> None:
    names = [name for name in inspect.signature(resolve(path)).parameters if name != "self"]
    expected = SIGNATURES[path].split()
    assert names[: len(expected)] == expected


@pytest.mark.parametrize("module", ["loss_tal_dual", "loss_tal"])
def test_the_loss_works_as_a_users_script_calls_it(module: str) -> None:
    model = resolve("models.yolo.DetectionModel")(TINY_DUAL, nc=2)
    model.hyp = {"box": 7.5, "cls": 0.5, "dfl": 1.5, "cls_pw": 1.0, "fl_gamma": 0.0, "label_smoothing": 0.0}
    predictions = model.train()(torch.rand(2, 3, 64, 64))
    targets = torch.tensor([[0, 1, 0.5, 0.5, 0.4, 0.4], [1, 0, 0.3, 0.6, 0.2, 0.3]])
    total, items = resolve(f"utils.{module}.ComputeLoss")(model)(predictions, targets)
    total.backward()
    assert items.shape == (3,)
    assert float(total.detach()) == pytest.approx(2 * float(items.sum()), rel=1e-5)


def test_predictions_go_through_nms_and_back_to_the_picture() -> None:
    general = importlib.import_module("utils.general")
    output = tiny_dual()(torch.rand(1, 3, 64, 64))
    detections = general.non_max_suppression(output, conf_thres=0.0, iou_thres=0.5, max_det=3)[0]
    assert detections.shape == (3, 6)
    boxes = general.scale_boxes((64, 64), detections[:, :4].clone(), (480, 640)).round()
    assert float(boxes[:, [0, 2]].max()) <= 640
    assert float(boxes[:, [1, 3]].max()) <= 480


@pytest.mark.parametrize("path", [path for path in SIGNATURES if path.count(".") > 1])
def test_names_are_listed_by_their_module(path: str) -> None:
    module, name = path.rsplit(".", 1)
    assert name in importlib.import_module(module).__all__


def test_formats_are_suffixes_without_a_dot() -> None:
    loaders = importlib.import_module("utils.dataloaders")
    assert {"jpg", "png", "tif", "webp"} <= set(loaders.IMG_FORMATS)
    assert {"mp4", "avi", "mov", "mkv"} <= set(loaders.VID_FORMATS)
    assert not set(loaders.IMG_FORMATS) & set(loaders.VID_FORMATS)
    assert all(name.isalnum() and name.islower() for name in (*loaders.IMG_FORMATS, *loaders.VID_FORMATS))


def test_pictures_come_as_a_users_script_reads_them(tmp_path: Path) -> None:
    loaders = importlib.import_module("utils.dataloaders")
    picture = tmp_path / "images" / "a.png"
    picture.parent.mkdir()
    cv2.imwrite(str(picture), np.full((48, 64, 3), 7, np.uint8))
    ((path, image, original, capture, text),) = loaders.LoadImages(str(picture), img_size=64, stride=32, auto=True)
    assert (path, image.shape, original.shape, capture) == (str(picture), (3, 64, 64), (48, 64, 3), None)
    assert str(picture) in text
    assert loaders.img2label_paths([str(picture)]) == [str(tmp_path / "labels" / "a.txt")]


def test_files_are_found_and_given_as_text(tmp_path: Path) -> None:
    general = importlib.import_module("utils.general")
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    assert general.check_yaml(tmp_path / "mine.yaml") == str(tmp_path / "mine.yaml")
    assert Path(general.check_yaml("gelan-t.yaml")).parts[-3:] == ("models", "detect", "gelan-t.yaml")
    assert general.check_file("") == ""
    assert general.check_file(str(tmp_path / "mine.yaml"), ".yaml") == str(tmp_path / "mine.yaml")
    with pytest.raises(ValueError, match="should end in .pt"):
        general.check_file(tmp_path / "mine.yaml", suffix=(".pt",))
    with pytest.raises(FileNotFoundError, match=r"no-such\.yaml"):
        general.check_yaml("no-such.yaml")


def test_coloured_text() -> None:
    colorstr = importlib.import_module("utils.general").colorstr
    assert colorstr("red", "bold", "hot") == "\033[31m\033[1mhot\033[0m"
    assert colorstr("train: ") == "\033[34m\033[1mtrain: \033[0m"
    assert colorstr("bright_cyan", 3) == "\033[96m3\033[0m"
    with pytest.raises(ValueError, match="colour 'purple' is unknown; known are black, "):
        colorstr("purple", "x")


def test_class_weights_are_a_tensor_that_adds_up_to_one() -> None:
    labels = [np.array([[0, 0.5, 0.5, 0.1, 0.1], [1, 0.5, 0.5, 0.1, 0.1]]), np.array([[0, 0.5, 0.5, 0.1, 0.1]] * 2)]
    weights = importlib.import_module("utils.general").labels_to_class_weights(labels, nc=3)
    # 3, 1 and no objects; a class without any counts as one with one
    torch.testing.assert_close(weights, torch.tensor([1 / 3, 1.0, 1.0]) / (7 / 3))


@pytest.mark.parametrize("is_bgr", [False, True])
def test_a_box_is_cut_out_and_written(tmp_path: Path, is_bgr: bool) -> None:
    save_one_box = importlib.import_module("utils.plots").save_one_box
    image = np.zeros((100, 200, 3), np.uint8)
    image[40:60, 50:90] = (10, 90, 200)
    box = torch.tensor([50.0, 40.0, 90.0, 60.0])
    crop = save_one_box(box, image, file=tmp_path / "crops" / "a.png", gain=1.0, pad=0, BGR=is_bgr)
    assert crop.shape == (20, 40, 3)
    assert crop[5, 5].tolist() == ([10, 90, 200] if is_bgr else [200, 90, 10])
    written = cv2.imread(str(tmp_path / "crops" / "a.jpg"))  # BGR
    assert np.abs(written.astype(int) - crop.astype(int)).max() < 6
    square = save_one_box(list(box), image, file=tmp_path / "crops" / "a.jpg", gain=1.0, pad=2, square=True, BGR=is_bgr)
    assert square.shape == (42, 42, 3) and (tmp_path / "crops" / "a2.jpg").is_file()
    save_one_box(box, image, file=tmp_path / "b.jpg", save=False)
    assert sorted(path.name for path in tmp_path.rglob("*.jpg")) == ["a.jpg", "a2.jpg"]
