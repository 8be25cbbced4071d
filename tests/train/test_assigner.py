"""Label assignment against reference draws, a plain-Python oracle and its own invariants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.assigner import assign_image, is_inside
from tests.reference.draws import CLASSES, Draw, draw
from utils.train import assigner
from utils.train.assigner import Assignment, Objects, TaskAlignedAssigner


def make_assigner(classes: int = CLASSES) -> TaskAlignedAssigner:
    return TaskAlignedAssigner(topk=10, num_classes=classes, alpha=0.5, beta=6.0)


def test_matches_reference(golden: Callable[[str], Path]) -> None:
    with np.load(golden("ops/assigner.npz")) as file:
        reference = {name: file[name] for name in file.files}
    names = ("pd_scores", "pd_bboxes", "anc_points", "gt_labels", "gt_bboxes", "mask_gt")
    for case, options in json.loads(str(reference["meta"])).items():
        call = (torch.from_numpy(reference[f"{case}.{name}"]) for name in names)
        labels, boxes, scores, foreground = make_assigner(options["nc"])(*call)
        settled = ~reference[f"{case}.order_dependent"]
        expected = reference[f"{case}.fg_mask"].astype(bool)
        np.testing.assert_array_equal(foreground.numpy()[settled], expected[settled], err_msg=case)
        compared = settled & expected
        np.testing.assert_array_equal(labels.numpy()[compared], reference[f"{case}.target_labels"][compared])
        np.testing.assert_array_equal(boxes.numpy()[compared], reference[f"{case}.target_bboxes"][compared])
        wanted = reference[f"{case}.target_scores"][settled]
        np.testing.assert_allclose(scores.numpy()[settled], wanted, rtol=1e-4, atol=1e-6, err_msg=case)


@pytest.mark.parametrize("seed", range(8))
def test_matches_the_oracle(seed: int) -> None:
    case = draw(seed, counts=(7, 0, 2) if seed % 2 else (5, 9))
    labels, boxes, scores, foreground = make_assigner()(*case.padded())
    for image in range(len(scores)):
        truth, kinds = case.truth[image].tolist(), case.labels[image, :, 0].long().tolist()
        expected = assign_image(
            case.scores[image].tolist(),
            case.boxes[image].tolist(),
            case.points.tolist(),
            kinds,
            truth,
            case.valid[image, :, 0].bool().tolist(),
        )
        assert foreground[image].tolist() == [owner is not None for owner in expected.owner]
        for anchor, owner in enumerate(expected.owner):
            if owner is not None:
                assert labels[image, anchor] == kinds[owner]
                assert boxes[image, anchor].tolist() == truth[owner]
        np.testing.assert_allclose(scores[image].sum(1), expected.score, rtol=1e-9, atol=1e-12)


def test_anchor_can_move_to_an_object_that_did_not_choose_it() -> None:
    """Two objects want the anchor, a third one outside of which it lies overlaps its prediction most."""
    points = torch.tensor([[5.0, 5.0], [95.0, 95.0]])
    predicted = torch.tensor([[[20.0, 20.0, 40.0, 40.0], [90.0, 90.0, 99.0, 99.0]]])
    truth = torch.tensor([[[0.0, 0.0, 30.0, 30.0], [0.0, 0.0, 31.0, 31.0], [20.0, 20.0, 41.0, 41.0]]])
    labels = torch.tensor([[[0.0], [1.0], [2.0]]])
    scores = torch.full((1, 2, 3), 0.5)
    found = make_assigner()(scores, predicted, points, labels, truth, torch.ones(1, 3, 1))
    assert found[3].tolist() == [[True, False]]
    assert found[0][0, 0] == 2
    assert found[2][0, 0, 2] > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pairs", [1, 84 * 3, 84 * 5])
def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, seed: int, pairs: int) -> None:
    case = draw(seed, (9, 7))
    case.truth[:, 4:6] = case.truth[:, :2]  # equal overlaps in different pieces
    whole = make_assigner().assign(case.scores, case.boxes, case.points, case.flat())
    monkeypatch.setattr(assigner, "PAIRS_PER_CHUNK", pairs)
    pieces = make_assigner().assign(case.scores, case.boxes, case.points, case.flat())
    for name in Assignment.__dataclass_fields__:
        assert torch.equal(getattr(whole, name), getattr(pieces, name)), name


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(0, 8), st.integers(0, 8))
def test_invariants(seed: int, first: int, second: int) -> None:
    case = draw(seed, (first, second), slots=8)
    objects = case.flat()
    found = make_assigner().assign(case.scores, case.boxes, case.points, objects)
    assert (found.score >= 0).all()
    assert (found.score <= 1).all()
    assert not found.score[~found.foreground].any()
    used = found.slot_anchor[found.slot_used]
    assert sorted(used.tolist()) == found.foreground.view(-1).nonzero().view(-1).tolist()
    assert len(found.slot_anchor) == 10 * len(objects.image)
    image, anchor = found.foreground.nonzero(as_tuple=True)
    rows = found.object_row[image, anchor]
    assert (objects.image[rows] == image).all()
    inside_any = [
        any(is_inside(case.points[a].tolist(), box) for box in case.truth[b, : (first, second)[b]].tolist())
        for b, a in zip(image.tolist(), anchor.tolist(), strict=True)
    ]
    assert all(inside_any)


@pytest.mark.parametrize("seed", range(4))
def test_padding_and_batching_do_not_matter(seed: int) -> None:
    case = draw(seed, (5, 2, 0), slots=9)
    case.truth *= case.valid  # padding is zero; any other box in a slot takes part in conflicts
    labels, boxes, scores, foreground = make_assigner()(*case.padded())
    flat = make_assigner().assign(case.scores, case.boxes, case.points, case.flat())
    assert torch.equal(flat.foreground, foreground)
    torch.testing.assert_close(flat.score, scores.sum(-1))
    for image in range(3):
        alone = Draw(*(part[image : image + 1] if part.ndim > 2 else part for part in case.padded()))
        found = make_assigner()(*alone.padded())
        for one, all_images in zip(found, (labels, boxes, scores, foreground), strict=True):
            torch.testing.assert_close(one[0], all_images[image])


def test_order_of_rows_only_breaks_ties() -> None:
    case = draw(11, (6, 6))
    objects = case.flat()
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    mixed = Objects(objects.image[shuffle], objects.label[shuffle], objects.boxes[shuffle], objects.valid[shuffle])
    plain = make_assigner().assign(case.scores, case.boxes, case.points, objects)
    other = make_assigner().assign(case.scores, case.boxes, case.points, mixed)
    assert torch.equal(plain.foreground, other.foreground)
    torch.testing.assert_close(plain.score, other.score)
    on = plain.foreground
    assert torch.equal(objects.boxes[plain.object_row[on]], mixed.boxes[other.object_row[on]])


def test_without_slots_everything_is_background() -> None:
    case = draw(0, (1, 1))
    empty = (case.labels[:, :0], case.truth[:, :0], case.valid[:, :0])
    labels, boxes, scores, foreground = make_assigner()(case.scores, case.boxes, case.points, *empty)
    assert (labels == CLASSES).all()
    assert not boxes.any()
    assert not scores.any()
    assert not foreground.any()


def test_fewer_anchors_than_wanted() -> None:
    case = draw(0, (2,))
    found = make_assigner()(case.scores[:, -4:], case.boxes[:, -4:], case.points[-4:], *case.padded()[3:])
    assert found[3].shape == (1, 4)


@pytest.mark.parametrize("seed", range(3))
def test_logits_give_what_their_probabilities_give(seed: int) -> None:
    case = draw(seed, (6, 0, 4))
    logits = case.scores.logit()
    expected = make_assigner().assign(logits.sigmoid(), case.boxes, case.points, case.flat())
    found = make_assigner().assign(logits, case.boxes, case.points, case.flat(), from_logits=True)
    for name in Assignment.__dataclass_fields__:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
