"""What is said when the memory of the card is full, with the figures of a card that is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from utils.options import TrainOptions
from utils.train.setup import memory_advice
from utils.train.trainer import Trainer

CUDA = torch.device("cuda")


@pytest.fixture
def full_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 24 GB, of which this run had 20.4 GB and 0.7 GB are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700_000_000, 24_000_000_000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 20_400_000_000)


def test_figures_and_remedies(full_card: None) -> None:
    text = memory_advice(CUDA, 16, 640)
    assert "batch 16 at 640 px, 20.4 GB used by this run at most, 0.7 of 24.0 GB free" in text
    for remedy in ("--batch 8", "--grad-checkpoint", "--img", "--batch -1"):
        assert remedy in text
    assert "64 images" in text  # a smaller batch does not change what a step learns from


@pytest.mark.parametrize(("batch", "proposed"), [(64, 32), (5, 2), (2, 1), (1, 1)])
def test_half_the_batch_is_proposed(full_card: None, batch: int, proposed: int) -> None:
    assert f"Try --batch {proposed} " in memory_advice(CUDA, batch, 640)


def test_a_full_card_ends_the_run_with_the_advice(
    full_card: None, make_options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(make_options(batch_size=6, imgsz=96))

    def full(*batch: object, **more: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    monkeypatch.setattr(trainer, "batch_pass", full)
    trainer.device = torch.device("cpu")
    with pytest.raises(MemoryError, match=r"memory is full: batch 6 at 96 px.*--batch 3") as caught:
        trainer.fit()
    assert isinstance(caught.value.__cause__, torch.cuda.OutOfMemoryError)
