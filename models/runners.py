"""Exported files behind one interface: images in, the file's outputs and what it says about itself out."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from models.checkpoint import complete_names
from utils.files import read_yaml
from utils.log import LOGGER, first_line
from utils.runtime import place

UNNAMED_CLASSES = 999
"""How many numbered names a file without names gets when its output does not tell the number of classes."""

IMAGE_TYPES = ("tensor(float)", "tensor(float16)")
"""Number types of images in ONNX Runtime's words."""

END2END_OUTPUTS = ("num_dets", "boxes", "scores", "classes")
"""Outputs of a file with NMS inside: (B, 1), (B, K, 4) x1 y1 x2 y2 in input pixels, (B, K), (B, K)."""


@dataclass(frozen=True, kw_only=True)
class BuiltInNms:
    """Thresholds of the NMS inside a file; nothing that is asked for later brings back what they removed."""

    conf_thres: float
    iou_thres: float
    max_det: int


class Runner(Protocol):
    """What the backend needs from one kind of file."""

    names: dict[int, str]
    stride: int
    static_shape: tuple[int, int] | None
    batch_size: int | None
    fp16: bool
    built_in_nms: BuiltInNms | None

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Return all outputs for images of the runner's number type."""


class ScriptRunner(nn.Module):
    """A TorchScript file; batch size free, height and width as traced."""

    batch_size: int | None = None
    built_in_nms: BuiltInNms | None = None

    def __init__(self, path: Path, device: torch.device, names: Any = None) -> None:
        super().__init__()
        extra = {"config.txt": ""}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer torch announces the end of TorchScript
                self.model = torch.jit.load(str(path), map_location=device, _extra_files=extra).eval()
        except RuntimeError as error:
            raise ValueError(f"{path} is not a readable TorchScript file: {first_line(error)}") from error
        place(self.model, device)
        config = _json_object(extra["config.txt"], path)
        self.fp16 = any(weight.dtype == torch.float16 for weight in self.model.parameters())
        self.static_shape = None if config.get("dynamic_hw") or "shape" not in config else _sides(config["shape"], path)
        self.stride = _stride(config, path)
        self.names = _names(config.get("names") or names, None, path)

    def forward(self, images: Tensor) -> list[Tensor]:
        outputs = self.model(images)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)


class OnnxRuntimeRunner:
    """An ONNX file in ONNX Runtime."""

    def __init__(self, path: Path, device: torch.device, names: Any = None) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError(
                f"{path.name} needs ONNX Runtime: pip install onnxruntime (or onnxruntime-gpu), or use --dnn"
            ) from error
        providers = ["CPUExecutionProvider"]
        if device.type == "cuda" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
            providers.insert(0, "CUDAExecutionProvider")
        elif device.type == "cuda":
            LOGGER.warning("this ONNX Runtime has no CUDA provider, so the CPU is used: pip install onnxruntime-gpu")
        try:
            self.session = onnxruntime.InferenceSession(str(path), providers=providers)
        except Exception as error:  # its exception types are not importable under one stable name
            raise ValueError(f"{path} is not a readable ONNX file: {first_line(error)}") from error
        source, outputs = _image_input(self.session.get_inputs(), path), self.session.get_outputs()
        self.output_names = [output.name for output in outputs]
        metadata = self.session.get_modelmeta().custom_metadata_map
        batch, _, height, width = (size if isinstance(size, int) else None for size in source.shape)
        self.input_name, self.fp16 = source.name, source.type == "tensor(float16)"
        self.batch_size = batch
        self.static_shape = (height, width) if height and width else None
        self.stride = _stride(metadata, path)
        self.has_nms = set(END2END_OUTPUTS) <= set(self.output_names)
        self.built_in_nms = _built_in_nms(metadata, path) if self.has_nms else None
        shape = None if self.has_nms else outputs[-1].shape
        self.names = _names(_literal(metadata.get("names"), path) or names, shape, path)

    def __call__(self, images: Tensor) -> list[Tensor]:
        outputs = self.session.run(None, {self.input_name: np.ascontiguousarray(images.cpu().numpy())})
        tensors = [torch.from_numpy(output).to(images.device) for output in outputs]
        if not self.has_nms:
            return tensors
        found = dict(zip(self.output_names, tensors, strict=True))
        return [as_prediction(*(found[name] for name in END2END_OUTPUTS[1:]), num_classes=len(self.names))]


class OpenCvRunner:
    """An ONNX file in OpenCV's network module; its metadata are read with the onnx package where that is installed."""

    fp16 = False
    built_in_nms: BuiltInNms | None = None

    def __init__(self, path: Path, names: Any) -> None:
        try:
            self.network = cv2.dnn.readNetFromONNX(str(path))
        except cv2.error as error:
            raise ValueError(f"OpenCV cannot read {path}: {error.err}; leave out --dnn") from error
        self.outputs = self.network.getUnconnectedOutLayersNames()
        if set(END2END_OUTPUTS) <= set(self.outputs):
            raise ValueError(f"{path} holds NMS, which OpenCV cannot run; leave out --dnn, or export without --end2end")
        metadata, shape = _onnx_description(path)
        batch, height, width = (shape[axis] for axis in (0, 2, 3)) if len(shape) == 4 else (None, None, None)
        self.batch_size = batch
        self.static_shape = (height, width) if height and width else None
        self.stride = _stride(metadata, path)
        self.names = _names(_literal(metadata.get("names"), path) or names, None, path)

    def __call__(self, images: Tensor) -> list[Tensor]:
        self.network.setInput(images.cpu().numpy())
        return [torch.from_numpy(output).to(images.device) for output in self.network.forward(self.outputs)]


class OpenVinoRunner:
    """A folder with an OpenVINO network (.xml, .bin) and its description (.yaml), on the CPU."""

    fp16 = False
    built_in_nms: BuiltInNms | None = None

    def __init__(self, path: Path, names: Any = None) -> None:
        try:
            import openvino
        except ImportError as error:
            raise ImportError(f"{path.name} needs OpenVINO: pip install openvino") from error
        networks = sorted(path.glob("*.xml"))
        if len(networks) != 1:
            raise ValueError(f"{path} holds {len(networks)} .xml files instead of one; export it again")
        core = openvino.Core()
        try:
            model = core.read_model(str(networks[0]))
            # In full precision: processors that know bfloat16 would use it by themselves and give other boxes.
            self.network = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        except RuntimeError as error:
            raise ValueError(f"{path} is no readable OpenVINO network: {first_line(error)}") from error
        description = networks[0].with_suffix(".yaml")
        metadata = read_yaml(description) if description.is_file() else {}
        axes = model.input(0).get_partial_shape()
        if len(axes) != 4:
            raise ValueError(f"{path} takes an input of shape {axes}, expected images (B, 3, H, W); export it again")
        batch, _, height, width = (axis.get_length() if axis.is_static else None for axis in axes)
        self.batch_size = batch
        self.static_shape = (height, width) if height and width else None
        self.stride = _stride(metadata, path)
        rows = model.output(0).get_partial_shape()[1]
        shape = (None, rows.get_length() if rows.is_static else None, None)
        self.names = _names(metadata.get("names") or names, shape, path)

    def __call__(self, images: Tensor) -> list[Tensor]:
        outputs = self.network(np.ascontiguousarray(images.cpu().numpy()))
        return [torch.from_numpy(np.array(output)).to(images.device) for output in outputs.values()]


class EngineRunner:
    """A TensorRT engine (8.6 or later), with or without a description in front of it."""

    built_in_nms: BuiltInNms | None = None

    def __init__(self, path: Path, device: torch.device, names: Any = None) -> None:
        if device.type != "cuda":
            raise ValueError(f"{path} is a TensorRT engine and needs a CUDA device: --device 0, or use the .onnx file")
        tensorrt = import_tensorrt(path.name)
        metadata, program = unpack_engine(path.read_bytes())
        self.device = device
        self.logger = tensorrt.Logger(tensorrt.Logger.WARNING)
        self.engine = tensorrt.Runtime(self.logger).deserialize_cuda_engine(program)
        if self.engine is None:
            raise ValueError(
                f"{path} does not fit this TensorRT ({tensorrt.__version__}) or this GPU; engines run only where they "
                "were built: python export.py --weights best.pt --include engine --device 0"
            )
        self.context = self.engine.create_execution_context()
        tensors = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        is_input = {name: self.engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT for name in tensors}
        self.input_name = next(name for name in tensors if is_input[name])
        self.output_names = [name for name in tensors if not is_input[name]]
        self.dtypes = {name: _torch_dtype(self.engine.get_tensor_dtype(name)) for name in tensors}
        self.fp16 = self.dtypes[self.input_name] == torch.float16
        batch, _, height, width = (int(size) for size in self.engine.get_tensor_shape(self.input_name))
        self.batch_size = batch if batch > 0 else None
        largest = self.engine.get_tensor_profile_shape(self.input_name, 0)[2] if batch < 0 else (batch,)
        self.largest_batch = int(largest[0])
        self.static_shape = (height, width) if height > 0 and width > 0 else None
        self.stride = _stride(metadata, path)
        shape = tuple(int(size) for size in self.engine.get_tensor_shape(self.output_names[-1]))
        self.names = _names(metadata.get("names") or names, [size if size > 0 else None for size in shape], path)

    def __call__(self, images: Tensor) -> list[Tensor]:
        parts = [self._run(part.contiguous()) for part in images.split(self.largest_batch)]
        return [torch.cat(outputs) for outputs in zip(*parts, strict=True)]

    def _run(self, images: Tensor) -> list[Tensor]:
        self.context.set_input_shape(self.input_name, tuple(images.shape))
        self.context.set_tensor_address(self.input_name, images.data_ptr())
        outputs = []
        for name in self.output_names:
            shape = tuple(int(size) for size in self.context.get_tensor_shape(name))
            outputs.append(torch.empty(shape, dtype=self.dtypes[name], device=images.device))
            self.context.set_tensor_address(name, outputs[-1].data_ptr())
        if not self.context.execute_async_v3(torch.cuda.current_stream(images.device).cuda_stream):
            raise RuntimeError(f"TensorRT refused a batch of shape {tuple(images.shape)}")
        torch.cuda.current_stream(images.device).synchronize()
        return outputs


def import_tensorrt(what: str) -> ModuleType:
    """Return the tensorrt package; ImportError with the way to it where it is missing."""
    try:
        import tensorrt
    except ImportError as error:
        raise ImportError(
            f"{what} needs TensorRT: pip install tensorrt, or build and run the engine elsewhere with trtexec"
        ) from error
    return tensorrt


def pack_engine(metadata: Mapping[str, Any], program: bytes) -> bytes:
    """Put a description in front of an engine: four bytes with its length, JSON, then the engine."""
    text = json.dumps(metadata, ensure_ascii=False).encode()
    return len(text).to_bytes(4, "little") + text + program


def unpack_engine(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Split what :func:`pack_engine` made; an engine of trtexec has no description."""
    length = int.from_bytes(content[:4], "little")
    if content[4:5] != b"{" or length > len(content) - 4:
        return {}, content
    return json.loads(content[4 : 4 + length]), content[4 + length :]


def _torch_dtype(kind: Any) -> torch.dtype:
    """Number type of torch for one of TensorRT, whose printed form ends in its name."""
    name = str(kind).rsplit(".", 1)[-1].upper()
    known = {"FLOAT": torch.float32, "HALF": torch.float16, "INT32": torch.int32, "INT64": torch.int64}
    if name not in known:
        raise ValueError(f"the engine has a tensor of type {kind}, expected one of {', '.join(known)}")
    return known[name]


def as_prediction(boxes_xyxy: Tensor, scores: Tensor, classes: Tensor, *, num_classes: int) -> Tensor:
    """Turn detections (B, K, 4), (B, K), (B, K) back into (B, 4 + nc, K), whose NMS gives the same detections.

    Places that hold no detection have score 0.
    """
    top_left, bottom_right = boxes_xyxy.float().split((2, 2), 2)
    boxes = torch.cat(((top_left + bottom_right) / 2, bottom_right - top_left), 2)  # (B, K, 4) cx, cy, w, h
    rows = torch.zeros(*scores.shape, num_classes, device=scores.device)
    rows.scatter_(2, classes.long().clamp(0, num_classes - 1)[..., None], scores.float()[..., None])
    return torch.cat((boxes, rows), 2).transpose(1, 2)


def lead_output(outputs: list[Tensor]) -> Tensor:
    """Pick the lead prediction: the last output of three axes (upstream writes the auxiliary branch first)."""
    predictions = [output for output in outputs if output.ndim == 3]
    if not predictions:
        shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
        raise ValueError(f"no output of shape (B, 4 + nc, A) in this file, found {shapes}; export it again")
    return predictions[-1]


def _built_in_nms(metadata: Mapping[str, str], path: Path) -> BuiltInNms | None:
    """Read what a file says about its NMS; None, with a warning, where it says nothing."""
    if "nms" not in metadata:
        LOGGER.warning(
            f"{path.name} holds NMS and does not tell its thresholds: lower --conf-thres and higher --iou-thres than "
            "those have no effect"
        )
        return None
    try:
        told = json.loads(metadata["nms"])
        conf_thres, iou_thres = float(told["conf_thres"]), float(told["iou_thres"])
        return BuiltInNms(conf_thres=conf_thres, iou_thres=iou_thres, max_det=int(told["max_det"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} states the NMS {metadata['nms'][:80]!r}, which is none; export it again") from error


def _json_object(text: str | bytes, path: Path) -> dict[str, Any]:
    """Read the description stored in a TorchScript file; foreign files may have none."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: its config.txt is not JSON ({error}); export it again") from error
    return value if isinstance(value, dict) else {}


def _literal(text: str | None, path: Path) -> Any:
    """Read a Python or JSON literal from metadata; anything that is not a literal is refused, never run."""
    if not text:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{path}: its class names are no literal ({text[:60]!r}); export it again") from error


def _image_input(inputs: Sequence[Any], path: Path) -> Any:
    """Return the one input of an ONNX file, or say why it takes no images."""
    found = ", ".join(f"{source.name} {source.type} {source.shape}" for source in inputs) or "none"
    is_image = len(inputs) == 1 and len(inputs[0].shape) == 4 and inputs[0].type in IMAGE_TYPES
    if not is_image:
        raise ValueError(f"{path} has the inputs {found}; expected one, images (B, 3, H, W) of floating-point numbers")
    return inputs[0]


def _stride(metadata: Mapping[str, Any], path: Path) -> int:
    """Return the stride that a file states, 32 where it states none."""
    try:
        stride = int(metadata.get("stride", 32))
    except (TypeError, ValueError):
        stride = 0
    if stride < 1:
        raise ValueError(
            f"{path} states the stride {metadata['stride']!r}, expected a number such as 32; export it again"
        )
    return stride


def _sides(shape: Any, path: Path) -> tuple[int, int]:
    """Return height and width of the input shape (B, 3, H, W) that a TorchScript file states."""
    try:
        _, _, height, width = (int(size) for size in shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} states the input shape {shape!r}, expected four numbers; export it again") from error
    return height, width


def _names(
    names: Mapping[Any, str] | Sequence[str] | None, output_shape: Sequence[Any] | None, path: Path
) -> dict[int, str]:
    """Complete class names; without any, numbered ones for as many classes as the output has."""
    rows = output_shape[1] if output_shape is not None and len(output_shape) == 3 else None
    count = rows - 4 if isinstance(rows, int) else None
    if not names:
        return {index: f"class{index}" for index in range(count or UNNAMED_CLASSES)}
    try:
        return complete_names(names, count)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; export it again") from error


def _onnx_description(path: Path) -> tuple[dict[str, str], list[int | None]]:
    """Return metadata and input shape (None = free axis) of an ONNX file, both empty without the onnx package."""
    try:
        import onnx
    except ImportError:
        LOGGER.warning("class names of the ONNX file are not read: pip install onnx")
        return {}, []
    model = onnx.load(str(path), load_external_data=False)
    axes = model.graph.input[0].type.tensor_type.shape.dim
    return {item.key: item.value for item in model.metadata_props}, [axis.dim_value or None for axis in axes]
