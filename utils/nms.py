"""Non-maximum suppression of a whole batch at once, on its device and in float32, without a time limit.

The greedy rule is worked through in blocks of candidates, all pictures side by side. The host waits for the device a
few times per batch, never per picture, and no picture is ever left out. A few candidates are worked through by the
processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CANDIDATES = 30_000  # rows per picture that enter the suppression, best first
CROWDED = MAX_CANDIDATES // 4  # candidates of a picture, on average, from which the worst ones are cut off beforehand
CPU_BLOCK = 128  # candidates per picture and round: little work in vain
DEVICE_BLOCKS, DEVICE_PAIRS = (128, 2048), 1 << 24  # on a device: few rounds, of about so many pairs within a block
HOST_ROWS = 1024  # up to so many candidates of a batch are suppressed by the processor: launching kernels takes longer
PASSES = 3  # over a block between two looks at the result on a device, where looking costs more than a pass


@dataclass(frozen=True)
class _Candidates:
    """What may become a detection, of all pictures of a batch."""

    image: Tensor  # (R,) number of the picture in the batch
    score: Tensor  # (R,)
    label: Tensor  # (R,) class, as float like everything that ends in a detection row
    corners: Tensor  # (R, 4) x1 y1 x2 y2 in pixels
    further: Tensor  # (R, nm)

    def parts(self) -> tuple[Tensor, ...]:
        """Return the fields in their order."""
        return (self.image, self.score, self.label, self.corners, self.further)

    def select(self, index: Tensor) -> _Candidates:
        """Return the candidates at ``index`` (numbers or a mask)."""
        return _Candidates(*(part[index] for part in self.parts()))

    def cpu(self) -> _Candidates:
        """Return the candidates in host memory; the arithmetic on them is the same there, bit for bit."""
        return _Candidates(*(part.cpu() for part in self.parts()))

    def joined(self, other: _Candidates) -> _Candidates:
        """Return these candidates and others behind them."""
        return _Candidates(*(torch.cat(pair) for pair in zip(self.parts(), other.parts(), strict=True)))


def non_max_suppression(
    prediction: Tensor | Sequence,
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    classes: Sequence[int] | None = None,
    agnostic: bool = False,
    multi_label: bool = False,
    labels: Sequence[Tensor] = (),
    max_det: int = 300,
    nm: int = 0,
) -> list[Tensor]:
    """Return for each picture its detections (n, 6 + nm): x1, y1, x2, y2, confidence, class, further values.

    Args:
        prediction: (B, 4 + nc + nm, A): centre and size in pixels, class probabilities, further values. Output of
            a model as it comes (with maps, with several branches) is taken too: the last branch counts.
        conf_thres: a class must be more probable than this.
        iou_thres: of two boxes that overlap more than this, the less confident goes.
        classes: keep only these class indices.
        agnostic: let boxes of different classes suppress each other.
        multi_label: a box may be reported once for every class above the threshold, not only for its best one.
        labels: per picture rows (k, 5) class, x, y, w, h in pixels that join as certain detections.
        max_det: detections kept per picture.
        nm: number of further values behind the classes.

    The result is float32 and in order of falling confidence, whatever the type of the prediction: half precision
    cannot hold pixel coordinates.

    Raises:
        ValueError: a threshold lies outside 0..1, or the prediction has no class channel.
    """
    for name, value in (("conf_thres", conf_thres), ("iou_thres", iou_thres)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}: give a value from 0 to 1")
    prediction = _lead_tensor(prediction).detach()
    num_classes = prediction.shape[1] - 4 - nm
    if num_classes < 1:
        raise ValueError(f"prediction has shape {tuple(prediction.shape)}: expected (batch, 4 + classes + {nm}, boxes)")
    candidates = _candidates(prediction, num_classes, conf_thres, multi_label and num_classes > 1)
    if len(labels):
        candidates = candidates.joined(_certain(labels, candidates))
    if classes is not None:
        wanted = torch.as_tensor(list(classes), dtype=candidates.label.dtype, device=prediction.device)
        candidates = candidates.select(torch.isin(candidates.label, wanted))
    if len(candidates.image) <= HOST_ROWS:
        candidates = candidates.cpu()
    rows, kept = _suppress(candidates, len(prediction), iou_thres, agnostic, max_det)
    return list(rows.to(prediction.device).split(kept))


def rehearse_suppression(device: torch.device) -> None:
    """Choose candidates on ``device`` and suppress them: a GPU loads each operation when it is first used."""
    prediction = torch.full((1, 6, 64), 0.5, device=device)  # the same box, by two classes, again and again
    non_max_suppression(prediction)
    non_max_suppression(prediction, multi_label=True)


def _lead_tensor(output: Tensor | Sequence) -> Tensor:
    """Find (B, channels, A) in nested output of a model: of the branches decoded side by side the last one leads."""
    while not isinstance(output, Tensor):
        decoded = [item for item in output if isinstance(item, Tensor) and item.ndim == 3]
        output = decoded[-1] if decoded else output[0]
    return output


def _candidates(prediction: Tensor, num_classes: int, conf_thres: float, multi_label: bool) -> _Candidates:
    """Pick boxes of (B, 4 + nc + nm, A): once for every class above the threshold, or once for the best class."""
    scores = prediction[:, 4 : 4 + num_classes]
    best, label = scores.max(1)  # (B, A); not above the threshold where any score is not a number
    if multi_label:
        mask = scores > conf_thres
        total = int(mask.sum())
        if total > CROWDED * len(scores) and scores[0].numel() > MAX_CANDIDATES:
            # An untrained model finds everything everywhere; sorting all of that would take longer than the network.
            mask &= scores >= scores.flatten(1).topk(MAX_CANDIDATES, sorted=False).values.amin(1)[:, None, None]
        image, anchor, label = mask.transpose(1, 2).nonzero(as_tuple=True)
        is_sound = best[image, anchor] > conf_thres
        image, anchor, label = image[is_sound], anchor[is_sound], label[is_sound]
    else:
        image, anchor = (best > conf_thres).nonzero(as_tuple=True)
        label = label[image, anchor]
    centre, sides = prediction[image, :4, anchor].float().split(2, 1)
    further = prediction[image, 4 + num_classes :, anchor].float()
    corners = torch.cat((centre - sides / 2, centre + sides / 2), 1)
    found = _Candidates(image, scores[image, label, anchor].float(), label.float(), corners, further)
    return found.select(corners.isfinite().all(1))


def _certain(labels: Sequence[Tensor], like: _Candidates) -> _Candidates:
    """Return label rows (k, 5) class, x, y, w, h of each picture as candidates of confidence 1."""
    rows = torch.cat([part.to(like.corners) for part in labels])
    sizes = torch.tensor([len(part) for part in labels])
    image = torch.arange(len(labels)).repeat_interleave(sizes).to(like.image)
    corners = torch.cat((rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2), 1)
    return _Candidates(
        image,
        torch.ones_like(rows[:, 0]),
        rows[:, 0],
        corners,
        like.further.new_zeros(len(rows), like.further.shape[1]),
    )


def _suppress(
    found: _Candidates, batch: int, iou_thres: float, agnostic: bool, max_det: int
) -> tuple[Tensor, list[int]]:
    """Drop what overlaps a better box of its class, keep ``max_det`` rows of each picture, best first.

    Returns the rows (n, 6 + nm), picture by picture, and how many each picture has.
    """
    # Bits of positive floats rise with their values, so one whole number orders by picture and falling confidence.
    order = ((found.image << 32) - found.score.view(torch.int32)).argsort(stable=True)
    found = found.select(order)
    counts = found.image.new_zeros(batch).index_add_(0, found.image, torch.ones_like(found.image))
    start = counts.cumsum(0) - counts
    index, kept = _greedy(found, start, start + counts.clamp(max=MAX_CANDIDATES), iou_thres, agnostic, max_det)
    index = index[torch.arange(max_det, device=index.device) < kept[:, None]]  # (kept rows,), picture by picture
    found = found.select(index)
    rows = torch.cat((found.corners, found.score[:, None], found.label[:, None], found.further), 1)
    return rows, kept.tolist()


def _greedy(
    found: _Candidates, start: Tensor, end: Tensor, iou_thres: float, agnostic: bool, max_det: int
) -> tuple[Tensor, Tensor]:
    """Return which candidates survive: their numbers (B, max_det), and how many of a row count (B,).

    Args:
        found: sorted by picture, then by falling confidence.
        start, end: (B,) where the candidates of each picture begin and end.
    """
    total, device = len(found.image), start.device
    # one more row, for the places that are not taken: an empty box of no class overlaps nothing
    boxes = torch.cat((found.corners, found.corners.new_zeros(1, 4)))
    label = torch.zeros_like(found.label) if agnostic else found.label
    label = torch.cat((label, label.new_full((1,), -1)))
    block = CPU_BLOCK if device.type == "cpu" else _device_block(len(start))
    steps = torch.arange(block, device=device)
    chosen = torch.full((len(start), max_det + 1), total, device=device)  # the last column takes what is too much
    kept = torch.zeros_like(start)
    done = 0
    while len(active := ((kept < max_det) & (start + done < end)).nonzero()[:, 0]):
        index = start[active, None] + done + steps  # (b, M)
        is_real = index < end[active, None]
        index = torch.where(is_real, index, total)
        prior = chosen[active, : min(done, max_det)]  # (b, k)
        front = torch.cat((prior, index), 1)
        # (b, k + M, M): row in front of column
        conflict = _overlapping(boxes[front], label[front], boxes[index], label[index], iou_thres)
        beaten, inner = conflict[:, : prior.shape[1]].any(1), conflict[:, prior.shape[1] :].triu(1)
        survives = _resolve(inner, is_real & ~beaten)
        place = kept[active, None] + survives.cumsum(1) - 1
        chosen[active[:, None], torch.where(survives, place.clamp(max=max_det), max_det)] = index
        kept[active] = (kept[active] + survives.sum(1)).clamp(max=max_det)
        done += block
    return chosen[:, :max_det], kept


def _device_block(pictures: int) -> int:
    """Return how many candidates of each picture are compared in a round on a device."""
    least, most = DEVICE_BLOCKS
    return min(max(1 << int(math.log2(math.sqrt(DEVICE_PAIRS / max(pictures, 1)))), least), most)


def _resolve(conflict: Tensor, is_free: Tensor) -> Tensor:
    """Return which candidates of a block survive each other, (b, M).

    A candidate goes if a survivor in front of it overlaps it. Started with all of them, this rule settles after as
    many passes as the longest chain of candidates that depend on each other, and then is the greedy result.

    Args:
        conflict: (b, M, M) whether a row overlaps the column, which stands behind it.
        is_free: (b, M) candidates that nothing beat before.
    """
    survives = is_free
    while True:
        before = survives
        for _ in range(1 if conflict.device.type == "cpu" else PASSES):
            before, survives = survives, is_free & ~(conflict & survives[:, :, None]).any(1)
        if torch.equal(before, survives):
            return survives


def _overlapping(first: Tensor, first_label: Tensor, second: Tensor, second_label: Tensor, iou_thres: float) -> Tensor:
    """Tell of boxes (b, K, 4) and (b, M, 4) which pairs are of one class and have an IoU above the threshold."""
    ax1, ay1, ax2, ay2 = first.movedim(-1, 0)[..., None]  # (b, K, 1) each
    bx1, by1, bx2, by2 = second.movedim(-1, 0).contiguous()[:, :, None]  # (b, 1, M) each, numbers side by side
    # In place, as each of these tables is large: on a CPU fresh memory takes longer than the arithmetic.
    shared = torch.minimum(ax2, bx2).sub_(torch.maximum(ax1, bx1)).clamp_(min=0)
    shared *= torch.minimum(ay2, by2).sub_(torch.maximum(ay1, by1)).clamp_(min=0)
    union = ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1)).sub_(shared)
    return (shared > union.mul_(iou_thres)).logical_and_(first_label[:, :, None] == second_label[:, None])
