"""Checkpoints written beside training: what was meant at the time of the call, in order, no failure lost."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.checkpoint import Checkpoint, load_checkpoint
from tests.reference.tiny import tiny_dual
from utils.train import saving
from utils.train.saving import CheckpointWriter, host_copy


def checkpoint_of(epoch: int = 0) -> Checkpoint:
    model = tiny_dual()
    return Checkpoint(
        kind="training", model=model.state_dict(), yaml=model.yaml, nc=int(model.yaml["nc"]), epoch=epoch,
        optimizer={"state": {0: {"momentum": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
    )  # fmt: skip


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing begins when it is set."""
    opened, write = threading.Event(), saving.save_checkpoint

    def wait_and_write(*arguments: object) -> None:
        assert opened.wait(60)
        write(*arguments)

    monkeypatch.setattr(saving, "save_checkpoint", wait_and_write)
    return opened


def test_what_training_changes_meanwhile_is_not_in_the_file(tmp_path: Path, gate: threading.Event) -> None:
    checkpoint, writer = checkpoint_of(), CheckpointWriter()
    expected = {key: tensor.clone() for key, tensor in checkpoint.model.items()}
    writer.write(checkpoint, [tmp_path / "last.pt"])
    for tensor in (*checkpoint.model.values(), checkpoint.optimizer["state"][0]["momentum"]):
        tensor.zero_()
    gate.set()
    writer.wait()
    found = load_checkpoint(tmp_path / "last.pt")
    assert all(torch.equal(found.model[key], tensor) for key, tensor in expected.items())
    assert torch.equal(found.optimizer["state"][0]["momentum"], torch.ones(3))


def test_files_are_written_in_order_and_one_checkpoint_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    writer, rename = CheckpointWriter(), os.replace

    def note_and_rename(old: Path, new: Path) -> None:
        written.append(new.name)
        rename(old, new)

    monkeypatch.setattr("utils.files.os.replace", note_and_rename)
    for epoch in range(3):
        writer.write(checkpoint_of(epoch), [tmp_path / "best.pt", tmp_path / f"epoch{epoch}.pt", tmp_path / "last.pt"])
    writer.wait()
    assert written == [name for epoch in range(3) for name in ("best.pt", f"epoch{epoch}.pt", "last.pt")]
    assert [load_checkpoint(tmp_path / name).epoch for name in ("best.pt", "epoch1.pt", "last.pt")] == [2, 1, 2]


@pytest.mark.parametrize("ask", ["write", "wait"])
def test_a_failure_is_raised_by_the_next_call_and_only_once(tmp_path: Path, ask: str) -> None:
    writer = CheckpointWriter()
    (tmp_path / "last.pt").mkdir()  # cannot be replaced by a file
    writer.write(checkpoint_of(), [tmp_path / "last.pt"])
    with pytest.raises(OSError, match=r"last\.pt"):
        writer.write(checkpoint_of(), [tmp_path / "other.pt"]) if ask == "write" else writer.wait()
    writer.wait()
    writer.write(checkpoint_of(), [tmp_path / "other.pt"])
    writer.wait()
    assert load_checkpoint(tmp_path / "other.pt").epoch == 0


def test_closing_says_what_nobody_was_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = CheckpointWriter()
    (tmp_path / "last.pt").mkdir()
    writer.write(checkpoint_of(), [tmp_path / "last.pt"])
    saving.LOGGER.propagate = True
    try:
        with caplog.at_level(logging.WARNING):
            writer.close()
    finally:
        saving.LOGGER.propagate = False
    assert "last.pt" in caplog.text
    caplog.clear()
    writer.close()
    assert not caplog.text


def test_the_thread_ends_with_its_writer(tmp_path: Path, new_threads: Callable[[], list[str]]) -> None:
    writer = CheckpointWriter()
    writer.write(checkpoint_of(), [tmp_path / "last.pt"])
    writer.wait()
    assert [name.split("_")[0] for name in new_threads()] == ["checkpoint"]
    thread = next(iter(writer._pool._threads))
    del writer
    thread.join(60)
    assert not thread.is_alive()


def test_copies_share_no_memory() -> None:
    value = {"a": torch.arange(3), "b": [torch.ones(2), (1, "x", None)], "c": torch.ones(2, 3, 4, 4).half()}
    copied = host_copy(value)
    assert copied["b"][1] == (1, "x", None) and type(copied["b"][1]) is tuple
    for found, own in ((copied["a"], value["a"]), (copied["b"][0], value["b"][0]), (copied["c"], value["c"])):
        assert torch.equal(found, own) and found.dtype == own.dtype and found.data_ptr() != own.data_ptr()
