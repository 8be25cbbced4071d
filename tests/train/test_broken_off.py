"""Runs that are broken off: what is said, what is left, and that nothing of another run is touched."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from models.checkpoint import load_checkpoint
from utils.cli import end_like_interrupt, run_script
from utils.files import lock_folder, read_yaml, write_yaml
from utils.options import TrainOptions
from utils.train import saving
from utils.train import trainer as trainer_module
from utils.train.saving import CheckpointWriter
from utils.train.stopping import EarlyStopping
from utils.train.trainer import Trainer

MakeOptions = Callable[..., TrainOptions]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Return a function that gives what was logged so far."""
    lines: list[str] = []
    monkeypatch.setattr(trainer_module.LOGGER, "info", lambda text: lines.append(str(text)))
    monkeypatch.setattr(trainer_module.LOGGER, "warning", lambda text: lines.append(f"WARNING: {text}"))
    yield lambda: "\n".join(lines)


def raise_in_epoch(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, epoch: int, error: BaseException) -> None:
    step = trainer.step

    def fail(*arguments: object, **keywords: object) -> int:
        if trainer.epoch == epoch:
            raise error
        return step(*arguments, **keywords)

    monkeypatch.setattr(trainer, "step", fail)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_an_error_of_the_system_is_followed_by_the_command_that_goes_on(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    trainer = Trainer(make_options(epochs=3))
    raise_in_epoch(trainer, monkeypatch, 1, OSError(errno.ENOSPC, "No space left"))
    with pytest.raises(OSError, match="No space"):
        trainer.fit()
    assert f"Broken off in epoch 1. To go on: python train_dual.py --resume {trainer.last}" in said()
    assert load_checkpoint(trainer.best).optimizer is not None  # nothing is rewritten on a full disk


def test_a_checkpoint_on_its_way_is_waited_for_also_when_ctrl_c_comes_again(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    trainer, opened = Trainer(make_options(epochs=3)), threading.Event()
    save, wait, waits = saving.save_checkpoint, trainer.writer.wait, []

    def save_late(*arguments: object) -> None:
        assert opened.wait(60)
        save(*arguments)

    def wait_interrupted_once() -> None:
        waits.append(None)
        if trainer.writer.is_busy and len(waits) == 2:  # the first one is that of the first checkpoint
            opened.set()
            raise KeyboardInterrupt
        wait()

    monkeypatch.setattr(saving, "save_checkpoint", save_late)
    monkeypatch.setattr(trainer.writer, "wait", wait_interrupted_once)
    raise_in_epoch(trainer, monkeypatch, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert "is being written, a moment" in said()
    assert load_checkpoint(trainer.last).epoch == 0


def test_a_wait_that_was_interrupted_can_be_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        is_over = False

        def result(self) -> None:
            if not self.is_over:
                raise KeyboardInterrupt

        def done(self) -> bool:
            return self.is_over

    writer = CheckpointWriter()
    running = writer._running = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        writer.wait()
    assert writer.is_busy
    running.is_over = True
    writer.wait()
    assert writer._running is None and not writer.is_busy


def test_an_older_run_in_the_folder_is_not_taken_for_this_one(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    options = make_options(epochs=1, exist_ok=True)
    Trainer(options).fit()
    trainer = Trainer(options)
    raise_in_epoch(trainer, monkeypatch, 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert "before the first checkpoint" in said()
    assert "--resume" not in said()
    assert trainer._kept() == "Nothing was saved yet"


def test_the_last_validation_that_is_broken_off_can_be_made_up_for(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    trainer = Trainer(make_options(epochs=1))

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert f"python val_dual.py --weights {trainer.best} --data {trainer.spec.yaml_file}" in said()


def test_ctrl_c_while_the_end_is_reported_ends_with_the_same_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(text: str) -> None:
        raise KeyboardInterrupt

    def main() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer_module.LOGGER, "error", again)
    with pytest.raises(SystemExit) as caught:
        run_script(main)
    assert caught.value.code == 130


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_requests_to_end_do_what_ctrl_c_does_unless_they_were_to_be_ignored(name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    try:
        for found, expected in ((signal.SIG_DFL, signal.default_int_handler), (signal.SIG_IGN, signal.SIG_IGN)):
            signal.signal(number, found)
            end_like_interrupt(name)
            assert signal.getsignal(number) is expected
    finally:
        signal.signal(number, before)


# --- what is left -----------------------------------------------------------------------------------------------------


def test_leftovers_of_a_killed_process_go_everywhere_in_the_run_folder(
    make_options: MakeOptions, interrupt_before: Callable[[TrainOptions, int], Path]
) -> None:
    last = interrupt_before(make_options(), 1)
    folder = last.parent.parent
    leftovers = [place / ".0123abcd.4711.tmp" for place in (folder, last.parent)]
    mine = folder / "notes.tmp"
    for path in (*leftovers, mine):
        path.touch()
    Trainer(TrainOptions(resume=str(last)))
    assert not any(path.exists() for path in leftovers)
    assert mine.exists()


def test_a_run_that_is_going_on_loses_nothing_to_a_second_resume_with_other_data(
    make_options: MakeOptions, interrupt_before: Callable[[TrainOptions, int], Path], tmp_path: Path
) -> None:
    options = make_options()
    last = interrupt_before(options, 1)
    held = lock_folder(last.parent.parent)
    writing = last.parent / ".0123abcd.4711.tmp"
    writing.touch()
    content = read_yaml(options.data)
    folder = str(Path(options.data).parent)
    write_yaml(tmp_path / "other.yaml", {**content, "path": folder, "val": content["test"]})
    with pytest.raises(ValueError, match="another process"):
        Trainer(TrainOptions.from_cli(["--resume", str(last), "--data", str(tmp_path / "other.yaml")]))
    assert writing.exists()
    assert {path.name for path in last.parent.glob("*.pt")} == {"best.pt", "last.pt"}
    held.close()


def test_a_checkpoint_that_could_not_be_written_ends_the_run_within_the_next_epoch(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch may take hours, all of them in vain."""
    trainer, ended, failed = Trainer(make_options(epochs=3)), [], threading.Event()
    trainer.monitor.setup = type(trainer.monitor.setup)(flush_every=1)
    end_epoch, step = trainer.end_epoch, trainer.step

    def fail(*_: object) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left")

    def note_and_end(record: dict[str, float]) -> object:
        ended.append(trainer.epoch)
        return end_epoch(record)

    def step_after_failure(*arguments: object, **keywords: object) -> int:
        if trainer.epoch == 1:
            assert failed.wait(60)
            with pytest.raises(OSError, match="No space"):
                trainer.writer._running.result()
        return step(*arguments, **keywords)

    monkeypatch.setattr(saving, "save_checkpoint", fail)
    monkeypatch.setattr(trainer, "end_epoch", note_and_end)
    monkeypatch.setattr(trainer, "step", step_after_failure)
    with pytest.raises(OSError, match="No space"):
        trainer.fit()
    assert ended == [0]


def test_an_announced_stop_is_remembered_by_a_resumed_run() -> None:
    stopper = EarlyStopping(patience=2)
    for epoch, fitness in enumerate((0.5, 0.1)):
        assert not stopper(epoch, fitness)
    assert stopper.possible_stop
    resumed = EarlyStopping(patience=2)
    resumed.load_state_dict(stopper.state_dict())
    assert resumed == stopper
    resumed.load_state_dict({"best_fitness": 0.5, "best_epoch": 0})  # of an older file
    assert not resumed.possible_stop


def test_a_folder_in_the_place_of_last_weights_is_no_checkpoint(make_options: MakeOptions) -> None:
    trainer = Trainer(make_options(epochs=1))
    trainer.writer.written.add(trainer.last)
    assert not trainer.has_last
    trainer.last.mkdir()
    assert not trainer.has_last
    trainer.last.rmdir()
    trainer.last.touch()
    assert trainer.has_last
