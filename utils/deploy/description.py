"""What an exported file says about itself, in the two forms that loaders of such files expect."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExportDescription:
    """Facts stored inside an exported file.

    Attributes:
        names: class index -> name.
        stride: largest stride; free heights and widths must be multiples of it.
        shape: input (B, 3, H, W) of the export.
        half: whether input and weights are float16 (the output is float32 all the same).
        dynamic: whether the batch size is free.
        dynamic_hw: whether height and width are free.
    """

    names: dict[int, str]
    stride: int
    shape: tuple[int, int, int, int]
    half: bool = False
    dynamic: bool = False
    dynamic_hw: bool = False

    def plain(self) -> dict[str, object]:
        """Content of the description beside an OpenVINO network and in front of an engine."""
        return {
            "stride": self.stride,
            "names": dict(self.names),
            "task": "detect",
            "imgsz": list(self.shape[2:]),
            "batch": self.shape[0],
            "half": self.half,
            "dynamic": {"batch": self.dynamic or self.dynamic_hw, "size": self.dynamic_hw},
        }

    def script_config(self) -> dict[str, object]:
        """Content of ``config.txt`` in a TorchScript file."""
        return {
            "shape": list(self.shape),
            "stride": self.stride,
            "names": {str(index): name for index, name in self.names.items()},
            "task": "detect",
            "half": self.half,
            "dynamic_hw": self.dynamic_hw,
        }

    def onnx_metadata(self) -> dict[str, str]:
        """Metadata properties of an ONNX file; ``names`` is the text of a Python literal, as other loaders expect."""
        return {
            "stride": str(self.stride),
            "names": str(self.names),
            "task": "detect",
            "imgsz": json.dumps(list(self.shape[2:])),
            "batch": str(self.shape[0]),
            "dynamic": json.dumps({"batch": self.dynamic or self.dynamic_hw, "size": self.dynamic_hw}),
        }
