"""Checkpoints written beside training: an epoch waits for a copy in memory, not for the disk."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from models.checkpoint import Checkpoint, save_checkpoint, strip_optimizer
from utils.files import atomic_write
from utils.log import LOGGER

if TYPE_CHECKING:
    from utils.train.trainer import Trainer

TEMPORARY = ".[0-9a-f]*.tmp"  # as utils.files.atomic_write names them


def host_copy(value: Any) -> Any:
    """Copy nested mappings, lists and tuples with their tensors in main memory, so that training may change its own."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: host_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(host_copy(item) for item in value)
    return value


def write_files(checkpoint: Checkpoint, files: Sequence[Path], written: set[Path]) -> None:
    """Write a checkpoint under the first name and copy that file to the others, in this order, each by one rename.

    What is complete is added to ``written``.

    Raises:
        OSError: one could not be written; those after it were not tried.
    """
    first, *others = files
    save_checkpoint(first, checkpoint)
    written.add(first)
    for other in others:
        with atomic_write(other) as temporary:
            shutil.copyfile(first, temporary)
        written.add(other)


class CheckpointWriter:
    """Writes one checkpoint after the other in a thread of its own.

    What goes wrong there (a full disk) is raised by the next :meth:`check`, :meth:`write` or :meth:`wait`. Python
    itself waits for the thread before it ends. ``written`` holds the files that were completed so far.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self.written: set[Path] = set()

    @property
    def is_busy(self) -> bool:
        """Whether files are being written."""
        return self._running is not None and not self._running.done()

    def check(self) -> None:
        """Raise what has gone wrong so far, without waiting: what follows could not be saved either.

        Raises:
            OSError: a file could not be written.
        """
        if self._running is not None and self._running.done():
            self.wait()

    def write(self, checkpoint: Checkpoint, files: Sequence[Path]) -> None:
        """Copy the tensors, then let :func:`write_files` go on beside the caller; the one before has to end first."""
        self.wait()
        copied = {item.name: host_copy(getattr(checkpoint, item.name)) for item in fields(checkpoint)}
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running = self._pool.submit(write_files, replace(checkpoint, **copied), files, self.written)

    def wait(self) -> None:
        """Return when everything is written.

        Raises:
            OSError: it could not be written.
        """
        running = self._running
        try:
            if running is not None:
                running.result()
        finally:  # a wait that was interrupted may be taken up again
            if running is None or running.done():
                self._running = None

    def close(self) -> None:
        """Wait and end the thread; what went wrong is said, as the caller has an error of its own or none to raise."""
        try:
            self.wait()
        except OSError as error:
            LOGGER.warning(str(error))
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def remove_leftovers(folder: Path) -> None:
    """Delete what a process that was killed while it wrote has left in a run's folder, which is locked."""
    for place in (folder, folder / "weights"):
        for leftover in place.glob(TEMPORARY):
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def resumable(trainer: Trainer) -> Iterator[None]:
    """Train in the block; say how to go on where it is interrupted or meets an error of the system."""
    try:
        yield
    except (KeyboardInterrupt, OSError) as error:
        _break_off(trainer, is_wanted=isinstance(error, KeyboardInterrupt))
        raise


def _break_off(trainer: Trainer, *, is_wanted: bool) -> None:
    """Let the writing end and say how a run goes on that was interrupted (wanted) or met an error of the system.

    After an interruption the weights that are best so far are made small, as at the end of a run.
    """
    writer, what = trainer.writer, "Interrupted" if is_wanted else f"Broken off in epoch {trainer.epoch}"
    try:
        if writer.is_busy:
            LOGGER.info(f"\n{what}: {trainer.last} is being written, a moment")
        writer.close()
    finally:  # also when Ctrl+C is pressed again
        if trainer.has_last:
            LOGGER.info(f"\n{what}. To go on: python train_dual.py --resume {trainer.last}")
        else:
            LOGGER.info(f"\n{what} before the first checkpoint: nothing was saved, {trainer.save_dir} may be deleted")
    if is_wanted and trainer.has_last and trainer.has_best and trainer.best.exists():
        try:
            strip_optimizer(trainer.best)
        except (OSError, ValueError) as error:
            LOGGER.warning(f"{trainer.best} keeps its full size: {error}")


@contextlib.contextmanager
def repeatable_validation(trainer: Trainer) -> Iterator[None]:
    """Make the final validation in the block; say how to make up for it where it is broken off."""
    try:
        yield
    except (KeyboardInterrupt, OSError):
        LOGGER.info(
            f"\nAll epochs are done and {trainer.best} holds the weights. To make up for the final validation: python "
            f"val_dual.py --weights {trainer.best} --data {trainer.spec.yaml_file}"
        )
        raise
