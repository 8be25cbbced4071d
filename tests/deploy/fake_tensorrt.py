"""Stand-ins for the tensorrt package of three generations, as far as this program uses it.

Building records what was asked for. Running doubles the input's first plane sums, written to the addresses given, so
that shapes, splitting into batches and addresses are really used.
"""

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace
from typing import Any

import numpy as np

ROWS, ANCHORS = 7, 5


class TensorIOMode(enum.Enum):
    INPUT = 0
    OUTPUT = 1


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1


class Engine:
    """images (batch, 3, 8, 8) -> output0 (batch, ROWS, ANCHORS), batch free up to ``largest`` (0 = fixed to 2)."""

    num_io_tensors = 2

    def __init__(self, largest: int) -> None:
        self.largest = largest

    def get_tensor_name(self, index: int) -> str:
        return ("images", "output0")[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name == "images" else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType.FLOAT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        batch = -1 if self.largest else 2
        return (batch, 3, 8, 8) if name == "images" else (batch, ROWS, ANCHORS)

    def get_tensor_profile_shape(self, name: str, profile: int) -> tuple[tuple[int, ...], ...]:
        return tuple((count, 3, 8, 8) for count in (1, 2, self.largest))

    def create_execution_context(self) -> Context:
        return Context(self)


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.addresses, self.shape, self.batches = engine, {}, (), []

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self.shape[0], ROWS, ANCHORS)

    def execute_async_v3(self, stream: int) -> bool:
        if self.engine.largest and self.shape[0] > self.engine.largest:
            return False
        self.batches.append(self.shape[0])
        count = int(np.prod(self.shape))
        images = np.ctypeslib.as_array(ctypes.cast(self.addresses["images"], ctypes.POINTER(ctypes.c_float)), (count,))
        sums = 2 * images.reshape(self.shape)[:, 0].sum((1, 2))
        result = np.ascontiguousarray(np.broadcast_to(sums[:, None, None], (len(sums), ROWS, ANCHORS)), np.float32)
        ctypes.memmove(self.addresses["output0"], result.ctypes.data, result.nbytes)
        return True


def make(version: str, *, largest: int = 4, parses: bool = True, builds: bool = True, fits: bool = True) -> Any:
    """A module like tensorrt ``version``; ``calls`` on it lists what was asked for."""
    major = int(version.split(".")[0])
    calls: list[tuple] = []
    trt = SimpleNamespace(__version__=version, calls=calls, TensorIOMode=TensorIOMode)
    trt.Logger = type("Logger", (), {"WARNING": 1, "VERBOSE": 2, "__init__": lambda self, level: None})
    trt.MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
    trt.NetworkDefinitionCreationFlag = SimpleNamespace(**({"EXPLICIT_BATCH": 0} if major == 8 else {}))
    trt.BuilderFlag = SimpleNamespace(TF32="tf32", **({"FP16": "fp16"} if major < 11 else {}))

    def record(name: str) -> Any:
        return lambda *arguments: calls.append((name, *arguments))

    profile = SimpleNamespace(set_shape=record("set_shape"))
    config = SimpleNamespace(
        set_memory_pool_limit=record("workspace"),
        add_optimization_profile=record("profile"),
        set_flag=record("flag"),
        clear_flag=record("clear"),
    )

    class Builder:
        def __init__(self, logger: object) -> None:
            if major < 10:
                self.platform_has_fast_fp16 = True

        def create_network(self, flags: int) -> str:
            calls.append(("network", flags))
            return "network"

        def create_builder_config(self) -> object:
            return config

        def create_optimization_profile(self) -> object:
            return profile

        def build_serialized_network(self, network: object, config: object) -> bytes | None:
            return b"ftrt-program" if builds else None

    class OnnxParser:
        num_errors = 2

        def __init__(self, network: object, logger: object) -> None:
            pass

        def parse(self, content: bytes) -> bool:
            calls.append(("parse", content))
            return parses

        def get_error(self, index: int) -> str:
            return f"fault {index}"

    class Runtime:
        def __init__(self, logger: object) -> None:
            pass

        def deserialize_cuda_engine(self, program: bytes) -> Engine | None:
            calls.append(("deserialize", program))
            return Engine(largest) if fits else None

    trt.Builder, trt.OnnxParser, trt.Runtime = Builder, OnnxParser, Runtime
    return trt
