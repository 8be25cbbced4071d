"""Detections as COCO json, and pycocotools as an independent referee where it is installed."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from utils.boxes import xyxy2xywh
from utils.files import write_text_atomic
from utils.log import LOGGER

if TYPE_CHECKING:
    from pycocotools.coco import COCO

_UNUSED_CATEGORIES = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
COCO_CATEGORIES = tuple(number for number in range(1, 91) if number not in _UNUSED_CATEGORIES)  # of the classes 0 … 79
MAX_NUMBER = (1 << 53) - 1  # the largest that readers of JSON with floating point numbers keep apart from the next


@dataclass(frozen=True, kw_only=True)
class CocoFigures:
    """The twelve figures of pycocotools' box evaluation; -1 where the set has no such object."""

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    ar1: float
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float


@dataclass
class CocoRecorder:
    """Collects detections and labels image by image; writes the former, has both judged.

    ``is_coco`` says that classes 0 … 79 are COCO's, whose category numbers have gaps; otherwise category = class.
    """

    is_coco: bool = False
    predictions: list[dict] = field(default_factory=list)
    _image_numbers: list[int] = field(default_factory=list)  # per prediction, counted from 1
    _images: list[dict] = field(default_factory=list)
    _annotations: list[dict] = field(default_factory=list)

    def add(self, image_id: int | str, shape: tuple[int, int], detections: Tensor, labels: Tensor) -> None:
        """Add one image.

        Args:
            image_id: what the json calls the image.
            shape: height, width in pixels.
            detections: (N, 6) x1 y1 x2 y2 confidence class, in pixels of the original image.
            labels: (G, 5) class x1 y1 x2 y2, likewise.
        """
        number = len(self._images) + 1
        self._images.append({"id": number, "name": image_id, "height": int(shape[0]), "width": int(shape[1])})
        for box, (score, category) in zip(_corner_size(detections[:, :4]), detections[:, 4:].tolist(), strict=True):
            row = {"image_id": image_id, "category_id": self._category(category)}
            row |= {"bbox": [round(side, 3) for side in box], "score": round(score, 5)}
            self.predictions.append(row)
            self._image_numbers.append(number)
        for box, category in zip(_corner_size(labels[:, 1:5]), labels[:, 0].tolist(), strict=True):
            row = {"id": len(self._annotations) + 1, "image_id": number, "category_id": self._category(category)}
            row |= {"bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            self._annotations.append(row)

    def write(self, path: str | Path) -> None:
        """Write the detections as a list of image_id, category_id, bbox (x, y, width, height) and score."""
        write_text_atomic(path, json.dumps(self.predictions))

    def judge(self, annotations: Path | None = None) -> CocoFigures | None:
        """Return pycocotools' figures against ``annotations`` (json), by default against the labels seen.

        None, with one line in the log, where pycocotools is missing or there is nothing to judge.
        """
        try:
            from pycocotools.coco import COCO
        except ImportError:
            LOGGER.warning("COCO figures are left out: pycocotools is not installed (pip install pycocotools)")
            return None
        if not self.predictions or not (annotations or self._annotations):
            LOGGER.warning("COCO figures are left out: no detections, or no labels to judge them by")
            return None
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO(str(annotations)) if annotations else self._own_truth(COCO())
        rows = self.predictions
        if not annotations:  # names of images need not be numbers; the referee's numbers are
            rows = [row | {"image_id": number} for row, number in zip(rows, self._image_numbers, strict=True)]
        images = [image["name"] if annotations else image["id"] for image in self._images]
        try:
            return _evaluate(truth, rows, images)
        except (AssertionError, KeyError, TypeError, IndexError) as error:  # how the referee refuses a foreign json
            LOGGER.warning(f"COCO figures are left out: {annotations} does not fit these images ({error})")
            return None

    def _category(self, number: float) -> int:
        return COCO_CATEGORIES[int(number)] if self.is_coco else int(number)

    def _own_truth(self, truth: COCO) -> COCO:
        """Fill an empty COCO object with the labels seen."""
        used = {row["category_id"] for row in self._annotations} | {row["category_id"] for row in self.predictions}
        categories = [{"id": number, "name": str(number)} for number in sorted(used)]
        truth.dataset = {"info": {}, "images": self._images, "annotations": self._annotations, "categories": categories}
        truth.createIndex()
        return truth


def image_identifiers(names: Iterable[str]) -> dict[str, int | str]:
    """Return what the json calls each image of a set: COCO's number where its name is one that no other name is.

    ``01`` and ``001`` are one number, so they stay names; so do numbers that a program may round.
    """
    names = list(names)
    numbers = {name: int(name) for name in names if name.isascii() and name.isdigit() and int(name) <= MAX_NUMBER}
    count = Counter(numbers.values())
    return {name: numbers[name] if count[numbers.get(name)] == 1 else name for name in names}


def _corner_size(boxes: Tensor) -> list[list[float]]:
    """Return xyxy boxes (N, 4) as x, y of the corner, width, height."""
    sized = xyxy2xywh(boxes)
    sized[:, :2] -= sized[:, 2:] / 2
    return sized.tolist()


def _evaluate(truth: COCO, rows: list[dict], images: list) -> CocoFigures:
    from pycocotools.cocoeval import COCOeval

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        evaluation = COCOeval(truth, truth.loadRes(rows), "bbox")
        evaluation.params.imgIds = images
        evaluation.evaluate()
        evaluation.accumulate()
        said.seek(0)
        said.truncate()
        evaluation.summarize()
    LOGGER.info(said.getvalue().rstrip())
    names = CocoFigures.__dataclass_fields__
    return CocoFigures(**dict(zip(names, (float(value) for value in evaluation.stats), strict=True)))
