"""A very small dual network with every kind of block, for tests that need a whole model quickly."""

from __future__ import annotations

import copy
from pathlib import Path

from models.checkpoint import Checkpoint, save_checkpoint
from models.graph import DetectionModel
from tests.reference.fill import fill_state_dict

TINY_DUAL: dict[str, object] = {
    "nc": 3,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": 3,
    "backbone": [
        [-1, 1, "Silence", []],
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "ELAN1", [16, 16, 8]],
        [-1, 1, "AConv", [16]],
        [-1, 1, "RepNCSPELAN4", [16, 16, 8, 1]],  # 5: stride 8
        [-1, 1, "ADown", [16]],
        [-1, 1, "RepNCSPELAN4", [16, 16, 8, 1]],  # 7: stride 16
        [-1, 1, "AConv", [16]],
        [-1, 1, "SPPELAN", [16, 8]],  # 9: stride 32
    ],
    "head": [
        [-1, 1, "nn.Upsample", ["None", 2, "nearest"]],
        [[-1, 7], 1, "Concat", [1]],
        [-1, 1, "Conv", [16, 1, 1]],  # 12: stride 16
        [9, 1, "CBLinear", [[16]]],
        [0, 1, "Conv", [16, 3, 2]],
        [-1, 1, "AConv", [16]],
        [-1, 1, "AConv", [16]],
        [[13, -1], 1, "CBFuse", [[0]]],  # 17: stride 8, auxiliary only
        [[17, 7, 9, 5, 12, 9], 1, "DualDDetect", ["nc"]],
    ],
}
"""Auxiliary maps are rows 17, 7, 9; lead maps are rows 5, 12, 9; strides 8, 16, 32."""


def tiny_dual(nc: int = 3, salt: str = "") -> DetectionModel:
    """Return the network with weights that matter, in eval mode."""
    model = DetectionModel(copy.deepcopy(TINY_DUAL), nc=nc)
    fill_state_dict(model.state_dict(), salt)
    return model.eval().requires_grad_(False)


def save_tiny_dual(path: Path) -> Path:
    """Write the network for bolts, nuts and washers as a weights file, and return its path."""
    model = tiny_dual()
    names = {0: "bolt", 1: "nut", 2: "washer"}
    save_checkpoint(path, Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, names=names))
    return path
