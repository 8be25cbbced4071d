"""What the network sees of each frame: the whole of it or slices, grouped by shape, and put back into order behind it.

Views of one shape are looked at together, from whatever frames they come. Their frames leave in reading order, so the
results do not depend on the grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from utils.data.frames import Frame, Unreadable
from utils.slicing import Window

WAITING_BATCHES = 4  # a view waits for others of its shape while this many batches are read …
WAITING_BYTES = 512 * 2**20  # … or this many bytes of pictures

Shape = tuple[int, int]


@dataclass(frozen=True)
class View:
    """A part of a frame.

    Attributes:
        frame: what it was cut from.
        sequence: running number of the frame among all that were read.
        windows: parts into which the frame was cut; one that covers it all without slicing.
        index: which of them this is.
    """

    frame: Frame
    sequence: int
    windows: tuple[Window, ...]
    index: int = 0

    @property
    def image_bgr(self) -> np.ndarray:
        """Its pixels (H, W, 3)."""
        return self.windows[self.index].cut(self.frame.image_bgr)


@dataclass(frozen=True)
class Skipped:
    """An input that cannot be read, with its place among the frames."""

    sequence: int
    unreadable: Unreadable


@dataclass
class Batch:
    """Views of one letterboxed shape on their way through the steps; fields are filled, used and emptied in turn.

    Attributes:
        views: B of them.
        shape: height and width for the network.
        images: (B, H, W, 3) uint8 BGR on the model's device.
        prediction: (B, 4 + nc, A) output of the network.
        found: per view (N, 6) x1 y1 x2 y2 confidence class in pixels of the view, best first.
        is_ready: marks on the device's time line that tell when ``images`` or ``prediction`` may be read.
        network_s: time of the network for the whole batch.
    """

    views: list[View]
    shape: Shape
    images: Tensor | None = None
    prediction: Tensor | None = None
    found: list[np.ndarray] = field(default_factory=list)
    is_ready: torch.cuda.Event | None = None
    began: torch.cuda.Event | None = None
    network_s: float = 0.0


@dataclass(frozen=True)
class Done:
    """A frame with all its detections.

    Attributes:
        rows: (N, 6) x1 y1 x2 y2 confidence class in pixels of the frame, best first.
        shape: height and width the network saw.
        network_ms: its share of the network's time.
        views: parts of the frame.
        batch_size: views, also of other frames, that the network saw together.
    """

    frame: Frame
    rows: np.ndarray
    shape: Shape
    network_ms: float
    views: int = 1
    batch_size: int = 1


def views_of(frame: Frame, sequence: int, windows: Iterable[Window] = ()) -> list[View]:
    """Return the views of a frame; without windows one that covers it."""
    height, width = frame.image_bgr.shape[:2]
    parts = tuple(windows) or (Window(0, 0, width, height),)
    return [View(frame, sequence, parts, index) for index in range(len(parts))]


@dataclass
class _Group:
    """Views of one shape that wait for company, with the number of views and bytes that were read before them."""

    views_before: int
    bytes_before: int
    views: list[View] = field(default_factory=list)


def grouped(
    events: Iterable[Frame | Unreadable],
    cut: Callable[[Frame, int], list[View]],
    shape_of: Callable[[View], Shape],
    size: int,
    start: int = 0,
) -> Iterator[Batch | Skipped]:
    """Yield views in batches of at most ``size`` and one shape; inputs that cannot be read come at once.

    Frames are numbered from ``start``.

    Frames leave in order, so a view that waits holds back all behind it. So a batch that is not full goes on its way
    when much was read since its first view.
    """
    groups: dict[Shape, _Group] = {}  # the one that waits longest comes first
    views_read = bytes_read = 0
    for sequence, event in enumerate(events, start):
        if isinstance(event, Unreadable):
            yield Skipped(sequence, event)
            continue
        for view in cut(event, sequence):
            shape = shape_of(view)
            groups.setdefault(shape, _Group(views_read, bytes_read)).views.append(view)
            views_read, bytes_read = views_read + 1, bytes_read + view.image_bgr.nbytes
            if len(groups[shape].views) == size:
                yield Batch(groups.pop(shape).views, shape)
            while groups and _has_waited(next(iter(groups.values())), views_read, bytes_read, size):
                oldest = next(iter(groups))
                yield Batch(groups.pop(oldest).views, oldest)
    for shape, group in groups.items():
        yield Batch(group.views, shape)


def _has_waited(group: _Group, views_read: int, bytes_read: int, size: int) -> bool:
    views, read = views_read - group.views_before, bytes_read - group.bytes_before
    return views > WAITING_BATCHES * size or read > WAITING_BYTES and views > size


def reassembled(
    batches: Iterable[Batch | Skipped], merge: Callable[[list[np.ndarray], View], np.ndarray]
) -> Iterator[Done | Unreadable]:
    """Yield frames in reading order once all their views are there; ``merge`` joins the detections of several views."""
    parts: dict[int, list[_Part]] = {}  # by frame; only frames that wait for others are held
    ready: dict[int, Done | Unreadable] = {}
    next_sequence = 0
    for batch in batches:
        if isinstance(batch, Skipped):
            ready[batch.sequence] = batch.unreadable
        else:
            for view, rows in zip(batch.views, batch.found, strict=True):
                size = len(batch.views)
                part = _Part(view, rows, batch.shape, 1000 * batch.network_s / size, size)
                of_frame = parts.setdefault(view.sequence, [])
                of_frame.append(part)
                if len(of_frame) == len(view.windows):
                    ready[view.sequence] = _finish(parts.pop(view.sequence), merge)
        while next_sequence in ready:
            yield ready.pop(next_sequence)
            next_sequence += 1


@dataclass(frozen=True)
class _Part:
    view: View
    rows: np.ndarray
    shape: Shape
    network_ms: float
    batch_size: int


def _finish(parts: list[_Part], merge: Callable[[list[np.ndarray], View], np.ndarray]) -> Done:
    parts = sorted(parts, key=lambda part: part.view.index)
    first = parts[0]
    rows = first.rows if len(parts) == 1 else merge([part.rows for part in parts], first.view)
    return Done(
        first.view.frame,
        rows,
        first.shape,
        sum(part.network_ms for part in parts),
        len(parts),
        first.batch_size,
    )
