"""Stages of the networks, built from :mod:`models.blocks`: bottlenecks, CSP and ELAN aggregation, pyramids.

The same rules hold as there: names and order of attributes are a contract, shapes are NCHW.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from models.blocks import Conv, RepConvN
from models.fast_paths import beside, joint_parts, trains_fast, two_readers
from models.upstream import known_as
from utils.kernels.layout import is_watched
from utils.kernels.moves import largest_neighbours

__all__ = ["Bottleneck", "ELAN1", "RepNBottleneck", "RepNCSP", "RepNCSPELAN4", "SP", "SPPELAN"]


@known_as("models.common")
class Bottleneck(nn.Module):
    """Two convolutions with an optional residual connection (used only where input and output widths agree)."""

    first_block: type[nn.Module] = Conv
    uses_kernels = False

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
        if not self.add:
            return self.cv2(self.cv1(x))
        read, kept = two_readers(x, self)
        return self.cv2.add_to(kept, self.cv1(read))


@known_as("models.common")
class RepNBottleneck(Bottleneck):
    """Bottleneck whose first convolution is a :class:`RepConvN`."""

    first_block = RepConvN


@known_as("models.common")
class RepNCSP(nn.Module):
    """Cross-stage partial block: one half runs through n bottlenecks, the other goes straight to the last 1x1."""

    uses_kernels = False

    def __init__(self, c1: int, c2: int, n: int = 1, shortcut: bool = True, g: int = 1, e: float = 0.5) -> None:
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, hidden, 1, 1)
        self.cv2 = Conv(c1, hidden, 1, 1)
        self.cv3 = Conv(2 * hidden, c2, 1)
        self.m = nn.Sequential(*(RepNBottleneck(hidden, hidden, shortcut, g, e=1.0) for _ in range(n)))

    def forward(self, x: Tensor) -> Tensor:
        inner, straight = joint_parts(x, (self.cv1, self.cv2))
        return self.cv3(beside((self.m(inner), straight), self))


class _AggregationBlock(nn.Module):
    """Shared forward of the ELAN blocks: halves (a, b), two stages behind b, a 1x1 over everything."""

    c: int
    uses_kernels = False

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.cv1.parts(x, (self.c, self.c))
        read, second = two_readers(second, self)
        read, stage_one = two_readers(self.cv2(read), self)
        return self.cv4(beside((first, second, stage_one, self.cv3(read)), self))


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

    uses_kernels = False

    def __init__(self, k: int = 3, s: int = 1) -> None:
        super().__init__()
        self.m = nn.MaxPool2d(kernel_size=k, stride=s, padding=k // 2)

    def forward(self, x: Tensor) -> Tensor:
        if trains_fast(self) and self.m.stride == 1 and not is_watched(self.m):
            return largest_neighbours(x, self.m.kernel_size)
        return self.m(x)


@known_as("models.common")
class SPPELAN(nn.Module):
    """Spatial pyramid pooling: three 5x5 poolings in a row, all steps concatenated."""

    uses_kernels = False

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
        return self.cv5(beside(steps, self))
