"""Building blocks of the YOLOv9 and GELAN networks.

Attribute names and their order of registration decide the keys of a ``state_dict`` and the order of optimizer
parameters, so neither may change. Shapes are NCHW throughout. The default activation is SiLU; a model that wants
another one replaces it after construction with :func:`set_activation`, so no choice outlives its model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.upstream import known_as

__all__ = [
    "AConv",
    "ADown",
    "Bottleneck",
    "CBFuse",
    "CBLinear",
    "Concat",
    "Conv",
    "DFL",
    "DWConv",
    "ELAN1",
    "RepConvN",
    "RepNBottleneck",
    "RepNCSP",
    "RepNCSPELAN4",
    "SP",
    "SPPELAN",
    "Silence",
    "same_padding",
    "set_activation",
]

IntOrPair = int | Sequence[int]


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


@known_as("models.common")
class Conv(nn.Module):
    """Convolution without bias, batch norm, activation.

    After fusing, ``conv`` carries a bias and ``bn`` is None.
    """

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
        self.conv = nn.Conv2d(c1, c2, k, s, same_padding(k, p, d), groups=g, dilation=d, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = _activation(act)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.bn is not None:
            x = self.bn(x)
        return self.act(x)


@known_as("models.common")
class DWConv(Conv):
    """Depth-wise flavour of :class:`Conv`: as many groups as both widths allow."""

    def __init__(
        self, c1: int, c2: int, k: IntOrPair = 1, s: IntOrPair = 1, d: int = 1, act: bool | nn.Module = True
    ) -> None:
        super().__init__(c1, c2, k, s, g=math.gcd(c1, c2), d=d, act=act)


def _smooth(x: Tensor) -> Tensor:
    """Average 2x2 neighbours at stride 1: (B, C, H, W) -> (B, C, H - 1, W - 1)."""
    return F.avg_pool2d(x, kernel_size=2, stride=1)


@known_as("models.common")
class AConv(nn.Module):
    """Halve the resolution: average neighbours, then a 3x3 convolution of stride 2."""

    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.cv1 = Conv(c1, c2, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv1(_smooth(x))


@known_as("models.common")
class ADown(nn.Module):
    """Halve the resolution along two paths: one half of the channels is convolved, the other is max-pooled first."""

    def __init__(self, c1: int, c2: int) -> None:
        super().__init__()
        self.c = c2 // 2
        self.cv1 = Conv(c1 // 2, self.c, 3, 2, 1)
        self.cv2 = Conv(c1 // 2, self.c, 1, 1, 0)

    def forward(self, x: Tensor) -> Tensor:
        # A width known from construction, not from the tensor: exporters need no shape arithmetic.
        half = self.cv1.conv.in_channels
        convolved, pooled = _smooth(x).split((half, half), 1)
        return torch.cat((self.cv1(convolved), self.cv2(F.max_pool2d(pooled, 3, 2, 1))), 1)


@known_as("models.common")
class RepConvN(nn.Module):
    """Sum of a 3x3 and a 1x1 convolution (each with its norm), then the activation; never an identity branch.

    ``d``, ``bn`` and ``deploy`` are accepted for the sake of the signature and have no effect. Fusing replaces both
    branches by one biased 3x3 convolution called ``conv``.
    """

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
        return self.act(self.conv1(x) + self.conv2(x))


@known_as("models.common")
class Bottleneck(nn.Module):
    """Two convolutions with an optional residual connection (used only where input and output widths agree)."""

    first_block: type[nn.Module] = Conv

    def __init__(
        self,
        c1: int,
        c2: int,
        shortcut: bool = True,
        g: int = 1,
        k: Sequence[int] = (3, 3),
        e: float = 0.5,
    ) -> None:
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = self.first_block(c1, hidden, k[0], 1)
        self.cv2 = Conv(hidden, c2, k[1], 1, g=g)
        self.add = shortcut and c1 == c2

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


@known_as("models.common")
class RepNBottleneck(Bottleneck):
    """Bottleneck whose first convolution is a :class:`RepConvN`."""

    first_block = RepConvN


@known_as("models.common")
class RepNCSP(nn.Module):
    """Cross-stage partial block: one half runs through n bottlenecks, the other goes straight to the last 1x1."""

    def __init__(self, c1: int, c2: int, n: int = 1, shortcut: bool = True, g: int = 1, e: float = 0.5) -> None:
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, hidden, 1, 1)
        self.cv2 = Conv(c1, hidden, 1, 1)
        self.cv3 = Conv(2 * hidden, c2, 1)
        self.m = nn.Sequential(*(RepNBottleneck(hidden, hidden, shortcut, g, e=1.0) for _ in range(n)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class _AggregationBlock(nn.Module):
    """Shared forward of the ELAN blocks: halves (a, b), two stages behind b, a 1x1 over everything."""

    c: int

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.cv1(x).split((self.c, self.c), 1)
        stage_one = self.cv2(second)
        stage_two = self.cv3(stage_one)
        return self.cv4(torch.cat((first, second, stage_one, stage_two), 1))


@known_as("models.common")
class RepNCSPELAN4(_AggregationBlock):
    """GELAN block of the YOLOv9 paper: layer aggregation over two RepNCSP stages with ``c5`` bottlenecks each."""

    def __init__(self, c1: int, c2: int, c3: int, c4: int, c5: int = 1) -> None:
        super().__init__()
        self.c = c3 // 2
        self.cv1 = Conv(c1, c3, 1, 1)
        self.cv2 = nn.Sequential(RepNCSP(c3 // 2, c4, c5), Conv(c4, c4, 3, 1))
        self.cv3 = nn.Sequential(RepNCSP(c4, c4, c5), Conv(c4, c4, 3, 1))
        self.cv4 = Conv(c3 + 2 * c4, c2, 1, 1)


@known_as("models.common")
class ELAN1(_AggregationBlock):
    """Light layer aggregation: one 3x3 convolution per stage."""

    def __init__(self, c1: int, c2: int, c3: int, c4: int) -> None:
        super().__init__()
        self.c = c3 // 2
        self.cv1 = Conv(c1, c3, 1, 1)
        self.cv2 = Conv(c3 // 2, c4, 3, 1)
        self.cv3 = Conv(c4, c4, 3, 1)
        self.cv4 = Conv(c3 + 2 * c4, c2, 1, 1)


@known_as("models.common")
class SP(nn.Module):
    """Size-preserving max pooling."""

    def __init__(self, k: int = 3, s: int = 1) -> None:
        super().__init__()
        self.m = nn.MaxPool2d(kernel_size=k, stride=s, padding=k // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x)


@known_as("models.common")
class SPPELAN(nn.Module):
    """Spatial pyramid pooling: three 5x5 poolings in a row, all steps concatenated."""

    def __init__(self, c1: int, c2: int, c3: int) -> None:
        super().__init__()
        self.c = c3
        self.cv1 = Conv(c1, c3, 1, 1)
        self.cv2 = SP(5)
        self.cv3 = SP(5)
        self.cv4 = SP(5)
        self.cv5 = Conv(4 * c3, c2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        steps = [self.cv1(x)]
        for pool in (self.cv2, self.cv3, self.cv4):
            steps.append(pool(steps[-1]))
        return self.cv5(torch.cat(steps, 1))


@known_as("models.common")
class Concat(nn.Module):
    """Concatenate a list of maps."""

    def __init__(self, dimension: int = 1) -> None:
        super().__init__()
        self.d = dimension

    def forward(self, x: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(x), self.d)


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


@known_as("models.common")
class CBFuse(nn.Module):
    """Add one slice of each CBLinear input, resized by nearest neighbour, to the last input."""

    def __init__(self, idx: Sequence[int]) -> None:
        super().__init__()
        self.idx = list(idx)

    def forward(self, xs: Sequence[tuple[Tensor, ...] | Tensor]) -> Tensor:
        target = xs[-1]
        terms = [
            F.interpolate(slices[index], size=target.shape[2:], mode="nearest")
            for slices, index in zip(xs[:-1], self.idx, strict=True)
        ]
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
