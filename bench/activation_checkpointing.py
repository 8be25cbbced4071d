"""Peak memory and time of training steps with activation checkpointing, against plain ones.

Random pictures and boxes, the real model, loss, optimizer, gradient scaler and clipping; on a CUDA device:

    python -m bench.activation_checkpointing --cfg yolov9-s.yaml --batch 64 --img 640 --parts 0 2 3 4 6 8

Every setting starts from the same weights. Peak memory is what torch had allocated at once ("used") and what it had
taken from the device ("reserved"); times are medians of single steps between two CUDA events, after a warm-up. The
loss of the last step is shown to be compared: it should differ between the rows by rounding only.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from models.graph import DetectionModel
from utils.runtime import init_seeds, select_device
from utils.train.loss import DetectionLoss
from utils.train.optim import smart_optimizer

OBJECTS_PER_IMAGE = 7  # about what COCO has
GIB = 2**30


@dataclass(frozen=True)
class Figures:
    """What was measured with one number of parts."""

    used_gib: float
    reserved_gib: float
    step_ms: float
    loss: float
    plan: str


class Stepper:
    """Makes training steps on one fixed batch in device memory."""

    def __init__(self, arguments: argparse.Namespace, parts: int, device: torch.device) -> None:
        init_seeds(0)
        self.model = DetectionModel(arguments.cfg).to(device, memory_format=torch.channels_last).train()
        self.model.grad_checkpoint = parts
        self.loss_fn = DetectionLoss(
            strides=self.model.stride.tolist(), num_classes=self.model.yaml["nc"], reg_max=self.model.head.reg_max
        )
        self.optimizer = smart_optimizer(self.model, "SGD", 1e-3, 0.937, 5e-4)
        self.scaler = torch.amp.GradScaler("cuda", enabled=arguments.amp)
        self.uses_amp, self.device = arguments.amp, device
        shape = (arguments.batch, 3, arguments.img, arguments.img)
        pictures = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        self.images = pictures.to(device).contiguous(memory_format=torch.channels_last)
        self.targets = random_targets(arguments.batch, self.model.yaml["nc"]).to(device)

    def step(self) -> Tensor:
        """Forward, backward, clip, update; return the loss items on the device."""
        with torch.autocast(self.device.type, dtype=torch.float16, enabled=self.uses_amp):
            predictions = self.model(self.images)
        loss, items = self.loss_fn(predictions, self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return items


def random_targets(batch: int, num_classes: int) -> Tensor:
    """Return rows (T, 6): image, class, centre and size as shares of the picture."""
    generator = torch.Generator().manual_seed(1)
    count = batch * OBJECTS_PER_IMAGE
    images = torch.arange(batch).repeat_interleave(OBJECTS_PER_IMAGE)[:, None]
    classes = torch.randint(num_classes, (count, 1), generator=generator)
    centres = 0.1 + 0.8 * torch.rand(count, 2, generator=generator)
    sizes = 0.02 + 0.3 * torch.rand(count, 2, generator=generator) ** 2
    return torch.cat((images, classes, centres, sizes), 1)


def measure(arguments: argparse.Namespace, parts: int, device: torch.device) -> Figures:
    """Run the steps of one setting."""
    torch.cuda.empty_cache()
    stepper = Stepper(arguments, parts, device)
    for _ in range(arguments.warmup):
        items = stepper.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(arguments.steps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        items = stepper.step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return Figures(
        torch.cuda.max_memory_allocated() / GIB,
        torch.cuda.max_memory_reserved() / GIB,
        statistics.median(times),
        float(items.sum()),
        str(stepper.model.checkpoint_plan()) if parts else "plain",
    )


def main() -> None:
    """Measure every setting and print one row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cfg", default="yolov9-s.yaml")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument("--parts", type=int, nargs="+", default=[0, 2, 3, 4, 6, 8], help="0 = plain, comes first")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/activation_checkpointing.py needs a CUDA device")
    device = select_device("")
    base: Figures | None = None
    print("parts | used GiB | reserved GiB | ms per step | memory | time | loss")
    plans = []
    for parts in arguments.parts:
        found = measure(arguments, parts, device)
        base = base or found
        memory, time = found.used_gib / base.used_gib - 1, found.step_ms / base.step_ms - 1
        print(
            f"{parts} | {found.used_gib:.2f} | {found.reserved_gib:.2f} | {found.step_ms:.1f} | {memory:+.1%} | "
            f"{time:+.1%} | {found.loss:.5f}",
            flush=True,
        )
        plans.append(f"{parts}: {found.plan}")
    print("\n".join(plans))


if __name__ == "__main__":
    main()
