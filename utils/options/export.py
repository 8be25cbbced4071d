"""Options of ``export.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from utils.cli import idle_option, option, own_option
from utils.options.base import FromCli, height_width

OUTPUT_NAMES = ("output0", "num_dets", "boxes", "scores", "classes")
"""Names that an input may not have, as the outputs of ONNX files have them."""

UNAVAILABLE = {
    "keras": "TensorFlow files are not written here; write ONNX (--include onnx) and convert it with onnx2tf",
    "int8": "use --half for float16, or quantise the ONNX file with the tools of the program that will run it",
    "nms": "use --include onnx --end2end, which puts NMS into the ONNX file",
    "optimize": "leave it out, the .torchscript file needs no mobile variant",
}
"""Switches of upstream whose effect cannot be had, and what to type instead."""


@dataclass(kw_only=True)
class ExportOptions(FromCli):
    """Options of ``export.py``."""

    description = "Write a trained detector in another format."

    data: str = idle_option("", "names come from the weights")
    weights: list = option(["yolo.pt"], "weights (.pt), one or more", nargs="+", type=str)
    offline: bool = own_option(False, "never fetch published weights (also: environment variable YOLO_OFFLINE=1)")
    imgsz: list = option([640, 640], "image side, or height and width", "--img", "--img-size", nargs="+", type=int)
    batch_size: int = option(1, "images per call", "--batch")
    device: str = option("cpu", "cpu, or the number of a CUDA device")
    half: bool = option(False, "float16 weights; results stay float32")
    inplace: bool = idle_option(False)
    keras: bool = option(False, "not available")
    optimize: bool = option(False, "not available")
    int8: bool = option(False, "not available")
    dynamic: bool = option(False, "ONNX: batch size may vary")
    dynamic_hw: bool = own_option(False, "ONNX: height and width may vary too")
    simplify: bool = option(False, "ONNX: simplify the graph with onnxslim")
    opset: int = option(17, "ONNX: operator set")
    input_name: str = own_option("images", "ONNX: name of the input")
    end2end: bool = own_option(False, "ONNX: put NMS into the file (outputs num_dets, boxes, scores, classes)")
    nms: bool = option(False, "not available; use --include onnx --end2end")
    agnostic_nms: bool = idle_option(False, "NMS of --end2end takes each class by itself")
    topk_per_class: int = idle_option(100, "NMS of --end2end limits all classes together, --topk-all")
    topk_all: int = option(100, "with --end2end: detections kept per image")
    iou_thres: float = option(0.45, "with --end2end: IoU above which NMS removes a box", "--iou")
    conf_thres: float = option(0.25, "with --end2end: lowest confidence that counts", "--conf")
    workspace: float = option(4.0, "TensorRT: memory for building in GiB (from 128 on: MiB)")
    reparam: bool = own_option(False, "keep the lead branch only in upstream files too (all other formats do anyway)")
    benchmark: bool = own_option(False, "measure the time per image of every file written")
    verbose: bool = option(False, "show what the exporters say")
    include: list = option(
        ["torchscript"],
        "torchscript, onnx, onnx_end2end, openvino, engine, reparam (lean .pt), upstream (.pt for the original)",
        nargs="+",
        type=str,
    )

    def __post_init__(self) -> None:
        self.check_types()
        self.check_at_least(batch_size=1, opset=11, topk_all=1)
        self.check_fractions("iou_thres", "conf_thres")
        if not self.input_name.strip() or self.input_name in OUTPUT_NAMES:
            raise ValueError(
                f"--input-name {self.input_name!r}: expected a name that no output has ({', '.join(OUTPUT_NAMES)}), "
                "images is usual"
            )
        if not self.workspace > 0:
            raise ValueError(f"--workspace {self.workspace}: should be above 0, 4 is usual")
        self.weights = [self.weights] if isinstance(self.weights, (str, Path)) else list(self.weights)
        self.imgsz = height_width(self.imgsz)
        for name, remedy in UNAVAILABLE.items():
            if getattr(self, name):
                raise ValueError(f"--{name} is not available: {remedy}")
