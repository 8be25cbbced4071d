"""``evaluation.json``: what a validation found, in full, for the run report and for programs of users.

Replaced by each validation. Beside the figures it holds the worst images, drawn small, labels and detections apart.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from utils.data.images import imread_bgr
from utils.evaluate.confusion import CONFIDENCE, IOU
from utils.evaluate.curves import confidence_axis
from utils.evaluate.draw import Annotator, class_name, harmless
from utils.evaluate.result import Example, ValResult
from utils.evaluate.size_ap import SIZE_NAMES
from utils.files import json_text, write_text_atomic
from utils.log import LOGGER

FILE_NAME = "evaluation.json"
CURVE_SAMPLES = 100  # steps of the confidence and recall axes that are kept
CURVE_CLASSES = 20  # with more classes only the mean is kept
PICTURE_SIDE = 400  # pixels of the longer side of a drawn image
JPEG_QUALITY = 70
GREEN, RED = (80, 190, 60), (40, 40, 215)  # BGR: as it should be, and not; only the latter carry a title
LINE_WIDTH, FONT_SIZE = 2, 18  # pixels
MOST_FALSE = 30  # false boxes drawn into a picture, the surest; a model that begins to learn finds hundreds


def write_evaluation(
    result: ValResult, folder: str | Path, *, epoch: int | None = None, use_pictures: bool = True
) -> Path | None:
    """Write evaluation.json into ``folder`` and return its path.

    ``epoch`` is the one that was validated; None stands for a finished model. ``use_pictures`` says whether the worst
    images are drawn into it. Where the file cannot be written one line says so, and None is returned: no training ends
    for it.
    """
    path = Path(folder) / FILE_NAME
    content = {**describe(result), "epoch": epoch, "worst": _worst(result) if use_pictures else {}}
    try:
        write_text_atomic(path, json_text(content))
    except OSError as error:
        LOGGER.warning(f"{path} was not written: {error}")
        return None
    return path


def describe(result: ValResult) -> dict[str, Any]:
    """Return the figures of ``result`` as plain data; what could not be measured is None."""
    coco = {name: None if value < 0 else _short(value) for name, value in vars(result.sizes.total).items()}
    point = result.point
    return {
        "images": result.images,
        "instances": result.instances,
        "precision": _short(result.precision),
        "recall": _short(result.recall),
        "map50": _short(result.map50),
        "map": _short(result.map),
        "losses": [_short(loss) for loss in result.losses],
        "speed_ms": [_short(time) for time in result.speed_ms],
        "settings": dict(result.settings),
        "operating_confidence": _short(point.confidence),
        "worst_confidence": _short(result.examples_confidence),
        "coco": coco,
        "sizes": {"names": SIZE_NAMES, "labels": result.sizes.labels.sum(0).tolist()},
        "classes": _classes(result),
        "confusion": _confusion(result),
        "curves": _curves(result),
    }


def _classes(result: ValResult) -> list[dict[str, Any]]:
    """Return one row for each class, classes without labels included, their figures None."""
    rows = {
        number: {"class": number, "name": name, "labels": 0, "p": None, "r": None, "f1": None, "ap50": None, "ap": None}
        for number, name in sorted(result.names.items())
    }
    columns = zip(*result.per_class.values(), result.point.f1, result.curves.labels, strict=True)
    for number, p, r, ap50, ap, f1, labels in columns:
        row = rows.setdefault(int(number), {"class": int(number), "name": str(number)})
        values = {"p": p, "r": r, "f1": f1, "ap50": ap50, "ap": ap}
        row |= {"labels": int(labels), **{name: _short(value) for name, value in values.items()}}
    for number, sizes in zip(result.sizes.classes, result.sizes.ap, strict=True):
        rows[int(number)]["coco"] = [_short(value) for value in sizes]
    return list(rows.values())


def _confusion(result: ValResult) -> dict[str, Any]:
    """Return the cells that are not 0, as row (predicted), column (true), count."""
    row, column = np.nonzero(result.confusion)
    cells = np.stack((row, column, result.confusion[row, column].astype(np.int64)), 1)
    return {"confidence": CONFIDENCE, "iou": IOU, "size": len(result.confusion), "cells": cells.tolist()}


def _curves(result: ValResult) -> dict[str, Any]:
    """Return the mean curves over confidence and recall, and those of the classes where there are few."""
    curves = result.curves
    if not len(curves.classes):
        return {}
    axis = confidence_axis()
    index = np.linspace(0, len(axis) - 1, CURVE_SAMPLES + 1).round().astype(int)
    tables = {"precision": curves.precision, "recall": curves.recall, "f1": curves.f1}
    tables["precision_at_recall"] = curves.precision_at_recall
    few = len(curves.classes) <= CURVE_CLASSES
    return {
        "axis": [_short(value) for value in axis[index]],
        "classes": curves.classes.tolist() if few else [],
        **{
            name: {
                "mean": [_short(value) for value in table.mean(0)[index]],
                "classes": [[_short(value) for value in row] for row in table[:, index]] if few else [],
            }
            for name, table in tables.items()
        },
    }


def _short(value: float) -> float | None:
    """Round to what a reader can use; None for what is not known."""
    value = float(value)
    return round(value, 5) if math.isfinite(value) else None


# ----------------------------------------------------------------------------------------------------- worst images


def _worst(result: ValResult) -> dict[str, list[dict[str, Any]]]:
    """Return the images with most missed objects and with most false boxes, each drawn twice as a JPEG in base 64."""
    drawn: dict[str, dict[str, Any]] = {}
    for example in (*result.examples[0], *result.examples[1]):
        if example.path not in drawn:
            pictures = draw_example(example, result.names) or (None, None)
            drawn[example.path] = {
                "file": example.path,
                "missed": example.missed,
                "false": example.false,
                "objects": len(example.true),
                "labels": pictures[0],
                "detections": pictures[1],
            }
    kinds = zip(("missed", "false"), result.examples, strict=True)
    return {kind: [drawn[example.path] for example in examples] for kind, examples in kinds}


@harmless
def draw_example(example: Example, names: Mapping[int, str]) -> tuple[str, str]:
    """Return the image with its labels, found ones green and missed ones red, and with its detections, right and false.

    Both are JPEG data in base 64. None where the image cannot be read any more.
    """
    image = imread_bgr(example.path)
    scale = PICTURE_SIDE / max(image.shape[:2])
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=method)
    labels = [class_name(number, names) for number in example.true]
    shown = np.flatnonzero(example.is_right | ((~example.is_right).cumsum() <= MOST_FALSE))
    detections = [f"{class_name(example.predicted[row], names)} {example.confidence[row]:.2f}" for row in shown]
    return (
        _drawn(image.copy(), example.label_boxes * scale, labels, example.is_found),
        _drawn(image, example.boxes[shown] * scale, detections, example.is_right[shown]),
    )


def _drawn(image: np.ndarray, boxes: np.ndarray, titles: list[str], is_good: np.ndarray) -> str:
    """Draw boxes on ``image`` in place, the faults last and with their titles, and encode it."""
    annotator = Annotator(image, LINE_WIDTH, FONT_SIZE)
    for index in np.argsort(~is_good, kind="stable"):
        title, color = ("", GREEN) if is_good[index] else (titles[index], RED)
        annotator.box_label(boxes[index], title, color)
    done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    if not done:
        raise ValueError(f"an image of shape {image.shape} cannot be encoded as JPEG")
    return base64.b64encode(data.tobytes()).decode("ascii")
