"""From views of frames to detections: letterbox and copy, network, suppression, each as one step of a chain.

On a GPU the steps may run in threads of their own. Then copies, network and suppression go to three streams of the
device, and events tell each step when its input is there, so that the device works on several batches at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from utils.boxes import scale_boxes
from utils.data.frames import Frame, Unreadable, network_shape
from utils.data.images import letterbox
from utils.deploy.speed import StepClock
from utils.deploy.views import Batch, Done, Skipped, View, grouped, reassembled, views_of
from utils.log import LOGGER
from utils.nms import non_max_suppression
from utils.options.base import SLICE_AS_INPUT
from utils.runtime import check_img_size, is_out_of_memory, picture_layout, synchronise
from utils.slicing import merge_slices, picture_windows

Step = Iterator[Batch | Skipped]


class Backend(Protocol):
    """What is needed of a model; ``DetectMultiBackend`` offers it."""

    names: dict[int, str]
    stride: int
    static_shape: tuple[int, int] | None
    pt: bool
    device: torch.device

    def __call__(self, images: Tensor, augment: bool = False) -> Tensor:
        """Return the lead prediction (B, 4 + nc, A) for images (B, 3, H, W) 0 … 1."""

    def warmup(self, imgsz: Sequence[int]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Thresholds and switches of a detector, named as on the command line."""

    imgsz: tuple[int, int] = (640, 640)
    conf_thres: float = 0.25
    iou_thres: float = 0.45
    max_det: int = 1000
    classes: tuple[int, ...] | None = None
    agnostic_nms: bool = False
    augment: bool = False
    slice_size: int = 0
    slice_overlap: float = 0.2

    @classmethod
    def of(cls, options: object) -> Settings:
        """Take the settings from an object with attributes of their names."""
        values = {item.name: getattr(options, item.name) for item in fields(cls)}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    def check_against(self, model: Backend) -> None:
        """Raise ValueError where the model cannot do what is asked."""
        if self.augment and not model.pt:
            raise ValueError("--augment needs a .pt file; exported files hold one fixed pass")
        unknown = [number for number in self.classes or () if number not in model.names]
        if unknown:
            raise ValueError(f"--classes {unknown[0]}: the weights know classes 0 to {max(model.names)}")
        self._compare_with_nms_of(model)

    def _compare_with_nms_of(self, model: Backend) -> None:
        """Tell which settings NMS inside the file leaves without effect: it has removed what they would let pass."""
        inside = getattr(model, "built_in_nms", None)  # other loaded models may lack it
        if inside is None:
            return
        idle = []
        if self.conf_thres < inside.conf_thres:
            idle.append(f"--conf-thres {self.conf_thres:g}")
        if self.iou_thres > inside.iou_thres:
            idle.append(f"--iou-thres {self.iou_thres:g}")
        if idle:
            LOGGER.warning(
                f"no effect of {' and '.join(idle)}: the file holds NMS, which has removed confidences below "
                f"{inside.conf_thres:g} and overlaps above IoU {inside.iou_thres:g}. Export it with the thresholds "
                f"wanted: python export.py --include onnx_end2end --conf-thres {self.conf_thres:g} "
                f"--iou-thres {self.iou_thres:g}, or without NMS: --include onnx"
            )
        if self.max_det > inside.max_det:
            LOGGER.info(f"the file holds NMS, which keeps at most {inside.max_det} detections per image (--topk-all)")


class Engine:
    """The steps on the model's device.

    Each step is a generator, and inputs that could not be read pass through. ``batches``, ``prepared``, ``predicted``,
    ``suppressed`` and ``frames`` are to be chained in this order, in one thread or several.

    Args:
        is_overlapped: the steps run in threads of their own; otherwise each waits until the device has done its work.
    """

    def __init__(
        self, model: Backend, settings: Settings, clock: StepClock | None = None, *, is_overlapped: bool = False
    ) -> None:
        settings.check_against(model)
        self.model, self.settings, self.clock = model, settings, clock or StepClock()
        self.size, self.auto = input_size(model, settings.imgsz)
        self.slice_size = max(self.size) if settings.slice_size == SLICE_AS_INPUT else settings.slice_size
        self.on_images: Callable[[Batch, Tensor], None] | None = None  # sees what goes into the network
        is_cuda = model.device.type == "cuda"
        self._lanes = [torch.cuda.Stream(model.device) for _ in range(3)] if is_cuda and is_overlapped else None
        synchronise(model.device)  # weights are in place before another stream reads them
        self._is_warm = False

    def batches(self, frames: Iterable[Frame | Unreadable], size: int, start: int = 0) -> Step:
        """Cut frames, numbered from ``start``, into slices where that is asked for, and group views of one shape."""
        return grouped(frames, self._cut, self._shape_of, size, start)

    def prepared(self, batches: Iterable[Batch | Skipped]) -> Step:
        """Letterbox the views and copy them to the device."""
        for batch in batches:
            if isinstance(batch, Batch):
                with memory_advice(batch), self.clock.timed("pre-process"), self._lane(0, None):
                    batch.images = self._stacked(batch).to(self.model.device, non_blocking=True)
                    batch.is_ready = self._mark(0)
            yield batch

    def predicted(self, batches: Iterable[Batch | Skipped]) -> Step:
        """Run the network."""
        for batch in batches:
            if isinstance(batch, Batch):
                if not self._is_warm:
                    self._warm_up(batch)
                started = time.perf_counter()
                with memory_advice(batch), self._lane(1, batch.is_ready, batch.images):
                    batch.began = self._mark(1, timing=True)
                    images = as_network_input(batch.images)
                    if self.on_images is not None:
                        self.on_images(batch, images)
                    batch.prediction = self.model(images, augment=self.settings.augment)
                    batch.is_ready, batch.images = self._mark(1, timing=True), None
                if self._lanes is None:  # otherwise the events tell, once they have passed
                    self._count_network(batch, time.perf_counter() - started)
            yield batch

    def suppressed(self, batches: Iterable[Batch | Skipped]) -> Step:
        """Turn the output of the network into detections in pixels of the views."""
        for batch in batches:
            if isinstance(batch, Batch):
                if batch.is_ready is not None:
                    batch.is_ready.synchronize()
                    self._count_network(batch, batch.began.elapsed_time(batch.is_ready) / 1000)
                with memory_advice(batch), self.clock.timed("NMS"), self._lane(2, batch.is_ready, batch.prediction):
                    shapes = [view.image_bgr.shape for view in batch.views]
                    batch.found = self._suppress(batch.prediction, batch.shape, shapes)
                batch.prediction = batch.is_ready = batch.began = None
            yield batch

    def frames(self, batches: Iterable[Batch | Skipped]) -> Iterator[Done | Unreadable]:
        """Put the detections of frames together, in reading order."""
        return reassembled(batches, self._merge)

    def detect(self, frames: Iterable[Frame | Unreadable], batch_size: int) -> Iterator[Done | Unreadable]:
        """Chain all steps in this thread."""
        return self.frames(self.suppressed(self.predicted(self.prepared(self.batches(frames, batch_size)))))

    def _cut(self, frame: Frame, sequence: int) -> list[View]:
        if not self.slice_size:
            return views_of(frame, sequence)
        height, width = frame.image_bgr.shape[:2]
        return views_of(frame, sequence, picture_windows(height, width, self.slice_size, self.settings.slice_overlap))

    def _shape_of(self, view: View) -> tuple[int, int]:
        """Return height and width of a view for the network."""
        window = view.windows[view.index]
        return network_shape(window.height, window.width, self.size, self.model.stride, self.auto)

    def _merge(self, found: list[np.ndarray], view: View) -> np.ndarray:
        with self.clock.timed("NMS"):
            return merge_slices(
                found,
                view.windows,
                view.frame.image_bgr.shape,
                size=self.slice_size,
                overlap=self.settings.slice_overlap,
                iou_thres=self.settings.iou_thres,
                agnostic=self.settings.agnostic_nms,
                max_det=self.settings.max_det,
            )

    def _stacked(self, batch: Batch) -> Tensor:
        """Return the letterboxed views as one tensor (B, H, W, 3) uint8 BGR, from which a GPU can copy by itself."""
        is_cuda = self.model.device.type == "cuda"
        stacked = torch.empty(len(batch.views), *batch.shape, 3, dtype=torch.uint8, pin_memory=is_cuda)
        for place, view in zip(stacked.numpy(), batch.views, strict=True):
            place[:] = letterbox(view.image_bgr, self.size, auto=self.auto, stride=self.model.stride)[0]
        return stacked

    def _suppress(
        self, prediction: Tensor, input_shape: Sequence[int], shapes: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        settings = self.settings
        kept = non_max_suppression(
            prediction,
            settings.conf_thres,
            settings.iou_thres,
            classes=settings.classes,
            agnostic=settings.agnostic_nms,
            max_det=settings.max_det,
        )
        rows = torch.cat(kept).cpu().split([len(part) for part in kept])  # one copy for the whole batch
        return [
            np.concatenate((scale_boxes(input_shape, part[:, :4].clone(), shape), part[:, 4:]), 1)
            for part, shape in zip(rows, shapes, strict=True)
        ]

    def _warm_up(self, batch: Batch) -> None:
        """Let the first shape pass once on a GPU, which loads kernels, and keep that time apart."""
        self._is_warm = True
        if self.model.device.type == "cuda":
            started = time.perf_counter()
            with memory_advice(batch), self._lane(1, None):
                self.model.warmup((len(batch.views), 3, *batch.shape))
            synchronise(self.model.device)
            self.clock.warmup_s = time.perf_counter() - started

    def _count_network(self, batch: Batch, seconds: float) -> None:
        batch.network_s = seconds
        self.clock.add("network", seconds)

    @contextlib.contextmanager
    def _lane(self, index: int, after: torch.cuda.Event | None, *used: Tensor | None) -> Iterator[None]:
        """Run the block on one of the device's streams, behind an event; without lanes wait for the device at its end.

        ``used`` are tensors made on another stream: their memory must not be given away while this one reads it.
        """
        if self._lanes is None:
            yield
            synchronise(self.model.device)
            return
        lane = self._lanes[index]
        with torch.cuda.stream(lane):
            if after is not None:
                lane.wait_event(after)
            for tensor in used:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(lane)
            yield

    def _mark(self, index: int, *, timing: bool = False) -> torch.cuda.Event | None:
        if self._lanes is None:
            return None
        event = torch.cuda.Event(enable_timing=timing)
        event.record(self._lanes[index])
        return event


@contextlib.contextmanager
def memory_advice(batch: Batch) -> Iterator[None]:
    """Raise MemoryError that says what to change where the block runs out of memory, on a GPU or beside it."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        height, width = batch.shape
        count = len(batch.views)
        smaller = "a smaller --batch-size or --imgsz" if count > 1 else "a smaller --imgsz, or --slice"
        raise MemoryError(f"out of memory for {count} picture(s) of {height} x {width}; choose {smaller}") from error


def input_size(model: Backend, imgsz: Sequence[int]) -> tuple[list[int], bool]:
    """Return height and width of the model's input, and whether pictures are padded to the stride only."""
    if model.static_shape is None:
        return list(check_img_size(list(imgsz), model.stride)), model.pt
    if list(model.static_shape) != list(imgsz):
        LOGGER.info(f"the file is made for {model.static_shape[0]}x{model.static_shape[1]}, so --imgsz has no effect")
    return list(model.static_shape), False


def as_network_input(images: Tensor) -> Tensor:
    """Turn (B, H, W, 3) uint8 BGR into (B, 3, H, W) float RGB 0 … 1 on its device, on CUDA laid out channels last."""
    layout = picture_layout(images.device)
    return images.flip(3).permute(0, 3, 1, 2).contiguous(memory_format=layout).float() / 255
