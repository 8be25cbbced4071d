"""Time of the detection loss alone, plain and with fused kernels, and how far their results lie apart.

    python -m bench.loss --batch 64 --img 640 --objects 20 50
    python -m bench.loss --profile

Both heads, forward and backward, replayed from a CUDA graph, so that the time is that of the device alone; means over
--steps replays, the lowest and highest of --runs are given. `--profile` lists the kernels of one pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.records import append_record
from utils.kernels.check import fused_kernels_work
from utils.kernels.loss_head import HeadLoss, make_levels, read_maps
from utils.kernels.loss_head import assign as assign_fused
from utils.train.loss import DetectionLoss

STRIDES = (8, 16, 32)
REG_MAX = 16
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Heads = list[list[Tensor]]


@dataclass(frozen=True)
class Times:
    """Lowest and highest mean of the runs, in ms."""

    forward: tuple[float, float]
    both: tuple[float, float]

    def __str__(self) -> str:
        lowest = f"forward {self.forward[0]:.3f}, backward {self.both[0] - self.forward[0]:.3f}"
        return f"{lowest}, together {self.both[0]:.3f} (up to {self.both[1]:.3f}) ms"


def random_heads(arguments: argparse.Namespace) -> Heads:
    """Maps of two heads in channels_last; rare classes, and boxes of all sizes."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads = []
    for _ in range(2):
        maps = []
        for stride in STRIDES:
            side = arguments.img // stride
            shape = (arguments.batch, 4 * REG_MAX + arguments.classes, side, side)
            level = torch.randn(shape, generator=generator, device="cuda") * 1.5
            level[:, 4 * REG_MAX :] -= 6
            level = level.to(DTYPES[arguments.dtype]).contiguous(memory_format=torch.channels_last)
            maps.append(level.requires_grad_())
        heads.append(maps)
    return heads


def random_targets(batch: int, objects: int, num_classes: int) -> Tensor:
    """Boxes (batch * objects, 6), more small ones than large ones."""
    generator = torch.Generator().manual_seed(1)
    index = torch.arange(batch).repeat_interleave(objects)[:, None]
    label = torch.randint(0, num_classes, (batch * objects, 1), generator=generator)
    size = torch.rand(batch * objects, 2, generator=generator) ** 2 * 0.6 + 0.02
    centre = size / 2 + torch.rand(batch * objects, 2, generator=generator) * (1 - size)
    return torch.cat((index, label, centre, size), 1).cuda()


def make_loss(arguments: argparse.Namespace, use_kernels: bool) -> DetectionLoss:
    """Return the loss with the exponents of training."""
    return DetectionLoss(
        strides=STRIDES, num_classes=arguments.classes, reg_max=REG_MAX, alpha=0.5, beta=6.0, use_kernels=use_kernels
    )


def forward(loss: DetectionLoss, heads: Heads, targets: Tensor, share: Tensor) -> list[Tensor]:
    """Total and items."""
    total, items = loss(heads, targets, label_smoothing=share)
    return [total, items]


def forward_backward(loss: DetectionLoss, heads: Heads, targets: Tensor, share: Tensor) -> list[Tensor]:
    """Total, items and gradients of all maps."""
    total, items = loss(heads, targets, label_smoothing=share)
    return [total.detach(), items, *torch.autograd.grad(total, [level for maps in heads for level in maps])]


def replay_ms(function: Callable[[], object], steps: int, runs: int) -> tuple[float, float]:
    """Record a function and return the lowest and highest mean time of a replay."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    means = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            graph.replay()
        end.record()
        end.synchronize()
        means.append(start.elapsed_time(end) / steps)
    return min(means), max(means)


def measure(loss: DetectionLoss, case: tuple[Heads, Tensor, Tensor], arguments: argparse.Namespace) -> Times:
    """Time the forward pass alone, and with the backward pass."""
    with torch.no_grad():
        once = replay_ms(lambda: forward(loss, *case), arguments.steps, arguments.runs)
    return Times(once, replay_ms(lambda: forward_backward(loss, *case), arguments.steps, arguments.runs))


def deviations(arguments: argparse.Namespace, case: tuple[Heads, Tensor, Tensor]) -> str:
    """Compare loss, items and gradients of both ways."""
    plain, fused = (forward_backward(make_loss(arguments, use), *case) for use in (False, True))
    items = ((plain[1] - fused[1]).abs() / plain[1].abs()).max()
    gradients = [
        (found.float() - expected.float()).abs().max() / expected.float().abs().max()
        for found, expected in zip(fused[2:], plain[2:], strict=True)
    ]
    again = forward_backward(make_loss(arguments, True), *case)
    is_same = all(torch.equal(one, other) for one, other in zip(fused, again, strict=True))
    total = abs(float(plain[0] - fused[0])) / abs(float(plain[0]))
    gradient = float(torch.stack(gradients).max())
    return (
        f"deviations: loss {total:.1e}, items {float(items):.1e} of their value, gradients {gradient:.1e} of the "
        f"largest; a second pass is {'equal' if is_same else 'DIFFERENT'}"
    )


@torch.no_grad()
def different_anchors(arguments: argparse.Namespace, heads: Heads, targets: Tensor) -> str:
    """Compare the assignment of both ways on the leading head."""
    loss, maps = make_loss(arguments, False), heads[-1]
    seen = []
    assign = loss.assigner.assign
    loss.assigner.assign = lambda *call: seen.append((call, assign(*call))) or seen[-1][1]
    loss(maps, targets)
    (_, _, _, objects, _), expected = seen[0]
    head = HeadLoss(STRIDES, arguments.classes, REG_MAX, loss.gains, 1.0, 10, 0.5, 6.0, loss.assigner.eps)
    levels = make_levels(head, maps)
    slots = assign_fused(head, levels, read_maps(head, levels)[0], objects)
    used = slots.row >= 0
    owner = torch.full_like(expected.object_row, -1).view(-1)
    owner[slots.anchor[used].long()] = slots.row[used].long()
    matters = (expected.score > 0).view(-1)
    wrong = int((owner[matters] != expected.object_row.view(-1)[matters]).sum())
    return (
        f"assignment: {wrong} of {int(matters.sum())} anchors with a score go elsewhere, {int(used.sum())} slots used"
    )


def print_profile(function: Callable[[], object], shown: int = 30) -> None:
    """Print the kernels of one pass."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in events)
    print(f"  {total / 1000:.3f} ms in {sum(event.count for event in events)} launches")
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:shown]:
        print(f"  {event.self_device_time_total / 1000:8.3f} ms {event.count:5d}  {event.key[:90]}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.loss", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64, help="images (default %(default)s)")
    parser.add_argument("--img", type=int, default=640, help="side of the square input (default %(default)s)")
    parser.add_argument("--classes", type=int, default=80, help="(default %(default)s)")
    parser.add_argument(
        "--objects", type=int, nargs="+", default=[20, 50], help="objects per image (default %(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the maps (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="replays in a run (default %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a pass")
    parser.add_argument("--record", action="store_true", help="add a row to RECORDS.md")
    return parser.parse_args()


def main() -> None:
    """Measure both ways for every number of objects."""
    arguments = parse_arguments()
    if obstacle := fused_kernels_work("cuda"):
        raise SystemExit(obstacle)
    heads, share = random_heads(arguments), torch.zeros((), device="cuda")
    figures = []
    for objects in arguments.objects:
        case = (heads, random_targets(arguments.batch, objects, arguments.classes), share)
        print(f"{objects} objects per image, {len(case[1])} rows")
        for name, use_kernels in (("plain", False), ("fused", True)):
            times = measure(make_loss(arguments, use_kernels), case, arguments)
            figures.append(f"{objects} objects, {name}: {times}")
            print(f"  {name}: {times}")
            if arguments.profile:
                loss = make_loss(arguments, use_kernels)
                print_profile(lambda loss=loss, case=case: forward_backward(loss, *case))
        print(f"  {deviations(arguments, case)}")
        print(f"  {different_anchors(arguments, *case[:2])}")
    if arguments.record:
        print(append_record("; ".join(figures), arguments.runs))


if __name__ == "__main__":
    main()
