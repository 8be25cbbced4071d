"""The fused loss of a head against the plain one, and its assignment against the plain-Python oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.reference.assigner import assign_image
from tests.reference.draws import CLASSES, STRIDES, Draw, draw
from utils.kernels import loss_head
from utils.kernels.loss_head import HeadLoss, Slots, make_levels
from utils.train.assigner import Objects, TaskAlignedAssigner
from utils.train.loss import DetectionLoss
from utils.train.loss_check import kernel_obstacle

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of gradients, by their largest
Maps = list[Tensor]


def random_maps(
    device: torch.device,
    classes: int = 3,
    batch: int = 2,
    size: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    reg_max: int = 16,
    scale: float = 1.5,
) -> Maps:
    """Maps (B, 4R + C, H, W) of one head, channels last."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, 4 * reg_max + classes, size[0] // stride, size[1] // stride) for stride in STRIDES]
    drawn = [torch.randn(shape, generator=generator) * scale for shape in shapes]
    return [x.to(device, dtype).contiguous(memory_format=torch.channels_last) for x in drawn]


def random_targets(count: int, classes: int = 3, batch: int = 2) -> Tensor:
    """Rows (T, 6), some reaching out of the picture."""
    generator = torch.Generator().manual_seed(1)
    centre, size = torch.rand(count, 2, generator=generator), torch.rand(count, 2, generator=generator) * 0.6 + 0.02
    image = torch.randint(0, batch, (count, 1), generator=generator)
    label = torch.randint(0, classes, (count, 1), generator=generator)
    return torch.cat((image, label, centre * 1.1 - 0.05, size), 1)


def losses(
    maps: Maps | list[Maps], targets: Tensor, *, smoothing: float | Tensor | None = None, **options: Any
) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """Total, items and gradients of the plain and of the fused loss."""
    results = []
    for use_kernels in (False, True):
        loss = DetectionLoss(strides=STRIDES, use_kernels=use_kernels, **options)
        heads = maps if isinstance(maps[0], list) else [maps]
        heads = [[x.detach().clone().requires_grad_() for x in levels] for levels in heads]
        total, items = loss(heads, targets, label_smoothing=smoothing)
        total.backward()
        results.append((total.detach(), items, [x.grad for levels in heads for x in levels]))
    return results


def check(plain: tuple[Tensor, Tensor, list[Tensor]], fused: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(fused[1], plain[1], rtol=1e-5, atol=1e-7)
    for found, expected in zip(fused[2], plain[2], strict=True):
        assert found.dtype == expected.dtype
        allowed = TOLERANCES[found.dtype] * expected.float().abs().max()
        assert (found.float() - expected.float()).abs().max() <= allowed


CASES = {
    "three classes": {},
    "one class": {"classes": 1, "count": 5},
    "many classes, wide picture": {"classes": 80, "size": (64, 96), "count": 6},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "classes": 7},
    "no objects": {"count": 0},
    "crowd in one image": {"batch": 1, "count": 16},
    "twelve bins": {"reg_max": 12},
    "certain background": {"scale": 0.2, "bias": -11.0},
    "two positive weights, smoothing": {"cls_pw": 2.0, "label_smoothing": 0.2},
    "other exponents": {"alpha": 1.0, "beta": 2.0, "topk": 17, "count": 5},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loss(device: torch.device, case: str) -> None:
    options = dict(CASES[case])
    shape = {name: options.pop(name) for name in ("batch", "size", "dtype", "scale") if name in options}
    classes, reg_max, bias = options.pop("classes", 3), options.pop("reg_max", 16), options.pop("bias", 0.0)
    maps = random_maps(device, classes, reg_max=reg_max, **shape)
    for level in maps:
        level[:, 4 * reg_max :] += bias
    targets = random_targets(options.pop("count", 8), classes, shape.get("batch", 2))
    check(*losses(maps, targets, num_classes=classes, reg_max=reg_max, **options))


def test_auxiliary_head_and_smoothing_in_memory(device: torch.device) -> None:
    maps = random_maps(device)
    share = torch.tensor(0.3, device=device)
    heads = [maps, [level.flip(0) for level in maps]]
    check(*losses(heads, random_targets(4), smoothing=share, num_classes=3, gains=(1.0, 2.0, 3.0)))


@pytest.mark.parametrize("layout", ["planes", "slice of channels"])
def test_layout_of_maps_does_not_matter(device: torch.device, layout: str) -> None:
    maps, targets = random_maps(device), random_targets(4)
    loss = DetectionLoss(strides=STRIDES, num_classes=3, use_kernels=True)
    expected = loss(maps, targets)[0]
    if layout == "planes":
        other = [level.contiguous() for level in maps]
    else:
        other = [torch.cat((level, level), 1).contiguous(memory_format=torch.channels_last)[:, :67] for level in maps]
    other = [level.requires_grad_() if level.is_leaf else level.detach().requires_grad_() for level in other]
    total = loss(other, targets)[0]
    assert torch.equal(total, expected)
    total.backward()
    assert all(level.grad.isfinite().all() and level.grad.any() for level in other)


def test_rows_without_extent_change_nothing(device: torch.device) -> None:
    """A recorded step has a fixed number of rows, most of the last ones zero."""
    maps, targets = random_maps(device), random_targets(4)
    padded = torch.cat((targets, torch.zeros(8, 6)))
    loss = DetectionLoss(strides=STRIDES, num_classes=3, use_kernels=True)
    torch.testing.assert_close(loss(maps, padded)[1], loss(maps, targets)[1], rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's word in the interpreter
def test_stays_finite_in_bad_corners(device: torch.device) -> None:
    """Saturated logits, boxes without extent, boxes outside, larger than the picture, and rows of no image."""
    rows = [(0, 0, 0.5, 0.5, 0, 0), (0, 1, 1.4, 0.5, 0.2, 0.2), (1, 2, 0.5, 0.5, 3, 3), (1, 2, 0.5, 0.5, 1e9, 1e9)]
    rows += [(0, 1, 0.5, 0.5, -0.5, 0.5), (9, 1, 0.5, 0.5, 0.5, 0.5), (0, 99, 0.5, 0.5, 0.5, 0.5)]
    maps = [(level * 60).requires_grad_() for level in random_maps(device)]
    loss = DetectionLoss(strides=STRIDES, num_classes=3, use_kernels=True, cls_pw=3.0)
    total, _ = loss(maps, torch.tensor(rows))
    total.backward()
    assert total.isfinite()
    assert all(level.grad.isfinite().all() for level in maps)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("channel", [5, 65])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(device: torch.device, channel: int, value: float) -> None:
    """A spoilt logit, of a box or a class, far from every object; training skips such steps by their gradients."""
    maps = random_maps(device)
    maps[0][1, channel, 0, 0] = value
    loss = DetectionLoss(strides=STRIDES, num_classes=3, use_kernels=True)
    leaves = [level.requires_grad_() for level in maps]
    total, _ = loss(leaves, torch.tensor([(0, 0, 0.5, 0.5, 0.2, 0.2)]))
    total.backward()
    assert not total.isfinite()
    if channel < 64 or value != value:
        assert not leaves[0].grad.isfinite().all()


@pytest.mark.parametrize("reason", ["focal factor", "double", "mixed types", "switched off"])
def test_what_does_not_fit_goes_the_plain_way(
    device: torch.device, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the kernels were called")

    monkeypatch.setattr("utils.train.loss.head_items", refuse)
    maps = random_maps(device, dtype=torch.float64 if reason == "double" else torch.float32)
    if reason == "mixed types":
        maps[1] = maps[1].double()
    gamma = 1.5 if reason == "focal factor" else 0.0
    loss = DetectionLoss(strides=STRIDES, num_classes=3, fl_gamma=gamma, use_kernels=reason != "switched off")
    assert loss(maps, random_targets(3))[0].isfinite()


def test_check_finds_agreement_and_disagreement(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = DetectionLoss(strides=STRIDES, num_classes=3, gains=(7.5, 0.5, 0.0))
    assert kernel_obstacle(loss, device, torch.float32) == ""
    assert not loss.use_kernels
    monkeypatch.setattr("utils.train.loss.head_items", lambda _, maps, *__: torch.stack([x.sum() for x in maps]))
    assert "differs" in kernel_obstacle(loss, device, torch.float32)
    assert "focal" in kernel_obstacle(DetectionLoss(strides=STRIDES, num_classes=3, fl_gamma=1.5), device)


# ------------------------------------------------------------------------------------------------------- assignment


def settings(**changes: Any) -> HeadLoss:
    plain = HeadLoss(STRIDES, CLASSES, 1, (1.0, 1.0, 1.0), pos_weight=1.0, topk=10, alpha=0.5, beta=6.0, eps=1e-9)
    return replace(plain, **changes)


def assign(device: torch.device, case: Draw, objects: Objects, size: tuple[int, int], **changes: Any) -> Slots:
    """Run the kernels on given boxes and probabilities instead of those of maps."""
    batch, anchors = case.scores.shape[:2]
    rows = torch.cat((torch.zeros(batch, anchors, 4), case.scores.logit().float()), 2)  # one bin per side
    cells = [size[0] // stride * (size[1] // stride) for stride in STRIDES]
    maps = [
        level.transpose(1, 2).reshape(batch, 4 + CLASSES, size[0] // stride, size[1] // stride).to(device)
        for level, stride in zip(rows.split(cells, 1), STRIDES, strict=True)
    ]
    head = settings(**changes)
    placed = Objects(*(getattr(objects, name).to(device) for name in ("image", "label", "boxes", "valid")))
    placed = replace(placed, boxes=placed.boxes.float())
    return loss_head.assign(head, make_levels(head, maps), case.boxes.float().to(device), placed)


def tables(slots: Slots, batch: int, anchors: int) -> tuple[Tensor, Tensor]:
    """Owner (B, A) of each anchor, -1 = none, and score (B, A)."""
    row, anchor = slots.row.long().cpu(), slots.anchor.long().cpu()
    used = row >= 0
    assert len(set(anchor[used].tolist())) == int(used.sum()), "an anchor has more than one slot"
    best_metric, best_overlap = slots.best.cpu()
    score = slots.metric.cpu() * best_overlap[row.clamp(0)] / (best_metric[row.clamp(0)] + 1e-9)
    owner, table = torch.full((batch * anchors,), -1), torch.zeros(batch * anchors)
    owner[anchor[used]], table[anchor[used]] = row[used], score[used]
    return owner.view(batch, anchors), table.view(batch, anchors)


@pytest.mark.parametrize("seed", range(4))
def test_assignment_matches_the_oracle(device: torch.device, seed: int) -> None:
    size = (64, 64) if seed % 2 else (96, 64)
    case = draw(seed, counts=(7, 0, 2) if seed % 2 else (3, 6), size=size)
    objects = case.flat()
    owner, score = tables(assign(device, case, objects, size), *case.scores.shape[:2])
    for image in range(len(case.scores)):
        rows = (objects.image == image).nonzero().view(-1).tolist()
        expected = assign_image(
            case.scores[image].tolist(),
            case.boxes[image].tolist(),
            case.points.tolist(),
            [int(objects.label[row]) for row in rows],
            [objects.boxes[row].tolist() for row in rows],
            [True] * len(rows),
        )
        wanted = [-1 if number is None else rows[number] for number in expected.owner]
        # An anchor without any alignment takes part in the oracle, here it does not; it learns nothing in either.
        matters = np.array(expected.score) > 0
        assert (owner[image].numpy()[matters] == np.array(wanted)[matters]).all()
        np.testing.assert_allclose(score[image], expected.score, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("topk", [1, 10, 13])
def test_assignment_of_a_crowd_matches_the_plain_one(device: torch.device, topk: int) -> None:
    case = draw(5, (14, 2))
    case.truth[:, 2:4] = case.truth[:, :2]  # equal objects: the first one wins
    objects = case.flat()
    expected = TaskAlignedAssigner(topk, CLASSES, 0.5, 6.0).assign(case.scores, case.boxes, case.points, objects)
    owner, score = tables(assign(device, case, objects, (64, 64), topk=topk), *case.scores.shape[:2])
    matters = expected.score > 0
    assert torch.equal(owner[matters], expected.object_row[matters])
    torch.testing.assert_close(score, expected.score.float(), rtol=2e-5, atol=1e-7)


def test_anchor_can_move_to_an_object_that_did_not_choose_it(device: torch.device) -> None:
    """Two objects want the first anchor, a third one outside of which it lies overlaps its prediction most."""
    case = draw(0, (3,))
    case.boxes[:] = 1000.0  # nothing fits
    case.boxes[0, 0] = torch.tensor([5.0, 5.0, 40.0, 40.0])
    case.truth[0] = torch.tensor([[0.0, 0.0, 30.0, 30.0], [0.0, 0.0, 31.0, 31.0], [6.0, 6.0, 41.0, 41.0]])
    owner, score = tables(assign(device, case, case.flat(), (64, 64)), *case.scores.shape[:2])
    assert owner[0, 0] == 2
    assert score[0, 0] > 0
    assert (owner[0, 1:] == -1).all()


# ------------------------------------------------------------------------------------------------- on a real device


@pytest.mark.gpu
def test_recorded_loss_equals_the_launched_one() -> None:
    """As in a training step: other maps, targets and smoothing in the same memory, nothing waits for the host."""
    device = torch.device("cuda")
    maps = [level.requires_grad_() for level in random_maps(device, dtype=torch.bfloat16)]
    targets, share = random_targets(8).to(device), torch.tensor(0.1, device=device)
    loss = DetectionLoss(strides=STRIDES, num_classes=3, use_kernels=True)

    def run() -> tuple[Tensor, ...]:
        total, items = loss(maps, targets, label_smoothing=share)
        return total.detach(), items, *torch.autograd.grad(total, maps)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run()
    with torch.no_grad():
        for level in maps:
            level.copy_(level.roll(1, 0) * 1.1)
        targets.copy_(random_targets(8).flip(0))
        share.fill_(0.3)
    graph.replay()
    for found, expected in zip(recorded, run(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
def test_two_thousand_objects_in_one_image() -> None:
    device, dtype = torch.device("cuda"), torch.float32
    maps = random_maps(device, 80, batch=2, size=(640, 640), dtype=dtype)
    targets = random_targets(2000, 80, batch=1)
    first, second = (losses(maps, targets, num_classes=80) for _ in range(2))
    check(*first)
    for found, again in zip(first[1][2], second[1][2], strict=True):
        assert torch.equal(found, again)
    loss = DetectionLoss(strides=STRIDES, num_classes=80, use_kernels=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        loss(maps, targets)
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20
