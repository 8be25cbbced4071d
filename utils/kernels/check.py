"""Whether the fused kernels compile and agree with the plain operations on a device."""

from __future__ import annotations

import copy
import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.kernels.biased import convolve_pointwise
from utils.kernels.launch import HALF_TYPES
from utils.kernels.layout import has_triton
from utils.kernels.moves import concatenate, enlarge_nearest, largest_neighbours
from utils.kernels.norm import bn_act, bn_add_act
from utils.kernels.pool import average_neighbours
from utils.kernels.weight_gradient import convolve

CHANNELS, SIDE = 32, 9
NARROW = ((32, 32, 1), (32, 64, 1), (48, 48, 1), (48, 96, 1), (3, 32, 2))
"""Inputs, outputs and stride of convolutions whose weight gradients are kernels of our own."""
WEIGHT_SCALE = 0.1  # keeps sums of many products near 1
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest difference from float64 results, as a share of their largest value."""


@cache
def fused_kernels_work(device: torch.device | str, dtype: torch.dtype | None = torch.float16) -> str:
    """Return an empty text if the kernels give the right results on ``device``, else a sentence that says why not.

    Compared are results in float32, and in the ``dtype`` of mixed precision. The first call compiles a few programs,
    which takes seconds; the answer is kept. Random states are left alone.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return f"Fused kernels need a CUDA device, not {device.type}."
    if not torch.cuda.is_available():
        return "Fused kernels need a CUDA device, and none answers."
    if not has_triton():
        return "Fused kernels need the package triton, which comes with CUDA builds of torch for Linux."
    try:
        differences = {kind: difference_from_plain(device, kind) for kind in (torch.float32, dtype) if kind}
    except Exception as error:  # whatever a missing compiler, an old driver or an unknown GPU makes Triton raise
        reason = next(iter(str(error).strip().splitlines()), "no message")
        return f"Fused kernels do not run on {device}: {type(error).__name__}: {reason}."
    for kind, difference in differences.items():
        if not difference <= TOLERANCES[kind]:
            return f"Fused kernels are wrong on {device}: {kind} results differ by {difference:.1e} of the largest."
    return ""


def difference_from_plain(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference between fused results in ``dtype`` and plain ones in float64.

    Compared are outputs, gradients and running statistics of a few small blocks, each as a share of the largest value.
    """
    # In float32 a card may round what it convolves to fewer digits: there only what surrounds convolutions is compared.
    convolves = dtype in HALF_TYPES
    fused = _results(device, dtype, is_fused=True, convolves=convolves)
    plain = _results(torch.device("cpu"), torch.float64, is_fused=False, convolves=convolves)
    shares = [
        float((found.double().cpu() - expected).abs().max() / expected.abs().max())
        for found, expected in zip(fused, plain, strict=True)
    ]
    return max(math.inf if math.isnan(share) else share for share in shares)


def _results(device: torch.device, dtype: torch.dtype, *, is_fused: bool, convolves: bool) -> list[Tensor]:
    """Outputs, gradients and running statistics of a few small blocks one behind the other."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator) * scale
        placed = drawn.bfloat16().half().to(device=device, dtype=dtype)  # exact in every type that is compared
        return (placed.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else placed).requires_grad_()

    inputs = [values(2, CHANNELS, SIDE, SIDE) for _ in range(2)]
    weights = [
        values(CHANNELS, CHANNELS, 3, 3, scale=WEIGHT_SCALE),
        values(CHANNELS, 2 * CHANNELS, 1, 1, scale=WEIGHT_SCALE),
        values(CHANNELS),
    ]
    norm = nn.BatchNorm2d(CHANNELS, device=device)
    norms = [norm.to(torch.float64 if dtype == torch.float64 else torch.float32), copy.deepcopy(norm)]
    norms.append(copy.deepcopy(norms[0]))
    run = _fused_outputs if is_fused else _plain_outputs
    outputs = run(inputs, norms, weights if convolves else None)
    for inside, outside, stride in NARROW if convolves else ():  # each cuts its weight gradient in another way
        x, weight = values(2, inside, 8, 8), values(outside, inside, 3, 3, scale=WEIGHT_SCALE)
        inputs.append(x)
        weights.append(weight)
        outputs.append(convolve(x, weight, stride) if is_fused else F.conv2d(x, weight, None, stride, 1))
    total = 0
    for output in outputs:
        shares = torch.linspace(-1, 1, output.numel(), device=device).view(output.shape)
        total = total + (output.to(shares.dtype) * shares).sum()
    total.backward()
    gradients = [x.grad for x in (inputs + weights if convolves else inputs)]
    parameters = [parameter.grad for module in norms for parameter in module.parameters()]
    running = [buffer for module in norms for buffer in (module.running_mean, module.running_var)]
    return [*(output.detach() for output in outputs), *gradients, *parameters, *running]


def _fused_outputs(inputs: list[Tensor], norms: list[nn.BatchNorm2d], weights: list[Tensor] | None) -> list[Tensor]:
    silu = nn.SiLU()
    total = bn_add_act(inputs[0], norms[0], inputs[1], norms[1], silu)
    mean = average_neighbours(bn_act(total, norms[2], silu, residual=total))
    pooled = largest_neighbours(inputs[0], 3)  # of values that are the same in every type, hence places too
    if weights is None:
        return [enlarge_nearest(concatenate([mean, mean]), 2), pooled]
    both = concatenate([convolve(mean, weights[0]), mean])
    return [enlarge_nearest(convolve_pointwise(both, weights[1], weights[2]), 2), pooled]


def _plain_outputs(inputs: list[Tensor], norms: list[nn.BatchNorm2d], weights: list[Tensor] | None) -> list[Tensor]:
    silu = nn.SiLU()
    total = silu(norms[0](inputs[0]) + norms[1](inputs[1]))
    mean = F.avg_pool2d(total + silu(norms[2](total)), 2, 1)
    pooled = F.max_pool2d(inputs[0], 3, 1, 1)
    if weights is None:
        return [F.interpolate(torch.cat([mean, mean], 1), scale_factor=2.0), pooled]
    both = torch.cat([F.conv2d(mean, weights[0], padding=1), mean], 1)
    return [F.interpolate(F.conv2d(both, weights[1], weights[2]), scale_factor=2.0), pooled]
