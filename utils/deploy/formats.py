"""The formats of ``export.py``: what each file is called, how it is written and how it is opened for the check."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from models.backend import OPENVINO_SUFFIX, TorchRunner
from models.checkpoint import Checkpoint, save_checkpoint
from models.graph import DetectionModel
from models.heads import lead_prediction
from models.reparam import to_single_head
from models.runners import EngineRunner, OnnxRuntimeRunner, OpenVinoRunner, Runner, ScriptRunner
from models.upstream_file import save_upstream
from utils.deploy.description import ExportDescription
from utils.deploy.end2end import NmsSettings
from utils.deploy.onnx import write_onnx
from utils.deploy.openvino import write_openvino
from utils.deploy.tensorrt_engine import build_engine, needs_half_graph
from utils.deploy.torchscript import write_torchscript
from utils.options import ExportOptions

UNAVAILABLE = {
    "coreml": "write TorchScript and convert it with coremltools",
    "saved_model": "write ONNX and convert it with onnx2tf",
    "pb": "write ONNX and convert it with onnx2tf",
    "tflite": "write ONNX and convert it with onnx2tf",
    "edgetpu": "write ONNX and convert it with onnx2tf",
    "tfjs": "write ONNX, which runs in a browser with ONNX Runtime Web",
    "paddle": "write ONNX and convert it with x2paddle",
}
"""Formats of upstream that are not written here, and the way to them."""


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
class ExportJob:
    """One weights file with everything that a format needs.

    Attributes:
        weights: the file.
        checkpoint: what it holds.
        model: its network as it is, float32, on the CPU.
        network: the inference form (lead branch only, norms folded) on ``device``.
    """

    weights: Path
    checkpoint: Checkpoint
    model: DetectionModel
    network: InferenceNetwork
    description: ExportDescription
    options: ExportOptions
    device: torch.device

    def traced_parts(self, half: bool) -> tuple[nn.Module, Tensor]:
        """Return a fresh network and an example input; exporters may leave traces in the module they work on."""
        network, images = copy.deepcopy(self.network), torch.zeros(self.description.shape, device=self.device)
        return (network.half(), images.half()) if half else (network, images)

    @property
    def nms(self) -> NmsSettings:
        """Settings of NMS inside a file."""
        options = self.options
        return NmsSettings(conf_thres=options.conf_thres, iou_thres=options.iou_thres, max_det=options.topk_all)


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one format is written and opened.

    Attributes:
        suffix: what follows the stem of the weights file.
        write: writes to a path that does not exist yet (a folder that exists, if ``is_folder``).
        open: gives the runner that the check compares with PyTorch.
        is_half: whether the format always rounds to half precision.
        has_nms: whether it gives detections instead of predictions.
    """

    suffix: str
    write: Callable[[ExportJob, Path], None]
    open: Callable[[Path, torch.device], Runner]
    is_folder: bool = False
    is_half: bool = False
    has_nms: bool = False


def _torchscript(job: ExportJob, path: Path) -> None:
    write_torchscript(*job.traced_parts(job.options.half), path, job.description)


def _onnx(job: ExportJob, path: Path) -> None:
    _write_onnx(job, path, job.description)


def _onnx_end2end(job: ExportJob, path: Path) -> None:
    _write_onnx(job, path, job.description, job.nms)


def _write_onnx(job: ExportJob, path: Path, description: ExportDescription, nms: NmsSettings | None = None) -> None:
    settings = {name: getattr(job.options, name) for name in ("opset", "input_name", "simplify", "verbose")}
    write_onnx(*job.traced_parts(description.half), path, description, nms=nms, **settings)


def _openvino(job: ExportJob, path: Path) -> None:
    graph = path / "graph.onnx"
    _write_onnx(job, graph, replace(job.description, half=False))  # OpenVINO rounds the weights itself
    write_openvino(graph, path, job.weights.stem, job.description)
    graph.unlink()


def _engine(job: ExportJob, path: Path) -> None:
    graph = path.with_suffix(".onnx.tmp")
    halve_graph = job.options.half and needs_half_graph()
    try:
        _write_onnx(job, graph, replace(job.description, dynamic=True, dynamic_hw=False, half=halve_graph))
        settings = {name: getattr(job.options, name) for name in ("input_name", "workspace", "verbose")}
        build_engine(graph, path, replace(job.description, dynamic=True, dynamic_hw=False), **settings)
    finally:
        graph.unlink(missing_ok=True)


def _reparam(job: ExportJob, path: Path) -> None:
    model = job.network.model
    state = {key: tensor.half() if job.options.half else tensor for key, tensor in model.state_dict().items()}
    lean = replace(
        job.checkpoint,
        kind="inference",
        model=state,
        ema=None,
        yaml=copy.deepcopy(model.yaml),
        names=dict(job.description.names),
        nc=len(job.description.names),
        epoch=-1,
        updates=0,
        optimizer=None,
        scaler=None,
        trainer=None,
    )
    save_checkpoint(path, lean)


def _upstream(job: ExportJob, path: Path) -> None:
    save_upstream(path, job.checkpoint, to_single_head(job.model) if job.options.reparam else job.model)


def _open_pt(path: Path, device: torch.device) -> Runner:
    return TorchRunner(path, device, fp16=False, fuse=True)


FORMATS: dict[str, Format] = {
    "torchscript": Format(suffix=".torchscript", write=_torchscript, open=ScriptRunner),
    "engine": Format(suffix=".engine", write=_engine, open=EngineRunner),
    "onnx": Format(suffix=".onnx", write=_onnx, open=OnnxRuntimeRunner),
    "onnx_end2end": Format(suffix="-end2end.onnx", write=_onnx_end2end, open=OnnxRuntimeRunner, has_nms=True),
    "openvino": Format(
        suffix=OPENVINO_SUFFIX, write=_openvino, open=lambda path, _: OpenVinoRunner(path), is_folder=True
    ),
    "reparam": Format(suffix="-reparam.pt", write=_reparam, open=_open_pt),
    "upstream": Format(suffix="-upstream.pt", write=_upstream, open=_open_pt, is_half=True),
}


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
        if name not in FORMATS:
            raise ValueError(f"--include {name}: unknown format; expected one of {', '.join(FORMATS)}")
    return [name for name in FORMATS if name in formats]
