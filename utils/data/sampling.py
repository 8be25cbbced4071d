"""Which pictures a batch consists of: the order of an epoch follows from (seed, epoch) and nothing else.

The stream of batches runs on into the next epoch when that one has been announced, so that loader processes need not
wait for the trainer between two epochs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from utils.data.dataset import SampleKey
from utils.data.tables import RowTable

ORDER_STREAM, PARTNER_STREAM = 1 << 40, 1 << 45  # keep these draws apart from those of the samples
PARTNERS = 6  # other pictures of a mosaic and of the one mixed with it


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Everything that decides the batches of one epoch; weights (N,) draw pictures with replacement."""

    epoch: int = 0
    is_mosaic: bool = True
    weights: np.ndarray | None = None

    def is_same(self, other: EpochPlan | None) -> bool:
        """Whether both give the same batches."""
        if other is None or (self.epoch, self.is_mosaic) != (other.epoch, other.is_mosaic):
            return False
        if self.weights is None or other.weights is None:
            return self.weights is other.weights
        return np.array_equal(self.weights, other.weights)


class BatchStream(Sampler[list[SampleKey]]):
    """Lists of SampleKeys, one list per batch: those of `current`, then those of `announced` if there is one.

    group is the number of pictures that belong together; a rest smaller than a group is left out of the epoch.
    `begun` holds the plans that the stream has started to hand out ahead of their pass.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        group: int = 1,
    ) -> None:
        self.length, self.batch_size, self.shuffle = length, batch_size, shuffle
        self.seed, self.drop_last, self.group = seed % 2**63, drop_last, group
        self.current = EpochPlan()
        self.announced: EpochPlan | None = None
        self.begun: deque[EpochPlan] = deque()

    def __len__(self) -> int:
        """Batches of one epoch."""
        usable = self.length // self.group * self.group
        return usable // self.batch_size if self.drop_last else -(-usable // self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        self.begun.clear()
        plan: EpochPlan | None = self.current
        while plan is not None:
            yield from self.batches_of(plan)
            plan, self.announced = self.announced, None
            if plan is not None:
                self.begun.append(plan)

    def batches_of(self, plan: EpochPlan) -> Iterator[list[SampleKey]]:
        """The batches of one epoch."""
        order = epoch_order(self.length, plan.epoch, seed=self.seed, shuffle=self.shuffle, weights=plan.weights)
        repeats, partners = np.zeros(len(order), np.int64), np.zeros((len(order), 0), np.int64)
        if plan.weights is not None:  # an order drawn with replacement, from which the partners are drawn as well
            rng = np.random.default_rng([self.seed, plan.epoch, PARTNER_STREAM])
            repeats, partners = repetitions(order), order[rng.integers(len(order), size=(len(order), PARTNERS))]
        usable = len(order) // self.group * self.group
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            chosen = slice(start, min(start + self.batch_size, usable))
            columns = (values[chosen].tolist() for values in (order, repeats, partners))
            yield [SampleKey(plan.epoch, i, plan.is_mosaic, n, tuple(p)) for i, n, p in zip(*columns, strict=True)]


class Pieces(Sampler[list[SampleKey]]):
    """The lists of a stream in pieces of at most ``size`` keys, so that several workers make one batch.

    `counts` holds how many pieces each batch has that was handed out, oldest first.
    """

    def __init__(self, stream: BatchStream, size: int) -> None:
        self.stream, self.size = stream, size
        self.counts: deque[int] = deque()

    def __iter__(self) -> Iterator[list[SampleKey]]:
        self.counts.clear()
        for keys in self.stream:
            count = -(-len(keys) // self.size)
            self.counts.append(count)
            bounds = [len(keys) * number // count for number in range(count + 1)]
            yield from (keys[start:end] for start, end in pairwise(bounds))


def piece_size(length: int, batch_size: int, workers: int, prefetch: int) -> int:
    """Pictures of a batch that one worker makes: all of them, or fewer where workers would have nothing to do.

    A set of few batches is cut into as many pieces as workers prepare: its first batch comes sooner, and nobody waits
    for the last one.
    """
    ahead = workers * prefetch
    if workers < 2 or -(-length // batch_size) >= ahead:
        return batch_size
    return min(batch_size, -(-length // ahead))


def epoch_order(
    length: int, epoch: int, *, seed: int = 0, shuffle: bool = True, weights: np.ndarray | None = None
) -> np.ndarray:
    """Indices (length,) of an epoch: 0, 1, 2, …, or shuffled, or drawn with replacement in proportion to weights."""
    rng = np.random.default_rng([seed % 2**63, epoch, ORDER_STREAM])
    if weights is not None:
        return rng.choice(length, size=length, p=weights / weights.sum())
    order = np.arange(length)
    if shuffle:
        rng.shuffle(order)
    return order


def repetitions(order: np.ndarray) -> np.ndarray:
    """For each position (n,) how often its value stands before it."""
    by_value = np.argsort(order, kind="stable")
    counts = np.empty_like(order)
    counts[by_value] = np.arange(len(order)) - np.searchsorted(order[by_value], order[by_value])
    return counts


def checked_weights(weights: Sequence[float] | np.ndarray, length: int) -> np.ndarray:
    """Weights (length,) as float64; all zero means that nothing speaks for any picture: all are drawn evenly.

    Raises ValueError for another length and for values that are negative or not finite.
    """
    values = np.asarray(weights, np.float64)
    if values.shape != (length,):
        raise ValueError(
            f"image weights have the shape {values.shape}, expected one number for each of {length} pictures"
        )
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("image weights hold values that are negative or not finite")
    return values if values.any() else np.ones(length)


def class_weights(labels: Sequence[np.ndarray], nc: int) -> np.ndarray:
    """Weight (nc,) of each class: inverse of its number of objects (at least 1), scaled to the mean 1."""
    classes = _rows(labels)[:, 0].astype(np.int64)
    inverse = 1.0 / np.maximum(np.bincount(classes, minlength=nc)[:nc], 1)
    return inverse / inverse.sum() * nc


def labels_to_class_weights(labels: Sequence[np.ndarray], nc: int = 80) -> Tensor:
    """Return :func:`class_weights` as upstream's function of that name: a tensor (nc,) that adds up to 1."""
    return torch.from_numpy(class_weights(labels, nc) / nc).float()


def image_weights(labels: Sequence[np.ndarray], nc: int, class_weights: np.ndarray) -> np.ndarray:
    """Weight (N,) of each picture: the weights (nc,) of its objects' classes added up; 0 for backgrounds.

    During training the class weights are those of `class_weights` times (1 - mAP of the class)^2 / nc, so that
    pictures with weak classes are shown more often.
    """
    rows = _rows(labels)
    lengths = labels.lengths() if isinstance(labels, RowTable) else [len(piece) for piece in labels]
    owner = np.repeat(np.arange(len(labels)), lengths)
    weights = np.asarray(class_weights, np.float64)
    if weights.shape != (nc,):
        raise ValueError(f"class weights have the shape {weights.shape}, expected ({nc},)")
    return np.bincount(owner, weights=weights[rows[:, 0].astype(np.int64)], minlength=len(labels))


def _rows(labels: Sequence[np.ndarray]) -> np.ndarray:
    """All label rows (sum n, 5) below each other."""
    if isinstance(labels, RowTable):
        return labels.values
    return np.concatenate([np.zeros((0, 5), np.float32), *labels])
