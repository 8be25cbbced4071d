"""One call for a detector, whatever file it came from: ``.pt``, ``.torchscript`` or ``.onnx``.

The result is always the lead prediction (B, 4 + nc, A), so the same file gives the same boxes in every script. Exported
files of upstream that carry both branches of a dual model work too: the second output is the lead branch.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from models.checkpoint import build_model, complete_names, load_checkpoint
from models.heads import lead_prediction
from models.reparam import inference_form
from utils.files import read_yaml
from utils.log import LOGGER

SUFFIXES = (".pt", ".torchscript", ".onnx")
UNNAMED_CLASSES = 999
"""How many numbered names a file without names gets when its output does not tell the number of classes."""


class Runner(Protocol):
    """What the backend needs from one kind of file."""

    names: dict[int, str]
    stride: int
    static_shape: tuple[int, int] | None
    batch_size: int | None
    fp16: bool

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Return all outputs for images of the runner's number type."""


class DetectMultiBackend(nn.Module):
    """Detector loaded from a file, called with images (B, 3, H, W), RGB, 0...1.

    Attributes:
        names: class index -> name.
        stride: largest stride; H and W must be multiples of it.
        static_shape: (height, width) the file is restricted to, None if free.
        batch_size: images per call the file is restricted to, None if free; other numbers are split and padded here.
        pt, jit, onnx: which kind of file it is.
        fp16: whether images are fed in half precision.

    Example::

        detector = DetectMultiBackend("best.onnx")
        prediction = detector(images)  # (B, 4 + nc, A)
    """

    def __init__(
        self,
        weights: str | Path | Sequence[str | Path] = "yolo.pt",
        device: torch.device | str = "cpu",
        dnn: bool = False,
        data: str | Path | None = None,
        fp16: bool = False,
        fuse: bool = True,
    ) -> None:
        """Load ``weights``.

        Args:
            device: where to run; an ONNX file follows it only if ONNX Runtime has a provider for it.
            dnn: run an ONNX file with OpenCV instead of ONNX Runtime.
            data: data YAML whose names are used when the file has none.
            fp16: half precision for a ``.pt`` file on CUDA; exported files are what they were exported as.
            fuse: run a ``.pt`` file in its inference form (lead branch only, norms folded).
        """
        super().__init__()
        path = _single_path(weights)
        self.device = torch.device(device)
        self.pt, self.jit, self.onnx = (path.suffix.lower() == suffix for suffix in SUFFIXES)
        fallback = read_yaml(data).get("names") if data else None
        self.runner: Runner = self._open(path, dnn, fallback, fp16 and self._may_halve(path), fuse)
        self.names, self.stride, self.fp16 = self.runner.names, self.runner.stride, self.runner.fp16
        self.static_shape, self.batch_size = self.runner.static_shape, self.runner.batch_size

    def _open(self, path: Path, dnn: bool, names: Any, fp16: bool, fuse: bool) -> Runner:
        if self.pt:
            return TorchRunner(path, self.device, fp16, fuse)
        if self.jit:
            return ScriptRunner(path, self.device, names)
        return OpenCvRunner(path, names) if dnn else OnnxRuntimeRunner(path, self.device, names)

    def _may_halve(self, path: Path) -> bool:
        if not self.pt:
            LOGGER.info(f"--half has no effect on {path.name}: an exported file keeps the precision of its export")
        elif self.device.type != "cuda":
            LOGGER.warning(f"--half needs a CUDA device; {path.name} runs in float32 on {self.device}")
        return self.pt and self.device.type == "cuda"

    @torch.no_grad()
    def forward(self, images: Tensor, augment: bool = False) -> Tensor:
        """Return the lead prediction (B, 4 + nc, A) in float32: cx, cy, w, h in input pixels, then class scores.

        Raises:
            ValueError: images of another size than the file is restricted to, or augmentation of an exported file.
        """
        if augment and not self.pt:
            raise ValueError("--augment needs a .pt file; exported files hold one fixed pass")
        height, width = images.shape[-2:]
        if self.static_shape and (height, width) != self.static_shape:
            raise ValueError(
                f"images of {height}x{width} given, but the file is made for {self.static_shape[0]}x"
                f"{self.static_shape[1]}; use --imgsz {self.static_shape[0]} {self.static_shape[1]} "
                "or export again with --dynamic-hw"
            )
        images = images.to(self.device, torch.float16 if self.fp16 else torch.float32)
        if augment:
            return lead_prediction(self.runner.model(images, augment=True)).float()
        return torch.cat([lead_output(self.runner(part))[:used] for part, used in self._parts(images)]).float()

    def _parts(self, images: Tensor) -> list[tuple[Tensor, int]]:
        """Split into the batches the file takes; the last one is padded with zeros. Gives (images, how many count)."""
        if self.batch_size is None or len(images) == self.batch_size:
            return [(images, len(images))]
        parts = []
        for part in images.split(self.batch_size):
            missing = self.batch_size - len(part)
            padded = torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) if missing else part
            parts.append((padded, len(part)))
        return parts

    def warmup(self, imgsz: Sequence[int] = (1, 3, 640, 640)) -> None:
        """Run blank images once (TorchScript: twice) on CUDA, so that set-up time does not count as inference."""
        if self.device.type != "cuda":
            return
        height, width = self.static_shape or imgsz[-2:]
        images = torch.zeros(imgsz[0], 3, height, width, device=self.device)
        for _ in range(2 if self.jit else 1):
            self(images)


class TorchRunner(nn.Module):
    """A ``.pt`` file of ours or of upstream."""

    static_shape: tuple[int, int] | None = None
    batch_size: int | None = None

    def __init__(self, path: Path, device: torch.device, fp16: bool, fuse: bool) -> None:
        super().__init__()
        model = build_model(load_checkpoint(path)).eval().requires_grad_(False)
        names = model.names
        if fuse:
            model = inference_form(model)
        self.model = model.to(device)
        if fp16:
            self.model.half()
        self.fp16, self.names, self.stride = fp16, names, int(model.stride.max())

    def forward(self, images: Tensor) -> list[Tensor]:
        return [lead_prediction(self.model(images))]


class ScriptRunner(nn.Module):
    """A TorchScript file; batch size free, height and width as traced."""

    batch_size: int | None = None

    def __init__(self, path: Path, device: torch.device, names: Any = None) -> None:
        super().__init__()
        extra = {"config.txt": ""}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer torch announces the end of TorchScript
                self.model = torch.jit.load(str(_existing(path)), map_location=device, _extra_files=extra).eval()
        except RuntimeError as error:
            raise ValueError(f"{path} is not a readable TorchScript file: {str(error).splitlines()[0]}") from error
        config = _json_object(extra["config.txt"], path)
        self.fp16 = next(self.model.parameters()).dtype == torch.float16
        shape = config.get("shape")
        self.static_shape = (int(shape[2]), int(shape[3])) if shape and not config.get("dynamic_hw") else None
        self.stride = int(config.get("stride", 32))
        self.names = _names(config.get("names") or names, None)

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
            self.session = onnxruntime.InferenceSession(str(_existing(path)), providers=providers)
        except Exception as error:  # its exception types are not importable under one stable name
            raise ValueError(f"{path} is not a readable ONNX file: {str(error).splitlines()[0]}") from error
        source, outputs = self.session.get_inputs()[0], self.session.get_outputs()
        if any(output.name == "num_dets" for output in outputs):
            raise ValueError(f"{path} has NMS built in, which is not supported; export it with --include onnx")
        metadata = self.session.get_modelmeta().custom_metadata_map
        batch, _, height, width = (size if isinstance(size, int) else None for size in source.shape)
        self.input_name, self.fp16 = source.name, source.type == "tensor(float16)"
        self.batch_size = batch
        self.static_shape = (height, width) if height and width else None
        self.stride = int(metadata.get("stride", 32))
        self.names = _names(_literal(metadata.get("names"), path) or names, outputs[-1].shape)

    def __call__(self, images: Tensor) -> list[Tensor]:
        outputs = self.session.run(None, {self.input_name: np.ascontiguousarray(images.cpu().numpy())})
        return [torch.from_numpy(output).to(images.device) for output in outputs]


class OpenCvRunner:
    """An ONNX file in OpenCV's network module; its metadata are read with the onnx package where that is installed."""

    fp16 = False

    def __init__(self, path: Path, names: Any) -> None:
        try:
            self.network = cv2.dnn.readNetFromONNX(str(_existing(path)))
        except cv2.error as error:
            raise ValueError(f"OpenCV cannot read {path}: {error.err}; leave out --dnn") from error
        self.outputs = self.network.getUnconnectedOutLayersNames()
        metadata, shape = _onnx_description(path)
        batch, height, width = (shape[axis] for axis in (0, 2, 3)) if len(shape) == 4 else (None, None, None)
        self.batch_size = batch
        self.static_shape = (height, width) if height and width else None
        self.stride = int(metadata.get("stride", 32))
        self.names = _names(_literal(metadata.get("names"), path) or names, None)

    def __call__(self, images: Tensor) -> list[Tensor]:
        self.network.setInput(images.cpu().numpy())
        return [torch.from_numpy(output).to(images.device) for output in self.network.forward(self.outputs)]


def _single_path(weights: str | Path | Sequence[str | Path]) -> Path:
    if isinstance(weights, (list, tuple)):
        if len(weights) != 1:
            raise ValueError(f"expected one weights file, got {len(weights)}; ensembles are not supported")
        weights = weights[0]
    path = Path(str(weights))
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"weights {path}: suffix {path.suffix or '(none)'} is not one of {', '.join(SUFFIXES)}")
    return _existing(path)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"weights file {path} does not exist; check --weights")
    return path


def lead_output(outputs: list[Tensor]) -> Tensor:
    """Pick the lead prediction: the last output of three axes (upstream writes the auxiliary branch first)."""
    predictions = [output for output in outputs if output.ndim == 3]
    if not predictions:
        shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
        raise ValueError(f"no output of shape (B, 4 + nc, A) in this file, found {shapes}; export it again")
    return predictions[-1]


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


def _names(names: Mapping[Any, str] | Sequence[str] | None, output_shape: Sequence[Any] | None) -> dict[int, str]:
    """Complete class names; without any, numbered ones for as many classes as the output has."""
    rows = output_shape[1] if output_shape is not None and len(output_shape) == 3 else None
    count = rows - 4 if isinstance(rows, int) else None
    if names:
        return complete_names(names, count or len(names))
    return {index: f"class{index}" for index in range(count or UNNAMED_CLASSES)}


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
