"""From a weights file to TorchScript and ONNX files beside it, each checked against PyTorch before it gets its name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from models.backend import OnnxRuntimeRunner, Runner, ScriptRunner, lead_output
from models.checkpoint import build_model, load_checkpoint
from models.graph import DetectionModel
from models.heads import lead_prediction
from models.reparam import inference_form
from utils.deploy.description import ExportDescription
from utils.deploy.onnx import write_onnx
from utils.deploy.torchscript import write_torchscript
from utils.files import atomic_write
from utils.log import LOGGER
from utils.options import ExportOptions
from utils.runtime import check_img_size, select_device

UNAVAILABLE = {
    "engine": "write ONNX and build the engine with the trtexec line that is shown then",
    "onnx_end2end": "write ONNX and run NMS behind it",
    "openvino": "write ONNX, which OpenVINO reads as it is",
    "coreml": "write TorchScript and convert it with coremltools",
    "saved_model": "write ONNX and convert it with onnx2tf",
    "pb": "write ONNX and convert it with onnx2tf",
    "tflite": "write ONNX and convert it with onnx2tf",
    "edgetpu": "write ONNX and convert it with onnx2tf",
    "tfjs": "write ONNX, which runs in a browser with ONNX Runtime Web",
    "paddle": "write ONNX and convert it with x2paddle",
}
"""Formats of upstream that are not written here, and the way to them."""

EXPORT_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ImportError, OSError)
"""What reading weights and the exporters of torch raise; the other formats are still written after one of these."""

BOX_LIMIT_PX = 1.0
SCORE_LIMIT = 0.01
"""Largest differences that rounding explains; a file beyond them is faulty and is not kept."""


class InferenceNetwork(nn.Module):
    """A model reduced to images (B, 3, H, W) -> lead prediction (B, 4 + nc, A)."""

    def __init__(self, model: DetectionModel, dynamic_hw: bool = False) -> None:
        super().__init__()
        self.model = model
        model.head.export = True
        model.head.dynamic = dynamic_hw

    def forward(self, images: Tensor) -> Tensor:
        return lead_prediction(self.model(images))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest deviation of an exported file from PyTorch."""

    box_px: float
    score: float

    def __str__(self) -> str:
        return f"{self.box_px:.1e} px, {self.score:.1e} score"


def check_formats(formats: list[str]) -> list[str]:
    """Return the requested formats in the order in which they are written.

    Raises:
        ValueError: a format that is unknown, or known upstream and not available here.
    """
    for name in formats:
        if name in UNAVAILABLE:
            raise ValueError(
                f"--include {name} is not available here: {UNAVAILABLE[name]} (--include onnx torchscript)"
            )
        if name not in WRITERS:
            raise ValueError(f"--include {name}: unknown format; expected {' or '.join(WRITERS)}")
    return [name for name in WRITERS if name in formats]


def export(options: ExportOptions) -> tuple[list[Path], list[str]]:
    """Write every requested format of every weights file; return the files and one line per failure.

    A failing format does not keep the others from being written.
    """
    formats = check_formats(options.include)
    device = select_device(options.device)
    files: list[Path] = []
    failures: list[str] = []
    for weights in map(Path, options.weights):
        prepared = None
        for name in formats:
            try:
                prepared = prepared or prepare(weights, options, device)
                files.append(_write_checked(name, weights.with_suffix(f".{name}"), *prepared, options, device))
            except EXPORT_ERRORS as error:
                failures.append(f"{name} of {weights}: {error}")
                LOGGER.error(f"export failed: {failures[-1]}")
    return files, failures


def prepare(weights: Path, options: ExportOptions, device: torch.device) -> tuple[InferenceNetwork, ExportDescription]:
    """Load weights in their inference form (lead branch only, norms folded, float32) and describe the export."""
    if weights.suffix.lower() != ".pt":
        raise ValueError(f"--weights {weights}: export starts from a .pt file")
    model = build_model(load_checkpoint(weights))
    names = model.names
    model = inference_form(model).requires_grad_(False).to(device)
    stride = int(model.stride.max())
    height, width = check_img_size(list(options.imgsz), stride)
    description = ExportDescription(
        names=names,
        stride=stride,
        shape=(options.batch_size, 3, height, width),
        half=options.half,
        dynamic=options.dynamic,
        dynamic_hw=options.dynamic_hw,
    )
    return InferenceNetwork(model, options.dynamic_hw).eval(), description


def _write_checked(
    name: str,
    target: Path,
    network: InferenceNetwork,
    description: ExportDescription,
    options: ExportOptions,
    device: torch.device,
) -> Path:
    """Write one format under a temporary name, compare it with PyTorch, rename it and report."""
    writer, runner = WRITERS[name]
    # A fresh copy, because exporters may leave traces in the module they work on.
    copied = copy.deepcopy(network)
    images = torch.zeros(description.shape, device=device)
    if options.half:
        copied, images = copied.half(), images.half()
    with atomic_write(target) as temporary:
        with warnings.catch_warnings():
            if not options.verbose:
                warnings.simplefilter("ignore")
            writer(copied, images, temporary, description, options)
        try:
            difference = compare(network, runner(temporary, device), description)
        except ImportError as error:
            LOGGER.warning(f"{target.name} was NOT compared with PyTorch: {error}")
            difference = None
        if difference is not None:
            _check_difference(difference, options.half)
    _report(name, target, description, options, difference)
    return target


def _report(
    name: str, file: Path, description: ExportDescription, options: ExportOptions, difference: Difference | None
) -> None:
    """Say what was written and how to use it."""
    batch, _, height, width = description.shape
    result = f"largest difference from PyTorch {difference}" if difference else "not compared with PyTorch"
    LOGGER.info(f"{name}: {file}, {file.stat().st_size / 1e6:.1f} MB, batch {batch}, {height}x{width}, {result}")
    LOGGER.info(f"  python detect_dual.py --weights {file} --imgsz {height} {width} --source PICTURES")
    if height == width:
        LOGGER.info(f"  python val_dual.py --weights {file} --imgsz {height} --data DATA.yaml")
    if name == "onnx":
        LOGGER.info(f"  {trtexec_line(file, description, options.input_name)}")


@torch.no_grad()
def compare(network: nn.Module, runner: Runner, description: ExportDescription) -> Difference:
    """Run an exported file and the float32 network on the same noise, for every kind of shape the file accepts."""
    batch, channels, height, width = description.shape
    shapes = [(batch, height, width)]
    if description.dynamic or description.dynamic_hw:
        shapes.append((batch + 1, height, width))
    if description.dynamic_hw:
        shapes.append((batch, height + description.stride, width))
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(0)
    worst_box, worst_score = 0.0, 0.0
    for count, rows, columns in shapes:
        images = torch.rand(count, channels, rows, columns, generator=generator).to(device)
        deviation = (lead_output(runner(images.half() if runner.fp16 else images)).float() - network(images)).abs()
        if not torch.isfinite(deviation).all():
            raise ValueError("the exported file gives values that are not finite")
        worst_box = max(worst_box, deviation[:, :4].max().item())
        worst_score = max(worst_score, deviation[:, 4:].max().item())
    return Difference(box_px=worst_box, score=worst_score)


def _check_difference(difference: Difference, half: bool) -> None:
    """Refuse a deviation that float32 rounding cannot explain; half precision is only reported."""
    if not half and (difference.box_px > BOX_LIMIT_PX or difference.score > SCORE_LIMIT):
        raise ValueError(
            f"the file deviates from PyTorch by {difference} (allowed: {BOX_LIMIT_PX} px, {SCORE_LIMIT} score) "
            "and was not kept"
        )


def trtexec_line(onnx_file: Path, description: ExportDescription, input_name: str) -> str:
    """Compose the command that builds a TensorRT engine (version 10 or later) from an ONNX file."""
    batch, _, height, width = description.shape
    line = f"trtexec --onnx={onnx_file} --saveEngine={onnx_file.with_suffix('.engine')} --fp16"
    if description.dynamic or description.dynamic_hw:
        sizes = (("min", 1), ("opt", max(1, batch // 2)), ("max", batch))
        line += "".join(f" --{kind}Shapes={input_name}:{count}x3x{height}x{width}" for kind, count in sizes)
    return line


def _torchscript(
    network: nn.Module, images: Tensor, path: Path, description: ExportDescription, _: ExportOptions
) -> None:
    write_torchscript(network, images, path, description)


def _onnx(
    network: nn.Module, images: Tensor, path: Path, description: ExportDescription, options: ExportOptions
) -> None:
    settings = {name: getattr(options, name) for name in ("opset", "input_name", "simplify", "verbose")}
    write_onnx(network, images, path, description, **settings)


Writer = Callable[[nn.Module, Tensor, Path, ExportDescription, ExportOptions], None]
WRITERS: dict[str, tuple[Writer, Callable[[Path, torch.device], Runner]]] = {
    "torchscript": (_torchscript, ScriptRunner),
    "onnx": (_onnx, OnnxRuntimeRunner),
}
