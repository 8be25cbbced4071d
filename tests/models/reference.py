"""What the recorded figures of the shipped models mean, and how to compare with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FIGURES: dict[str, dict] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "model_figures.json").read_text(encoding="utf-8")
)
"""Per shipped YAML: sizes of the plain and the folded form, digests of keys and shapes, sampled predictions."""

ALL_MODELS = tuple(FIGURES)
SMALL_MODELS = ("yolov9-t", "yolov9-s", "gelan-t", "gelan-s")
PAIRS = {
    "yolov9-t": "gelan-t",
    "yolov9-s": "gelan-s",
    "yolov9-m": "gelan-m",
    "yolov9-c": "gelan-c",
    "yolov9-e": "gelan-e",
    "yolov9": "gelan",
}
"""Two-branch models and the single-branch model that remains of each for inference."""

BOX_TOLERANCE_PX = 1e-3
SCORE_TOLERANCE = 1e-5


def digest(entries: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over the lines ``key 16x3x3x3``: equal digests mean equal names, shapes and order."""
    lines = (f"{key} {'x'.join(str(size) for size in tensor.shape)}\n" for key, tensor in entries)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def random_images(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Uniform images of a PCG64 generator, as the recorded outputs used them."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return torch.from_numpy(generator.random(shape).astype(np.float32))


def sample_positions(size: int, count: int = 256) -> np.ndarray:
    """Scattered positions in a flattened array of ``size`` entries."""
    return np.arange(count, dtype=np.int64) * 2654435761 % size


def assert_matches(values: Tensor, recorded: Mapping, tolerance: float) -> None:
    """Compare a tensor with the digest of a recorded one; ``tolerance`` is absolute."""
    array = values.detach().double().numpy()
    assert list(array.shape) == recorded["shape"]
    found = array.ravel()[sample_positions(array.size)]
    np.testing.assert_allclose(found, recorded["sample"], rtol=0, atol=tolerance)
    slack = 1e-4 * recorded["absmax"]
    assert abs(array.mean() - recorded["mean"]) <= slack
    assert abs(array.std() - recorded["std"]) <= slack
