"""What a card could compute at best, and which share of that a training run uses.

Peaks are the makers' figures for dense matrices in TFLOP/s, tensor cores included, half precision with float32
accumulation. A card that is not in the table, a slice of one (MIG) or a mobile version has no peak here: no figure is
better than a wrong one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

TRAINING_PASSES = 3  # backward costs twice the forward pass: gradients of the inputs and of the weights


@dataclass(frozen=True)
class Peak:
    """Peak arithmetic in TFLOP/s per number type; None = the card lacks it."""

    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float


# The first pattern found in the name counts, so versions of a card stand before the card itself.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"\b(H100|H200) NVL\b", Peak(835, 835, 417, 60)),
    (r"\bH100 PCIe\b", Peak(756, 756, 378, 51)),
    (r"\b(H100|H200|GH200)\b", Peak(989, 989, 494, 67)),
    (r"\bA100\b", Peak(312, 312, 156, 19.5)),
    (r"\bA30\b", Peak(165, 165, 82, 10.3)),
    (r"\bA10\b", Peak(125, 125, 62.5, 31.2)),
    (r"\bA40\b", Peak(149.7, 149.7, 74.8, 37.4)),
    (r"\bL40S\b", Peak(362, 362, 183, 91.6)),
    (r"\bL40\b", Peak(181, 181, 90.5, 90.5)),
    (r"\bL4\b", Peak(121, 121, 60, 30.3)),
    (r"\bRTX 6000 Ada\b", Peak(364, 364, 182, 91.1)),
    (r"\bRTX A6000\b", Peak(154.8, 154.8, 77.4, 38.7)),
    (r"\bRTX 4090\b", Peak(165.2, 165.2, 82.6, 82.6)),
    (r"\bRTX 3090\b", Peak(71, 71, 35.6, 35.6)),
    (r"\bV100-PCIE\b", Peak(112, None, None, 14)),
    (r"\bV100-SXM", Peak(125, None, None, 15.7)),
    (r"\bT4\b", Peak(65, None, None, 8.1)),
)
_OTHER_VERSION = re.compile(r"\bMIG\b|Laptop|Max-Q|\b(4090 D|3090 Ti)\b")


def number_type(dtype: torch.dtype | None) -> str:
    """Name the arithmetic that convolutions use under autocast to ``dtype`` (None: float32 weights and inputs)."""
    if dtype == torch.float16:
        return "fp16"
    if dtype == torch.bfloat16:
        return "bf16"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"


def peak_tflops(device_name: str, kind: str) -> float | None:
    """Return the peak of a card for ``fp16``, ``bf16``, ``tf32`` or ``fp32``, or None when it is not known.

    A card without tf32 computes such work in fp32.

    Raises:
        ValueError: another number type.
    """
    if kind not in ("fp16", "bf16", "tf32", "fp32"):
        raise ValueError(f"number type {kind!r}: expected fp16, bf16, tf32 or fp32")
    if _OTHER_VERSION.search(device_name):
        return None
    for pattern, peak in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return peak.fp32 if kind == "tf32" and peak.tf32 is None else getattr(peak, kind)
    return None


def device_peak_tflops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Return the peak of a torch device; None on anything but a known CUDA card."""
    return peak_tflops(torch.cuda.get_device_name(device), number_type(dtype)) if device.type == "cuda" else None


def flop_utilisation(images_per_s: float, forward_flops: float, peak: float | None) -> float | None:
    """Return the share of the peak that training uses: images/s x 3 x forward FLOPs of an image / peak.

    ``forward_flops`` counts a multiplication and its addition as two. None where the peak or the count is unknown.
    """
    if not peak or not forward_flops:
        return None
    return images_per_s * TRAINING_PASSES * forward_flops / (peak * 1e12)
