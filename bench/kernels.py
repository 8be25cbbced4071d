"""Time of the fused training kernels beside the plain operations, layer by layer of a yolov9-s training step.

Needs a CUDA device with Triton:

    python3 -m bench.kernels
    python3 -m bench.kernels --type bf16 --batch 32 --rows 8
    python3 -m bench.kernels --tune

Every kind of layer is captured in a CUDA graph, so that launches cost the host nothing, and replayed between two
events. "GB/s" counts the bytes that have to move at least (a norm reads its input twice and writes its output; its
backward pass reads input and gradient twice and writes one gradient), small maps come out of the cache. The deviation
is the largest difference of an output or a gradient between both ways, as a share of the largest value. The last line
adds everything up, each layer as often as the network has it.

With --tune the sizes of tiles and the numbers of warps are tried one by one; the fastest should become the constants
of utils/kernels/norm.py and utils/kernels/pool.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.kernels import norm, pool
from utils.kernels.check import fused_kernels_work
from utils.kernels.norm import bn_act, bn_add_act
from utils.kernels.pool import average_neighbours

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
REPEATS = 10  # per captured graph
REPLAYS = 5
SETTLING = 3  # runs before capturing: compilation, memory


@dataclass(frozen=True)
class Layer:
    """A kind of layer: what it computes, channels, side of its map at 640 pixels, how often yolov9-s has it."""

    kind: str
    channels: int
    side: int
    count: int

    @property
    def passes(self) -> tuple[int, int]:
        """How often a map has to cross the memory bus in the forward and in the backward pass."""
        return {"norm": (3, 5), "residual": (4, 5), "pair": (5, 8), "average": (2, 2)}[self.kind]


LAYERS = (
    Layer("norm", 32, 320, 1),
    Layer("norm", 64, 160, 3),
    Layer("norm", 32, 160, 2),
    Layer("norm", 128, 80, 11),
    Layer("norm", 64, 80, 16),
    Layer("norm", 32, 80, 12),
    Layer("residual", 32, 80, 18),
    Layer("pair", 32, 80, 18),
    Layer("norm", 192, 40, 9),
    Layer("norm", 128, 40, 4),
    Layer("norm", 96, 40, 17),
    Layer("norm", 64, 40, 4),
    Layer("norm", 48, 40, 16),
    Layer("residual", 48, 40, 24),
    Layer("pair", 48, 40, 24),
    Layer("norm", 256, 20, 7),
    Layer("norm", 128, 20, 15),
    Layer("norm", 64, 20, 12),
    Layer("residual", 64, 20, 12),
    Layer("pair", 64, 20, 12),
    Layer("average", 64, 160, 1),
    Layer("average", 128, 80, 2),
    Layer("average", 192, 40, 2),
)
"""Counted in the training form with two heads."""

TRIALS = (
    (norm, "STATISTICS_RESIDENT", (4, 6, 7, 8), ("norm",), 0),
    (norm, "REDUCTION_VALUES", (512, 1024, 2048), ("norm", "pair"), 2),
    (norm, "REDUCTION_WARPS", (2, 4, 8), ("norm", "pair"), 2),
    (norm, "APPLY_VALUES", (1024, 2048, 4096, 8192), ("norm", "pair"), 0),
    (norm, "APPLY_WARPS", (2, 4, 8), ("norm", "pair"), 0),
    (norm, "SUMS_RESIDENT", (3, 4, 5, 6, 8), ("norm",), 1),
    (norm, "PAIR_SUMS_RESIDENT", (2, 3, 4, 6), ("pair",), 1),
    (norm, "GRADIENT_VALUES", (1024, 2048, 4096), ("norm", "pair"), 1),
    (norm, "GRADIENT_WARPS", (2, 4, 8), ("norm", "pair"), 1),
    (norm, "FINISH_WARPS", (4, 8, 16), ("norm",), 2),
    (pool, "POOL_VALUES", (512, 1024, 2048), ("average",), 2),
    (pool, "OUT_ROWS", (4, 8, 16), ("average",), 2),
    (pool, "POOL_WARPS", (2, 4, 8), ("average",), 2),
)
"""Module, constant, values to try, kinds of layers it matters to, and which time tells: forward, backward or both."""


class Case:
    """One layer with fixed inputs on the device, to be computed either way."""

    def __init__(self, layer: Layer, batch: int, dtype: torch.dtype) -> None:
        self.layer = layer
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (batch, layer.channels, layer.side, layer.side)

        def values(*size: int) -> Tensor:
            drawn = torch.randn(size, device="cuda", generator=generator)
            return drawn.to(dtype).contiguous(memory_format=torch.channels_last)

        self.inputs = [values(*shape).requires_grad_() for _ in range(1 if layer.kind in ("norm", "average") else 2)]
        self.norms = [nn.BatchNorm2d(layer.channels, device="cuda") for _ in range(2 if layer.kind == "pair" else 1)]
        self.act = nn.SiLU(inplace=True)
        trim = 1 if layer.kind == "average" else 0
        self.gradient = values(batch, layer.channels, layer.side - trim, layer.side - trim)
        self.map_bytes = self.inputs[0].numel() * dtype.itemsize

    def forward(self, is_fused: bool) -> Tensor:
        """Output of the layer, fused or by plain operations."""
        x, first = self.inputs[0], self.norms[0]
        if self.layer.kind == "average":
            return average_neighbours(x) if is_fused else F.avg_pool2d(x, 2, 1)
        if self.layer.kind == "pair":
            other, second = self.inputs[1], self.norms[1]
            if is_fused:
                return bn_add_act(x, first, other, second, self.act)
            return self.act(first(x) + second(other))
        residual = self.inputs[1] if self.layer.kind == "residual" else None
        if is_fused:
            return bn_act(x, first, self.act, residual)
        y = self.act(first(x))
        return y if residual is None else residual + y

    def backward(self, y: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the inputs and of the parameters."""
        parameters = [] if self.layer.kind == "average" else [p for bn in self.norms for p in bn.parameters()]
        return torch.autograd.grad(y, [*self.inputs, *parameters], self.gradient)

    def times(self, is_fused: bool) -> tuple[float, float]:
        """Milliseconds of a forward and of a backward pass."""
        with torch.no_grad():
            forward = replay_ms(lambda: self.forward(is_fused))
        return forward, replay_ms(lambda: self.backward(self.forward(is_fused))) - forward

    def deviation(self) -> float:
        """Largest difference between both ways, as a share of the largest value."""
        results = []
        for is_fused in (False, True):
            y = self.forward(is_fused)
            results.append([y.detach(), *self.backward(y)])
        pairs = zip(*results, strict=True)
        return max(float((found - plain).abs().max() / plain.abs().max()) for plain, found in pairs)


def replay_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds of one ``run``, captured several times in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(SETTLING):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / (REPEATS * REPLAYS)


def compare(arguments: argparse.Namespace) -> None:
    """Print the table of layers."""
    print(
        f"{'layer':>22} {'count':>5} | {'plain':>6} {'fused':>6} {'GB/s':>6} forward"
        f" | {'plain':>6} {'fused':>6} {'GB/s':>6} backward | deviation"
    )
    totals = [0.0] * 4
    for layer in LAYERS[: arguments.rows]:
        case = Case(layer, arguments.batch, TYPES[arguments.type])
        plain, fused = case.times(is_fused=False), case.times(is_fused=True)
        rates = [passes * case.map_bytes / 1e6 / time for passes, time in zip(layer.passes, fused, strict=True)]
        name = f"{layer.kind} {layer.channels} x {layer.side}^2"
        print(
            f"{name:>22} {layer.count:5d} | {plain[0]:6.3f} {fused[0]:6.3f} {rates[0]:6.0f}        "
            f" | {plain[1]:6.3f} {fused[1]:6.3f} {rates[1]:6.0f}          | {case.deviation():.1e}"
        )
        for index, time in enumerate((plain[0], fused[0], plain[1], fused[1])):
            totals[index] += layer.count * time
        del case
        torch.cuda.empty_cache()
    print(
        f"ms in one step: forward {totals[0]:.2f} plain, {totals[1]:.2f} fused; "
        f"backward {totals[2]:.2f} plain, {totals[3]:.2f} fused"
    )


@contextmanager
def constant(module: object, name: str, value: int) -> Iterator[None]:
    """Give a constant of a module another value for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def tune(arguments: argparse.Namespace) -> None:
    """Print, for each constant and value, the time of all layers of the kinds that it matters to."""
    for module, name, values, kinds, which in TRIALS:
        found = {}
        for value in values:
            total = 0.0
            for layer in (layer for layer in LAYERS if layer.kind in kinds):
                case = Case(layer, arguments.batch, TYPES[arguments.type])
                with constant(module, name, value):
                    times = case.times(is_fused=True)
                total += layer.count * (sum(times) if which == 2 else times[which])
            found[value] = total
        listed = "  ".join(f"{value}: {time:.2f}" for value, time in found.items())
        print(f"{name:>20} (now {getattr(module, name)})  {listed}  ms of {', '.join(kinds)}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=TYPES, default="fp16", help="type of the maps")
    parser.add_argument("--batch", type=int, default=64, help="pictures in a batch")
    parser.add_argument("--rows", type=int, default=len(LAYERS), help="only the first so many layers of the table")
    parser.add_argument("--tune", action="store_true", help="try other sizes instead")
    arguments = parser.parse_args()
    problem = fused_kernels_work("cuda")
    if problem:
        raise SystemExit(problem)
    print(torch.cuda.get_device_name(), torch.__version__, arguments.type, "batch", arguments.batch)
    tune(arguments) if arguments.tune else compare(arguments)


if __name__ == "__main__":
    main()
