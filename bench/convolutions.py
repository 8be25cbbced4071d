"""Time of the convolutions of a training step, layer by layer, and of other ways to compute them.

    python -m bench.convolutions
    python -m bench.convolutions --cfg yolov9-c.yaml --batch 16 --type bf16
    python -m bench.convolutions --shown 5 --device cpu --batch 1 --img 64

Forward pass, gradient of the input (dx) and gradient of the weight (dw) are timed apart, in half precision and
channels last, recorded in a CUDA graph. Convolutions that read the same map are one layer. The ways, of which each
layer has those that suit it:

- apart: one call per convolution, as the modules say;
- joint: convolutions of one input as one with all their outputs, a 1x1 kernel as the middle of a 3x3 one;
- dense: groups as one convolution whose other weights are zero;
- product: a 1x1 convolution as a matrix product of positions by channels;
- padded: few input channels filled up with zeros to 4 or 8, for the picture.

A star marks the way that training takes. "floor" is the time that a plain copy of as many bytes takes: input and output
once in each of the three passes. The layers that cost most come first, each counted as often as the network has it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.kernels import TYPES, replay_ms
from models.blocks import RepConvN
from models.flops import shape_pass
from models.graph import DetectionModel
from models.stages import RepNCSP
from utils.runtime import select_device

FEW_CHANNELS = 4  # inputs of fewer channels are tried with more
PADDED = (4, 8)
TRIES_ON_CPU = 2
COPIED_BYTES = 2**30


@dataclass(frozen=True)
class Convolution:
    """Sizes of a convolution without dilation: square kernel, equal strides."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    groups: int

    @classmethod
    def of(cls, module: nn.Conv2d) -> Convolution:
        """Read the sizes off a module."""
        return cls(module.in_channels, module.out_channels, module.kernel_size[0], module.stride[0], module.groups)

    def __str__(self) -> str:
        extra = f" /{self.stride}" if self.stride > 1 else ""
        extra += f" g{self.groups}" if self.groups > 1 else ""
        return f"{self.inputs}>{self.outputs} {self.kernel}x{self.kernel}{extra}"


@dataclass(frozen=True)
class Layer:
    """Convolutions that read the same map of ``height`` by ``width``; pictures need no gradient."""

    convolutions: tuple[Convolution, ...]
    height: int
    width: int
    is_first: bool
    usual: str  # the way that training takes

    def __str__(self) -> str:
        return f"{' + '.join(map(str, self.convolutions))} at {self.height}x{self.width}"


def layers_of(model: DetectionModel, img: int) -> Counter[Layer]:
    """Return the layers of convolutions of a model for pictures of ``img`` pixels, with how often they occur."""
    shapes: dict[nn.Module, tuple[int, int]] = {}

    def observe(module: nn.Module, inputs: tuple[Tensor, ...], _output: object) -> None:
        shapes[module] = (inputs[0].shape[2], inputs[0].shape[3])

    handles = [module.register_forward_hook(observe) for module in model.modules() if isinstance(module, nn.Conv2d)]
    try:
        shape_pass(model, torch.empty(1, model.yaml["ch"], img, img, device="meta"))
    finally:
        for handle in handles:
            handle.remove()
    layers: Counter[Layer] = Counter()
    for modules, usual in _joined(model, shapes):
        convolutions = tuple(Convolution.of(module) for module in modules)
        layers[Layer(convolutions, *shapes[modules[0]], convolutions[0].inputs == model.yaml["ch"], usual)] += 1
    return layers


def _joined(
    model: DetectionModel, shapes: dict[nn.Module, tuple[int, int]]
) -> Iterator[tuple[Sequence[nn.Conv2d], str]]:
    """Yield the convolutions of each layer and the way that training takes for them."""
    left = dict(shapes)

    def take(modules: Sequence[nn.Conv2d], usual: str) -> tuple[Sequence[nn.Conv2d], str]:
        for module in modules:
            del left[module]
        return modules, usual

    for block in model.modules():
        if isinstance(block, RepNCSP):
            yield take((block.cv1.conv, block.cv2.conv), "joint")
        elif isinstance(block, RepConvN):
            yield take((block.conv1.conv, block.conv2.conv), "apart")
    for boxes, classes, _ in model.head.branches:
        for box, cls in zip(boxes, classes, strict=True):
            yield take((box[0].conv, cls[0].conv), "apart")
    for module in list(left):
        yield take((module,), "apart")


Way = Callable[[Tensor, Sequence[Tensor]], list[Tensor]]
"""(input, weights) -> outputs, whose channels in a row are those of all convolutions."""


def ways_of(layer: Layer) -> dict[str, Way]:
    """Return the ways that suit a layer, by name; each computes what "apart" does."""
    first, *others = layer.convolutions
    ways: dict[str, Way] = {"apart": lambda x, weights: apart(layer, x, weights)}
    if others and {(c.stride, c.groups) for c in others} == {(first.stride, 1)} and first.groups == 1:
        ways["joint"] = lambda x, weights: joint(layer, x, weights)
    if not others and first.groups > 1:
        ways["dense"] = lambda x, weights: dense(layer, x, weights)
    if not others and first.kernel == first.stride == first.groups == 1:
        ways["product"] = lambda x, weights: product(x, weights)
    if not others and first.inputs < FEW_CHANNELS:
        for width in PADDED:
            ways[f"padded to {width}"] = lambda x, weights, width=width: padded(layer, x, weights, width)
    return ways


def apart(layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """One call per convolution."""
    return [
        F.conv2d(x, weight, None, sizes.stride, sizes.kernel // 2, 1, sizes.groups)
        for sizes, weight in zip(layer.convolutions, weights, strict=True)
    ]


def joint(layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """All outputs from one convolution, with the largest of the kernels."""
    kernel = max(sizes.kernel for sizes in layer.convolutions)
    borders = [(kernel - sizes.kernel) // 2 for sizes in layer.convolutions]
    weight = torch.cat([F.pad(each, (border,) * 4) for each, border in zip(weights, borders, strict=True)])
    return [F.conv2d(x, weight, None, layer.convolutions[0].stride, kernel // 2)]


def dense(layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """A grouped convolution as one without groups."""
    (sizes,) = layer.convolutions
    return [F.conv2d(x, dense_weight(weights[0], sizes.groups), None, sizes.stride, sizes.kernel // 2)]


def dense_weight(weight: Tensor, groups: int) -> Tensor:
    """Return the weight (C, I, k, k) of the convolution without groups that equals one (C, I / groups, k, k) with."""
    outputs, width = weight.shape[:2]
    owner = torch.arange(outputs, device=weight.device) // (outputs // groups)
    source = torch.arange(groups * width, device=weight.device) // width
    return weight.repeat(1, groups, 1, 1) * (owner[:, None] == source[None, :])[..., None, None]


def product(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """A 1x1 convolution as (positions, inputs) @ (inputs, outputs)."""
    (weight,) = weights
    return [F.linear(x.permute(0, 2, 3, 1), weight.flatten(1)).permute(0, 3, 1, 2)]


def padded(layer: Layer, x: Tensor, weights: Sequence[Tensor], width: int) -> list[Tensor]:
    """A convolution of few channels with further ones of zeros, which a picture can bring along for nothing."""
    if x.shape[1] < width:
        x = F.pad(x, (0, 0, 0, 0, 0, width - x.shape[1])).contiguous(memory_format=torch.channels_last)
    (weight,) = weights
    return apart(layer, x, [F.pad(weight, (0, 0, 0, 0, 0, width - weight.shape[1]))])


class Case:
    """A layer with fixed inputs on a device."""

    def __init__(self, layer: Layer, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layer, self.device = layer, device
        generator = torch.Generator(device).manual_seed(0)

        def values(*shape: int) -> Tensor:
            drawn = torch.randn(shape, device=device, generator=generator)
            return drawn.to(dtype).contiguous(memory_format=torch.channels_last)

        first = layer.convolutions[0]
        self.x = values(batch, first.inputs, layer.height, layer.width)
        self.weights = [
            (values(c.outputs, c.inputs // c.groups, c.kernel, c.kernel) / 8).requires_grad_()
            for c in layer.convolutions
        ]
        with torch.no_grad():
            outputs = apart(layer, self.x, self.weights)
        self.gradients = [values(*output.shape) for output in outputs]
        self.bytes = 3 * (self.x.nbytes + sum(output.nbytes for output in outputs))

    def times(self, name: str, way: Way) -> tuple[float, float, float]:
        """Milliseconds of the forward pass, of dx (0 for a picture) and of dw."""
        x = self.x
        if name.startswith("padded"):
            x = F.pad(x, (0, 0, 0, 0, 0, int(name.split()[-1]) - x.shape[1]))
            x = x.contiguous(memory_format=torch.channels_last)
        x = x.detach().requires_grad_(not self.layer.is_first)
        gradients = self.gradients
        with torch.no_grad():
            if len(way(x, self.weights)) < len(gradients):
                gradients = [torch.cat(gradients, 1)]
            forward = milliseconds(lambda: way(x, self.weights), self.device)

        def backward(of: Sequence[Tensor]) -> float:
            both = milliseconds(lambda: torch.autograd.grad(way(x, self.weights), of, gradients), self.device)
            return max(both - forward, 0.0)

        return forward, 0.0 if self.layer.is_first else backward([x]), backward(self.weights)

    def deviation(self, way: Way) -> float:
        """Largest difference of an output from that of "apart", as a share of the largest value."""
        with torch.no_grad():
            found, expected = (torch.cat(each(self.x, self.weights), 1) for each in (way, ways_of(self.layer)["apart"]))
        return float((found - expected).abs().max() / expected.abs().max())


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of one ``run``."""
    if device.type == "cuda":
        return replay_ms(run)
    run()
    started = time.perf_counter()
    for _ in range(TRIES_ON_CPU):
        run()
    return 1000 * (time.perf_counter() - started) / TRIES_ON_CPU


def copy_rate(device: torch.device) -> float:
    """Bytes a millisecond that a plain copy reads and writes."""
    size = COPIED_BYTES if device.type == "cuda" else COPIED_BYTES // 32
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), device)


def report(case: Case, count: int, rate: float) -> tuple[float, dict[str, float], list[str]]:
    """Return the time in a step of the usual way, of each way, and the rows to print."""
    totals, rows = {}, []
    for name, way in ways_of(case.layer).items():
        forward, dx, dw = case.times(name, way)
        totals[name] = count * (forward + dx + dw)
        mark = "*" if name == case.layer.usual else " "
        rows.append(
            f"   {mark} {name:<12} {totals[name]:7.2f} ms = {count} x (forward {forward:.3f}, dx {dx:.3f}, dw {dw:.3f})"
            f"{'' if name == 'apart' else f', off by {case.deviation(way):.0e}'}"
        )
    floor = count * case.bytes / rate
    return totals[case.layer.usual], totals, [f"{case.layer}, floor {floor:.2f} ms", *rows]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cfg", default="yolov9-s.yaml", help="model")
    parser.add_argument("--type", choices=TYPES, default="fp16", help="type of the maps")
    parser.add_argument("--batch", type=int, default=64, help="pictures in a batch")
    parser.add_argument("--img", type=int, default=640, help="side of the pictures")
    parser.add_argument("--shown", type=int, default=0, help="only the so many layers of most bytes, 0 = all")
    parser.add_argument("--device", default="")
    arguments = parser.parse_args(argv)
    device = select_device(arguments.device)
    torch.backends.cudnn.benchmark = True
    layers = layers_of(DetectionModel(arguments.cfg), arguments.img)
    largest = sorted(layers, key=lambda layer: -layer.height * layer.width * layers[layer])
    rate = copy_rate(device)
    found = []
    for layer in largest[: arguments.shown or None]:
        case = Case(layer, arguments.batch, TYPES[arguments.type], device)
        found.append(report(case, layers[layer], rate))
        del case
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for _, _, rows in sorted(found, key=lambda each: -each[0]):
        print("\n".join(rows))
    usual, best = sum(each[0] for each in found), sum(min(each[1].values()) for each in found)
    print(f"{len(found)} layers: {usual:.2f} ms a step as in training, {best:.2f} ms with the fastest way of each")


if __name__ == "__main__":
    main()
