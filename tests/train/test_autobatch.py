"""``--batch -1``: the batch that is found, with the memory figures of a card that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from utils.options import TrainOptions
from utils.train.autobatch import CPU_BATCH, TRIED, find_batch_size
from utils.train.trainer import Trainer

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
MIB, GIB = 2**20, 2**30
SIDE = 64


class OnCpu(TorchFunctionMode):
    """Makes tensors that are asked for on a CUDA device in main memory."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == CUDA:
            kwargs["device"] = CPU
        return func(*args, **kwargs)


class Card:
    """A card with ``free`` bytes, of which a step takes ``fixed`` and ``per_image`` for each image."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int, fixed: int, per_image: int) -> None:
        self.free, self.fixed, self.per_image = free, fixed, per_image
        self.tried: list[int] = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.used(self.tried[-1]))

    def used(self, images: int) -> int:
        return self.fixed + self.per_image * images

    def network(self) -> nn.Module:
        """A network that fails where its batch does not fit."""

        def check(_: nn.Module, inputs: tuple[Tensor]) -> None:
            self.tried.append(len(inputs[0]))
            if self.used(len(inputs[0])) > self.free:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")

        network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)).train()
        network.register_forward_pre_hook(check)
        return network

    def find(self, network: nn.Module | None = None) -> int:
        with OnCpu():
            return find_batch_size(network or self.network(), loss_of, SIDE, CUDA, None)


def loss_of(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    assert targets.shape == (10 * len(predictions), 6), "ten boxes in each image"
    return predictions.mean(), torch.zeros(3)


@pytest.mark.parametrize(
    ("free", "fixed", "per_image", "batch"),
    [
        (10 * GIB, GIB, 200 * MIB, 35),  # (0.8 * 10 - 1) GiB / 200 MiB = 35.84
        (10 * GIB, 0, 1024 * MIB, 8),
        (80 * GIB, GIB, 200 * MIB, 128),  # no more than twice the nominal 64
        (10 * GIB, 7 * GIB, 700 * MIB, 1),  # four fit, 80 % of what is free holds one
    ],
)
def test_most_of_the_free_memory_is_filled(
    monkeypatch: pytest.MonkeyPatch, free: int, fixed: int, per_image: int, batch: int
) -> None:
    card = Card(monkeypatch, free=free, fixed=fixed, per_image=per_image)
    assert card.find() == batch
    assert batch == 1 or card.used(batch) <= 0.8 * free
    assert card.tried == [size for size in TRIED if card.used(size) <= free or size == card.tried[-1]]


def test_a_card_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, free=5 * GIB, fixed=2 * GIB, per_image=GIB)  # room for three
    with pytest.raises(
        ValueError, match=f"^--batch -1: not even 4 images of {SIDE} px fit this GPU; use a smaller --img"
    ):
        card.find()


def test_the_line_says_what_was_measured(monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    Card(monkeypatch, free=10 * GIB, fixed=GIB, per_image=200 * MIB).find()
    assert messages == ["--batch -1: 35 (200 MiB per image, 10.0 GiB free, about 7.8 GiB will be used)"]


def test_the_network_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, free=6 * GIB, fixed=0, per_image=512 * MIB)  # 16 do not fit
    network = card.network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    card.find(network)
    assert card.tried == list(TRIED)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_without_a_card_a_usual_batch_is_taken(make_options: Callable[..., TrainOptions], messages: list[str]) -> None:
    assert Trainer(make_options(batch_size=-1)).batch_size == CPU_BATCH
    assert f"--batch -1: no CUDA device to measure, batch {CPU_BATCH} is used" in messages
