"""Options of ``export.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from utils.cli import option
from utils.options.base import FromCli, height_width


@dataclass(kw_only=True)
class ExportOptions(FromCli):
    """Options of ``export.py``."""

    description = "Write a trained detector in another format."

    data: str = option("", "accepted without effect (names come from the weights)")
    weights: list = option(["yolo.pt"], "weights (.pt), one or more", nargs="+", type=str)
    offline: bool = option(False, "never fetch published weights (also: environment variable YOLO_OFFLINE=1)")
    imgsz: list = option([640, 640], "image side, or height and width", "--img", "--img-size", nargs="+", type=int)
    batch_size: int = option(1, "images per call", "--batch")
    device: str = option("cpu", "cpu, or the number of a CUDA device")
    half: bool = option(False, "float16 weights (CUDA only)")
    inplace: bool = option(False, "accepted without effect")
    optimize: bool = option(False, "not available")
    dynamic: bool = option(False, "ONNX: batch size may vary")
    dynamic_hw: bool = option(False, "ONNX: height and width may vary too")
    simplify: bool = option(False, "ONNX: simplify the graph with onnxslim")
    opset: int = option(17, "ONNX: operator set")
    input_name: str = option("images", "ONNX: name of the input")
    verbose: bool = option(False, "show what the exporters say")
    include: list = option(["torchscript"], "formats: torchscript, onnx", nargs="+", type=str)

    def __post_init__(self) -> None:
        self.check_at_least(batch_size=1, opset=11)
        self.weights = [self.weights] if isinstance(self.weights, (str, Path)) else list(self.weights)
        self.imgsz = height_width(self.imgsz)
        if self.optimize:
            raise ValueError("--optimize is not available in this version; leave it out")
