"""Peaks by name, and the share of them in use."""

from __future__ import annotations

import pytest
import torch

from utils.train.throughput import device_peak_tflops, flop_utilisation, number_type, peak_tflops


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA L4", "fp16", 121),
        ("NVIDIA L40S", "fp16", 362),
        ("NVIDIA RTX A6000", "fp32", 38.7),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("Tesla T4", "tf32", 8.1),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "fp16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp16", None),
        ("NVIDIA H20", "fp16", None),
        ("NVIDIA RTX A4000", "fp16", None),
        ("Some card of tomorrow", "fp16", None),
    ],
)
def test_peaks(name, kind, expected) -> None:
    assert peak_tflops(name, kind) == expected


def test_unknown_number_type_is_refused() -> None:
    with pytest.raises(ValueError, match="int8.*expected fp16"):
        peak_tflops("NVIDIA H200", "int8")


def test_number_type_follows_autocast() -> None:
    assert number_type(torch.float16) == "fp16"
    assert number_type(torch.bfloat16) == "bf16"
    assert number_type(None) in ("tf32", "fp32")


def test_share_of_the_peak() -> None:
    assert flop_utilisation(1000, 39.5e9, 989) == pytest.approx(3 * 39.5 / 989)
    assert flop_utilisation(1000, 39.5e9, None) is None
    assert flop_utilisation(1000, 0, 989) is None
    assert device_peak_tflops(torch.device("cpu"), None) is None
