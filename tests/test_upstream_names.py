"""Import paths and signatures that users' scripts rely on."""

from __future__ import annotations

import importlib
import inspect

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
    "utils.augmentations.letterbox": "im new_shape color auto scaleFill scaleup stride",
    "utils.augmentations.random_perspective": "im targets segments degrees translate scale shear perspective border",
    "utils.dataloaders.create_dataloader": "path imgsz batch_size stride",
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
