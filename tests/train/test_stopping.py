"""Early stopping."""

from __future__ import annotations

from utils.train.stopping import EarlyStopping


def run(patience: int, scores: list[float]) -> tuple[int | None, list[bool]]:
    stopper = EarlyStopping(patience)
    announced = []
    for epoch, score in enumerate(scores):
        announced.append(stopper.possible_stop)
        if stopper(epoch, score):
            return epoch, announced
    return None, announced


def test_stops_after_patience_epochs_without_progress_and_announces_it() -> None:
    stopped, announced = run(3, [0.1, 0.5, 0.4, 0.4, 0.4, 0.9])
    assert stopped == 4
    assert announced == [False, False, False, False, True]


def test_equal_fitness_counts_as_progress() -> None:
    assert run(2, [0.3] * 10)[0] is None


def test_zero_patience_never_stops() -> None:
    assert run(0, [0.5] + [0.1] * 50)[0] is None


def test_state_survives_a_restart() -> None:
    whole = EarlyStopping(3)
    for epoch, score in enumerate([0.5, 0.4]):
        whole(epoch, score)
    restarted = EarlyStopping(3)
    restarted.load_state_dict(whole.state_dict())
    assert [restarted(epoch, 0.1) for epoch in (2, 3)] == [whole(epoch, 0.1) for epoch in (2, 3)] == [False, True]
