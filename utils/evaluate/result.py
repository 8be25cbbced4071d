"""What one validation found: its figures, the table of them, and the images the model did worst on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from utils.evaluate.coco import CocoFigures
from utils.evaluate.metrics import ClassCurves, OperatingPoint, class_curves
from utils.evaluate.scene import AllFindings
from utils.evaluate.size_ap import SizeFigures, size_figures
from utils.log import LOGGER

TABLE_HEADER = ("%22s" + "%11s" * 6) % ("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")
TABLE_ROW = "%22s" + "%11i" * 2 + "%11.3g" * 4
NAME_WIDTH = 22  # characters of the first column of both
SIZE_TITLES = ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large", "AR")
SIZE_HEADER = ("%22s" + "%11s" * len(SIZE_TITLES)) % ("as COCO defines them", *SIZE_TITLES)
WORST_IMAGES = 6  # shown of each kind
AT_50 = 0  # column of ``correct`` for IoU 0.5
PLAIN_CONFIDENCE = 0.25  # limit for the worst images where nothing was found, so that no F1 is highest: as in detection


@dataclass(frozen=True)
class Example:
    """An image worth looking at: what is wrong with it at the operating point, and its boxes in pixels."""

    path: str
    shape: tuple[int, int]  # height, width
    missed: int
    false: int
    boxes: np.ndarray  # (n, 4) detections above the confidence, the surest first
    confidence: np.ndarray  # (n,)
    predicted: np.ndarray  # (n,)
    is_right: np.ndarray  # (n,) bool
    label_boxes: np.ndarray  # (m, 4)
    true: np.ndarray  # (m,)
    is_found: np.ndarray  # (m,) bool


@dataclass(frozen=True, kw_only=True)
class ValResult:
    """What one validation found. All figures are 0 where nothing could be measured."""

    precision: float  # means over the labelled classes, at the confidence of the best mean F1
    recall: float
    map50: float
    map: float
    losses: tuple[float, float, float]  # box, class, DFL: mean over the batches, zero without a loss function
    names: Mapping[int, str]
    curves: ClassCurves  # of the K labelled classes
    point: OperatingPoint
    sizes: SizeFigures  # COCO's figures, sizes included
    speed_ms: tuple[float, float, float]  # per image: pre-process, inference, NMS
    images: int
    instances: int
    confusion: np.ndarray  # (nc + 1, nc + 1)
    examples: tuple[tuple[Example, ...], tuple[Example, ...]] = ((), ())  # with most missed, with most false boxes
    examples_confidence: float = 0.0  # above which boxes count there
    coco: CocoFigures | None = None  # pycocotools' own, with save_json only, where that package is installed
    settings: Mapping[str, str | float | bool] = field(default_factory=dict)  # how it was measured
    unwritten: tuple[str, ...] = ()  # what was asked for and could not be written, each with its reason and a remedy

    def summary(self) -> tuple[float, float, float, float, float, float, float]:
        """Return P, R, mAP50, mAP50-95 and the three losses, the order of ``fitness`` and results.csv."""
        return (self.precision, self.recall, self.map50, self.map, *self.losses)

    def columns(self) -> dict[str, float]:
        """Return the columns of results.csv; the ones of COCO's definition are NaN where there is no such object."""
        losses = zip(("val/box_loss", "val/cls_loss", "val/dfl_loss"), self.losses, strict=True)
        return {
            "metrics/precision": self.precision,
            "metrics/recall": self.recall,
            "metrics/mAP_0.5": self.map50,
            "metrics/mAP_0.5:0.95": self.map,
            **dict(losses),
            **self.sizes.columns(),
        }

    @property
    def per_class(self) -> dict[str, np.ndarray]:
        """Return classes, p, r, ap50, ap: (K,) each, for the K labelled classes."""
        ap = self.curves.ap
        figures = {"p": self.point.precision, "r": self.point.recall, "ap50": ap[:, AT_50], "ap": ap.mean(1)}
        return {"classes": self.curves.classes, **figures}

    @property
    def maps(self) -> np.ndarray:
        """Return mAP50-95 by class number, (nc,); classes without labels carry the mean."""
        ap, classes = self.curves.ap.mean(1), self.curves.classes
        maps = np.full(max([len(self.names), *(classes + 1)]), ap.mean() if len(ap) else 0.0)
        maps[classes] = ap
        return maps

    def print_table(self, *, verbose: bool) -> None:
        """Log the table known from YOLO, with ``verbose`` one row per class, and COCO's figures below it."""
        LOGGER.info(TABLE_HEADER)
        summary = (self.precision, self.recall, self.map50, self.map)
        LOGGER.info(TABLE_ROW % ("all", self.images, self.instances, *summary))
        if not self.instances:
            LOGGER.warning("no labels in this split, so nothing can be measured; check the label files of the data set")
        if verbose and len(self.names) > 1:
            for (number, *figures), count in zip(
                zip(*self.per_class.values(), strict=True), self.curves.labels, strict=True
            ):
                name = str(self.names.get(int(number), int(number)))
                name = name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"
                LOGGER.info(TABLE_ROW % (name, self.images, count, *figures))
        values = self.sizes.columns().values()
        cells = "".join(f"{'-' if np.isnan(value) else f'{value:.3g}':>11s}" for value in values)
        LOGGER.info(f"{SIZE_HEADER}\n{'all':>22s}{cells}")


def measure(
    seen: AllFindings,
    names: Mapping[int, str],
    *,
    losses: tuple[float, float, float],
    speed_ms: tuple[float, float, float],
    confusion: np.ndarray,
    official: CocoFigures | None = None,
    coco: CocoFigures | None = None,
    settings: Mapping[str, str | float | bool] | None = None,
    unwritten: Sequence[str] = (),
) -> ValResult:
    """Turn everything seen into figures; those of ``official`` replace mAP50 and mAP50-95."""
    curves = class_curves(seen.correct, seen.confidence, seen.predicted, seen.true)
    point = OperatingPoint.of(curves)
    has_classes = bool(len(curves.classes))
    map50, map_ = (float(curves.ap[:, AT_50].mean()), float(curves.ap.mean())) if has_classes else (0.0, 0.0)
    shown_from = point.confidence if point.f1.any() else PLAIN_CONFIDENCE
    return ValResult(
        precision=float(point.precision.mean()) if has_classes else 0.0,
        recall=float(point.recall.mean()) if has_classes else 0.0,
        map50=official.ap50 if official else map50,
        map=official.ap if official else map_,
        losses=losses,
        names=names,
        curves=curves,
        point=point,
        sizes=size_figures(seen.detections(), seen.labels(), seen.pairs),
        speed_ms=speed_ms,
        images=len(seen.paths),
        instances=len(seen.true),
        confusion=confusion,
        examples=worst_images(seen, shown_from),
        examples_confidence=shown_from,
        coco=coco,
        settings=settings or {},
        unwritten=tuple(unwritten),
    )


def worst_images(
    seen: AllFindings, confidence: float, count: int = WORST_IMAGES
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Return the images with most missed objects, and those with most false boxes, above ``confidence`` at IoU 0.5.

    Images without a fault are left out; of equal ones the first comes first.
    """
    total = len(seen.paths)
    is_shown = seen.confidence > confidence
    is_right = is_shown & seen.correct[:, AT_50]
    shown, right = (np.bincount(seen.detection_image[mask], minlength=total) for mask in (is_shown, is_right))
    missed, false = np.array(seen.wanted, np.int64) - right, shown - right
    return tuple(
        tuple(
            _example(seen, int(image), is_shown, int(missed[image]), int(false[image]))
            for image in np.argsort(-faults, kind="stable")[:count]
            if faults[image]
        )
        for faults in (missed, false)
    )


def _example(seen: AllFindings, image: int, is_shown: np.ndarray, missed: int, false: int) -> Example:
    """Collect the boxes of one image, and which of its labels were found."""
    start, label_start = sum(seen.found[:image]), sum(seen.wanted[:image])
    rows = start + np.flatnonzero(is_shown[start : start + seen.found[image]])
    labels = slice(label_start, label_start + seen.wanted[image])
    is_right = seen.correct[rows, AT_50]
    true, boxes = seen.true[labels], seen.label_boxes[labels]
    is_found = np.zeros(len(true), bool)
    if is_right.any():  # a detection that is right has won the label of its class that it overlaps most
        hits = rows[is_right]
        fits = np.where(true == seen.predicted[hits, None], _overlaps(seen.boxes[hits], boxes), -1)
        is_found[len(true) - 1 - fits[:, ::-1].argmax(1)] = True
    parts = (seen.boxes[rows], seen.confidence[rows], seen.predicted[rows], is_right, boxes, true, is_found)
    return Example(seen.paths[image], seen.shapes[image], missed, false, *parts)


def _overlaps(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the IoU of boxes (n, 4) with others (m, 4), (n, m)."""
    one = boxes[:, None]
    sides = np.minimum(one[..., 2:], others[:, 2:]) - np.maximum(one[..., :2], others[:, :2])
    shared = sides.clip(0).prod(-1)
    areas = (others[:, 2:] - others[:, :2]).prod(-1) + (one[..., 2:] - one[..., :2]).prod(-1)
    return shared / np.maximum(areas - shared, 1e-7)
