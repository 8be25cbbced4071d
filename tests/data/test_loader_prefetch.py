"""Batches on their way to the device: the same ones, in the same order, with the waiting time counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.data.loader_kit import fingerprint, loader_of
from utils.data.batching import Batch
from utils.data.prefetch import DevicePrefetcher

CPU = torch.device("cpu")


def test_batches_are_those_of_the_loader(shapes_dataset: Path) -> None:
    plain = [fingerprint(batch) for batch in loader_of(shapes_dataset)]
    prefetcher = DevicePrefetcher(loader_of(shapes_dataset), CPU)
    assert len(prefetcher) == 5
    assert [fingerprint(batch) for batch in prefetcher] == plain
    assert prefetcher.wait_s > 0


class Slow:
    """Two batches, each 20 ms late."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Batch]:
        for number in range(2):
            time.sleep(0.02)
            yield torch.full((1, 3, 8, 8), number, dtype=torch.uint8), torch.zeros(0, 6), ("a",), (None,)


def test_waiting_is_counted_per_pass_and_computing_is_not() -> None:
    prefetcher = DevicePrefetcher(Slow(), CPU)
    for _ in range(2):
        for _ in prefetcher:
            time.sleep(0.1)
        assert 0.04 <= prefetcher.wait_s < 0.2


def test_an_error_of_the_loader_comes_through() -> None:
    class Broken(Slow):
        def __iter__(self) -> Iterator[Batch]:
            yield next(super().__iter__())
            raise ChildProcessError("gone")

    batches = iter(DevicePrefetcher(Broken(), CPU))
    next(batches)
    with pytest.raises(ChildProcessError, match="gone"):
        next(batches)


@pytest.mark.gpu
def test_batches_on_the_gpu_are_those_of_the_loader(shapes_dataset: Path) -> None:
    device = torch.device("cuda:0")
    plain = [fingerprint(batch) for batch in loader_of(shapes_dataset)]
    prefetcher = DevicePrefetcher(loader_of(shapes_dataset, 2), device)
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        kept = []
        for images, targets, paths, shapes in prefetcher:
            assert images.device == targets.device == device
            assert images.dtype == torch.uint8
            busy = busy @ busy.T / 4096  # the GPU is behind the host, as in training
            kept.append((images.clone(), targets.clone(), paths, shapes))
        assert [fingerprint(batch) for batch in kept] == plain
