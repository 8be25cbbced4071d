"""The validation loop behind ``val_dual.py`` and the trainer: one path, hence one set of numbers.

Works on a ``DetectionModel`` of any head and on a ``DetectMultiBackend``. Labels and detections are compared in the
pixels of the original images.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from models.heads import lead_prediction
from models.replay import Replay
from utils.evaluate import plots
from utils.evaluate.coco import CocoFigures, CocoRecorder, image_identifiers
from utils.evaluate.confusion import ConfusionMatrix
from utils.evaluate.matching import BatchMatch, iou_thresholds
from utils.evaluate.outputs import LabelWriter, OutputNames, merge_labels
from utils.evaluate.own_files import LABELS
from utils.evaluate.result import ValResult, measure
from utils.evaluate.scene import AllFindings, Findings, Scene
from utils.evaluate.sliced import Slicing
from utils.log import LOGGER, progress
from utils.nms import non_max_suppression
from utils.runtime import autocast, picture_layout, synchronise

__all__ = ["ValResult", "Validator"]

PLOTTED_BATCHES = 3
LossFunction = Callable[[object, Tensor], tuple[Tensor, Tensor]]


@dataclass
class _Tally:
    """Sums over the batches."""

    losses: Tensor | None = None  # (3,) sum over the batches, on the device
    batches: int = 0
    images: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def mean_losses(self) -> tuple[float, float, float]:
        """Return box, class and DFL loss; zero without a loss function."""
        if self.losses is None:
            return (0.0, 0.0, 0.0)
        box, cls, dfl = (self.losses / self.batches).tolist()
        return (box, cls, dfl)

    def speed_ms(self) -> tuple[float, float, float]:
        """Return milliseconds per image: pre-process, inference, NMS."""
        prepared, inferred, suppressed = (1000 * seconds / max(self.images, 1) for seconds in self.seconds)
        return (prepared, inferred, suppressed)


class Validator:
    """Measure a model on the batches of a loader.

    Args:
        loader: yields images (B, 3, H, W) uint8, targets (T, 6) image class xywh normalised, paths, shapes.
        names: class number to name.
        half: float16 by autocast, on CUDA only; the weights keep their type.
        dtype: the same with another short type, such as that of the training; replaces ``half``.
        single_cls: every class counts as class 0, and boxes suppress each other whatever their class.
        loss_fn: ``(raw model output, targets) -> (total, items (3,))``; needs a model that returns its maps.
        save_dir: folder of plots, label files and json; needed for those only.
        verbose: one table row per class.
        save_hybrid: with ``save_txt``: write labels and detections together; the figures stay those of the detections.
        coco_annotations: official json; with ``save_json`` its verdict replaces mAP50 and mAP50-95.
        is_coco: classes are COCO's 80, the json carries COCO's category numbers.
        json_name: name of the json file in ``save_dir``.
        on_label_file: called with each label file and its content, ahead of its writing.
        slicing: look at pictures in slices; the loader then gives whole ones, as ``WholeImageLoader`` does.
        replay: recorded passes for batches whose shape comes again, also in a later run of the same model; results may
            be overwritten by the next pass. The model needs a method ``priors``.

    Raises:
        ValueError: ``save_txt`` would write among labels that are there, outputs are wanted without a folder, or slices
            together with ``augment`` or ``loss_fn``.
    """

    def __init__(
        self,
        loader: Iterable[tuple],
        *,
        names: Mapping[int, str],
        device: torch.device,
        half: bool = False,
        dtype: torch.dtype | None = None,
        conf_thres: float = 0.001,
        iou_thres: float = 0.7,
        max_det: int = 300,
        single_cls: bool = False,
        loss_fn: LossFunction | None = None,
        save_dir: str | Path | None = None,
        plots: bool = False,
        save_txt: bool = False,
        save_conf: bool = False,
        save_json: bool = False,
        verbose: bool = False,
        augment: bool = False,
        save_hybrid: bool = False,
        coco_annotations: Path | None = None,
        is_coco: bool = False,
        json_name: str = "predictions.json",
        on_label_file: Callable[[Path, bytes], object] | None = None,
        slicing: Slicing | None = None,
        replay: Replay | None = None,
    ) -> None:
        if save_dir is None and (plots or save_txt or save_json or save_hybrid):
            raise ValueError("plots, save_txt, save_hybrid and save_json need save_dir, the folder they are written to")
        if slicing is not None and (augment or loss_fn is not None):
            raise ValueError("slices are measured without test-time augmentation and without losses")
        self.loader = loader
        self.names = {0: "item"} if single_cls and len(names) > 1 else dict(names)
        self.device = torch.device(device)
        self.dtype = dtype or self._mixed_precision(half)
        self.conf_thres, self.iou_thres, self.max_det = conf_thres, iou_thres, max_det
        self.single_cls = single_cls
        self.loss_fn = loss_fn
        self.save_dir = Path(save_dir) if save_dir is not None else None
        self.plots = plots
        self.save_txt, self.save_conf, self.save_hybrid = save_txt or save_hybrid, save_conf, save_hybrid
        self.save_json, self.json_name = save_json, json_name
        self.on_label_file = on_label_file
        self.coco_annotations, self.is_coco = coco_annotations, is_coco
        self.verbose = verbose
        self.augment = augment
        self.slicing = slicing
        is_fit = replay is not None and not replay.is_off and not augment  # which changes sizes within a pass
        self.replay = replay if is_fit and self.device.type == "cuda" else None
        self._weights: tuple[int, ...] = ()  # where those of the model are
        self.thresholds = iou_thresholds()

    def _mixed_precision(self, half: bool) -> torch.dtype | None:
        if half and self.device.type != "cuda":
            LOGGER.warning(f"--half needs a CUDA device; validating in float32 on {self.device}")
        return torch.float16 if half and self.device.type == "cuda" else None

    @torch.no_grad()
    def run(self, model: nn.Module) -> ValResult:
        """Return the figures of ``model`` and write the outputs asked for; the model is left in the mode it came in."""
        tally, seen, outputs = _Tally(), Findings(), _Outputs(self)
        if self.replay is not None:
            self._weights = tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
        with _evaluating(model):
            for index, (images, targets, paths, shapes) in enumerate(
                progress(self.loader, desc="validating", unit="batch")
            ):
                found = self._detect(model, images, targets, tally)
                scene = Scene.build(found, targets, shapes, images.shape[2:])
                scene = scene.merged() if self.single_cls else scene
                match, scene = scene.match(self.thresholds).cpu(), scene.cpu()
                seen.add(scene, match, paths)
                outputs.add(scene, match, paths)
                if self.plots and index < PLOTTED_BATCHES:
                    self._plot_batch(index, images, targets, paths, found)
        return self._report(tally, seen.joined(), outputs)

    def _detect(self, model: nn.Module, images: Tensor, targets: Tensor, tally: _Tally) -> list[Tensor]:
        """Return the detections (n, 6) of each image in input pixels; add losses and times to ``tally``."""
        tally.batches += 1
        tally.images += len(images)
        if self.slicing is None:
            return self._look(model, images, targets, tally)
        return [self._look_at_slices(model, image, tally) for image in images]

    def _look_at_slices(self, model: nn.Module, image: Tensor, tally: _Tally) -> Tensor:
        """Return the detections (n, 6) of a whole image (3, H, W), merged from its slices."""
        slicing = self.slicing

        def look(parts: list[np.ndarray]) -> list[np.ndarray]:
            start = self._clock()
            inputs = slicing.fit(parts)
            tally.seconds[0] += self._clock() - start
            return slicing.unfit(self._look(model, inputs, None, tally), inputs.shape[2:], parts)

        start, counted = self._clock(), sum(tally.seconds)
        found = slicing.detect(look, image, iou_thres=self.iou_thres, agnostic=self.single_cls, max_det=self.max_det)
        tally.seconds[2] += self._clock() - start - (sum(tally.seconds) - counted)  # merging belongs to suppression
        return found

    def _look(self, model: nn.Module, images: Tensor, targets: Tensor | None, tally: _Tally) -> list[Tensor]:
        """Run network and suppression: detections (n, 6) of each of (B, 3, H, W) uint8; count losses and times."""
        start = self._clock()
        inputs = images.to(self.device, non_blocking=True).contiguous(memory_format=picture_layout(self.device))
        inputs = inputs.float() / 255 if self.replay is None else inputs  # a recorded pass begins with it
        ready = self._clock()
        output = self._pass(model, inputs)
        if self.loss_fn is not None and not self.augment:
            items = self.loss_fn(output, targets.to(self.device))[1].detach()
            tally.losses = items if tally.losses is None else tally.losses + items
        inferred = self._clock()
        found = non_max_suppression(
            lead_prediction(output),
            self.conf_thres,
            self.iou_thres,
            agnostic=self.single_cls,
            multi_label=True,
            max_det=self.max_det,
        )
        times = (ready - start, inferred - ready, self._clock() - inferred)
        tally.seconds = [total + spent for total, spent in zip(tally.seconds, times, strict=True)]
        return found

    def _pass(self, model: nn.Module, images: Tensor) -> object:
        """Return what the model gives for (B, 3, H, W) on its device: 0 … 1, or uint8 for a recorded pass."""

        def network(images: Tensor) -> object:
            with autocast(self.device, self.dtype):
                return model(images if images.is_floating_point() else images.float() / 255, augment=self.augment)

        if self.replay is None:
            return network(images)
        return self.replay(network, images, weights=self._weights, constants=model.priors)

    def _settings(self) -> dict[str, str | float | bool]:
        """Return what the figures depend on beside model and data."""
        limits = {"confidence": self.conf_thres, "NMS IoU": self.iou_thres, "boxes per image": self.max_det}
        how = {"numbers": str(self.dtype or torch.float32).removeprefix("torch."), "device": self.device.type}
        special = {"one class": self.single_cls, "augmented": self.augment}
        slices = {"slice size": self.slicing.size, "slice overlap": self.slicing.overlap} if self.slicing else {}
        return {**limits, **how, **{name: True for name, is_on in special.items() if is_on}, **slices}

    def _clock(self) -> float:
        synchronise(self.device)
        return time.perf_counter()

    def _plot_batch(self, index: int, images: Tensor, targets: Tensor, paths: tuple, found: list[Tensor]) -> None:
        drawn = targets.float().cpu().clone()
        predicted = torch.from_numpy(plots.output_to_target(found, self.max_det))
        if self.single_cls:
            drawn[:, 1] = 0
            predicted[:, 1] = 0
        plots.plot_images(images, drawn, paths, self.save_dir / f"val_batch{index}_labels.jpg", self.names)
        plots.plot_images(images, predicted, paths, self.save_dir / f"val_batch{index}_pred.jpg", self.names)

    def _report(self, tally: _Tally, seen: AllFindings, outputs: _Outputs) -> ValResult:
        """Turn everything seen into figures, print the table, finish the outputs."""
        coco = outputs.finish()
        result = measure(
            seen,
            self.names,
            losses=tally.mean_losses(),
            speed_ms=tally.speed_ms(),
            confusion=outputs.confusion.matrix,
            official=coco if self.coco_annotations is not None else None,
            coco=coco,
            settings=self._settings(),
            unwritten=outputs.unwritten,
        )
        if self.plots and seen.correct.any():
            plots.plot_curves(result.curves, result.point, self.save_dir, self.names)
        result.print_table(verbose=self.verbose)
        return result


class _Outputs:
    """What grows image by image: the confusion matrix, and label files and json where they were asked for."""

    def __init__(self, settings: Validator) -> None:
        self.settings = settings
        paths = getattr(getattr(settings.loader, "dataset", None), "im_files", ())
        self.names = OutputNames(paths if settings.save_json else ())
        self.writer = None
        if settings.save_txt:
            folder, note = settings.save_dir / LABELS, settings.on_label_file
            self.writer = LabelWriter(folder, paths, settings.save_conf, on_writing=note)
        self.identifiers = image_identifiers(self.names[path] for path in paths) if settings.save_json else {}
        self.unwritten: list[str] = []  # what could not be written
        self.recorder = CocoRecorder(settings.is_coco) if settings.save_json else None
        self.confusion = ConfusionMatrix(nc=len(settings.names))

    def add(self, scene: Scene, match: BatchMatch, paths: tuple[str, ...]) -> None:
        """Take the images of one batch."""
        parts = (scene.detections[:, 4], scene.detections[:, 5], scene.labels[:, 0], match.nearest, match.nearest_label)
        self.confusion.add(*(part.numpy() for part in parts))
        if not (self.writer or self.recorder):
            return
        for path, shape, (detections, labels) in zip(paths, scene.shapes, scene.images(), strict=True):
            if self.recorder:
                name = self.names[path]
                self.recorder.add(self.identifiers.get(name, name), shape, detections, labels)
            if self.writer:
                hybrid = self.settings.save_hybrid
                rows = merge_labels(detections, labels, self.settings.iou_thres) if hybrid else detections
                self.writer.write(path, rows, shape)

    def finish(self) -> CocoFigures | None:
        """Write what is written once, at the end; return the referee's figures if there are any.

        What cannot be written is noted in ``unwritten``: the figures are worth more than a file.
        """
        settings = self.settings
        if settings.plots:
            self.confusion.plot(save_dir=settings.save_dir, names=settings.names)
            with self._noting():
                self.confusion.save_counts(settings.save_dir / "confusion_matrix.csv", settings.names)
        if self.writer:
            LOGGER.info(f"{self.writer.written} label files written to {self.writer.folder}")
            self.unwritten += [self.writer.failure] if self.writer.failure else []
        if not self.recorder:
            return None
        path = settings.save_dir / settings.json_name
        with self._noting():
            self.recorder.write(path)
            LOGGER.info(f"{len(self.recorder.predictions)} detections written to {path}")
        return self.recorder.judge(settings.coco_annotations)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # names file and remedy
            self.unwritten.append(str(error))


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode, and back afterwards."""
    was_training = bool(getattr(model, "training", False))
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()
