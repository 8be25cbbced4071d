"""The question whether kernels can be used is answered with a reason, and wrong results are noticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from utils.kernels import check
from utils.kernels.check import TOLERANCES, difference_from_plain, fused_kernels_work


@pytest.fixture(autouse=True)
def forget_answers() -> None:
    fused_kernels_work.cache_clear()


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, difference: object) -> None:
    """Let the check run as if there were a device, with a given outcome of the comparison."""

    def compared(device: torch.device, dtype: torch.dtype) -> float:
        if isinstance(difference, Exception):
            raise difference
        return difference

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "has_triton", lambda: True)
    monkeypatch.setattr(check, "difference_from_plain", compared)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_fused_results_agree(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter reads bfloat16 as whole numbers")
    assert 0 < difference_from_plain(device, dtype) <= TOLERANCES[dtype]


def test_every_fault_counts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def biased(x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(x, 2, 1) * torch.tensor(1.01, device=x.device)

    monkeypatch.setattr(check, "average_neighbours", biased)
    assert difference_from_plain(device, torch.float32) > TOLERANCES[torch.float32]
    monkeypatch.setattr(check, "average_neighbours", lambda x: biased(x) * torch.nan)
    assert difference_from_plain(device, torch.float32) == float("inf")


def test_other_devices_have_no_kernels() -> None:
    assert "need a CUDA device, not cpu" in fused_kernels_work("cpu")


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (0.5, "wrong on cuda: torch.float32 results differ by 5.0e-01"),
        (float("inf"), "differ by inf"),
        (RuntimeError("Failed to find C compiler\nline two"), "RuntimeError: Failed to find C compiler."),
        (OSError(), "OSError: no message"),
    ],
    ids=["wrong", "not finite", "no compiler", "silent"],
)
def test_reasons_are_told(difference: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, difference)
    assert words in fused_kernels_work("cuda")


def test_no_reason_if_all_is_well_and_the_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 0.0)
    assert fused_kernels_work("cuda") == ""
    pretend_cuda(monkeypatch, 1.0)
    assert fused_kernels_work("cuda") == ""
    monkeypatch.setattr(check, "has_triton", lambda: False)
    fused_kernels_work.cache_clear()
    assert "package triton" in fused_kernels_work("cuda")


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_compared_are_float32_and_the_type_of_mixed_precision(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    pretend_cuda(monkeypatch, 0.0)
    monkeypatch.setattr(check, "difference_from_plain", lambda _, kind: seen.append(kind) or 0.0)
    assert fused_kernels_work("cuda", dtype) == ""
    assert seen == [torch.float32, *([dtype] if dtype else [])]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_kernels_work_on_this_device(dtype: torch.dtype | None) -> None:
    assert fused_kernels_work("cuda", dtype) == ""
