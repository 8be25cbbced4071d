"""Building blocks of the YOLOv9 and GELAN networks.

Attribute names and their order of registration decide the keys of a ``state_dict`` and the order of optimizer
parameters, so neither may change. Shapes are NCHW throughout. The default activation is SiLU; a model that wants
another one replaces it after construction with :func:`set_activation`, so no choice outlives its model.

Every block computes with plain operations of torch, until :func:`use_fused_kernels` lets those of a model train with
the kernels of :mod:`utils.kernels` where these apply. Results differ by rounding only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.fast_paths import beside, convolution, joint_sum, trains_fast
from models.upstream import known_as
from utils.kernels.layout import is_watched
from utils.kernels.moves import enlarge_nearest
from utils.kernels.norm import bn_act, bn_add_act
from utils.kernels.norm_parts import bn_act_parts
from utils.kernels.pool import average_neighbours

__all__ = [
    "AConv",
    "ADown",
    "CBFuse",
    "CBLinear",
    "Concat",
    "Conv",
    "DFL",
    "DWConv",
    "RepConvN",
    "Silence",
    "Upsample",
    "same_padding",
    "set_activation",
    "use_fused_kernels",
    "without_autocast",
]

IntOrPair = int | Sequence[int]


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Switch autocast off where the kind of device knows it at all (the meta device does not)."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def same_padding(kernel: IntOrPair, padding: IntOrPair | None = None, dilation: int = 1) -> IntOrPair:
    """Return ``padding`` if given, else the one that keeps the size of a stride-1 convolution (odd kernels)."""
    if padding is not None:
        return padding
    if isinstance(kernel, int):
        return (dilation * (kernel - 1) + 1) // 2
    return [(dilation * (size - 1) + 1) // 2 for size in kernel]


def _activation(act: bool | nn.Module) -> nn.Module:
    """Turn the ``act`` argument of a block into a module: True = SiLU, a module = itself, else identity."""
    if act is True:
        return nn.SiLU(inplace=True)
    return act if isinstance(act, nn.Module) else nn.Identity()


class _NoMetaValues(nn.Module):
    """Draws no initial values on the meta device: there is nowhere to put them, and it takes time."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class _Conv2d(_NoMetaValues, nn.Conv2d):
    """A convolution while it is made."""


class _BatchNorm2d(_NoMetaValues, nn.BatchNorm2d):
    """A batch norm while it is made."""


@known_as("models.common")
class Conv(nn.Module):
    """Convolution without bias, batch norm, activation.

    After fusing, ``conv`` carries a bias and ``bn`` is None.
    """

    uses_kernels = False

    def __init__(
        self,
        c1: int,
        c2: int,
        k: IntOrPair = 1,
        s: IntOrPair = 1,
        p: IntOrPair | None = None,
        g: int = 1,
        d: int = 1,
        act: bool | nn.Module = True,
    ) -> None:
        super().__init__()
        self.conv = _Conv2d(c1, c2, k, s, same_padding(k, p, d), groups=g, dilation=d, bias=False)
        self.bn = _BatchNorm2d(c2)
        self.conv.__class__, self.bn.__class__ = nn.Conv2d, nn.BatchNorm2d  # which they are once they are made
        self.act = _activation(act)

    def forward(self, x: Tensor) -> Tensor:
        x = convolution(self, x)
        if self.bn is not None:
            if self.uses_kernels:
                return bn_act(x, self.bn, self.act)
            x = self.bn(x)
        return self.act(x)

    def parts(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        """Return ``self(x)`` cut into parts of ``widths`` channels."""
        if self.uses_kernels and self.bn is not None and not is_watched(self):
            return bn_act_parts(convolution(self, x), [self.bn], self.act, widths)
        return self(x).split(widths, 1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return ``residual + self(x)``."""
        if self.uses_kernels and self.bn is not None and not is_watched(self):
            return bn_act(convolution(self, x), self.bn, self.act, residual)
        return residual + self(x)


@known_as("models.common")
class DWConv(Conv):
    """Depth-wise flavour of :class:`Conv`: as many groups as both widths allow."""

    def __init__(
        self, c1: int, c2: int, k: IntOrPair = 1, s: IntOrPair = 1, d: int = 1, act: bool | nn.Module = True
    ) -> None:
        super().__init__(c1, c2, k, s, g=math.gcd(c1, c2), d=d, act=act)


def _smooth(x: Tensor, uses_kernels: bool) -> Tensor:
    """Average 2x2 neighbours at stride 1: (B, C, H, W) -> (B, C, H - 1, W - 1)."""
    return average_neighbours(x) if uses_kernels else F.avg_pool2d(x, kernel_size=2, stride=1)


@known_as("models.common")
class AConv(nn.Module):
    """Halve the resolution: average neighbours, then a 3x3 convolution of stride 2."""

    uses_kernels = False

    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.cv1 = Conv(c1, c2, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv1(_smooth(x, self.uses_kernels and self.training))


@known_as("models.common")
class ADown(nn.Module):
    """Halve the resolution along two paths: one half of the channels is convolved, the other is max-pooled first."""

    uses_kernels = False

    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.c = c2 // 2
        self.cv1 = Conv(c1 // 2, self.c, 3, 2, 1)
        self.cv2 = Conv(c1 // 2, self.c, 1, 1, 0)

    def forward(self, x: Tensor) -> Tensor:
        # A width known from construction, not from the tensor: exporters need no shape arithmetic.
        half = self.cv1.conv.in_channels
        convolved, pooled = _smooth(x, self.uses_kernels and self.training).split((half, half), 1)
        return beside((self.cv1(convolved), self.cv2(F.max_pool2d(pooled, 3, 2, 1))), self)


@known_as("models.common")
class RepConvN(nn.Module):
    """Sum of a 3x3 and a 1x1 convolution (each with its norm), then the activation; never an identity branch.

    ``d``, ``bn`` and ``deploy`` are accepted for the sake of the signature and have no effect. Fusing replaces both
    branches by one biased 3x3 convolution called ``conv``.
    """

    uses_kernels = False

    def __init__(
        self,
        c1: int,
        c2: int,
        k: int = 3,
        s: int = 1,
        p: int = 1,
        g: int = 1,
        d: int = 1,
        act: bool | nn.Module = True,
        bn: bool = False,
        deploy: bool = False,
    ) -> None:
        super().__init__()
        if k != 3 or p != 1:
            raise ValueError(f"RepConvN needs kernel 3 and padding 1, not kernel {k} and padding {p}")
        self.g, self.c1, self.c2 = g, c1, c2
        self.act = _activation(act)
        self.bn = None
        self.conv1 = Conv(c1, c2, k, s, p, g, act=False)
        self.conv2 = Conv(c1, c2, 1, s, p - k // 2, g, act=False)

    @property
    def is_fused(self) -> bool:
        return "conv" in self._modules

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused:
            return self.act(self.conv(x))
        branches = (self.conv1, self.conv2)
        if self.uses_kernels and not any(branch.bn is None or is_watched(branch) for branch in branches):
            joint = joint_sum(x, branches, self.act)
            if joint is not None:
                return joint
            first, second = self.conv1.conv(x), self.conv2.conv(x)
            return bn_add_act(first, self.conv1.bn, second, self.conv2.bn, self.act)
        return self.act(self.conv1(x) + self.conv2(x))


@known_as("models.common")
class Concat(nn.Module):
    """Concatenate a list of maps."""

    uses_kernels = False

    def __init__(self, dimension: int = 1) -> None:
        super().__init__()
        self.d = dimension

    def forward(self, x: Sequence[Tensor]) -> Tensor:
        return beside(x, self) if self.d == 1 else torch.cat(tuple(x), self.d)


@known_as("models.common")
class CBLinear(nn.Module):
    """Biased convolution whose output is handed on in slices of the widths ``c2s``, one per reading level."""

    def __init__(
        self, c1: int, c2s: Sequence[int], k: IntOrPair = 1, s: IntOrPair = 1, p: IntOrPair | None = None, g: int = 1
    ) -> None:
        super().__init__()
        self.c2s = list(c2s)
        self.conv = nn.Conv2d(c1, sum(self.c2s), k, s, same_padding(k, p), groups=g, bias=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.conv(x).split(self.c2s, 1)


def enlarge(x: Tensor, size: Sequence[int] | None = None, scale: float | None = None) -> Tensor:
    """Resize (B, C, H, W) to ``size`` or by ``scale`` with nearest neighbours, in the type of ``x``.

    Autocast would do it in float32: the same values with twice the bytes, here and in all that reads them.
    """
    with without_autocast(x.device.type):
        return F.interpolate(x, size=size, scale_factor=scale, mode="nearest")


@known_as("torch.nn.modules.upsampling")
class Upsample(nn.Upsample):
    """torch's module, with nearest neighbours in half precision under autocast."""

    uses_kernels = False

    def forward(self, x: Tensor) -> Tensor:
        if self.mode != "nearest":
            return super().forward(x)
        if trains_fast(self) and self.size is None and self.scale_factor == 2:
            return enlarge_nearest(x, 2)
        return enlarge(x, self.size, self.scale_factor)


@known_as("models.common")
class CBFuse(nn.Module):
    """Add one slice of each CBLinear input, resized by nearest neighbour, to the last input."""

    def __init__(self, idx: Sequence[int]) -> None:
        super().__init__()
        self.idx = list(idx)

    def forward(self, xs: Sequence[tuple[Tensor, ...] | Tensor]) -> Tensor:
        target = xs[-1]
        terms = [enlarge(slices[index], target.shape[2:]) for slices, index in zip(xs[:-1], self.idx, strict=True)]
        total = terms[0]
        # One by one, the target last: the same bits as summing a stack, without holding the stack.
        for term in (*terms[1:], target):
            total = total + term
        return total


@known_as("models.common")
class Silence(nn.Module):
    """Pass the input on; makes the image itself reachable as a row of the network."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@known_as("models.common")
class DFL(nn.Module):
    """Expectation of a box distance over ``c1`` bins (Generalized Focal Loss, integral form of its section 3.2).

    (B, 4 * c1, A) logits -> (B, 4, A) distances in grid units, each in [0, c1 - 1].
    """

    def __init__(self, c1: int = 17) -> None:
        super().__init__()
        self.c1 = c1
        self.conv = nn.Conv2d(c1, 1, 1, bias=False)
        # On the CPU even where a network is laid out without values: these are no weights but constants.
        bins = torch.arange(c1, dtype=torch.float32, device="cpu").view(1, c1, 1, 1)
        self.conv.weight = nn.Parameter(bins, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        anchors = x.shape[2]
        probabilities = x.view(-1, 4, self.c1, anchors).transpose(2, 1).softmax(1)  # (B, c1, 4, A)
        if probabilities.dtype == self.conv.weight.dtype:
            expectation = self.conv(probabilities)  # (B, 1, 4, A)
        else:
            # Half-precision models are decoded in float32; the integers of the weight are exact in every type.
            expectation = F.conv2d(probabilities, self.conv.weight.to(probabilities.dtype))
        return expectation.squeeze(1)


def set_activation(module: nn.Module, activation: nn.Module | None = None) -> None:
    """Replace every default activation below ``module``; modules given explicitly as ``act`` stay.

    All Conv blocks share one instance and all RepConvN another (an activation has no state), which keeps the module
    count of a summary equal to upstream's. ``activation`` None keeps SiLU and only does the sharing.
    """
    for_conv = activation if activation is not None else nn.SiLU()
    if hasattr(for_conv, "inplace"):
        for_conv.inplace = True
    for_repconv = copy.deepcopy(for_conv)
    for block in module.modules():
        if isinstance(block, (Conv, RepConvN)) and type(block.act) is nn.SiLU:
            block.act = for_repconv if isinstance(block, RepConvN) else for_conv


def use_fused_kernels(model: nn.Module, on: bool = True) -> int:
    """Let the blocks of ``model`` train with fused kernels, or stop them; return how many blocks were switched.

    A block takes the plain path anyway in eval mode, off CUDA and wherever else the kernels do not apply. Whether they
    work on a device is told by :func:`utils.kernels.check.fused_kernels_work`.
    """
    blocks = [module for module in model.modules() if hasattr(type(module), "uses_kernels")]
    for block in blocks:
        block.__dict__.pop("uses_kernels", None)  # off is the default of the class: no trace in copies and files
        if on:
            block.uses_kernels = True
    return len(blocks)
