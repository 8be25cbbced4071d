"""Whether the fused kernels compile and agree with the plain operations on a device."""

from __future__ import annotations

import copy
import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.kernels.layout import has_triton
from utils.kernels.norm import bn_act, bn_add_act
from utils.kernels.pool import average_neighbours

CHANNELS, SIDE = 32, 9
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3}
"""Largest difference from float64 results, as a share of their largest value."""


@cache
def fused_kernels_work(device: torch.device | str) -> str:
    """Return an empty text if the kernels give the right results on ``device``, else a sentence that says why not.

    The first call compiles a few programs, which takes seconds; the answer is kept. Random states are left alone.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return f"Fused kernels need a CUDA device, not {device.type}."
    if not torch.cuda.is_available():
        return "Fused kernels need a CUDA device, and none answers."
    if not has_triton():
        return "Fused kernels need the package triton, which comes with CUDA builds of torch for Linux."
    try:
        differences = {dtype: difference_from_plain(device, dtype) for dtype in TOLERANCES}
    except Exception as error:  # whatever a missing compiler, an old driver or an unknown GPU makes Triton raise
        reason = next(iter(str(error).strip().splitlines()), "no message")
        return f"Fused kernels do not run on {device}: {type(error).__name__}: {reason}."
    for dtype, difference in differences.items():
        if not difference <= TOLERANCES[dtype]:
            return f"Fused kernels are wrong on {device}: {dtype} results differ by {difference:.1e} of the largest."
    return ""


def difference_from_plain(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference between fused results in ``dtype`` and plain ones in float64.

    Compared are outputs, gradients and running statistics of a few small blocks, each as a share of the largest value.
    """
    fused = _results(device, dtype, is_fused=True)
    plain = _results(torch.device("cpu"), torch.float64, is_fused=False)
    shares = [
        float((found.double().cpu() - expected).abs().max() / expected.abs().max())
        for found, expected in zip(fused, plain, strict=True)
    ]
    return max(math.inf if math.isnan(share) else share for share in shares)


def _results(device: torch.device, dtype: torch.dtype, is_fused: bool) -> list[Tensor]:
    """Output, gradients and statistics of: average, norm + norm with SiLU, norm with SiLU and a residual."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, CHANNELS, SIDE, SIDE)

    def values() -> Tensor:
        drawn = torch.randn(shape, generator=generator).half()  # exact in every type that is compared
        placed = drawn.to(device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
        return placed.requires_grad_()

    inputs = values(), values()
    norm = nn.BatchNorm2d(CHANNELS, device=device)
    norms = [norm.to(torch.float64 if dtype == torch.float64 else torch.float32), copy.deepcopy(norm)]
    norms.append(copy.deepcopy(norms[0]))
    silu = nn.SiLU()
    if is_fused:
        total = bn_add_act(inputs[0], norms[0], inputs[1], norms[1], silu)
        output = average_neighbours(bn_act(total, norms[2], silu, residual=total))
    else:
        total = silu(norms[0](inputs[0]) + norms[1](inputs[1]))
        output = F.avg_pool2d(total + silu(norms[2](total)), 2, 1)
    weights = torch.linspace(-1, 1, output.numel(), device=device).view(output.shape)
    (output.to(weights.dtype) * weights).sum().backward()
    parameters = [parameter.grad for module in norms for parameter in module.parameters()]
    running = [buffer for module in norms for buffer in (module.running_mean, module.running_var)]
    return [output.detach(), *(x.grad for x in inputs), *parameters, *running]
