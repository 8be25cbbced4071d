"""One call for a detector, whatever file it came from: .pt, .torchscript, .onnx, .engine or an OpenVINO folder.

The result is always the lead prediction (B, 4 + nc, A), so the same file gives the same boxes in every script. Exported
files of upstream that carry both branches of a dual model work too: the second output is the lead branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.checkpoint import build_model, load_checkpoint
from models.heads import lead_prediction
from models.published import find_weights
from models.reparam import inference_form
from models.replay import Replay
from models.runners import (
    BuiltInNms,
    EngineRunner,
    OnnxRuntimeRunner,
    OpenCvRunner,
    OpenVinoRunner,
    Runner,
    ScriptRunner,
    lead_output,
)
from utils.files import find_file, read_yaml
from utils.log import LOGGER
from utils.runtime import place, wake

SUFFIXES = (".pt", ".torchscript", ".onnx", ".engine")
OPENVINO_SUFFIX = "_openvino_model"
"""How the name of a folder with an OpenVINO network ends."""


class DetectMultiBackend(nn.Module):
    """Detector loaded from a file, called with images (B, 3, H, W), RGB, 0...1.

    Attributes:
        names: class index -> name.
        stride: largest stride; H and W must be multiples of it.
        static_shape: (height, width) the file is restricted to, None if free.
        batch_size: images per call the file is restricted to, None if free; other numbers are split and padded here.
        pt, jit, onnx, engine, xml: which kind of file it is.
        fp16: whether images are fed in half precision.
        built_in_nms: thresholds of NMS inside the file (``conf_thres``, ``iou_thres``, ``max_det``), None without NMS.

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
        *,
        offline: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        """Load ``weights``; one of the published files is fetched if it is missing.

        Args:
            device: where to run; an ONNX file follows it only if ONNX Runtime has a provider for it.
            dnn: run an ONNX file with OpenCV instead of ONNX Runtime.
            data: data YAML whose names are used when the file has none; a path, or a name found below data/.
            fp16: half precision for a ``.pt`` file on CUDA; exported files are what they were exported as.
            fuse: run a ``.pt`` file in its inference form (lead branch only, norms folded).
            offline: never fetch.
            cuda_graphs: replay passes of a ``.pt`` file on CUDA when a shape comes again and again; see ``Replay``.

        Raises:
            FileNotFoundError: no such weights, or no such data YAML although its names are needed.
            ValueError: a file that cannot be used.
        """
        super().__init__()
        path = find_weights(_single_path(weights), offline=offline)
        self.device = torch.device(device)
        self.pt, self.jit, self.onnx, self.engine = (path.suffix.lower() == suffix for suffix in SUFFIXES)
        self.xml = path.name.endswith(OPENVINO_SUFFIX)
        if dnn and not self.onnx:
            LOGGER.warning(f"--dnn has no effect on {path.name}: OpenCV's DNN module runs .onnx files here")
        fallback, absent = _names_in(data) if data else (None, None)
        self.runner: Runner = self._open(path, dnn, fallback, fp16 and self._may_halve(path), fuse)
        if isinstance(self.runner, TorchRunner):
            self.runner.replay.is_off = not cuda_graphs
        self.names, self.stride, self.fp16 = self.runner.names, self.runner.stride, self.runner.fp16
        if absent is not None:
            self._do_without(absent, path)
        self.static_shape, self.batch_size = self.runner.static_shape, self.runner.batch_size
        self.built_in_nms = self.runner.built_in_nms
        self.eval()  # else a validation would put it back into training mode

    def _open(self, path: Path, dnn: bool, names: Any, fp16: bool, fuse: bool) -> Runner:
        if self.pt:
            wake(self.device)
            return TorchRunner(path, self.device, fp16, fuse)
        if self.jit:
            return ScriptRunner(path, self.device, names)
        if self.engine:
            return EngineRunner(path, self.device, names)
        if self.xml:
            return OpenVinoRunner(path, names)
        return OpenCvRunner(path, names) if dnn else OnnxRuntimeRunner(path, self.device, names)

    def _do_without(self, absent: FileNotFoundError, path: Path) -> None:
        """Pass over a data YAML that is not there where the weights name their classes; raise ``absent`` elsewhere."""
        has_names = self.pt or any(name != f"class{index}" for index, name in self.names.items())  # as runners number
        if not has_names:
            raise FileNotFoundError(f"--data {absent}. {path.name} holds no class names, that file was to name them")
        LOGGER.warning(f"--data {absent}; it is not needed, {path.name} names its classes")

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

    def priors(self) -> tuple[Tensor, ...]:
        """Tensors besides weights that the last pass of a ``.pt`` file has read."""
        return self.runner.model.priors() if self.pt else ()

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
    built_in_nms: BuiltInNms | None = None

    def __init__(self, path: Path, device: torch.device, fp16: bool, fuse: bool) -> None:
        super().__init__()
        model = build_model(load_checkpoint(path)).eval().requires_grad_(False)
        names = model.names
        if fuse:
            model = inference_form(model, in_place=True)
        self.model = place(model, device)
        if fp16:
            self.model.half()
        self.fp16, self.names, self.stride = fp16, names, int(model.stride.max())
        self.replay = Replay()

    def _predict(self, images: Tensor) -> Tensor:
        return lead_prediction(self.model(images))

    def forward(self, images: Tensor) -> list[Tensor]:
        last = self.model.head.branches[-1][1][-1][-1].weight
        moved = (last.data_ptr(), last.dtype)
        return [self.replay(self._predict, images, weights=moved, constants=self.model.priors)]


def _names_in(data: str | Path) -> tuple[Any, FileNotFoundError | None]:
    """Return the names a data YAML holds; where it is not there the error that says so."""
    try:
        return read_yaml(find_file(data, roots=("data", "models", "utils"))).get("names"), None
    except FileNotFoundError as error:
        return None, error


def _single_path(weights: str | Path | Sequence[str | Path]) -> Path:
    if isinstance(weights, (list, tuple)):
        if len(weights) != 1:
            raise ValueError(f"expected one weights file, got {len(weights)}; ensembles are not supported")
        weights = weights[0]
    if not str(weights):
        raise ValueError("weights are missing: give the path of a .pt file or of an exported one")
    path = Path(str(weights))
    if path.is_dir() and not path.name.endswith(OPENVINO_SUFFIX):
        raise ValueError(f"weights {path} is a folder; name a file, for example {path / 'best.pt'}")
    if path.suffix.lower() not in SUFFIXES and not path.name.endswith(OPENVINO_SUFFIX):
        raise ValueError(
            f"weights {path}: suffix {path.suffix or '(none)'} is not one of {', '.join(SUFFIXES)}, *{OPENVINO_SUFFIX}"
        )
    return path
