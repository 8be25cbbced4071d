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
from utils.boxes import xywh2xyxy
from utils.evaluate import plots
from utils.evaluate.coco import CocoFigures, CocoRecorder, image_identifier
from utils.evaluate.confusion import ConfusionMatrix
from utils.evaluate.metrics import (
    PAD_DETECTION,
    PAD_LABEL,
    ap_per_class,
    iou_thresholds,
    match_predictions,
    pad_rows,
)
from utils.evaluate.outputs import LabelWriter, OutputNames, merge_labels
from utils.log import LOGGER, progress
from utils.nms import non_max_suppression
from utils.runtime import autocast, synchronise

PLOTTED_BATCHES = 3
TABLE_HEADER = ("%22s" + "%11s" * 6) % ("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")
TABLE_ROW = "%22s" + "%11i" * 2 + "%11.3g" * 4
LossFunction = Callable[[object, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ValResult:
    """What one validation found. All figures are 0 where nothing could be measured."""

    precision: float  # means over the labelled classes, at the confidence of the best mean F1
    recall: float
    map50: float
    map: float
    losses: tuple[float, float, float]  # box, class, DFL: mean over the batches, zero without a loss function
    per_class: dict[str, np.ndarray]  # classes, p, r, ap50, ap: (K,) each, for the K labelled classes
    maps: np.ndarray  # (nc,) mAP50-95 by class number; classes without labels carry the mean
    speed_ms: tuple[float, float, float]  # per image: pre-process, inference, NMS
    images: int
    instances: int
    confusion: np.ndarray | None = None  # (nc + 1, nc + 1), with plots only
    coco: CocoFigures | None = None  # with save_json only, where pycocotools is installed

    def summary(self) -> tuple[float, float, float, float, float, float, float]:
        """Return P, R, mAP50, mAP50-95 and the three losses, the order of ``fitness`` and results.csv."""
        return (self.precision, self.recall, self.map50, self.map, *self.losses)


@dataclass
class _Tally:
    """Statistics gathered over the batches; rows of predictions belong together across the lists."""

    correct: list[np.ndarray] = field(default_factory=list)  # (n, 10)
    confidence: list[np.ndarray] = field(default_factory=list)
    predicted: list[np.ndarray] = field(default_factory=list)
    true: list[np.ndarray] = field(default_factory=list)
    losses: Tensor | None = None  # (3,) sum over the batches, on the device
    batches: int = 0
    images: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def joined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return correct (N, 10), confidence (N,), predicted (N,), true (M,), also when nothing came in."""
        parts = (self.correct, self.confidence, self.predicted, self.true)
        empty = (np.zeros((0, 10), bool), *(np.zeros(0, np.float32) for _ in range(3)))
        return tuple(np.concatenate((start, *part)) for start, part in zip(empty, parts, strict=True))


@dataclass(frozen=True)
class _Scene:
    """Detections and labels of one batch on the CPU, in original pixels, grouped by image."""

    detections: Tensor  # (R, 6) x1 y1 x2 y2 confidence class
    detection_image: Tensor  # (R,)
    labels: Tensor  # (M, 5) class x1 y1 x2 y2
    label_image: Tensor  # (M,)
    shapes: list[tuple[int, int]]  # height, width of each original image

    def images(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield detections and labels of one image after the other."""
        found = torch.bincount(self.detection_image, minlength=len(self.shapes)).tolist()
        wanted = torch.bincount(self.label_image, minlength=len(self.shapes)).tolist()
        yield from zip(self.detections.split(found), self.labels.split(wanted), strict=True)


class Validator:
    """Measure a model on the batches of a loader.

    Args:
        loader: yields images (B, 3, H, W) uint8, targets (T, 6) image class xywh normalised, paths, shapes.
        names: class number to name.
        half: float16 by autocast, on CUDA only; the weights keep their type.
        single_cls: every class counts as class 0, and boxes suppress each other whatever their class.
        loss_fn: ``(raw model output, targets) -> (total, items (3,))``; needs a model that returns its maps.
        save_dir: folder of plots, label files and json; needed for those only.
        verbose: one table row per class.
        save_hybrid: with ``save_txt``: write labels and detections together; the figures stay those of the detections.
        coco_annotations: official json; with ``save_json`` its verdict replaces mAP50 and mAP50-95.
        is_coco: classes are COCO's 80, the json carries COCO's category numbers.
        json_name: name of the json file in ``save_dir``.

    Raises:
        ValueError: ``save_txt`` would overwrite labels of the data set, or outputs are wanted without a folder.
    """

    def __init__(
        self,
        loader: Iterable[tuple],
        *,
        names: Mapping[int, str],
        device: torch.device,
        half: bool = False,
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
    ) -> None:
        if save_dir is None and (plots or save_txt or save_json or save_hybrid):
            raise ValueError("plots, save_txt, save_hybrid and save_json need save_dir, the folder they are written to")
        self.loader = loader
        self.names = {0: "object"} if single_cls and len(names) > 1 else dict(names)
        self.device = torch.device(device)
        self.dtype = self._mixed_precision(half)
        self.conf_thres, self.iou_thres, self.max_det = conf_thres, iou_thres, max_det
        self.single_cls = single_cls
        self.loss_fn = loss_fn
        self.save_dir = Path(save_dir) if save_dir is not None else None
        self.plots = plots
        self.save_txt, self.save_conf, self.save_hybrid = save_txt or save_hybrid, save_conf, save_hybrid
        self.save_json, self.json_name = save_json, json_name
        self.coco_annotations, self.is_coco = coco_annotations, is_coco
        self.verbose = verbose
        self.augment = augment
        self.thresholds = iou_thresholds()

    def _mixed_precision(self, half: bool) -> torch.dtype | None:
        if half and self.device.type != "cuda":
            LOGGER.warning(f"--half needs a CUDA device; validating in float32 on {self.device}")
        return torch.float16 if half and self.device.type == "cuda" else None

    @torch.no_grad()
    def run(self, model: nn.Module) -> ValResult:
        """Return the figures of ``model`` and write the outputs asked for; the model is left in the mode it came in."""
        tally = _Tally()
        outputs = _Outputs(self)
        with _evaluating(model):
            for index, batch in enumerate(progress(self.loader, desc="validating", unit="batch")):
                images, targets, paths, shapes = batch
                found = self._detect(model, images, targets, tally)
                scene = self._scene(found, targets, images.shape[2:], shapes)
                self._count(scene, tally)
                outputs.add(scene, paths)
                if self.plots and index < PLOTTED_BATCHES:
                    self._plot_batch(index, images, targets, paths, found)
        return self._report(tally, outputs)

    def _detect(self, model: nn.Module, images: Tensor, targets: Tensor, tally: _Tally) -> list[Tensor]:
        """Return the detections (n, 6) of each image in input pixels; add losses and times to ``tally``."""
        start = self._clock()
        inputs = images.to(self.device, non_blocking=True).float() / 255
        ready = self._clock()
        with autocast(self.device, self.dtype):
            output = model(inputs, augment=self.augment)
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
        tally.batches += 1
        tally.images += len(images)
        return found

    def _clock(self) -> float:
        synchronise(self.device)
        return time.perf_counter()

    def _scene(self, found: list[Tensor], targets: Tensor, input_shape: torch.Size, shapes: tuple) -> _Scene:
        """Bring detections (per image, input pixels) and targets (normalised) into original pixels on the CPU."""
        detections = torch.cat(found).float().cpu()  # the one transfer of a batch
        detection_image = torch.repeat_interleave(torch.arange(len(found)), torch.tensor([len(part) for part in found]))
        targets = targets.float().cpu()
        targets = targets[targets[:, 0].argsort(stable=True)]
        height, width = input_shape
        corners = xywh2xyxy(targets[:, 2:] * torch.tensor([width, height, width, height]))
        labels, label_image = torch.cat((targets[:, 1:2], corners), 1), targets[:, 0].long()
        if self.single_cls:
            detections[:, 5] = 0
            labels[:, 0] = 0
        detections[:, :4] = _to_original(detections[:, :4], detection_image, shapes)
        labels[:, 1:] = _to_original(labels[:, 1:], label_image, shapes)
        return _Scene(detections, detection_image, labels, label_image, [tuple(shape[0]) for shape in shapes])

    def _count(self, scene: _Scene, tally: _Tally) -> None:
        """Match one batch and keep what the figures need of it."""
        batch = len(scene.shapes)
        rows = pad_rows(scene.detections, scene.detection_image, batch, PAD_DETECTION, class_column=5)
        truth = pad_rows(scene.labels, scene.label_image, batch, PAD_LABEL, class_column=0)
        correct = match_predictions(rows.block, truth.block, self.thresholds)[rows.image_index, rows.position]
        tally.correct.append(correct.numpy())
        tally.confidence.append(scene.detections[:, 4].numpy())
        tally.predicted.append(scene.detections[:, 5].numpy())
        tally.true.append(scene.labels[:, 0].numpy())

    def _plot_batch(self, index: int, images: Tensor, targets: Tensor, paths: tuple, found: list[Tensor]) -> None:
        drawn = targets.float().cpu().clone()
        predicted = torch.from_numpy(plots.output_to_target(found, self.max_det))
        if self.single_cls:
            drawn[:, 1] = 0
            predicted[:, 1] = 0
        plots.plot_images(images, drawn, paths, self.save_dir / f"val_batch{index}_labels.jpg", self.names)
        plots.plot_images(images, predicted, paths, self.save_dir / f"val_batch{index}_pred.jpg", self.names)

    def _report(self, tally: _Tally, outputs: _Outputs) -> ValResult:
        """Turn the tally into figures, print the table, finish the outputs."""
        correct, confidence, predicted, true = tally.joined()
        _, _, p, r, _, ap, classes = ap_per_class(
            correct,
            confidence,
            predicted,
            true,
            plot=self.plots and bool(correct.any()),
            save_dir=self.save_dir or ".",
            names=self.names,
        )
        mean = ap.mean() if len(classes) else 0.0
        maps = np.full(max([len(self.names), *(classes + 1)]), mean)
        maps[classes] = ap.mean(1)
        coco = outputs.finish()
        official = coco if coco is not None and self.coco_annotations is not None else None
        result = ValResult(
            precision=float(p.mean()) if len(classes) else 0.0,
            recall=float(r.mean()) if len(classes) else 0.0,
            map50=official.ap50 if official else float(ap[:, 0].mean()) if len(classes) else 0.0,
            map=official.ap if official else float(mean),
            losses=_mean_losses(tally),
            per_class={"classes": classes, "p": p, "r": r, "ap50": ap[:, 0], "ap": ap.mean(1)},
            maps=maps,
            speed_ms=tuple(1000 * seconds / max(tally.images, 1) for seconds in tally.seconds),
            images=tally.images,
            instances=len(true),
            confusion=outputs.confusion.matrix if outputs.confusion else None,
            coco=coco,
        )
        self._print_table(result, true)
        return result

    def _print_table(self, result: ValResult, true: np.ndarray) -> None:
        LOGGER.info(TABLE_HEADER)
        summary = (result.precision, result.recall, result.map50, result.map)
        LOGGER.info(TABLE_ROW % ("all", result.images, result.instances, *summary))
        if not result.instances:
            LOGGER.warning("no labels in this split, so nothing can be measured; check the label files of the data set")
        if not self.verbose or len(self.names) < 2:
            return
        for number, *figures in zip(*result.per_class.values(), strict=True):
            name = self.names.get(int(number), str(number))
            LOGGER.info(TABLE_ROW % (name, result.images, (true == number).sum(), *figures))


class _Outputs:
    """Files that grow image by image: label files, json, confusion matrix; each only if it was asked for."""

    def __init__(self, settings: Validator) -> None:
        self.settings = settings
        paths = getattr(getattr(settings.loader, "dataset", None), "im_files", ())
        self.names = OutputNames(paths)
        self.writer = None
        if settings.save_txt:
            self.writer = LabelWriter(settings.save_dir / "labels", paths, settings.save_conf)
        self.recorder = CocoRecorder(settings.is_coco) if settings.save_json else None
        self.confusion = ConfusionMatrix(nc=len(settings.names)) if settings.plots else None

    def add(self, scene: _Scene, paths: tuple[str, ...]) -> None:
        """Take the images of one batch."""
        if not (self.writer or self.recorder or self.confusion):
            return
        for path, shape, (detections, labels) in zip(paths, scene.shapes, scene.images(), strict=True):
            if self.confusion:
                self.confusion.process_batch(detections, labels)
            if self.recorder:
                self.recorder.add(image_identifier(self.names[path]), shape, detections, labels)
            if self.writer:
                hybrid = self.settings.save_hybrid
                rows = merge_labels(detections, labels, self.settings.iou_thres) if hybrid else detections
                self.writer.write(path, rows, shape)

    def finish(self) -> CocoFigures | None:
        """Write what is written once, at the end; return the referee's figures if there are any."""
        settings = self.settings
        if self.confusion:
            self.confusion.plot(save_dir=settings.save_dir, names=settings.names)
            self.confusion.save_counts(settings.save_dir / "confusion_matrix.csv", settings.names)
        if self.writer:
            LOGGER.info(f"{self.writer.written} label files written to {self.writer.folder}")
        if not self.recorder:
            return None
        path = settings.save_dir / settings.json_name
        self.recorder.write(path)
        LOGGER.info(f"{len(self.recorder.predictions)} detections written to {path}")
        return self.recorder.judge(settings.coco_annotations)


def _to_original(boxes: Tensor, image_index: Tensor, shapes: tuple) -> Tensor:
    """Undo the letterbox of each box's image and clip the box to it.

    Args:
        boxes: (R, 4) xyxy in input pixels.
        image_index: (R,)
        shapes: per image ((height, width) of the original, ((gain y, gain x), (pad x, pad y))).
    """
    size = torch.tensor([[width, height] for (height, width), _ in shapes], dtype=boxes.dtype)  # (B, 2)
    gain = torch.tensor([[gain[1], gain[0]] for _, (gain, _) in shapes], dtype=boxes.dtype)
    pad = torch.tensor([tuple(pad) for _, (_, pad) in shapes], dtype=boxes.dtype)
    size, gain, pad = (part[image_index].repeat(1, 2) for part in (size, gain, pad))  # (R, 4)
    return ((boxes - pad) / gain).clamp(min=0).minimum(size)


def _mean_losses(tally: _Tally) -> tuple[float, float, float]:
    if tally.losses is None:
        return (0.0, 0.0, 0.0)
    box, cls, dfl = (tally.losses / tally.batches).tolist()
    return (box, cls, dfl)


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
