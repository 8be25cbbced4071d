"""pycocotools on plain arrays, as the referee of our own figures."""

from __future__ import annotations

import contextlib
import io

import numpy as np

from utils.evaluate.coco import CocoFigures
from utils.evaluate.size_ap import Instances


def corner_size(boxes: np.ndarray) -> np.ndarray:
    """Return x1 y1 x2 y2 as x, y, width, height."""
    return np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), 1)


def judge(detections: Instances, labels: Instances, images: int) -> tuple[CocoFigures, np.ndarray]:
    """Return pycocotools' twelve figures, and its AP per class and size (K, 4), NaN where there is no label."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    classes = np.unique(labels.number).astype(int)
    rows = zip(labels.image.tolist(), labels.number.tolist(), corner_size(labels.boxes).tolist(), strict=True)
    truth = COCO()
    truth.dataset = {
        "images": [{"id": number} for number in range(images)],
        "categories": [{"id": int(number), "name": str(number)} for number in classes],
        "annotations": [
            {"id": index + 1, "image_id": image, "category_id": number, "bbox": box, "area": box[2] * box[3]}
            | {"iscrowd": 0}
            for index, (image, number, box) in enumerate(rows)
        ],
    }
    parts = (detections.image, detections.number, corner_size(detections.boxes), detections.confidence)
    found = [
        {"image_id": image, "category_id": number, "bbox": box, "score": score}
        for image, number, box, score in zip(*(part.tolist() for part in parts), strict=True)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    names = CocoFigures.__dataclass_fields__
    precision = evaluation.eval["precision"][..., -1].mean((0, 1))  # (K, A); -1 where there is no label
    return CocoFigures(**dict(zip(names, map(float, evaluation.stats), strict=True))), np.where(
        precision < 0, np.nan, precision
    )
