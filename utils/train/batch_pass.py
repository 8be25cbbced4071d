"""Forward, loss and backward of one batch: the plain way, and replayed from CUDA graphs.

A graph is recorded once per picture size and number of target rows and then launched with a single call, so that the
device never waits for Python. It computes what the plain way computes, into the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.runtime import GraphPool, autocast, device_lock, picture_layout, synchronise

LossFunction = Callable[..., tuple[Tensor, Tensor]]

SMALLEST_ROWS = 256  # of targets in a graph
ROW_STEP = 1.25  # from one number of target rows to the next
ROOMIEST = 2.0  # how many times more rows than needed a recorded graph may have
MAX_GRAPHS = 64  # further kinds of batches go the plain way: recording again and again would cost more


def prepare_images(images: Tensor, dtype: torch.dtype = torch.float32, size: tuple[int, int] | None = None) -> Tensor:
    """Turn uint8 pictures (B, 3, H, W) into values from 0 to 1, at another (height, width) where one is given.

    On CUDA the result is laid out channels last. Dividing after the conversion to a short type gives the same bits as
    before it: all 256 levels are exact in each of them.
    """
    layout = picture_layout(images.device)
    if size is None or tuple(images.shape[-2:]) == tuple(size):
        return images.to(dtype, memory_format=layout).div_(255)
    resized = functional.interpolate(images.float() / 255, size, mode="bilinear", align_corners=False)
    return resized.to(dtype, memory_format=layout)


class BatchPass:
    """Adds the gradients of one batch to those of the model's weights.

    Args:
        model: in training mode at the call.
        loss_fn: (predictions, targets, label_smoothing=) -> (scalar, three items).
        scaler: scales the loss.
        amp_dtype: type of the mixed-precision forward pass, None for float32.
        loss_weight: factor of the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        scaler: torch.amp.GradScaler,
        *,
        device: torch.device,
        amp_dtype: torch.dtype | None = None,
        loss_weight: float = 1.0,
    ) -> None:
        self.model, self.loss_fn, self.scaler = model, loss_fn, scaler
        self.device, self.amp_dtype, self.loss_weight = device, amp_dtype, loss_weight

    def __call__(
        self,
        images: Tensor,
        targets: Tensor,
        *,
        size: tuple[int, int] | None = None,
        smoothing: float | Tensor = 0.0,
    ) -> Tensor:
        """Return the three loss items, detached.

        Args:
            images: (B, 3, H, W) uint8, on the device.
            targets: (T, 6) rows image index, class, xywh normalised, on the device.
            size: (height, width) to which the pictures are brought first.
            smoothing: label smoothing.
        """
        inputs = prepare_images(images, self.amp_dtype or torch.float32, size)
        with autocast(self.device, self.amp_dtype):
            predictions = self.model(inputs)
        loss, items = self.loss_fn(predictions, targets, label_smoothing=smoothing)
        self.scaler.scale(loss * self.loss_weight if self.loss_weight != 1 else loss).backward()
        return items


@dataclass
class Recording:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    targets: Tensor
    items: Tensor


Kind = tuple[tuple[int, ...], tuple[int, int] | None, bool]  # shape, wanted size, whether labels are smoothed


class CapturedPass(BatchPass):
    """The same, recorded as CUDA graphs when a kind of batch comes for the second time.

    The first time runs the plain way, which lets cuDNN choose its algorithms and the weights get their gradients;
    afterwards these have to stay where they are (`zero_grad(set_to_none=False)`). All graphs share one pool of memory.
    Should recording fail, the plain way goes on for the rest of the run.
    """

    def __init__(self, *arguments: object, pool: GraphPool | None = None, **keywords: object) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[arg-type]
        self.recordings: dict[tuple[Kind, int], Recording] = {}  # by kind of batch and number of target rows
        self.seen: set[Kind] = set()
        self.smoothing = torch.zeros((), device=self.device)
        self.pool = pool or GraphPool()
        self.working = WorkingWeights(self.model, self.amp_dtype)
        self.is_off = False

    def __call__(
        self,
        images: Tensor,
        targets: Tensor,
        *,
        size: tuple[int, int] | None = None,
        smoothing: float | Tensor = 0.0,
    ) -> Tensor:
        """See :class:`BatchPass`. The result is overwritten by the next call."""
        is_smoothed = bool(smoothing)
        kind = (tuple(images.shape), size, is_smoothed)
        if self.is_off or kind not in self.seen:
            self.seen.add(kind)
            return super().__call__(images, targets, size=size, smoothing=smoothing)
        recording = self._find(kind, len(targets)) or self._record(kind, images, len(targets))
        if recording is None:
            return super().__call__(images, targets, size=size, smoothing=smoothing)
        recording.images.copy_(images, non_blocking=True)
        recording.targets.zero_()  # a row without extent is no object
        recording.targets[: len(targets)].copy_(targets, non_blocking=True)
        if is_smoothed:
            self.smoothing.fill_(smoothing)
        recording.graph.replay()
        return recording.items

    def _find(self, kind: Kind, rows: int) -> Recording | None:
        """The recorded graph with the fewest target rows that are enough, unless it is far too roomy."""
        most = max(rows, SMALLEST_ROWS) * ROOMIEST
        fitting = [room for known, room in self.recordings if known == kind and rows <= room <= most]
        return self.recordings[kind, min(fitting)] if fitting else None

    def _record(self, kind: Kind, images: Tensor, rows: int) -> Recording | None:
        if len(self.recordings) >= MAX_GRAPHS:
            return None
        capacity = row_capacity(rows)
        align_gradients(self.model)
        try:
            with device_lock:  # nobody may wait for the whole device meanwhile
                synchronise(self.device)
                torch.cuda.empty_cache()  # what plain passes have left: the graphs have memory of their own
                recording = self._captured(kind, images, capacity)
        except RuntimeError as error:  # torch's and CUDA's own kinds derive from it
            self.is_off = True
            self.pool.give_up(self.recordings, "training", error)
            return None
        self.recordings[kind, capacity] = recording
        return recording

    def _captured(self, kind: Kind, images: Tensor, capacity: int) -> Recording:
        _, size, is_smoothed = kind
        graph = torch.cuda.CUDAGraph()
        # Buffers of the inputs live outside the pool: they have to survive the other graphs.
        static_images = torch.empty_like(images)
        static_targets = torch.zeros(capacity, 6, device=self.device)
        items = torch.zeros(3, device=self.device)
        smoothing = self.smoothing if is_smoothed else 0.0
        # Only this thread is watched: the loader's threads pin memory meanwhile.
        with torch.cuda.graph(graph, pool=self.pool.handle(), capture_error_mode="thread_local"), self.working:
            items.copy_(super().__call__(static_images, static_targets, size=size, smoothing=smoothing))
        return Recording(graph, static_images, static_targets, items)


class WorkingWeights:
    """Context in which a model's convolutions use short copies of their weights, all made at once.

    Autocast makes a copy of each weight by itself, and turns each gradient back by itself: some thousand small kernels
    a step. On leaving, the gradients of the copies are added to those of the weights, which are there already.
    Values are the same as with autocast.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self.model, self.dtype = model, dtype
        self.swapped: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        self.kept: list[tuple[nn.Parameter, Tensor]] = []

    def __enter__(self) -> None:
        self.kept = [(weight, weight.grad) for weight in self.model.parameters() if weight.grad is not None]
        for weight, _ in self.kept:
            weight.grad = None
        self.swapped = list(self._copies()) if self.dtype is not None else []
        if self.swapped:
            with torch.no_grad():
                torch._foreach_copy_([copy for *_, copy in self.swapped], [weight for _, _, weight, _ in self.swapped])
        for parameters, name, _, copy in self.swapped:
            parameters[name] = copy

    def _copies(self) -> Iterator[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]]:
        """Yield where each weight of a convolution is kept, its name there, itself, and an empty copy of it."""
        for module in self.model.modules():
            if isinstance(module, nn.Conv2d):
                for name, weight in module._parameters.items():
                    if weight is not None and weight.dtype == torch.float32:
                        copy = nn.Parameter(torch.empty_like(weight, dtype=self.dtype), weight.requires_grad)
                        yield module._parameters, name, weight, copy

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        kept = {id(weight): gradient for weight, gradient in self.kept}
        pairs = [(gradient, weight.grad) for weight, gradient in self.kept if weight.grad is not None]
        for parameters, name, weight, copy in self.swapped:
            parameters[name] = weight
            if copy.grad is not None and id(weight) in kept:
                pairs.append((kept[id(weight)], copy.grad))
        for weight in self.model.parameters():
            weight.grad = kept.get(id(weight))
        if kind is None:
            _add_gradients(pairs)
        self.swapped, self.kept = [], []


def align_gradients(model: nn.Module) -> None:
    """Lay out every gradient like its weight, so that all of them are worked on in a few kernels."""
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad = _laid_out_like(weight.grad, weight)


def _add_gradients(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Add gradients of any floating type to float32 ones, in a few kernels."""
    sums = [sum_ for sum_, _ in pairs]
    fresh = [_laid_out_like(gradient, sum_) for sum_, gradient in pairs]
    short = [index for index, gradient in enumerate(fresh) if gradient.dtype != torch.float32]
    if short:
        # One after the other in memory, they are converted by a single kernel.
        joined = torch.cat([fresh[index].as_strided((fresh[index].numel(),), (1,)) for index in short]).float()
        for index, part in zip(short, joined.split([fresh[index].numel() for index in short]), strict=True):
            like = sums[index]
            fresh[index] = part.as_strided(like.size(), like.stride(), part.storage_offset())
    torch._foreach_add_(sums, fresh)


def _laid_out_like(tensor: Tensor, example: Tensor) -> Tensor:
    """Return ``tensor`` with the strides of ``example``; where only sides of 1 differ in them, without a copy."""
    if tensor.stride() == example.stride():
        return tensor
    for layout in (torch.contiguous_format, torch.channels_last):
        has_sides = tensor.ndim == 4 or layout is torch.contiguous_format
        if has_sides and all(each.is_contiguous(memory_format=layout) for each in (tensor, example)):
            return tensor.as_strided(example.size(), example.stride(), tensor.storage_offset())
    return torch.empty_like(example, dtype=tensor.dtype, memory_format=torch.preserve_format).copy_(tensor)


def make_batch_pass(
    *arguments: object, device: torch.device, use_graphs: bool, pool: GraphPool | None = None, **keywords: object
) -> BatchPass:
    """Return the recorded way on CUDA where it is wanted, else the plain one; see :class:`BatchPass`.

    ``pool`` is for graphs of other passes to share their memory, such as those of validation.
    """
    if use_graphs and device.type == "cuda":
        return CapturedPass(*arguments, device=device, pool=pool, **keywords)
    return BatchPass(*arguments, device=device, **keywords)


def row_capacity(rows: int) -> int:
    """Round a number of target rows up to the next of a growing series, so that few graphs serve all batches."""
    steps = max(0, math.ceil(math.log(max(rows, 1) / SMALLEST_ROWS, ROW_STEP)))
    capacity = math.ceil(SMALLEST_ROWS * ROW_STEP**steps / 64) * 64
    return max(capacity, math.ceil(rows / 64) * 64)
