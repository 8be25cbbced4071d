"""Time of a training step alone: the batch is in device memory already, everything else is as in training.

    python -m bench.train_step --cfg yolov9-s.yaml --batch 64 --img 640 --record
    python -m bench.train_step --ways torch kernels+graphs --profile
    python -m bench.train_step --ways kernels+graphs --grad-checkpoint 0 2 3 4 6

Ways: `torch` = torch's kernels, one call after the other; `kernels` = with the kernels of this repository; `+graphs` =
the same recorded as a CUDA graph (training does `kernels+graphs`). Times are means over --steps steps between two
synchronisations, after a warm-up that is shown apart; the lowest and highest of --runs are given. `--profile` lists
where the device's time goes, `--profile-loss` the same for the loss alone.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.records import append_record
from models.blocks import use_fused_kernels
from models.flops import flops
from models.graph import DetectionModel
from utils.runtime import init_seeds, place, select_device
from utils.train.batch_pass import BatchPass, CapturedPass, prepare_images
from utils.train.ema import ModelEMA
from utils.train.loss import ComputeLoss
from utils.train.optim import apply_plan, smart_optimizer
from utils.train.schedule import StepPlan
from utils.train.throughput import TRAINING_PASSES, device_peak_tflops
from utils.train.weight_update import WeightUpdate

GIB = 2**30
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
WAYS = ("torch", "torch+graphs", "kernels", "kernels+graphs")
CATEGORIES = (  # first match names the category of a device kernel
    ("batch norm", ("batch_norm", "bn_fw", "bn_bw", "batchnorm")),
    ("convolution", ("conv", "xmma", "cutlass", "implicit", "gemm", "wgrad", "dgrad", "sm90", "sm80", "splitKreduce")),
    ("pooling", ("pool",)),
    ("activation", ("silu",)),
    ("concatenation", ("CatArray",)),
    ("top-k, sort", ("topk", "sort", "radix", "gatherTopK")),
    ("optimizer", ("multi_tensor", "fused", "lerp")),
    ("copies, casts", ("copy", "Memcpy", "Memset", "nchwToNhwc", "nhwcToNchw", "fill", "Fill")),
    ("reduction", ("reduce",)),
    ("scatter, gather, index", ("scatter", "gather", "index")),
    ("elementwise", ("elementwise",)),
)
OWN = "own kernels"  # whatever is no kernel of torch, cuDNN or cuBLAS


@dataclass(frozen=True)
class Figures:
    """Outcome of one way; times in seconds."""

    step_s: tuple[float, ...]  # mean of each run
    first_s: float
    peak_gib: float
    losses: tuple[float, ...]


class Stepper:
    """Makes whole training steps on one fixed batch."""

    def __init__(self, arguments: argparse.Namespace, way: str, device: torch.device) -> None:
        init_seeds(0, autotune=not arguments.no_autotune)
        self.device = device
        self.model = place(DetectionModel(arguments.cfg), device).train()
        self.model.grad_checkpoint = arguments.grad_checkpoint
        uses_kernels = way.startswith("kernels")
        if uses_kernels:
            use_fused_kernels(self.model)
        loss_fn = ComputeLoss(self.model, use_kernels=uses_kernels)
        dtype = DTYPES[arguments.dtype]
        self.optimizer = smart_optimizer(self.model, "SGD", 1e-3, 0.937, 5e-4)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16, init_scale=1024.0)
        self.update = WeightUpdate(self.model, self.optimizer, scaler, ModelEMA(self.model), 10.0)
        kind = CapturedPass if way.endswith("graphs") else BatchPass
        self.batch_pass = kind(self.model, loss_fn, scaler, device=device, amp_dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        shape = (arguments.batch, 3, arguments.img, arguments.img)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
        self.targets = random_targets(arguments.batch, arguments.objects, self.model.yaml["nc"]).to(device)

    def step(self) -> Tensor:
        """Forward, loss, backward, clip, update, average; return the loss items on the device."""
        apply_plan(self.optimizer, StepPlan(lr_bias=1e-4, lr_other=1e-4, momentum=0.9, accumulate=1))
        items = self.batch_pass(self.images, self.targets)
        self.update()
        return items


def random_targets(batch: int, objects: int, num_classes: int) -> Tensor:
    """Boxes (batch * objects, 6) of many sizes."""
    generator = torch.Generator().manual_seed(1)
    index = torch.arange(batch).repeat_interleave(objects).float()
    label = torch.randint(0, num_classes, (batch * objects,), generator=generator).float()
    size = torch.rand(batch * objects, 2, generator=generator) ** 2 * 0.5 + 0.02
    centre = size / 2 + torch.rand(batch * objects, 2, generator=generator) * (1 - size)
    return torch.cat((index[:, None], label[:, None], centre, size), 1)


def measure(arguments: argparse.Namespace, way: str, device: torch.device) -> Figures:
    """Run the warm-up and --runs stretches of --steps steps."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    stepper = Stepper(arguments, way, device)
    started = time.perf_counter()
    for _ in range(4):
        stepper.step()
    torch.cuda.synchronize(device)
    first_s = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(arguments.runs):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(arguments.steps):
            items = stepper.step()
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - started) / arguments.steps)
    # Recorded graphs keep their memory, which counts as reserved rather than as newly allocated.
    peak = max(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)) / GIB
    figures = Figures(tuple(times), first_s, peak, tuple(items.tolist()))
    if arguments.profile:
        print_profile(stepper, device)
    return figures


def print_profile(stepper: Stepper, device: torch.device, steps: int = 3, shown: int = 40) -> None:
    """Print the device time of kernels per step, by category and one by one."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            stepper.step()
        torch.cuda.synchronize(device)
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    kernels = []
    for event in profiler.key_averages():
        ms = event.self_device_time_total / 1000 / steps
        if ms <= 0:
            continue
        name = category(event.key)
        totals[name][0] += ms
        totals[name][1] += event.count / steps
        kernels.append((ms, event.count / steps, name, event.key))
    print(f"  device time {sum(ms for ms, _ in totals.values()):.1f} ms a step")
    for name, (ms, count) in sorted(totals.items(), key=lambda item: -item[1][0]):
        print(f"  {ms:8.2f} ms {count:7.0f} launches  {name}")
    for ms, count, name, key in sorted(kernels, reverse=True)[:shown]:
        print(f"    {ms:7.2f} ms {count:6.0f}x  [{name}] {key[:150]}")


def category(kernel: str) -> str:
    """Sort a device kernel by its name; Triton kernels have plain Python names."""
    if kernel.isidentifier() and not kernel.startswith(("cutlass", "sm", "cudnn", "_ZN")):
        return OWN
    return next((name for name, words in CATEGORIES if any(word in kernel for word in words)), "other")


def profile_loss(arguments: argparse.Namespace, device: torch.device) -> None:
    """Print where the loss alone, forward and backward, spends the device's time."""
    stepper = Stepper(arguments, "kernels" if arguments.ways[-1].startswith("kernels") else "torch", device)
    pass_ = stepper.batch_pass
    with torch.no_grad(), torch.autocast("cuda", dtype=pass_.amp_dtype, enabled=pass_.amp_dtype is not None):
        maps = stepper.model(prepare_images(stepper.images, pass_.amp_dtype or torch.float32))
    maps = [[level.detach().requires_grad_() for level in head] for head in maps]

    def step() -> None:
        pass_.loss_fn(maps, stepper.targets)[0].backward()

    step()
    stepper.step = step
    print("loss alone:")
    print_profile(stepper, device)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cfg", nargs="+", default=["yolov9-s.yaml"], help="one or more models")
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="one or more batch sizes")
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument("--objects", type=int, default=20, help="boxes per picture")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp16")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--grad-checkpoint", type=float, nargs="+", default=[0], help="parts; 0 = none; one or more")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="")
    parser.add_argument("--cudnn-limit", type=int, help="algorithms that cuDNN tries per convolution; 0 = all")
    parser.add_argument("--no-autotune", action="store_true", help="take cuDNN's first choice, as --multi-scale does")
    parser.add_argument("--profile", action="store_true", help="list the device's time by kind of kernel")
    parser.add_argument("--profile-loss", action="store_true", help="the same for the loss alone, nothing else")
    parser.add_argument("--record", action="store_true", help="add a row to RECORDS.md")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure and print every way."""
    arguments = parse(argv)
    device = select_device(arguments.device)
    if device.type != "cuda":
        raise SystemExit("bench.train_step measures CUDA devices; none was found")
    if arguments.cudnn_limit is not None:
        torch.backends.cudnn.benchmark_limit = arguments.cudnn_limit
    for cfg, batch, parts in itertools.product(arguments.cfg, arguments.batch, arguments.grad_checkpoint):
        case = argparse.Namespace(**{**vars(arguments), "cfg": cfg, "batch": batch, "grad_checkpoint": parts})
        if case.profile_loss:
            profile_loss(case, device)
            continue
        summary = [describe(case, way, measure(case, way, device), device) for way in case.ways]
        if case.record:
            name = torch.cuda.get_device_name(device)
            text = f"{name}, {Path(cfg).stem}, batch {batch}{case_suffix(case)}: " + "; ".join(summary)
            print(append_record(text, case.runs))


def case_suffix(case: argparse.Namespace) -> str:
    """What is unusual about a case."""
    words = [f"{case.img} px"] if case.img != 640 else []
    words += [case.dtype] if case.dtype != "fp16" else []
    words += [f"checkpointing, 1/{case.grad_checkpoint:g} kept"] if case.grad_checkpoint else []
    words += ["no autotuning"] if case.no_autotune else []
    return "".join(f", {word}" for word in words)


def describe(case: argparse.Namespace, way: str, figures: Figures, device: torch.device) -> str:
    """Print and return the figures of one way."""
    best, worst = min(figures.step_s), max(figures.step_s)
    peak_tflops = device_peak_tflops(device, DTYPES[case.dtype])
    operations = TRAINING_PASSES * flops(DetectionModel(case.cfg), case.img) * case.batch
    share = f", {operations / best / peak_tflops / 1e12:.1%} of peak arithmetic" if peak_tflops else ""
    text = (
        f"{way}: {1000 * best:.1f}-{1000 * worst:.1f} ms, {case.batch / best:.0f} img/s{share}, "
        f"peak {figures.peak_gib:.1f} GiB, first 4 steps {figures.first_s:.1f} s"
    )
    losses = ", ".join(f"{loss:.4f}" for loss in figures.losses)
    print(f"{case.cfg} batch {case.batch}{case_suffix(case)} {text}, losses {losses}", flush=True)
    return text


if __name__ == "__main__":
    main()
