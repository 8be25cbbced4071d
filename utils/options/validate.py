"""Options of ``val_dual.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from utils.cli import option, own_option
from utils.options.base import BOOLEAN, FromCli, replay_option, slice_option, slice_overlap_option


@dataclass(kw_only=True)
class ValOptions(FromCli):
    """Options of ``val_dual.py``."""

    description = "Measure a detector on a labelled data set."

    data: str = option("data/coco.yaml", "data set YAML")
    weights: list = option(
        ["yolo.pt"], "weights: .pt, .torchscript, .onnx, .engine or an OpenVINO folder", nargs="+", type=str
    )
    offline: bool = own_option(False, "never fetch published weights (also: environment variable YOLO_OFFLINE=1)")
    batch_size: int = option(32, "images per step", "--batch")
    imgsz: int = option(640, "image side in pixels", "--img", "--img-size")
    conf_thres: float = option(0.001, "lowest confidence that counts", "--conf")
    iou_thres: float = option(0.7, "IoU above which NMS removes a box", "--iou")
    max_det: int = option(300, "detections kept per image")
    task: str = option(
        "val", "train, val or test split; speed; study", choices=("train", "val", "test", "speed", "study")
    )
    device: str = option("", "'' = GPU if there is one, else CPU; or cpu, 0, 1, …, mps")
    workers: int = option(8, "loader processes, at most one per core")
    single_cls: bool = option(False, "treat all classes as one")
    augment: bool = option(False, "test-time augmentation")
    verbose: bool = option(False, "one row per class also for 50 classes and more")
    save_txt: bool = option(False, "write detections as label files")
    save_hybrid: bool = option(False, "write labels and detections together; implies --save-txt")
    save_conf: bool = option(False, "with --save-txt: confidence as sixth column")
    save_json: bool = option(False, "write detections in COCO's JSON form")
    project: str = option("runs/val", "folder that collects runs")
    name: str = option("exp", "name of the run's folder")
    exist_ok: bool = option(False, "use the run's folder even if it exists")
    half: bool = option(False, "float16 inference on CUDA")
    dnn: bool = option(False, "run ONNX files with OpenCV's DNN module")
    min_items: int = option(0, "leave out images with fewer boxes")
    rect: bool = own_option(
        True, "pad batches to the smallest rectangle, as training does, where the file takes any shape", action=BOOLEAN
    )
    cuda_graphs: bool = replay_option()

    slice_size: int = slice_option()
    slice_overlap: float = slice_overlap_option()

    def __post_init__(self) -> None:
        self.check_types()
        self.check_at_least(batch_size=1, imgsz=32, max_det=1, workers=-1, min_items=0)
        self.check_fractions("conf_thres", "iou_thres")
        self.check_slices()
        self._check_combinations()
        self.weights = [self.weights] if isinstance(self.weights, (str, Path)) else list(self.weights)

    def _check_combinations(self) -> None:
        if self.slice_size and self.task in ("speed", "study"):
            raise ValueError(
                f"--slice with --task {self.task}: that task measures the network at one image size; "
                "measure a split in slices, for example --task val, or leave --slice out"
            )
        if self.slice_size and self.augment:
            raise ValueError("--slice with --augment: slices are looked at once, at one size; leave one of the two out")
