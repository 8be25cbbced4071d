"""Options of ``detect_dual.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.cli import option, own_option
from utils.options.base import (
    FromCli,
    height_width,
    replay_option,
    slice_option,
    slice_overlap_option,
    whole_numbers,
)

THICKEST_LINE = 255  # pixels; OpenCV draws up to 32767, and labels grow with the line


@dataclass(kw_only=True)
class DetectOptions(FromCli):
    """Options of ``detect_dual.py``."""

    description = "Find objects in pictures and videos."

    weights: list = option(
        ["yolo.pt"], "weights: .pt, .torchscript, .onnx, .engine or an OpenVINO folder", nargs="+", type=str
    )
    offline: bool = own_option(False, "never fetch published weights (also: environment variable YOLO_OFFLINE=1)")
    source: str = option(
        "data/images", "picture, video, folder, pattern with *, .txt list, stream address, camera number or screen"
    )
    data: str = option("", "data set YAML with class names, for weights that carry none")
    imgsz: list = option(
        [640], "image side, or height and width, in pixels", "--img", "--img-size", nargs="+", type=int
    )
    conf_thres: float = option(0.25, "lowest confidence shown", "--conf")
    iou_thres: float = option(0.45, "IoU above which NMS removes a box", "--iou")
    max_det: int = option(1000, "detections kept per image")
    device: str = option("", "'' = GPU if there is one, else CPU; or cpu, 0, 1, …, mps")
    view_img: bool = option(False, "show results in a window")
    save_txt: bool = option(False, "write label files")
    save_conf: bool = option(False, "with --save-txt: confidence as sixth column")
    save_empty: bool = own_option(False, "with --save-txt: an empty label file where nothing was found")
    save_crop: bool = option(False, "write each detection as a picture of its own")
    save_csv: bool = own_option(False, "write all detections to detections.csv")
    save_json: bool = own_option(False, "write all detections to detections.json")
    nosave: bool = option(False, "write no annotated pictures and videos")
    classes: Any = option(None, "only these class numbers", nargs="+", type=int)
    agnostic_nms: bool = option(False, "NMS across classes")
    augment: bool = option(False, "test-time augmentation")
    visualize: bool = option(False, "write the feature maps of every layer")
    update: bool = option(False, "not available")
    project: str = option("runs/detect", "folder that collects runs")
    name: str = option("exp", "name of the run's folder")
    exist_ok: bool = option(False, "use the run's folder even if it exists")
    line_thickness: int = option(3, "thickness of boxes in pixels")
    hide_labels: bool = option(False, "draw boxes without names")
    hide_conf: bool = option(False, "draw names without confidence")
    half: bool = option(False, "float16 inference on CUDA")
    dnn: bool = option(False, "run ONNX files with OpenCV's DNN module")
    vid_stride: int = option(1, "use every N-th frame of a video")
    batch_size: int = own_option(1, "frames per step", "--batch")
    slice_size: int = slice_option()
    slice_overlap: float = slice_overlap_option()
    video_codec: str = own_option(
        "auto", "auto: H.264 where an encoder is found, else mp4v", choices=["auto", "h264", "mp4v"]
    )
    cuda_graphs: bool = replay_option()
    sequential: bool = own_option(
        False, "one step after the other instead of reading, network and writing side by side"
    )

    def __post_init__(self) -> None:
        self.check_types()
        self.check_slices()
        self.check_at_least(max_det=1, line_thickness=1, vid_stride=1, batch_size=1)
        if self.line_thickness > THICKEST_LINE:
            raise ValueError(f"--line-thickness {self.line_thickness}: should be at most {THICKEST_LINE}")
        self.check_fractions("conf_thres", "iou_thres")
        if self.classes is not None:
            self.classes = whole_numbers("classes", self.classes, "numbers of classes", "[0, 2]")
        self.weights = [self.weights] if isinstance(self.weights, (str, Path)) else list(self.weights)
        self.imgsz = height_width(self.imgsz)
        if self.update:
            raise ValueError("--update would change the weights file; use models.checkpoint.strip_optimizer on a copy")
