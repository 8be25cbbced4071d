"""The steps between frames and files: they run side by side in threads, or one after the other.

Views of frames travel in batches of one shape and come back in reading order, so the results do not depend on how they
were grouped, nor on which way the steps run.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

from utils.data.frames import Unreadable
from utils.data.sources import DECODERS, LoadStreams, Source, read_frames
from utils.deploy.display import count_text
from utils.deploy.engine import Engine
from utils.deploy.speed import StepClock
from utils.deploy.tables import shown
from utils.deploy.views import Batch, Done, Skipped
from utils.deploy.writers import Picture, RunWriter
from utils.evaluate.draw import draw_boxes
from utils.log import LOGGER
from utils.options import DetectOptions
from utils.threads import Overlap, interrupts_wait, ordered_map

READ_AHEAD = 4  # frames between two steps, or one batch if that is more: enough to even out frames that take longer
ENCODERS = min(4, os.cpu_count() or 1)  # threads that turn annotated pictures into files
NOTHING_READ = (
    "nothing was processed: no input could be read. Name others with --source; files that another program can show "
    "are read once they are converted, such as by: ffmpeg -i FILE new.mp4 (new.png for a picture)"
)


@dataclass
class DetectionSummary:
    """What a run did.

    Attributes:
        save_dir: folder of the run.
        frames: pictures and video frames that went through the model.
        detections: boxes found in all of them.
        processed: inputs (files, streams) that gave at least one frame.
        unreadable: (input, reason) of those that gave none.
        clock: where the time went.
        is_interrupted: the user ended the run; everything up to then is written.
    """

    save_dir: Path
    frames: int = 0
    detections: int = 0
    processed: set[int] = field(default_factory=set)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    clock: StepClock = field(default_factory=StepClock)
    is_interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 when at least one input was processed, 130 after Ctrl+C, else 1."""
        if self.is_interrupted:
            return 130
        return 0 if self.processed else 1


@dataclass
class _Drawn:
    """A frame on its way to the files; ``media`` is what gets written as picture or video frame."""

    done: Done
    annotated: np.ndarray | None = None
    media: np.ndarray | Picture | None = None


def line_width(options: DetectOptions, image_bgr: np.ndarray) -> int:
    """Return the thickness that was typed; the default is thinner on small pictures, which labels would cover."""
    width = options.line_thickness
    return width if "line_thickness" in options.given else min(width, max(1, min(image_bgr.shape[:2]) // 150))


class Pipeline:
    """The steps from frames to files and lines."""

    def __init__(
        self,
        options: DetectOptions,
        engine: Engine,
        writer: RunWriter,
        summary: DetectionSummary,
        batch_size: int,
    ) -> None:
        self.options, self.engine, self.writer, self.summary = options, engine, writer, summary
        self.batch_size, self.clock, self.is_live = batch_size, engine.clock, False
        self._shape = (0, 3, 0, 0)  # of the largest batch for the network, and of the latest among equals
        if options.visualize:
            engine.on_images = self._write_feature_maps

    def run(self, source: Source, streams: LoadStreams | None) -> None:
        """Work through the source. Reading, preparing, network, suppression, drawing and writing have a thread each.

        Streams are read only when the network is free, because a picture that waits is an old one.
        """
        self.is_live = streams is not None
        depth = 1 if self.is_live else 1 + (READ_AHEAD - 1) // self.batch_size
        with ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode") as pool, Overlap(depth) as overlap:
            ahead = self._in_this_thread if self.options.sequential else overlap.ahead
            between = self._in_this_thread if self.is_live else ahead
            try:
                batches = self._live_batches(streams) if streams is not None else self._file_batches(source)
                prepared = self.engine.prepared(between(batches))
                predicted = self.engine.predicted(between(prepared))
                found = self.engine.suppressed(between(predicted))
                drawn = self._drawn(between(self.engine.frames(found)))
                if not self.options.nosave and any(not output.is_video for output in self.writer.outputs):
                    drawn = self._encoded(ahead(drawn), None if self.options.sequential else pool)
                for item in ahead(drawn):
                    with interrupts_wait():  # tables, labels and video agree on the last frame
                        self._finish(item)
            except BaseException:
                if streams is not None:
                    streams.close()  # ends the thread that waits for frames
                raise

    @staticmethod
    def _in_this_thread(items: Iterable) -> Iterable:
        return items

    def _file_batches(self, source: Source) -> Iterator[Batch | Skipped]:
        decoders = 0 if self.options.sequential else DECODERS
        frames = read_frames(source.files, self.options.vid_stride, decoders=decoders)
        return self.engine.batches(self.clock.timed_items("read", frames), self.batch_size)

    def _live_batches(self, streams: LoadStreams) -> Iterator[Batch | Skipped]:
        sequence = 0
        for frames in streams.rounds():
            size = max(len(frames), self.batch_size)
            yield from self.engine.batches(frames, size, start=sequence)
            sequence += len(frames)

    def _drawn(self, frames: Iterable[Done | Unreadable]) -> Iterator[_Drawn | Unreadable]:
        """Round the boxes to whole pixels and draw them."""
        options = self.options
        is_drawn = not options.nosave or options.view_img
        for done in frames:
            if isinstance(done, Unreadable):
                yield done
                continue
            drawn = _Drawn(done)
            with self.clock.timed("draw"):
                done.rows[:, :4] = done.rows[:, :4].round()
                if is_drawn:
                    image = done.frame.image_bgr
                    drawn.annotated = draw_boxes(
                        image.copy() if options.save_crop else image,  # crops are cut from what is not drawn on
                        done.rows,
                        self.engine.model.names,
                        line_width=line_width(options, image),
                        hide_labels=options.hide_labels,
                        hide_conf=options.hide_conf,
                    )
                    drawn.media = drawn.annotated
            yield drawn

    def _encoded(
        self, frames: Iterable[_Drawn | Unreadable], pool: ThreadPoolExecutor | None
    ) -> Iterator[_Drawn | Unreadable]:
        """Turn annotated pictures into the bytes of their files; frames of videos pass."""
        workers = ENCODERS if pool else 1

        def encode(drawn: _Drawn | Unreadable) -> tuple[_Drawn | Unreadable, float]:
            started = time.perf_counter()
            if isinstance(drawn, _Drawn) and not self.writer.outputs[drawn.done.frame.item].is_video:
                drawn.media = self.writer.encode(drawn.done.frame.item, drawn.annotated)
            return drawn, time.perf_counter() - started

        for drawn, seconds in ordered_map(pool, encode, frames, 2 * workers) if pool else map(encode, frames):
            self.clock.add("write", seconds / workers)
            yield drawn

    def _finish(self, drawn: _Drawn | Unreadable) -> None:
        """Write, show and log one frame, or name an input that cannot be read."""
        if isinstance(drawn, Unreadable):
            title = self.writer.titles[drawn.item]
            LOGGER.warning(f"{self._position(drawn.item)} {shown(title)}: {drawn.reason}, left out")
            self.summary.unreadable.append((title, drawn.reason))
            return
        done, frame = drawn.done, drawn.done.frame
        with self.clock.timed("write"):
            media = None if self.options.nosave else drawn.media
            self.writer.write(frame.item, frame.number, frame.image_bgr, media, done.rows, frame.rate)
        if self.options.view_img:
            cv2.imshow(self.writer.titles[frame.item], drawn.annotated)
            cv2.waitKey(1)
        self.summary.frames += 1
        self.summary.detections += len(done.rows)
        self.summary.processed.add(frame.item)
        if done.batch_size >= self._shape[0]:
            self._shape = (done.batch_size, 3, *done.shape)
        self._log(done)

    def _write_feature_maps(self, batch: Batch, images: Tensor) -> None:
        network = self.engine.model.runner.model
        images = images.to(next(network.parameters()).dtype)
        for index, view in enumerate(batch.views):
            item = view.frame.item
            place = self.writer.outputs[item].maps_folder(view.frame.number)
            place = place / f"part{view.index}" if len(view.windows) > 1 else place
            folder = self.summary.save_dir / f".partial-{os.getpid()}-maps"
            try:
                with torch.no_grad():
                    network(images[index : index + 1], visualize=folder)
                self.writer.write_maps(item, folder, place)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _position(self, item: int, number: int = 0, total: int = 0) -> str:
        is_video = self.writer.outputs[item].is_video
        if self.is_live:
            return f"{item}:"
        text = f"{'video' if is_video else 'image'} {item + 1}/{len(self.writer.titles)}"
        return f"{text} ({number}/{total or '?'})" if number else text

    def _log(self, done: Done) -> None:
        frame = done.frame
        title = "" if self.is_live else f" {shown(self.writer.titles[frame.item])}:"
        counts = count_text(done.rows, self.engine.model.names) or "(no detections)"
        position = self._position(frame.item, frame.number, frame.total)
        shape = f"{done.shape[0]}x{done.shape[1]}" + (f" in {done.views} parts" if done.views > 1 else "")
        LOGGER.info(f"{position}{title} {shape} {counts}, {done.network_ms:.1f}ms")

    def report(self) -> None:
        """Log times, the folder and what could not be read."""
        summary, writer = self.summary, self.writer
        if summary.frames:
            shares = summary.clock.per_image_ms(summary.frames)
            before, inside, after = (shares[step] for step in ("pre-process", "network", "NMS"))
            LOGGER.info(
                f"Speed: {before:.1f}ms pre-process, {inside:.1f}ms inference, {after:.1f}ms NMS per image "
                f"at shape {self._shape}"
            )
            LOGGER.info(summary.clock.table(summary.frames))
        if writer.codec and writer.codec.note and summary.frames:
            LOGGER.info(writer.codec.note)
        folder = summary.save_dir
        labels = f", {writer.label_files} label file(s) in {folder / 'labels'}" if self.options.save_txt else ""
        LOGGER.info(f"{summary.detections} detection(s) in {summary.frames} image(s); results in {folder}{labels}")
        if summary.unreadable:
            LOGGER.warning(f"{len(summary.unreadable)} input(s) could not be read, see above")
        if not summary.processed and not summary.is_interrupted:
            LOGGER.error(NOTHING_READ)
