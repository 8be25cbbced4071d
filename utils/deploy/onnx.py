"""Writing of ONNX files: one input, one output ``output0`` (B, 4 + nc, A), no custom operators, no side files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from utils.deploy.description import ExportDescription
from utils.deploy.end2end import SMALLEST_OPSET, NmsSettings, add_nms
from utils.log import LOGGER

OUTPUT_NAME = "output0"
OPSETS = range(11, 21)
"""Operator sets that the tracing exporter of torch can write."""


def write_onnx(
    network: nn.Module,
    images: Tensor,
    path: Path,
    description: ExportDescription,
    *,
    opset: int = 17,
    input_name: str = "images",
    simplify: bool = False,
    verbose: bool = False,
    nms: NmsSettings | None = None,
) -> None:
    """Write ``network`` as seen with ``images`` (B, 3, H, W) to ``path``.

    Only the axes that ``description`` calls dynamic are symbolic; all others are plain numbers in the file. With
    ``nms`` the file gives detections instead of the prediction, see :mod:`utils.deploy.end2end`.

    Raises:
        ImportError: the onnx package is missing.
        ValueError: an operator set that cannot be written, or a graph that does not pass the ONNX checker.
    """
    onnx = _import_onnx()
    if opset not in OPSETS:
        raise ValueError(f"--opset {opset}: expected {OPSETS[0]} to {OPSETS[-1]} (17 is a good choice)")
    if nms and opset < SMALLEST_OPSET:
        raise ValueError(f"--opset {opset}: NMS in the file needs {SMALLEST_OPSET} or more (17 is a good choice)")
    with torch.no_grad():
        shape = tuple(network(images).shape)
        # The exporter that traces: it keeps the operator set asked for and writes one self-contained file.
        torch.onnx.export(
            network,
            (images,),
            str(path),
            opset_version=opset,
            input_names=[input_name],
            output_names=[OUTPUT_NAME],
            dynamic_axes=_dynamic_axes(description, input_name),
            do_constant_folding=True,
            verbose=verbose,
            dynamo=False,
        )
    model = onnx.load(str(path))
    if simplify:
        model = _simplified(model)
    _name_output_axes(model, description, shape)
    metadata = description.onnx_metadata()
    if nms:
        add_nms(model, nms, shape[1] - 4, None if description.dynamic_hw else shape[2])
        metadata["nms"] = json.dumps(asdict(nms))
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, metadata)
    del model.graph.value_info[:]  # exporter and simplifier leave shapes twice; inferred anew they are complete
    try:
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ValueError(f"the ONNX graph does not pass the checker: {error}") from error
    onnx.save(model, str(path))


def _import_onnx() -> ModuleType:
    try:
        import onnx
    except ImportError as error:
        raise ImportError("writing ONNX needs a package: pip install onnx onnxslim onnxruntime") from error
    return onnx


def _dynamic_axes(description: ExportDescription, input_name: str) -> dict[str, dict[int, str]] | None:
    if description.dynamic_hw:
        return {input_name: {0: "batch", 2: "height", 3: "width"}, OUTPUT_NAME: {0: "batch", 2: "anchors"}}
    if description.dynamic:
        return {input_name: {0: "batch"}, OUTPUT_NAME: {0: "batch"}}
    return None


def _name_output_axes(model: object, description: ExportDescription, shape: tuple[int, ...]) -> None:
    """Write the output shape (batch, 4 + nc, anchors) with numbers wherever an axis is fixed.

    Shape inference leaves axes unknown behind reshapes, though they follow from the export.
    """
    free = _dynamic_axes(description, "") or {OUTPUT_NAME: {}}
    axes = model.graph.output[0].type.tensor_type.shape.dim
    for index, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        if index in free[OUTPUT_NAME]:
            axis.dim_param = free[OUTPUT_NAME][index]
        else:
            axis.dim_value = size


def _simplified(model: object) -> object:
    """Simplify with onnxslim; without it, or if it fails, say so and go on with the graph as exported."""
    try:
        import onnxslim
    except ImportError:
        LOGGER.warning("ONNX: --simplify had NO effect, the file is not simplified: pip install onnxslim")
        return model
    before = len(model.graph.node)
    try:
        slim = onnxslim.slim(model)
    except Exception as error:  # a third-party optimiser on an optional path; the plain graph is complete without it
        LOGGER.warning(f"ONNX: onnxslim failed ({error}), the file is NOT simplified")
        return model
    LOGGER.info(f"ONNX: simplified from {before} to {len(slim.graph.node)} nodes")
    return slim
