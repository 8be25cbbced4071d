"""From samples to batches, as it happens in a loader process; what goes wrong there travels home as data."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from utils.data.dataset import LoadImagesAndLabels, Sample, SampleKey, Shapes

Batch = tuple[Tensor, Tensor, tuple[str, ...], tuple[Shapes | None, ...]]
QUAD = 4  # pictures that --quad joins to one
QUAD_STREAM = 1 << 41  # keeps these draws apart from those of the samples and of the order
MESSAGE_BYTES = 48 << 10
"""Tensors inside a message. A pipe takes 64 KiB at once, so a killed process leaves no half of a message."""
T = TypeVar("T", bound="Travelling")


class Travelling:
    """A dataclass of tensors on its way from a loader process, small ones as part of the message itself.

    Whoever receives a tensor in shared memory asks the sender for it through a connection made for that, 0.6 ms of
    Python; a few kilobytes more in the message are read in a hundredth of that.
    """

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to_shared_memory(self: T) -> T:
        """Move large tensors; done here, where lack of room can be reported, and not by the queue, which would hang."""
        room = MESSAGE_BYTES
        for value in sorted(self.tensors().values(), key=lambda tensor: tensor.nbytes):
            room -= value.nbytes
            if room < 0:
                value.share_memory_()
        return self

    def pin_memory(self: T, device: str | None = None) -> T:
        """The same in page-locked memory; device is what torch passes, the default is meant."""
        pinned = {name: value.pin_memory() for name, value in self.tensors().items() if value.numel()}
        return replace(self, **pinned)  # type: ignore[type-var]

    def __getstate__(self) -> dict[str, object]:
        inside = {name: value.numpy() for name, value in self.tensors().items() if not value.is_shared()}
        return {**self.__dict__, **inside}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            self.__dict__[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value


@dataclass(frozen=True)
class Parcel(Travelling):
    """A batch on its way; no tuple, because torch turns the tuples inside one into lists when it pins memory."""

    images: Tensor
    targets: Tensor
    paths: tuple[str, ...]
    shapes: tuple[Shapes | None, ...]

    def batch(self) -> Batch:
        """Images (B, 3, H, W) uint8, targets (T, 6), paths, shapes."""
        return self.images, self.targets, self.paths, self.shapes

    @classmethod
    def joined(cls, pieces: Sequence[Parcel], *, pin_memory: bool = False) -> Parcel:
        """Put the pieces of a batch together, whose pictures have one size."""
        if len(pieces) == 1:
            return pieces[0].pin_memory() if pin_memory else pieces[0]
        size = (sum(len(piece.images) for piece in pieces), *pieces[0].images.shape[1:])
        images = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
        targets, start = [], 0
        for piece in pieces:
            images[start : start + len(piece.images)] = piece.images
            rows = piece.targets.clone()
            rows[:, 0] += start
            targets.append(rows)
            start += len(piece.images)
        joined = torch.cat(targets)
        return cls(
            images,
            joined.pin_memory() if pin_memory else joined,
            tuple(path for piece in pieces for path in piece.paths),
            tuple(shape for piece in pieces for shape in piece.shapes),
        )


@dataclass(frozen=True)
class Failure:
    """What went wrong while a batch was made: where (a picture or a step), why, and the whole traceback."""

    where: str
    reason: str
    details: str

    @classmethod
    def from_error(cls, where: str, error: Exception) -> Failure:
        """Describe an exception that is being handled."""
        return cls(where, f"{type(error).__name__}: {error}", traceback.format_exc())


class BatchMaker(Dataset):
    """`maker[keys]` gives the Parcel of a list of SampleKeys, or a Failure that names the picture."""

    def __init__(self, dataset: LoadImagesAndLabels, *, quad: bool = False, seed: int = 0) -> None:
        self.dataset, self.quad, self.seed = dataset, quad, seed % 2**63

    def __getitem__(self, keys: Sequence[SampleKey]) -> Parcel | Failure:
        samples: list[Sample] = []
        for key in keys:
            try:
                samples.append(self.dataset[key])
            except Exception as error:  # noqa: BLE001 - whatever it is, the user has to learn which picture it was
                return Failure.from_error(f"the picture {self.dataset.im_files[key.index]}", error)
        try:
            is_shared = get_worker_info() is not None
            if self.quad:
                parcel = Parcel(*collate_quad(samples, self.zoomed(keys), shared=is_shared))
            else:
                parcel = Parcel(*collate(samples, shared=is_shared))
            return parcel.to_shared_memory() if is_shared else parcel
        except (RuntimeError, ValueError, MemoryError, OSError) as error:
            return Failure.from_error(f"a batch of {len(keys)} pictures", error)

    def zoomed(self, keys: Sequence[SampleKey]) -> list[bool]:
        """For each group of four: whether its first picture is enlarged (else all four are tiled)."""
        return [
            bool(np.random.default_rng([self.seed, key.epoch, key.index, QUAD_STREAM]).random() < 0.5)
            for key in keys[::QUAD]
        ]


def collate(samples: Sequence[Sample], *, shared: bool = False) -> Batch:
    """Stack samples; column 0 of the joined targets tells the picture's position in the batch.

    shared: put the pictures into shared memory at once, which saves a copy.
    """
    images, targets, paths, shapes = zip(*samples, strict=True)
    for position, rows in enumerate(targets):
        rows[:, 0] = position
    return _stack(images, shared), torch.cat(targets), paths, shapes


def _stack(images: Sequence[Tensor], shared: bool) -> Tensor:
    """Pictures (B, 3, H, W)."""
    if not shared or any(image.shape != images[0].shape for image in images):
        return torch.stack(images)
    size = (len(images), *images[0].shape)
    return torch.stack(images, out=reserve_bytes(math.prod(size), shared=True).view(size))


def reserve_bytes(size: int, *, shared: bool) -> Tensor:
    """Flat uint8 tensor, in shared memory where wanted; the private call is the one that torch's own collating uses.

    Pages of shared memory count from the moment they are written to.
    """
    reserve = getattr(torch.UntypedStorage, "_new_shared", None) if shared and size else None
    if reserve is None:
        return torch.empty(size, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(reserve(size), 0, (size,))


def collate_quad(samples: Sequence[Sample], zoomed: Sequence[bool], *, shared: bool = False) -> Batch:
    """Make one picture of twice the side from each group of four; a batch of B gives B / 4.

    Where zoomed, the first picture of the group is enlarged and the others are dropped; else all four are tiled, in
    the order top left, bottom left, top right, bottom right. Paths are those of the first of each group; shapes are
    None. The loss has to be multiplied by 4, as each step sees a quarter of the pictures.
    """
    groups = [samples[start : start + QUAD] for start in range(0, len(samples), QUAD)]
    joined = [
        _enlarge(group[0]) if is_zoomed else _tile(group) for group, is_zoomed in zip(groups, zoomed, strict=True)
    ]
    tiles = [(image, rows, group[0][2], None) for (image, rows), group in zip(joined, groups, strict=True)]
    return collate(tiles, shared=shared)


def _enlarge(sample: Sample) -> tuple[Tensor, Tensor]:
    """Picture (3, 2H, 2W), bilinear, and its unchanged targets."""
    image, targets, _, _ = sample
    larger = F.interpolate(image[None].float(), scale_factor=2.0, mode="bilinear", align_corners=False)
    return larger[0].round().to(torch.uint8), targets


def _tile(group: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Picture (3, 2H, 2W) of four and the targets of all, fractions of the larger picture."""
    images = [sample[0] for sample in group]
    left, right = torch.cat(images[:2], 1), torch.cat(images[2:], 1)  # (3, 2H, W) each
    return torch.cat((left, right), 2), quad_targets([sample[1] for sample in group])


def quad_targets(targets: Sequence[Tensor]) -> Tensor:
    """Targets (T, 6) of four pictures that were tiled, as fractions of the larger picture."""
    moved = []
    for position, given in enumerate(targets):
        rows = given.clone()
        rows[:, 2] += position // 2
        rows[:, 3] += position % 2
        rows[:, 2:] /= 2
        moved.append(rows)
    return torch.cat(moved)
