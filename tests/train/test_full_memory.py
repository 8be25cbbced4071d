"""What is said when the memory of the card is full, with the figures of a card that is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from utils.options import TrainOptions
from utils.train.autobatch import fitting_batch, memory_advice, memory_advised
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


# --- how many images would fit ----------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives a card its figures in GB."""

    def set_figures(*, free: float, reserved: float, peak: float) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * 1e9), 24_000_000_000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(reserved * 1e9))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(peak * 1e9))

    return set_figures


@pytest.mark.parametrize(
    ("batch", "held", "free", "reserved", "peak", "largest"),
    [
        (16, 2, 1, 21, 18, 15),  # 0.8 * 22 - 2 = 15.6 GB at 1 GB an image
        (32, 2, 1, 21, 18, 31),
        (64, 4, 0.5, 21.5, 20, 54),  # (17.6 - 4) / 0.25 = 54.4
        (16, 12, 0.5, 21.5, 20, 11),  # (17.6 - 12) / 0.5 = 11.2
        (16, 16, 0.5, 19.5, 20, 1),  # the model alone takes it all
    ],
)
def test_the_largest_batch_is_estimated_from_the_figures(
    card: Callable[..., None],
    batch: int,
    held: float,
    free: float,
    reserved: float,
    peak: float,
    largest: int,
) -> None:
    card(free=free, reserved=reserved, peak=peak)
    text = memory_advice(CUDA, batch, 640, int(held * 1e9))
    per_image = (peak - held) / batch
    assert text.endswith(
        f". Estimated from {held:.1f} GB before the first step and about {per_image:.2f} GB for each image, "
        f"--batch {largest} is the largest that might fit"
    )
    assert f"Try --batch {min(batch // 2, largest)} (" in text and "--grad-checkpoint" in text


@pytest.mark.parametrize(
    ("held", "peak", "reserved"),
    [(0, 20, 21), (2, 0, 21), (2, 2, 21), (2, 5, 21)],
    ids=["nothing before", "no peak", "no step", "small steps: someone else's memory, or scattered"],
)
def test_nothing_is_estimated_without_figures_that_explain_it(
    card: Callable[..., None], held: float, peak: float, reserved: float
) -> None:
    card(free=1, reserved=reserved, peak=peak)
    text = memory_advice(CUDA, 16, 640, int(held * 1e9))
    assert "stimate" not in text and "Try --batch 8 " in text


@pytest.mark.parametrize(("batch", "half", "largest"), [(12, 4, 8), (16, 8, 12), (4, 4, None)])
def test_batches_of_quads_stay_whole(card: Callable[..., None], batch: int, half: int, largest: int | None) -> None:
    card(free=1, reserved=21, peak=20)
    text = memory_advice(CUDA, batch, 640, int(2e9), group=4)
    assert f"Try --batch {half} " in text
    assert (f"--batch {largest} is the largest" in text) if largest else "the largest" not in text


def test_the_rule_is_that_of_the_automatic_batch() -> None:
    assert fitting_batch(10 * 2**30, 2**30, 200 * 2**20) == 35  # as in the tests of --batch -1
    assert fitting_batch(1e9, 2e9, 1e9) == 1 and fitting_batch(1e9, 0, 0) > 1


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_a_run_hands_over_what_its_memory_held_before_the_first_step(
    card: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    card(free=1, reserved=21, peak=18)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2_000_000_000)
    text = r"2\.0 GB before the first step and about 1\.00 GB for each image"
    with pytest.raises(MemoryError, match=text), memory_advised(CUDA, 16, 640):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    for error in (RuntimeError("something else"), ValueError("another")):
        with pytest.raises(type(error), match=str(error)), memory_advised(CUDA, 16, 640):
            raise error


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
