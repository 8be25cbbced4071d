"""What a trainer has opened ends with it: processes, threads, the claim on its folder, the ear on the log."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

import pytest

from utils.evaluate.warning_file import WarningRecorder
from utils.files import lock_folder
from utils.log import LOGGER
from utils.options import TrainOptions
from utils.train.profiling import profile_training
from utils.train.trainer import Trainer

MakeOptions = Callable[..., TrainOptions]


@pytest.fixture
def new_processes() -> Callable[[], list[int | None]]:
    """Return a function that lists the processes started since the test began and still alive."""
    before = set(multiprocessing.active_children())
    return lambda: [process.pid for process in multiprocessing.active_children() if process not in before]


def leaves_nothing(new_processes: Callable[[], list[int | None]], new_threads: Callable[[], list[str]]) -> bool:
    """Whether there are no processes, and in a moment (a watch has to wake up to end) no threads."""
    deadline = time.monotonic() + 10
    while new_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not new_processes() and not new_threads()


def is_listening(trainer: Trainer) -> bool:
    return trainer.warning_recorder in LOGGER.handlers


def is_claimed(trainer: Trainer) -> bool:
    try:
        lock = lock_folder(trainer.save_dir)
    except ValueError:
        return True
    assert lock is not None
    lock.close()
    return False


@pytest.mark.parametrize("epochs", [0, 1])
def test_one_call_ends_everything_and_may_be_repeated(
    epochs: int,
    make_options: MakeOptions,
    new_threads: Callable[[], list[str]],
    new_processes: Callable[[], list[int | None]],
) -> None:
    trainer = Trainer(make_options(workers=2, epochs=3))
    for epoch in range(epochs):
        trainer.begin_epoch(epoch)
        trainer.end_epoch(trainer.run_epoch())
        assert new_processes()
    assert is_claimed(trainer) and is_listening(trainer)
    for _ in range(2):
        trainer.close()
        assert leaves_nothing(new_processes, new_threads)
        assert not is_claimed(trainer) and not is_listening(trainer)
    if epochs:
        assert trainer.last.is_file()


def test_a_run_that_is_through_has_closed_everything(
    make_options: MakeOptions, new_threads: Callable[[], list[str]], new_processes: Callable[[], list[int | None]]
) -> None:
    trainer = Trainer(make_options(workers=2, epochs=1))
    assert trainer.fit().map50 >= 0
    assert leaves_nothing(new_processes, new_threads)
    assert not is_claimed(trainer) and not is_listening(trainer)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("step", OSError("disk")),
        ("step", RuntimeError("bug")),
        ("end_epoch", KeyboardInterrupt()),
        ("finish", KeyboardInterrupt()),
        ("finish", RuntimeError("bug")),
    ],
)
def test_a_run_that_fails_ends_its_processes_and_goes_on_listening_for_the_error(
    where: str,
    error: BaseException,
    make_options: MakeOptions,
    monkeypatch: pytest.MonkeyPatch,
    new_threads: Callable[[], list[str]],
    new_processes: Callable[[], list[int | None]],
) -> None:
    trainer = Trainer(make_options(workers=1, epochs=1))

    def fail(*arguments: object, **keywords: object) -> None:
        raise error

    monkeypatch.setattr(trainer, where, fail)
    with pytest.raises(type(error)):
        trainer.fit()
    assert leaves_nothing(new_processes, new_threads)
    assert is_listening(trainer) and is_claimed(trainer)
    LOGGER.error("why it ended")
    assert "why it ended" in trainer.warning_recorder.entries
    trainer.close()
    assert not is_claimed(trainer) and not is_listening(trainer)


@pytest.mark.parametrize("batch_size", [2, 24], ids=["enough", "too few batches"])
def test_profiling_leaves_nothing_behind(
    batch_size: int,
    make_options: MakeOptions,
    new_threads: Callable[[], list[str]],
    new_processes: Callable[[], list[int | None]],
) -> None:
    options = make_options(workers=1, batch_size=batch_size)
    if batch_size == 24:
        with pytest.raises(ValueError, match="too few to profile"):
            profile_training(options)
    else:
        profile_training(options)
    assert leaves_nothing(new_processes, new_threads)
    assert not any(isinstance(handler, WarningRecorder) for handler in LOGGER.handlers)


@pytest.mark.parametrize("part", ["board", "writer", "train_loader", "monitor"])
def test_a_part_that_does_not_close_keeps_none_of_the_others_open(
    part: str,
    make_options: MakeOptions,
    monkeypatch: pytest.MonkeyPatch,
    new_threads: Callable[[], list[str]],
    new_processes: Callable[[], list[int | None]],
) -> None:
    trainer = Trainer(make_options(workers=1, epochs=1))
    trainer.begin_epoch(0)
    next(iter(trainer.train_loader))
    owner = getattr(trainer, part)
    close = owner.close

    def fail() -> None:
        close()
        raise OSError("disk")

    monkeypatch.setattr(owner, "close", fail)
    with pytest.raises(OSError, match="disk"):
        trainer.close()
    assert leaves_nothing(new_processes, new_threads)


def test_the_final_validation_names_what_it_could_not_write(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError("confusion_matrix.csv could not be written: disk full")

    monkeypatch.setattr("utils.evaluate.confusion.ConfusionMatrix.save_counts", fail)
    assert Trainer(make_options(epochs=1, noplots=False)).fit().map50 >= 0
    assert any("confusion_matrix.csv could not be written" in line for line in messages)
