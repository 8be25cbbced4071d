"""What a model looks like: layer table, sizes in both forms, time per row, pictures of its maps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
from torch import Tensor, nn

from models.flops import count_operations, flops
from models.parse import read_rows
from models.reparam import is_fused, single_head_skeleton
from utils.log import LOGGER
from utils.runtime import synchronise

if TYPE_CHECKING:
    from models.graph import DetectionModel

MAX_PICTURED_CHANNELS = 32
PICTURE_COLUMNS = 8


@dataclass(frozen=True)
class ModelSize:
    """Counts of a model: distinct modules, parameters, those that require gradients, FLOPs for one image."""

    layers: int
    parameters: int
    gradients: int
    flops: float

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, {self.parameters} parameters, {self.gradients} gradients, "
            f"{self.flops / 1e9:.1f} GFLOPs"
        )


@dataclass(frozen=True)
class RowProfile:
    """Cost of one row in one forward pass."""

    index: int
    kind: str
    time_ms: float
    gflops: float
    parameters: int


def model_size(model: DetectionModel, imgsz: int = 640) -> ModelSize:
    """Count ``model`` as it stands."""
    parameters = list(model.parameters())
    return ModelSize(
        layers=sum(1 for _ in model.modules()),
        parameters=sum(parameter.numel() for parameter in parameters),
        gradients=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        flops=flops(model, imgsz),
    )


def inference_size(model: DetectionModel, imgsz: int = 640) -> ModelSize:
    """Count what remains of ``model`` for inference (lead branch only, norms folded); its weights are not copied."""
    return model_size(single_head_skeleton(model).eval().fuse(), imgsz)


def log_summary(model: DetectionModel, verbose: bool = True, imgsz: int = 640) -> None:
    """Log one line per row (if ``verbose``), the totals of ``model`` and those of its inference form."""
    if verbose:
        LOGGER.info(f"{'':>3}{'from':>24}{'n':>3}{'params':>12}  {'module':<40}arguments")
        for row, layer in zip(read_rows(model.yaml), model.model, strict=True):
            arguments = ", ".join(str(value) for value in row.args)
            LOGGER.info(f"{layer.i:>3}{layer.f!s:>24}{row.repeats:>3}{layer.np:>12}  {layer.type:<40}[{arguments}]")
    LOGGER.info(f"{model.name} summary: {model_size(model, imgsz)}")
    if not is_fused(model) or len(model.head.branch_names) > 1:
        size = inference_size(model, imgsz)
        LOGGER.info(
            f"{model.name} for inference (lead branch only, fused): {size.layers} layers, "
            f"{size.parameters} parameters, {size.flops / 1e9:.1f} GFLOPs"
        )


def profile_row(row: nn.Module, inputs: object) -> tuple[object, RowProfile]:
    """Run one row and measure it; on a GPU the measurement waits for the device."""
    _synchronize(row, inputs)
    started = time.perf_counter()
    with count_operations(row) as count:
        output = row(inputs)
    _synchronize(row, inputs)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    return output, RowProfile(row.i, row.type, elapsed_ms, count.flops / 1e9, row.np)


def _synchronize(row: nn.Module, inputs: object) -> None:
    tensor = next(row.parameters(), inputs[0] if isinstance(inputs, (list, tuple)) else inputs)
    if isinstance(tensor, Tensor):
        synchronise(tensor.device)


def log_profile(rows: list[RowProfile]) -> None:
    """Log time, GFLOPs and parameters of every row and their sums."""
    LOGGER.info(f"{'time (ms)':>10}{'GFLOPs':>10}{'params':>12}  module")
    for row in rows:
        LOGGER.info(f"{row.time_ms:>10.2f}{row.gflops:>10.2f}{row.parameters:>12}  {row.index} {row.kind}")
    total_gflops = sum(row.gflops for row in rows)
    LOGGER.info(f"{sum(row.time_ms for row in rows):>10.2f}{total_gflops:>10.2f}{'':>12}  total")


def save_feature_maps(output: object, row: nn.Module, folder: Path) -> None:
    """Write the first channels of a row's first image as a tiled picture and all of them as an array.

    Files are ``stage{i}_{class}_features.png`` and ``.npy``; rows without a single map (heads, CBLinear) are left out.
    """
    if not isinstance(output, Tensor) or output.ndim != 4:
        return
    maps = output[0].detach().float().cpu().numpy()  # (C, H, W)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"stage{row.i}_{row.type.rsplit('.', 1)[-1]}_features"
    np.save(f"{stem}.npy", maps)
    encoded = cv2.imencode(".png", _tiles(maps[:MAX_PICTURED_CHANNELS]))[1]
    Path(f"{stem}.png").write_bytes(encoded.tobytes())


def _tiles(maps: np.ndarray) -> np.ndarray:
    """Arrange (C, H, W) maps, each stretched to 0...255, in rows of eight."""
    channels, height, width = maps.shape
    rows = -(-channels // PICTURE_COLUMNS)
    canvas = np.zeros((rows * height, PICTURE_COLUMNS * width), dtype=np.uint8)
    for index, values in enumerate(maps):
        top, left = index // PICTURE_COLUMNS * height, index % PICTURE_COLUMNS * width
        spread = max(float(np.ptp(values)), 1e-9)
        canvas[top : top + height, left : left + width] = (values - values.min()) / spread * 255
    return cv2.applyColorMap(canvas, cv2.COLORMAP_VIRIDIS)
