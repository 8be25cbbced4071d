"""Writing of TorchScript files: a traced network with its description stored inside as ``config.txt``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.deploy.description import ExportDescription


def write_torchscript(network: nn.Module, images: Tensor, path: Path, description: ExportDescription) -> None:
    """Trace ``network`` with ``images`` (B, 3, H, W) and write it to ``path``; LibTorch can load the file.

    The batch size stays free in the file. Height and width are those of ``images`` unless the network computes its
    priors in the graph.
    """
    with torch.no_grad():
        traced = torch.jit.trace(network, images, strict=False, check_trace=False)
    content = io.BytesIO()
    config = json.dumps(description.script_config(), ensure_ascii=False)
    torch.jit.save(traced, content, _extra_files={"config.txt": config})
    path.write_bytes(content.getbuffer())  # not by torch, whose writer ends the whole process on a full disk
