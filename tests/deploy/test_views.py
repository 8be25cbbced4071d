"""Views of frames: grouped by shape, bounded in what waits, back in reading order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from utils.data.frames import Frame, Unreadable
from utils.deploy import views as views_module
from utils.deploy.views import Batch, Done, Skipped, View, grouped, reassembled, views_of
from utils.slicing import Window

SMALL, LARGE = np.zeros((4, 4, 3), np.uint8), np.zeros((4, 8, 3), np.uint8)


def shape_of(view: View) -> tuple[int, int]:
    return view.image_bgr.shape[:2]


def group(events: list[Frame | Unreadable], size: int) -> list[Batch | Skipped]:
    return list(grouped(events, views_of, shape_of, size))


def items_of(batches: list[Batch | Skipped]) -> list[list[int] | str]:
    return [
        f"skipped {batch.sequence}" if isinstance(batch, Skipped) else [view.frame.item for view in batch.views]
        for batch in batches
    ]


def looked_at(batches: list[Batch | Skipped]) -> Iterator[Batch | Skipped]:
    """Each view finds one box whose corner is the number of its frame."""
    for batch in batches:
        if isinstance(batch, Batch):
            batch.network_s = 0.002 * len(batch.views)
            batch.found = [np.array([[view.frame.item, 0, 9, 9, 0.5, view.index]]) for view in batch.views]
        yield batch


def test_views_of_one_shape_travel_together_and_frames_leave_in_order() -> None:
    images = (SMALL, LARGE, SMALL, None, LARGE, SMALL, SMALL)
    events = [Unreadable(i, "broken") if image is None else Frame(image, i) for i, image in enumerate(images)]
    batches = group(events, 2)
    assert items_of(batches) == [[0, 2], "skipped 3", [1, 4], [5, 6]]
    done = list(reassembled(looked_at(batches), lambda found, view: found[0]))
    assert [event.item if isinstance(event, Unreadable) else event.frame.item for event in done] == list(range(7))
    assert [event.rows[0, 0] for event in done if isinstance(event, Done)] == [0, 1, 2, 4, 5, 6]
    assert all(event.network_ms == pytest.approx(2) for event in done if isinstance(event, Done))


def test_one_at_a_time_nothing_waits() -> None:
    assert items_of(group([Frame(SMALL, 0), Frame(LARGE, 1), Frame(SMALL, 2)], 1)) == [[0], [1], [2]]


def taken_when_they_left(frames: list[Frame], size: int) -> dict[int, int]:
    """How many frames had been read when each one went on its way."""
    taken = 0

    def counted() -> Iterator[Frame]:
        nonlocal taken
        for frame in frames:
            taken += 1
            yield frame

    return {view.frame.item: taken for batch in grouped(counted(), views_of, shape_of, size) for view in batch.views}


def test_a_single_odd_shape_does_not_hold_back_the_rest_for_ever() -> None:
    """Neither the views that wait nor the results behind them may pile up."""
    left = taken_when_they_left([Frame(LARGE if n == 3 else SMALL, n) for n in range(100)], 2)
    assert sorted(left) == list(range(100))
    assert left[3] <= 3 + 2 * views_module.WAITING_BATCHES + 2


def test_large_pictures_wait_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [Frame(np.zeros((4, 8 + number, 3), np.uint8), number) for number in range(20)]
    assert taken_when_they_left(frames, 4)[0] == 4 * views_module.WAITING_BATCHES + 1
    monkeypatch.setattr(views_module, "WAITING_BYTES", 6 * frames[0].image_bgr.nbytes)
    assert taken_when_they_left(frames, 4)[0] == 5  # 8 + 9 + 10 + 11 + 12 columns are more than 48
    monkeypatch.setattr(views_module, "WAITING_BYTES", 1)
    same = [Frame(LARGE, number) for number in range(8)]
    assert items_of(group(same, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # a batch that was asked for is filled


def test_frames_are_complete_when_all_their_slices_are() -> None:
    windows = (Window(0, 0, 4, 4), Window(4, 0, 4, 4), Window(0, 0, 8, 4))

    def cut(frame: Frame, sequence: int) -> list[View]:
        return views_of(frame, sequence, windows)

    events = [Frame(LARGE + np.uint8(number), number) for number in range(5)]
    batches = list(grouped(events, cut, shape_of, 4))
    assert {batch.shape for batch in batches} == {(4, 4), (4, 8)} and max(len(batch.views) for batch in batches) == 4
    merged = []

    def merge(found: list[np.ndarray], view: View) -> np.ndarray:
        merged.append([rows[0].tolist() for rows in found])
        return found[-1]

    done = list(reassembled(looked_at(batches), merge))
    assert [frame.frame.item for frame in done] == list(range(5)) and {frame.views for frame in done} == {3}
    assert [[row[0] for row in rows] for rows in merged] == [[number] * 3 for number in range(5)]
    assert [[row[5] for row in rows] for rows in merged] == [[0, 1, 2]] * 5


def test_numbers_go_on_where_they_stopped() -> None:
    first = grouped([Frame(SMALL, 0)], views_of, shape_of, 1)
    second = grouped([Frame(SMALL, 0), Unreadable(1, "")], views_of, shape_of, 1, start=1)
    assert [batch.views[0].sequence if isinstance(batch, Batch) else batch.sequence for batch in [*first, *second]] == [
        0,
        1,
        2,
    ]
