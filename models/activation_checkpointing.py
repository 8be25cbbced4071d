"""Training with less memory: parts of the network forget what they computed and compute it again for their gradients.

Rows are put together in segments. A checkpointed segment keeps its inputs only, and runs a second time when the
backward pass reaches it. Which rows are worth that is decided here, from what each row keeps and what it costs;
:class:`models.graph.DetectionModel` owns the switch, ``grad_checkpoint``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.flops import count_operations

if TYPE_CHECKING:
    from models.graph import DetectionModel

IMAGE = -1  # row number of the image
OPERATIONS_PER_KEPT_VALUE = 500
"""Operations that take as long as writing and reading one half-precision value: about 400 TFLOP/s against 3 TB/s in
convolutions of current GPUs. Small feature maps are bound by arithmetic, large ones by memory."""
SLACK = 1.1  # a plan within this factor of the least memory found is good enough if it computes less

RowCall = Callable[[nn.Module, object], object]


def call_row(row: nn.Module, inputs: object) -> object:
    """Evaluate one row; the plainest ``RowCall``."""
    return row(inputs)


def row_sources(row: nn.Module) -> tuple[int, ...]:
    """Return the numbers of the rows that ``row`` reads, ``IMAGE`` for the image."""
    sources = row.f if isinstance(row.f, list) else [row.f]
    return tuple(source if source >= 0 else row.i + source for source in sources)


def run_rows(
    rows: Sequence[nn.Module], known: dict[int, object], saved: Collection[int], call: RowCall = call_row
) -> object:
    """Evaluate consecutive ``rows`` and return the output of the last.

    ``known`` maps row numbers to the outputs computed so far. It is extended, and loses each output that no row but
    the next one reads (those not in ``saved``) as soon as it has been read.
    """
    for row in rows:
        inputs = [known[source] for source in row_sources(row)]
        output = call(row, inputs if isinstance(row.f, list) else inputs[0])
        del inputs
        if row.i - 1 not in saved:
            known.pop(row.i - 1, None)
        known[row.i] = output
    return known[rows[-1].i]


@dataclass(frozen=True)
class Segment:
    """Rows ``start`` to ``stop - 1``, which rows they read from outside, and which of them are read outside."""

    start: int
    stop: int
    is_checkpointed: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointPlan:
    """Segments of a network for a wish of ``parts`` (more than 1), with the estimates they were chosen by.

    Attributes:
        memory: largest amount kept at any time, as a share of what the plain network keeps (weights not counted).
        recomputation: work done twice, as a share of one forward pass.
    """

    parts: float
    segments: tuple[Segment, ...]
    memory: float
    recomputation: float

    def __str__(self) -> str:
        rows = ", ".join(
            str(part.start) if part.stop - part.start == 1 else f"{part.start}-{part.stop - 1}"
            for part in self.segments
            if part.is_checkpointed
        )
        return (
            f"Activation checkpointing: rows {rows} are computed twice; about {self.memory:.0%} of the plain "
            f"activation memory, {self.recomputation:.0%} of a forward pass on top"
        )


class UntouchedStatistics:
    """Context in which batch norms in training mode normalise as always but leave their running statistics alone.

    Their buffers are swapped for a scrap of memory. Omitting them, or a momentum of zero, would not do: the first
    changes the number of tensors kept for the backward pass, the second lets an infinite activation through.
    """

    def __init__(self, rows: Sequence[nn.Module]) -> None:
        self.rows = rows
        self.swapped: list[tuple[nn.Module, Tensor, Tensor, Tensor | None]] = []

    def _norms(self) -> list[nn.Module]:
        return [
            module
            for row in self.rows
            for module in row.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.training
            and module.running_mean is not None
        ]

    def __enter__(self) -> None:
        norms = self._norms()
        if not norms:
            return
        widest = max((norm.running_mean for norm in norms), key=Tensor.numel)
        scrap = torch.zeros_like(widest)
        for norm in norms:
            self.swapped.append((norm, norm.running_mean, norm.running_var, norm.num_batches_tracked))
            norm.running_mean = norm.running_var = scrap[: norm.num_features]
            norm.num_batches_tracked = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self.swapped:
            norm, mean, variance, batches = self.swapped.pop()
            norm.running_mean, norm.running_var, norm.num_batches_tracked = mean, variance, batches


def run_segments(rows: nn.Sequential, plan: CheckpointPlan, saved: Collection[int], image: Tensor) -> object:
    """Return what the last row returns, with the checkpointed segments of ``plan`` keeping their inputs only.

    Gradients and running statistics are those of a plain pass. The network must hold nothing random (no dropout):
    random states are not restored for the second computation, since reading them would stall a GPU.
    """
    known: dict[int, object] = {IMAGE: image}
    modules = list(rows)
    for segment in plan.segments:
        part = modules[segment.start : segment.stop]
        run = partial(_run_segment, part, segment, frozenset(saved).union(segment.outputs))
        inputs = [known[source] for source in segment.inputs]
        if segment.is_checkpointed:
            contexts = partial(_contexts, part)
            outputs = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        else:
            outputs = run(*inputs)
        known.update(zip(segment.outputs, outputs, strict=True))
    return known[len(modules) - 1]


def _run_segment(
    part: Sequence[nn.Module], segment: Segment, saved: Collection[int], *inputs: object
) -> tuple[object, ...]:
    known = dict(zip(segment.inputs, inputs, strict=True))
    run_rows(part, known, saved)
    return tuple(known[number] for number in segment.outputs)


def _contexts(part: Sequence[nn.Module]) -> tuple[nullcontext, UntouchedStatistics]:
    """Contexts of the first and of the second computation."""
    return nullcontext(), UntouchedStatistics(part)


# --- which rows to checkpoint ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowCost:
    """What one row means for a training step; amounts are bytes for one small image.

    Attributes:
        inner: kept for the backward pass besides the row's inputs and output.
        output: size of the output.
        is_output_kept: some row's backward pass needs the output.
        work: operations of the forward pass, memory traffic included.
        sources: rows read.
    """

    inner: int
    output: int
    is_output_kept: bool
    work: float
    sources: tuple[int, ...]

    @property
    def kept(self) -> int:
        return self.inner + self.output * self.is_output_kept

    @property
    def density(self) -> float:
        """Bytes saved per operation that is done twice."""
        return self.kept / self.work if self.work else 0.0


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class _KeptMaps:
    """Collects the feature maps that autograd keeps; weights and vectors of statistics do not count."""

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        self.ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self.held: list[torch.UntypedStorage] = []  # alive, so that no address is given away twice
        self.current: dict[int, int] = {}

    def sizes(self, tensors: Iterator[Tensor]) -> dict[int, int]:
        """Return bytes by address of the storages that count."""
        found: dict[int, int] = {}
        for tensor in tensors:
            if tensor.dim() != 4:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.ignored:
                self.held.append(storage)
                found[storage.data_ptr()] = storage.nbytes()
        return found

    def pack(self, tensor: Tensor) -> Tensor:
        self.current.update(self.sizes(iter((tensor,))))
        return tensor


@contextmanager
def _without_autotuning() -> Iterator[None]:
    """Keep cuDNN from searching the fastest kernels for sizes that are used once."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def measure_rows(model: DetectionModel) -> list[RowCost]:
    """Return the cost of every row, from one forward pass of a small image on the model's device.

    Weights and statistics stay as they are. Frozen rows keep nothing and are seen to do so.
    """
    example = next(model.parameters())
    side = 2 * int(model.stride.max())  # the coarsest map needs more than one value for its statistics
    image = torch.zeros(1, model.yaml["ch"], side, side, device=example.device, dtype=example.dtype)
    kept = _KeptMaps([*model.parameters(), *model.buffers(), image])
    producers: dict[int, int] = {}  # address -> row
    measured: list[tuple[int, int, float, tuple[int, ...]]] = []
    needed: set[int] = set()

    def call(row: nn.Module, inputs: object) -> object:
        kept.current.clear()
        before = count.flops
        output = row(inputs)
        outputs = kept.sizes(_tensors(output))
        needed.update(producers[address] for address in kept.current if address in producers)
        inner = sum(size for at, size in kept.current.items() if at not in producers and at not in outputs)
        for address in outputs:
            producers.setdefault(address, row.i)
        traffic = (inner + sum(outputs.values())) / image.element_size() * OPERATIONS_PER_KEPT_VALUE
        work = count.flops - before + traffic
        measured.append((inner, sum(outputs.values()), work, row_sources(row)))
        return output

    hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor)
    plain = torch.autocast(image.device.type, enabled=False)  # weights converted by autocast would look like maps
    setting = (plain, torch.enable_grad(), _without_autotuning(), UntouchedStatistics(model.model), hooks)
    with ExitStack() as stack, count_operations(model) as count:
        for context in setting:
            stack.enter_context(context)
        run_rows(model.model, {IMAGE: image}, model.save, call)
    return [
        RowCost(inner, output, number in needed, work, sources)
        for number, (inner, output, work, sources) in enumerate(measured)
    ]


def make_plan(costs: Sequence[RowCost], parts: float) -> CheckpointPlan:
    """Choose the segments that do the least work twice while at most 1 / ``parts`` of the memory is kept.

    Tried are the rows with the most bytes saved per operation, and the rows from the first on, as many as it takes.
    If that is out of reach (the largest row and the kept inputs remain), the plan gets near the least.

    Raises:
        ValueError: ``parts`` is not a number above 1.
    """
    if not 1 < parts < math.inf:
        raise ValueError(f"grad_checkpoint is {parts:g}: give 0 for none, or a number above 1, such as 1.5 or 2")
    limit = sum(cost.kept for cost in costs) / parts
    numbers = range(len(costs))
    by_density = sorted(numbers, key=lambda number: -costs[number].density)
    plans = []
    for order in (by_density, list(numbers)):
        plans += [_plan(costs, order[:count], parts, limit) for count in range(1, len(order) + 1)]
    target = max(1 / parts, SLACK * min(plan.memory for plan in plans))
    best = min((plan for plan in plans if plan.memory <= target), key=lambda plan: (plan.recomputation, plan.memory))
    return _without_needless_rows(costs, best, by_density, limit, target)


def _without_needless_rows(
    costs: Sequence[RowCost], plan: CheckpointPlan, by_density: Sequence[int], limit: float, target: float
) -> CheckpointPlan:
    """Take rows out again, those that save least per operation first, as long as the memory stays within bounds."""
    chosen = [
        number
        for number in by_density
        if any(part.is_checkpointed and part.start <= number < part.stop for part in plan.segments)
    ]
    for number in reversed(list(chosen)):
        fewer = [other for other in chosen if other != number]
        smaller = _plan(costs, fewer, plan.parts, limit)
        if smaller.memory <= target and smaller.recomputation <= plan.recomputation:
            plan, chosen = smaller, fewer
    return plan


def _plan(costs: Sequence[RowCost], chosen: Collection[int], parts: float, limit: float) -> CheckpointPlan:
    segments = _segments(costs, frozenset(chosen), limit)
    total, work = sum(cost.kept for cost in costs), sum(cost.work for cost in costs)
    twice = sum(costs[n].work for part in segments if part.is_checkpointed for n in range(part.start, part.stop))
    return CheckpointPlan(parts, segments, _peak(costs, segments) / total if total else 0.0, twice / work)


def _segments(costs: Sequence[RowCost], chosen: Collection[int], limit: float) -> tuple[Segment, ...]:
    """Join neighbours: plain rows without end, chosen ones as long as a segment keeps no more than ``limit``."""
    bounds: list[int] = []
    amount = 0
    for number, cost in enumerate(costs):
        is_chosen = number in chosen
        is_new = not number or is_chosen != (number - 1 in chosen) or (is_chosen and amount + cost.kept > limit)
        if is_new:
            bounds.append(number)
            amount = 0
        amount += cost.kept
    bounds.append(len(costs))
    segments = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        read = {source for cost in costs[start:stop] for source in cost.sources if source < start}
        read_later = {source for cost in costs[stop:] for source in cost.sources if start <= source < stop}
        if stop == len(costs):
            read_later.add(stop - 1)
        segments.append(Segment(start, stop, start in chosen, tuple(sorted(read)), tuple(sorted(read_later))))
    return tuple(segments)


def _peak(costs: Sequence[RowCost], segments: Sequence[Segment]) -> float:
    """Return the most bytes kept at once: after the forward pass, or while a segment is there for the second time."""
    inputs = {source for part in segments if part.is_checkpointed for source in part.inputs}
    stored, peak = 0, 0
    for part in segments:
        numbers = range(part.start, part.stop)
        everything = sum(costs[number].kept for number in numbers)
        peak = max(peak, stored + everything)
        crossing = inputs.union(part.outputs) if part.is_checkpointed else inputs
        for number in numbers:
            is_kept = number in crossing if part.is_checkpointed else costs[number].is_output_kept or number in inputs
            stored += costs[number].output * is_kept
        stored += 0 if part.is_checkpointed else sum(costs[number].inner for number in numbers)
    return max(peak, stored)
