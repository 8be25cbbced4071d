"""What the loader tests share: a loader of the rendered set, hashes of batches, samples that tell of their worker."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from utils.data.batching import Batch
from utils.data.dataset import Sample, SampleKey
from utils.data.loader import EpochLoader, create_dataloader
from utils.data.sampling import BatchStream
from utils.data.shared_memory import process_memory_bytes
from utils.data.spec import load_data_spec

HYP = {"mosaic": 0.8, "mixup": 0.3, "hsv_v": 0.4, "scale": 0.5, "translate": 0.1, "fliplr": 0.5}


def loader_of(shapes: Path, workers: int = 0, batch_size: int = 5, imgsz: int = 64, **options: object) -> EpochLoader:
    """Training loader of the rendered picture set."""
    spec = load_data_spec(shapes)
    settings = {"augment": True, "hyp": HYP, "shuffle": True, "nc": spec.nc, **options}
    return create_dataloader(spec.train, imgsz, batch_size, 32, workers=workers, **settings)[0]


def fingerprint(batch: Batch) -> str:
    """Hash of everything in a batch."""
    images, targets, paths, shapes = batch
    digest = hashlib.sha256(images.cpu().numpy().tobytes() + targets.cpu().numpy().tobytes())
    digest.update(repr((tuple(images.shape), paths, shapes)).encode())
    return digest.hexdigest()


def fingerprints(loader: EpochLoader, epochs: Iterable[int], *, announce: bool = False) -> list[str]:
    """Hashes of all batches of some epochs; the second has no mosaic."""
    out, epochs = [], list(epochs)
    for number, epoch in enumerate(epochs):
        loader.set_epoch(epoch, mosaic=epoch != 1)
        if announce and number + 1 < len(epochs):
            loader.announce(epochs[number + 1], mosaic=epochs[number + 1] != 1)
        out += [fingerprint(batch) for batch in loader]
    return out


class Probe:
    """Stands in for a data set: each sample's target row holds what the worker that made it looks like.

    Columns after the first: OpenCV threads, torch threads, threads of the process, epoch, index.
    """

    def __init__(self, length: int = 16) -> None:
        self.im_files = [f"{index}.jpg" for index in range(length)]

    def __len__(self) -> int:
        return len(self.im_files)

    def __getitem__(self, key: SampleKey) -> Sample:
        threads = kernel_threads()
        row = (0, cv2.getNumThreads(), torch.get_num_threads(), threads, key.epoch, key.index)
        targets: Tensor = torch.tensor([row], dtype=torch.float32)
        return torch.zeros(3, 8, 8, dtype=torch.uint8), targets, self.im_files[key.index], None


def kernel_threads() -> int:
    """Threads of this process as the kernel counts them, else as Python does."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("Threads:"))
    return threading.active_count()


def probe_loader(workers: int, batch_size: int = 2, length: int = 16, **options: object) -> EpochLoader:
    """Loader of a Probe."""
    return EpochLoader(Probe(length), BatchStream(length, batch_size), workers=workers, **options)


def memory_of(pids: Iterable[int]) -> int:
    """Bytes that belong to these processes alone (anonymous pages)."""
    return int(np.sum([process_memory_bytes(pid, "RssAnon") for pid in pids]))


def count_restarts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one each time a loader begins anew."""
    restarts: list[int] = []
    original = EpochLoader._restart
    monkeypatch.setattr(EpochLoader, "_restart", lambda self: (restarts.append(1), original(self))[1])
    return restarts
