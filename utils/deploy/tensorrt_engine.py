"""Building of TensorRT engines from ONNX files, with versions 8.6 to the present, and the same as a trtexec line."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from models.runners import import_tensorrt, pack_engine
from utils.deploy.description import ExportDescription
from utils.log import LOGGER

DEFAULT_LARGEST_BATCH = 16
MEBIBYTES_FROM = 128
"""Workspaces from this number on are taken as MiB: nobody means 4096 GiB."""


def batch_profile(batch_size: int) -> tuple[int, int, int]:
    """Return smallest, usual and largest batch of an engine: 1, 4, 16, or up to ``batch_size`` where that is given."""
    largest = batch_size if batch_size > 1 else DEFAULT_LARGEST_BATCH
    return 1, max(1, largest // 4), largest


def workspace_mib(workspace: float) -> int:
    """Return the workspace in MiB; numbers below 128 mean GiB."""
    return round(workspace if workspace >= MEBIBYTES_FROM else workspace * 1024)


def trtexec_line(
    onnx_file: Path, description: ExportDescription, input_name: str = "images", workspace: float = 4
) -> str:
    """Compose the command that builds an engine (TensorRT 8.6 or later) from an ONNX file, to be typed as it is."""
    _, _, height, width = description.shape
    source, target = (shlex.quote(str(file)) for file in (onnx_file, onnx_file.with_suffix(".engine")))
    line = (
        f"trtexec --onnx={source} --saveEngine={target} --fp16 "
        f"--memPoolSize=workspace:{workspace_mib(workspace)} --skipInference"
    )
    if description.dynamic or description.dynamic_hw:
        profile = zip(("min", "opt", "max"), batch_profile(description.shape[0]), strict=True)
        name = shlex.quote(input_name)
        line += "".join(f" --{kind}Shapes={name}:{count}x3x{height}x{width}" for kind, count in profile)
    return line


def needs_half_graph() -> bool:
    """Whether this TensorRT takes the precision from the graph instead of a flag (weakly typed networks are gone)."""
    return not hasattr(import_tensorrt("writing an engine").BuilderFlag, "FP16")


def build_engine(
    onnx_file: Path,
    target: Path,
    description: ExportDescription,
    *,
    input_name: str = "images",
    workspace: float = 4,
    verbose: bool = False,
) -> None:
    """Build an engine from an ONNX file with a free batch axis and write it with its description in front.

    Raises:
        ImportError: the tensorrt package is missing.
        ValueError: TensorRT cannot read the graph, or cannot build an engine from it.
    """
    trt = import_tensorrt("writing an engine")
    logger = trt.Logger(trt.Logger.VERBOSE if verbose else trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(_explicit_batch(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(onnx_file.read_bytes()):
        reasons = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise ValueError(f"TensorRT {trt.__version__} cannot read the graph: {reasons}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_mib(workspace) << 20)
    profile = builder.create_optimization_profile()
    _, _, height, width = description.shape
    batches = batch_profile(description.shape[0])
    profile.set_shape(input_name, *((count, 3, height, width) for count in batches))
    config.add_optimization_profile(profile)
    if description.half:
        _allow_half(trt, builder, config)
    elif hasattr(trt.BuilderFlag, "TF32"):
        config.clear_flag(trt.BuilderFlag.TF32)  # full float32: whoever wants speed asks for half precision
    LOGGER.info(f"TensorRT {trt.__version__}: building for batches {'/'.join(map(str, batches))}; this takes minutes")
    program = builder.build_serialized_network(network, config)
    if program is None:
        raise ValueError(f"TensorRT {trt.__version__} could not build an engine; --verbose shows why")
    target.write_bytes(pack_engine(description.plain(), bytes(program)))


def _explicit_batch(trt: ModuleType) -> int:
    """Flag that TensorRT 8 needs for a batch axis in the graph; later versions know nothing else."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH", None)
    return 0 if flag is None else 1 << int(flag)


def _allow_half(trt: ModuleType, builder: Any, config: Any) -> None:
    if not hasattr(trt.BuilderFlag, "FP16"):
        return  # the graph itself is in half precision then
    if getattr(builder, "platform_has_fast_fp16", True):
        config.set_flag(trt.BuilderFlag.FP16)
    else:
        LOGGER.warning("this GPU is not faster in half precision, so the engine is built in full precision")
