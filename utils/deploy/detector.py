"""Detection over any source: read a batch, letterbox, run the model, suppress, write and report.

Frames are read ahead in a thread while the model works. A batch holds frames of one shape, in reading order, so results
do not depend on how frames were grouped.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np
import torch
from torch import Tensor

from models.backend import DetectMultiBackend
from utils.boxes import scale_boxes
from utils.data.frames import Frame, Unreadable, to_network
from utils.data.sources import LoadStreams, Source, prefetched, read_frames, resolve_source
from utils.data.streams import without_password
from utils.deploy.writers import RESULTS_NAME, OutputNames, RunWriter, plan_outputs, stream_name
from utils.evaluate.draw import draw_boxes
from utils.files import increment_path
from utils.log import LOGGER
from utils.nms import non_max_suppression
from utils.options import DetectOptions
from utils.runtime import check_img_size, select_device

READ_AHEAD = 2  # batches decoded while the model works
CODEC_NOTE = (
    "videos are written as MPEG-4 Part 2 (mp4v), which players show but browsers do not; "
    "convert with: ffmpeg -i IN.mp4 -c:v libx264 OUT.mp4"
)


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


@dataclass
class DetectionSummary:
    """What a run did.

    Attributes:
        save_dir: folder of the run.
        frames: pictures and video frames that went through the model.
        detections: boxes found in all of them.
        processed: inputs (files, streams) that gave at least one frame.
        unreadable: (input, reason) of those that gave none.
        seconds: total time of pre-process, inference and NMS.
        is_interrupted: the user ended the run; everything up to then is written.
    """

    save_dir: Path
    frames: int = 0
    detections: int = 0
    processed: set[int] = field(default_factory=set)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    is_interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 when at least one input was processed, 130 after Ctrl+C, else 1."""
        if self.is_interrupted:
            return 130
        return 0 if self.processed else 1


class Detector:
    """Detection as the options say.

    Example::

        summary = Detector(DetectOptions(weights=["best.pt"], source="pictures")).run()

    Args:
        options: what to do.
        model: loaded model; without one ``options.weights`` is loaded, once the source is found to be there.
        batch_size: frames per call of the model.
    """

    def __init__(self, options: DetectOptions, *, model: Backend | None = None, batch_size: int = 1) -> None:
        if batch_size < 1:
            raise ValueError(f"batch size {batch_size}: should be at least 1")
        if options.view_img and (problem := display_problem()):
            raise ValueError(f"--view-img: {problem}; leave it out and look at the written files")
        self.options, self.batch_size = options, batch_size
        self._model = model

    def run(self) -> DetectionSummary:
        """Process the whole source; the run's folder is made when source and weights are known to be good.

        Raises:
            FileNotFoundError, ValueError, OSError: source, weights or options that cannot be used.
        """
        source = resolve_source(self.options.source)
        streams: LoadStreams | None = None
        try:
            if source.streams:
                streams = LoadStreams(source.streams, vid_stride=self.options.vid_stride)
            source.report()
            model = self._prepare_model()
            return self._run(source, streams, model)
        finally:
            if streams is not None:
                streams.close()
            source.close()

    def _run(self, source: Source, streams: LoadStreams | None, model: Backend) -> DetectionSummary:
        options = self.options
        if streams is None:
            inputs = [(file.relative, file.is_video) for file in source.files]
            titles = [str(file.path) for file in source.files]
        else:
            inputs = [(Path(stream_name(address) + ".mp4"), True) for address in source.streams]
            titles = [without_password(address) for address in source.streams]
        outputs = plan_outputs(inputs)
        folder = self._make_folder(source, outputs)
        summary = DetectionSummary(folder, unreadable=list(source.missing))
        writer = RunWriter(
            folder,
            outputs,
            titles,
            model.names,
            save_txt=options.save_txt,
            save_conf=options.save_conf,
            save_crop=options.save_crop,
            save_media=not options.nosave,
            keep_open=streams is not None,
        )
        size, auto = self._input_size(model)
        pipeline = _Pipeline(options, model, writer, summary, size, auto, is_live=streams is not None)
        with writer:
            try:
                model.warmup((self.batch_size, 3, *size))
                for event in self._events(source, streams):
                    pipeline.handle(event)
            except KeyboardInterrupt:
                LOGGER.warning("interrupted; everything up to here is written")
                summary.is_interrupted = True
        if options.view_img:
            cv2.destroyAllWindows()
        pipeline.report()
        return summary

    def _prepare_model(self) -> Backend:
        """Load the weights and check the options that depend on them."""
        options = self.options
        model = self._model
        if model is None:
            model = DetectMultiBackend(
                options.weights,
                device=select_device(options.device),
                dnn=options.dnn,
                data=options.data or None,
                fp16=options.half,
            )
        for flag in ("augment", "visualize"):
            if getattr(options, flag) and not model.pt:
                raise ValueError(f"--{flag} needs a .pt file; exported files hold one fixed pass")
        unknown = [number for number in options.classes or () if number not in model.names]
        if unknown:
            raise ValueError(f"--classes {unknown[0]}: the weights know classes 0 to {max(model.names)}")
        return model

    def _input_size(self, model: Backend) -> tuple[list[int], bool]:
        """Return height and width of the model's input, and whether pictures are padded to the stride only."""
        if model.static_shape is None:
            return list(check_img_size(list(self.options.imgsz), model.stride)), model.pt
        if list(model.static_shape) != list(self.options.imgsz):
            LOGGER.info(
                f"the file is made for {model.static_shape[0]}x{model.static_shape[1]}, so --imgsz has no effect"
            )
        return list(model.static_shape), False

    def _make_folder(self, source: Source, outputs: Sequence[OutputNames]) -> Path:
        """Make the run's folder; refuse one in which files of the user would be replaced.

        Raises:
            ValueError: the folder is that of the source, or holds label files that no run wrote.
        """
        options = self.options
        folder = increment_path(Path(options.project) / options.name, exist_ok=options.exist_ok)
        if folder.is_dir():
            remedy = "choose another --project or --name"
            for file, output in zip(source.files, outputs, strict=False):
                if not options.nosave and os.path.realpath(folder / output.media) == os.path.realpath(file.path):
                    raise ValueError(f"--exist-ok: the result would replace its own source {file.path}; {remedy}")
            if options.save_txt and (folder / "labels").is_dir() and not (folder / RESULTS_NAME).exists():
                raise ValueError(f"--exist-ok: {folder}/labels is not from a run of detection; {remedy}")
        return increment_path(folder, exist_ok=options.exist_ok, mkdir=True)

    def _events(self, source: Source, streams: LoadStreams | None) -> Iterator[list[Frame] | Unreadable]:
        """Yield batches of frames of one shape, and inputs that cannot be read, in their order."""
        if streams is None:
            frames = read_frames(source.files, self.options.vid_stride)
            yield from prefetched(batched(frames, self.batch_size), READ_AHEAD)
        else:
            for frames in streams.rounds():  # never read ahead: what waits is old
                yield from batched(frames, len(frames))


def line_width(options: DetectOptions, image_bgr: np.ndarray) -> int:
    """Return the thickness that was typed; the default is thinner on small pictures, which labels would cover."""
    width = options.line_thickness
    return width if "line_thickness" in options.given else min(width, max(1, min(image_bgr.shape[:2]) // 150))


class _Pipeline:
    """From a batch of frames to files and lines."""

    def __init__(
        self,
        options: DetectOptions,
        model: Backend,
        writer: RunWriter,
        summary: DetectionSummary,
        size: list[int],
        auto: bool,
        *,
        is_live: bool,
    ) -> None:
        self.options, self.model, self.writer, self.summary = options, model, writer, summary
        self.size, self.auto, self.is_live = size, auto, is_live
        self._shape = (1, 3, *size)

    def handle(self, event: list[Frame] | Unreadable) -> None:
        """Process one batch, or name an input that cannot be read."""
        if isinstance(event, Unreadable):
            title = self.writer.titles[event.item]
            LOGGER.warning(f"{self._position(event.item)} {title}: {event.reason}, left out")
            self.summary.unreadable.append((title, event.reason))
            return
        started = time.perf_counter()
        images = self.preprocess([frame.image_bgr for frame in event])
        prepared = self._now()
        prediction = self.model(images, augment=self.options.augment)
        inferred = self._now()
        found = self.suppress(prediction, images.shape[2:], [frame.image_bgr.shape for frame in event])
        finished = self._now()
        for stage, duration in enumerate((prepared - started, inferred - prepared, finished - inferred)):
            self.summary.seconds[stage] += duration
        self._shape = (1, *images.shape[1:])
        each_ms = 1000 * (inferred - prepared) / len(event)
        for index, (frame, detections) in enumerate(zip(event, found, strict=True)):
            if self.options.visualize:
                self._write_feature_maps(images[index : index + 1], frame)
            self._write(frame, detections)
            self._log(frame, detections, images.shape[2:], each_ms)

    def preprocess(self, images_bgr: Sequence[np.ndarray]) -> Tensor:
        """Return pictures of one shape as (B, 3, H, W) RGB 0 … 1 on the model's device."""
        boxed = np.stack([to_network(image, self.size, self.model.stride, self.auto) for image in images_bgr])
        return torch.from_numpy(boxed).to(self.model.device).float() / 255

    def suppress(
        self, prediction: Tensor, input_shape: Sequence[int], original_shapes: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """Return detections (N, 6) x1 y1 x2 y2 confidence class of each picture in its whole pixels, best first."""
        options = self.options
        kept = non_max_suppression(
            prediction,
            options.conf_thres,
            options.iou_thres,
            classes=options.classes,
            agnostic=options.agnostic_nms,
            max_det=options.max_det,
        )
        results = []
        for rows, shape in zip(kept, original_shapes, strict=True):
            rows[:, :4] = scale_boxes(input_shape, rows[:, :4], shape).round()
            results.append(rows.cpu().numpy())
        return results

    def _now(self) -> float:
        """Return the time when the device has done what it was given."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def _write(self, frame: Frame, detections: np.ndarray) -> None:
        options = self.options
        annotated = None
        if not options.nosave or options.view_img:
            annotated = draw_boxes(
                frame.image_bgr.copy(),
                detections,
                self.model.names,
                line_width=line_width(options, frame.image_bgr),
                hide_labels=options.hide_labels,
                hide_conf=options.hide_conf,
            )
        self.writer.write(frame.item, frame.number, frame.image_bgr, annotated, detections, frame.rate)
        if options.view_img and annotated is not None:
            cv2.imshow(self.writer.titles[frame.item], annotated)
            cv2.waitKey(1)
        self.summary.frames += 1
        self.summary.detections += len(detections)
        self.summary.processed.add(frame.item)

    def _write_feature_maps(self, image: Tensor, frame: Frame) -> None:
        folder = self.summary.save_dir / self.writer.outputs[frame.item].label_stem(frame.number)
        with torch.no_grad():
            self.model.runner.model(image.to(next(self.model.runner.model.parameters()).dtype), visualize=folder)

    def _position(self, item: int, number: int = 0, total: int = 0) -> str:
        is_video = self.writer.outputs[item].is_video
        if self.is_live:
            return f"{item}:"
        text = f"{'video' if is_video else 'image'} {item + 1}/{len(self.writer.titles)}"
        return f"{text} ({number}/{total or '?'})" if number else text

    def _log(self, frame: Frame, detections: np.ndarray, shape: Sequence[int], each_ms: float) -> None:
        title = "" if self.is_live else f" {self.writer.titles[frame.item]}:"
        counts = count_text(detections, self.model.names) or "(no detections)"
        position = self._position(frame.item, frame.number, frame.total)
        LOGGER.info(f"{position}{title} {shape[0]}x{shape[1]} {counts}, {each_ms:.1f}ms")

    def report(self) -> None:
        """Log times, the folder and what could not be read."""
        summary, folder = self.summary, self.summary.save_dir
        if summary.frames:
            before, inside, after = (1000 * seconds / summary.frames for seconds in summary.seconds)
            LOGGER.info(
                f"Speed: {before:.1f}ms pre-process, {inside:.1f}ms inference, {after:.1f}ms NMS per image "
                f"at shape {self._shape}"
            )
        if any(output.is_video for output in self.writer.outputs) and not self.options.nosave and summary.frames:
            LOGGER.info(CODEC_NOTE)
        labels = f", {self.writer.label_files} label file(s) in {folder / 'labels'}" if self.options.save_txt else ""
        LOGGER.info(f"{summary.detections} detection(s) in {summary.frames} image(s); results in {folder}{labels}")
        if summary.unreadable:
            LOGGER.warning(f"{len(summary.unreadable)} input(s) could not be read, see above")
        if not summary.processed and not summary.is_interrupted:
            LOGGER.error("nothing was processed: no input could be read")


def batched(events: Iterable[Frame | Unreadable], size: int) -> Iterator[list[Frame] | Unreadable]:
    """Group neighbouring frames of one shape into lists of at most ``size``; the order stays as it is.

    Example: frames of shapes A A B A with size 2 come as [A A] [B] [A].
    """
    batch: list[Frame] = []
    for event in events:
        is_frame = isinstance(event, Frame)
        if batch and (not is_frame or event.image_bgr.shape != batch[0].image_bgr.shape):
            yield batch
            batch = []
        if not is_frame:
            yield event
            continue
        batch.append(event)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def count_text(detections: np.ndarray, names: Mapping[int, str]) -> str:
    """Return for example ``3 squares, 1 triangle``, classes in rising order; empty without detections."""
    counts = Counter(detections[:, 5].astype(int).tolist())
    return ", ".join(
        f"{count} {names.get(number, str(number))}{'s' if count > 1 else ''}"
        for number, count in sorted(counts.items())
    )


def display_problem() -> str | None:
    """Return why no window can be shown, None if one can. The window system is not asked: that may end the process."""
    kind = re.search(r"GUI:\s*(\S+)", cv2.getBuildInformation())
    if kind and kind.group(1).upper() == "NONE":
        return "this OpenCV has no windows (opencv-python-headless); install opencv-python"
    is_linux = sys.platform.startswith("linux")
    if is_linux and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return "there is no display (neither DISPLAY nor WAYLAND_DISPLAY is set)"
    return None
