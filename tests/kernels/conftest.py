"""Kernels run on the GPU where there is one; elsewhere Triton's interpreter computes on the CPU what they would."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from utils.kernels.layout import has_triton

PROGRAMS = (
    "streaming",
    "norm_forward",
    "norm_backward",
    "pool",
    "moves",
    "loss_math",
    "loss_maps",
    "loss_assign",
    "loss_slots",
    "weight_gradient",
)
INTERPRETED = {"TRITON_INTERPRET": "1"}


def load_interpreted_programs() -> None:
    """Import the programs for the interpreter, which Triton chooses while it is imported itself.

    torchvision and torch.onnx load Triton too, without the interpreter; such a copy is given up.
    """
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" or name.startswith("utils.kernels.programs"):
            del sys.modules[name]
    with mock.patch.dict(os.environ, INTERPRETED):
        for name in PROGRAMS:
            importlib.import_module(f"utils.kernels.programs.{name}")


if has_triton() and not torch.cuda.is_available():
    load_interpreted_programs()


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where kernels run here; skips without Triton."""
    if not has_triton():
        pytest.skip("needs the package triton")
    if torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        with mock.patch.dict(os.environ, INTERPRETED):
            yield torch.device("cpu")
