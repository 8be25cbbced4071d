"""Detection over any source: what is asked for is checked, then the pipeline runs and the outcome is reported."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import cv2

from models.backend import DetectMultiBackend
from utils.data.addresses import without_password
from utils.data.sources import LoadStreams, Source, resolve_source
from utils.deploy.display import display_problem
from utils.deploy.engine import Backend, Engine, Settings
from utils.deploy.naming import stream_name
from utils.deploy.pipeline import DetectionSummary, Pipeline
from utils.deploy.record import Input
from utils.deploy.run_folder import SaveOptions, claimed, make_folder, plan_run
from utils.deploy.speed import StepClock
from utils.deploy.video import VIDEO_SUFFIX, Codec, choose_codec
from utils.deploy.writers import RunWriter
from utils.log import LOGGER
from utils.options import DetectOptions
from utils.runtime import select_device

__all__ = ["DetectionSummary", "Detector"]


class Detector:
    """Detection as the options say.

    Example::

        summary = Detector(DetectOptions(weights=["best.pt"], source="pictures")).run()

    Args:
        options: what to do.
        model: loaded model; without one ``options.weights`` is loaded, once the source is found to be there.
        batch_size: frames per call of the model; ``options.batch_size`` without it.
    """

    def __init__(self, options: DetectOptions, *, model: Backend | None = None, batch_size: int | None = None) -> None:
        self.batch_size = options.batch_size if batch_size is None else batch_size
        if self.batch_size < 1:
            raise ValueError(f"batch size {self.batch_size}: should be at least 1")
        if options.view_img and (problem := display_problem()):
            raise ValueError(f"--view-img: {problem}; leave it out and look at the written files")
        for name in ("save_conf", "save_empty"):
            if getattr(options, name) and not options.save_txt:
                LOGGER.warning(f"--{name.replace('_', '-')} has no effect without --save-txt")
        self.options = options
        self._model = model

    def run(self) -> DetectionSummary:
        """Process the whole source; the run's folder is made when source and weights are known to be good.

        Raises:
            FileNotFoundError, ValueError, OSError: source, weights or options that cannot be used.
        """
        source = resolve_source(self.options.source)
        with ExitStack() as stack:
            stack.callback(source.close)
            streams: LoadStreams | None = None
            if source.streams:
                streams = LoadStreams(source.streams, vid_stride=self.options.vid_stride)
                stack.callback(streams.close)
            source.report()
            engine = self._make_engine()
            return self._run(source, streams, engine)

    def _run(self, source: Source, streams: LoadStreams | None, engine: Engine) -> DetectionSummary:
        options = self.options
        inputs = _inputs_of(source, is_live=streams is not None)
        codec = self._choose_codec(inputs)
        folder = make_folder(Path(options.project) / options.name, exist_ok=options.exist_ok)
        summary = DetectionSummary(folder, unreadable=list(source.missing), clock=engine.clock)
        save = SaveOptions(
            **{name: getattr(options, name) for name in SaveOptions.__annotations__ if name != "save_media"},
            save_media=not options.nosave,
        )
        with claimed(folder), summary.clock.whole():
            run = plan_run(folder, inputs, save, [file.path for file in source.files])
            with RunWriter(run, engine.model.names, keep_open=streams is not None, codec=codec) as writer:
                pipeline = Pipeline(options, engine, writer, summary, self.batch_size)
                try:
                    pipeline.run(source, streams)
                except KeyboardInterrupt:
                    LOGGER.warning("interrupted; everything up to here is written")
                    summary.is_interrupted = True
        if options.view_img:
            cv2.destroyAllWindows()
        pipeline.report()
        return summary

    def _make_engine(self) -> Engine:
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
                offline=options.offline,
                cuda_graphs=options.cuda_graphs,
            )
        if options.visualize and not model.pt:
            raise ValueError("--visualize needs a .pt file; exported files hold one fixed pass")
        clock = StepClock(is_overlapped=not options.sequential)
        return Engine(model, Settings.of(options), clock, is_overlapped=not options.sequential)

    def _choose_codec(self, inputs: Sequence[Input]) -> Codec | None:
        """Return how videos will be written; None where there are none."""
        if self.options.nosave or not any(one.is_video for one in inputs):
            return None
        return choose_codec(self.options.video_codec)


def _inputs_of(source: Source, *, is_live: bool) -> list[Input]:
    """Return what is detected in, each with a key of its own."""
    if is_live:
        titles = [without_password(address) for address in source.streams]
        places = [Path(stream_name(title) + VIDEO_SUFFIX) for title in titles]
        inputs = [Input(title, title, place, True) for title, place in zip(titles, places, strict=True)]
    else:
        keys = [file.address or os.path.abspath(file.path) for file in source.files]
        inputs = [
            Input(key, file.title, file.relative, file.is_video) for key, file in zip(keys, source.files, strict=True)
        ]
    counts: Counter[str] = Counter()
    for index, one in enumerate(inputs):
        counts[one.key] += 1
        if counts[one.key] > 1:  # one address twice
            inputs[index] = replace(one, key=f"{one.key} ({counts[one.key]})")
    return inputs
