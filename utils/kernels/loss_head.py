"""The detection loss of one head in few passes over its maps: each is read once forward and once backward.

Forward, level by level: decode the boxes and sum the class term as if there were no objects; then visit the anchors
inside each object to find its candidates; settle whom each wanted anchor goes to; correct the sums in those anchors
alone. Backward: write the gradient of the background, then replace the rows of the wanted anchors.

Nothing is read back by the host, and all sizes follow from the shapes, so that the calls can be recorded in CUDA
graphs. Sums have a fixed order and atomic operations work on integers: results do not vary from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from utils.kernels.layout import as_rows, can_launch, ceil_div, is_interpreted, on_device

if TYPE_CHECKING:
    from utils.train.assigner import Objects

MAP_TYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_CANDIDATES = 64  # per object, they are held in registers
INDEX_LIMIT = 2**31 - 2**16  # anchors of a batch and slots are counted in 32 bits, offsets within maps in 64

MAP_ROWS, MAP_WARPS = 64, 4
CANDIDATE_CELLS, CANDIDATE_WARPS = 512, 4
CONTEST_OBJECTS, CONTEST_WARPS = 256, 1
TERM_SLOTS, TERM_WARPS = 16, 2
SUM_VALUES, SUM_WARPS = 4096, 8
CONTEST_SLOTS = 1  # an anchor that several objects want costs a walk over all of them, and few anchors are
INTERPRETED_SLOTS = 256  # of any program; the interpreter takes its time for each


@dataclass(frozen=True)
class HeadLoss:
    """What the loss of a head depends on besides its maps and the objects."""

    strides: tuple[float, ...]
    num_classes: int
    reg_max: int
    gains: tuple[float, float, float]  # of box, class and distribution term, with the weight of the head
    pos_weight: float
    topk: int
    alpha: float
    beta: float
    eps: float

    def fits(self, maps: Sequence[Tensor]) -> bool:
        """Whether the kernels can compute the loss of these maps (B, 4R + C, H, W)."""
        first = maps[0]
        anchors = sum(level.shape[2] * level.shape[3] for level in maps) * first.shape[0]
        return (
            all(level.dtype == first.dtype and level.device == first.device for level in maps)
            and first.dtype in MAP_TYPES
            and can_launch(first)
            and 0 < anchors < INDEX_LIMIT
            and self.topk <= MOST_CANDIDATES
            and self.alpha >= 0
            and self.beta > 0  # without an exponent, anchors that do not overlap an object would be candidates
        )

    @property
    def bins_block(self) -> int:
        return power_of_two(self.reg_max)

    @property
    def topk_block(self) -> int:
        return power_of_two(self.topk)

    @property
    def class_block(self) -> int:
        """Classes of a tile: the width that wastes least at the end of a row, the largest of those."""
        return min((64, 32, 16), key=lambda width: ceil_div(self.num_classes, width) * width)


@dataclass(frozen=True)
class Level:
    """One map as a matrix of rows by channels, and where its anchors lie."""

    x: Tensor
    row_stride: int
    offset: int  # first anchor within an image
    stride: float

    @property
    def width(self) -> int:
        return self.x.shape[3]

    @property
    def cells(self) -> int:
        return self.x.shape[2] * self.x.shape[3]

    @property
    def rows(self) -> int:
        return self.x.shape[0] * self.cells


@dataclass(frozen=True)
class Slots:
    """Candidates of all objects, S = T * K; see the programs of the assignment."""

    anchor: Tensor  # (S,) int32 image * A + anchor, where the slot is used
    row: Tensor  # (S,) int32 row of the object that gets the anchor; -1 = not used
    metric: Tensor  # (S,) float32
    best: Tensor  # (2, T) float32 highest metric and overlap of each object


def slot_block(slots: int) -> int:
    """Return how many slots a program takes that takes ``slots`` of them on a GPU."""
    return INTERPRETED_SLOTS if is_interpreted() else slots


def power_of_two(number: int) -> int:
    """Return the smallest power of two from ``number`` up."""
    return 1 << (number - 1).bit_length()


def head_items(head: HeadLoss, maps: Sequence[Tensor], objects: Objects, smoothing: Tensor) -> Tensor:
    """Return the box, class and distribution term (3,) of a head, with gains; differentiable once, by the maps.

    Args:
        head: settings, which must fit the maps.
        maps: (B, 4R + C, H, W), one per level.
        objects: T rows of ground truth in pixels, float32.
        smoothing: label smoothing, float32 without axes, on the device.
    """
    with on_device(maps[0]):
        return _HeadItems.apply(head, objects, smoothing, *maps)


class _HeadItems(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, head: HeadLoss, objects: Objects, smoothing: Tensor, *maps: Tensor) -> Tensor:
        levels = make_levels(head, maps)
        boxes, background = read_maps(head, levels)
        slots = assign(head, levels, boxes, objects)
        score, partials = sum_terms(head, levels, slots, objects, smoothing)
        items, scales = finish_items(head, background, partials)
        ctx.head = head
        ctx.save_for_backward(
            slots.anchor, slots.row, score, scales, objects.label, objects.boxes, smoothing, *(v.x for v in levels)
        )
        return items

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, slopes: Tensor) -> tuple[Tensor | None, ...]:
        anchor, row, score, scales, label, truth, smoothing, *maps = ctx.saved_tensors
        slopes = slopes.contiguous()
        gradients: list[Tensor | None] = []
        with on_device(slopes):
            for level, is_needed in zip(make_levels(ctx.head, maps), ctx.needs_input_grad[3:], strict=True):
                if not is_needed:
                    gradients.append(None)
                    continue
                dx = background_gradient(ctx.head, level, slopes, scales)
                anchors = sum(x.shape[2] * x.shape[3] for x in maps)
                add_slots(ctx.head, level, anchors, dx, (anchor, row, score), (label, truth, smoothing, slopes, scales))
                gradients.append(dx)
        return None, None, None, *gradients


def make_levels(head: HeadLoss, maps: Sequence[Tensor]) -> list[Level]:
    """Look at the maps as matrices; maps of another layout are copied."""
    levels, offset = [], 0
    for x, stride in zip(maps, head.strides, strict=True):
        levels.append(Level(*as_rows(x), offset, stride))
        offset += levels[-1].cells
    return levels


def read_maps(head: HeadLoss, levels: Sequence[Level]) -> tuple[Tensor, Tensor]:
    """Return the boxes (B, A, 4) in pixels, and parts of the sum of softplus of all class logits."""
    from utils.kernels.programs import loss_maps

    first = levels[0].x
    anchors = sum(level.cells for level in levels)
    boxes = torch.empty((first.shape[0], anchors, 4), dtype=torch.float32, device=first.device)
    programs = [ceil_div(level.rows, MAP_ROWS) for level in levels]
    background = torch.empty(sum(programs), dtype=torch.float32, device=first.device)
    for number, level in enumerate(levels):
        loss_maps.read_maps[(programs[number],)](
            level.x,
            level.row_stride,
            boxes,
            background,
            sum(programs[:number]),
            level.rows,
            level.cells,
            level.width,
            level.offset,
            anchors,
            level.stride,
            BINS=head.reg_max,
            BINS_P=head.bins_block,
            CLASSES=head.num_classes,
            BLOCK_N=MAP_ROWS,
            BLOCK_C=head.class_block,
            num_warps=MAP_WARPS,
        )
    return boxes, background


def assign(head: HeadLoss, levels: Sequence[Level], boxes: Tensor, objects: Objects) -> Slots:
    """Choose the anchors that learn an object, see :class:`utils.train.assigner.TaskAlignedAssigner`.

    Where that one takes anchors without any alignment, to fill up an object's candidates, here none is taken: they
    would learn nothing.
    """
    rows, total = len(objects.image), boxes.shape[0] * boxes.shape[1]
    slots = Slots(
        anchor=torch.empty(rows * head.topk, dtype=torch.int32, device=boxes.device),
        row=torch.full((rows * head.topk,), -1, dtype=torch.int32, device=boxes.device),
        metric=torch.empty(rows * head.topk, dtype=torch.float32, device=boxes.device),
        best=torch.zeros((2, rows), dtype=torch.float32, device=boxes.device),
    )
    if rows:
        keys = torch.empty((rows, head.topk_block), dtype=torch.int64, device=boxes.device)
        chosen_by, claims = torch.zeros((2, total), dtype=torch.int32, device=boxes.device)
        for level in levels:
            _find_candidates(head, level, boxes, objects, (keys, chosen_by, claims), level is levels[-1])
        for level in levels:
            _settle_owners(head, level, boxes, objects, (keys, chosen_by, claims), slots)
    return slots


def _find_candidates(
    head: HeadLoss, level: Level, boxes: Tensor, objects: Objects, found: tuple[Tensor, ...], is_last: bool
) -> None:
    from utils.kernels.programs import loss_assign

    rows = len(objects.image)
    loss_assign.find_candidates[(rows,)](
        *found,
        boxes,
        level.x,
        level.row_stride,
        objects.image,
        objects.label,
        objects.boxes,
        objects.valid,
        level.x.shape[2],
        level.width,
        level.offset,
        boxes.shape[1],
        boxes.shape[0],
        rows * head.topk,
        level.stride,
        head.alpha,
        head.beta,
        head.eps,
        CLASS_COLUMN=4 * head.reg_max,
        CLASSES=head.num_classes,
        TOPK=head.topk,
        TOPK_P=head.topk_block,
        IS_FIRST=level.offset == 0,
        IS_LAST=is_last,
        BLOCK=CANDIDATE_CELLS,
        num_warps=CANDIDATE_WARPS,
    )


def _settle_owners(
    head: HeadLoss, level: Level, boxes: Tensor, objects: Objects, found: tuple[Tensor, ...], slots: Slots
) -> None:
    from utils.kernels.programs import loss_assign

    block = slot_block(CONTEST_SLOTS)
    loss_assign.settle_owners[(ceil_div(len(slots.row), block),)](
        slots.anchor,
        slots.row,
        slots.metric,
        slots.best.view(torch.int32),
        *found,
        boxes,
        level.x,
        level.row_stride,
        objects.image,
        objects.label,
        objects.boxes,
        len(objects.image),
        len(slots.row),
        level.cells,
        level.offset,
        boxes.shape[1],
        head.alpha,
        head.beta,
        CLASS_COLUMN=4 * head.reg_max,
        CLASSES=head.num_classes,
        TOPK=head.topk,
        TOPK_P=head.topk_block,
        BLOCK_S=block,
        BLOCK_T=CONTEST_OBJECTS,
        num_warps=CONTEST_WARPS,
    )


def sum_terms(
    head: HeadLoss, levels: Sequence[Level], slots: Slots, objects: Objects, smoothing: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scores (S,) of used slots, and parts (4, n) of the sums of box, class, distribution term and score."""
    from utils.kernels.programs import loss_slots

    score = torch.empty_like(slots.metric)
    block = slot_block(TERM_SLOTS)
    programs = ceil_div(len(score), block)
    partials = score.new_empty((4, programs * len(levels)))
    for number, level in enumerate(levels if programs else ()):
        loss_slots.sum_terms[(programs,)](
            score,
            partials,
            slots.anchor,
            slots.row,
            slots.metric,
            slots.best,
            level.x,
            level.row_stride,
            objects.label,
            objects.boxes,
            smoothing,
            len(objects.image),
            len(score),
            level.cells,
            level.width,
            level.offset,
            sum(other.cells for other in levels),
            number * programs,
            programs * len(levels),
            level.stride,
            head.pos_weight,
            head.eps,
            BINS=head.reg_max,
            BINS_P=head.bins_block,
            CLASSES=head.num_classes,
            BLOCK_S=block,
            BLOCK_C=head.class_block,
            num_warps=TERM_WARPS,
        )
    return score, partials


def finish_items(head: HeadLoss, background: Tensor, partials: Tensor) -> tuple[Tensor, Tensor]:
    """Return the items (3,) and by how much each rises with its sum (3,)."""
    from utils.kernels.programs import loss_slots

    items, scales = background.new_empty(3), background.new_empty(3)
    loss_slots.finish_items[(1,)](
        items,
        scales,
        background,
        partials,
        len(background),
        partials.shape[1],
        *head.gains,
        BLOCK=SUM_VALUES,
        num_warps=SUM_WARPS,
    )
    return items, scales


def background_gradient(head: HeadLoss, level: Level, slopes: Tensor, scales: Tensor) -> Tensor:
    """Return the gradient of a map, channels last, as if there were no objects."""
    from utils.kernels.programs import loss_maps

    dx = torch.empty_like(level.x, memory_format=torch.channels_last)
    loss_maps.background_gradient[(ceil_div(level.rows, MAP_ROWS),)](
        dx,
        level.x,
        level.row_stride,
        slopes,
        scales,
        level.rows,
        BINS=head.reg_max,
        CLASSES=head.num_classes,
        BLOCK_N=MAP_ROWS,
        BLOCK_C=head.class_block,
        BLOCK_B=power_of_two(4 * head.reg_max),
        num_warps=MAP_WARPS,
    )
    return dx


def add_slots(
    head: HeadLoss, level: Level, anchors: int, dx: Tensor, slots: tuple[Tensor, ...], context: tuple[Tensor, ...]
) -> None:
    """Replace the rows of used slots in the gradient of a map.

    Args:
        anchors: number of anchors of an image.
        dx: gradient of the background, changed in place.
        slots: anchors, rows and scores of the slots.
        context: labels and boxes of the objects, smoothing, gradients of the items, scales of the items.
    """
    from utils.kernels.programs import loss_slots

    label, truth, smoothing, slopes, scales = context
    block = slot_block(TERM_SLOTS)
    programs = ceil_div(len(slots[0]), block)
    if not programs:
        return
    loss_slots.slot_gradients[(programs,)](
        dx,
        *slots,
        level.x,
        level.row_stride,
        label,
        truth,
        smoothing,
        slopes,
        scales,
        len(slots[0]),
        level.cells,
        level.width,
        level.offset,
        anchors,
        level.stride,
        head.pos_weight,
        BINS=head.reg_max,
        BINS_P=head.bins_block,
        CLASSES=head.num_classes,
        BLOCK_S=block,
        BLOCK_C=head.class_block,
        num_warps=TERM_WARPS,
    )
