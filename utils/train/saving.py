"""Checkpoints written beside training: an epoch waits for a copy in memory, not for the disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from models.checkpoint import Checkpoint, save_checkpoint
from utils.files import atomic_write
from utils.log import LOGGER


def host_copy(value: Any) -> Any:
    """Copy nested mappings, lists and tuples with their tensors in main memory, so that training may change its own."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: host_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(host_copy(item) for item in value)
    return value


def write_files(checkpoint: Checkpoint, files: Sequence[Path]) -> None:
    """Write a checkpoint under the first name and copy that file to the others, in this order, each by one rename.

    Raises:
        OSError: one could not be written; those after it were not tried.
    """
    first, *others = files
    save_checkpoint(first, checkpoint)
    for other in others:
        with atomic_write(other) as temporary:
            shutil.copyfile(first, temporary)


class CheckpointWriter:
    """Writes one checkpoint after the other in a thread of its own.

    What goes wrong there (a full disk) is raised by the next :meth:`write` or :meth:`wait`. Python itself waits for
    the thread before it ends.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def write(self, checkpoint: Checkpoint, files: Sequence[Path]) -> None:
        """Copy the tensors, then let :func:`write_files` go on beside the caller; the one before has to end first."""
        self.wait()
        copied = {item.name: host_copy(getattr(checkpoint, item.name)) for item in fields(checkpoint)}
        self._running = self._pool.submit(write_files, replace(checkpoint, **copied), files)

    def wait(self) -> None:
        """Return when everything is written.

        Raises:
            OSError: it could not be written.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait; what went wrong is said, as the caller has an error of its own or none to raise."""
        try:
            self.wait()
        except OSError as error:
            LOGGER.warning(str(error))
