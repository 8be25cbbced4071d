"""Recall of small objects in large pictures, without and with slices.

    python -m bench.slicing --weights best.pt --data ../datasets/hituav/hituav.yaml --record

Canvases of ``--side`` pixels are composed of the labelled pictures of a data set at their own size, in random order, so
that objects keep their pixels while the canvas shrinks them for the network. Recall counts labels of the right class
with an IoU of 0.5 or more at confidence 0.25; AP is that of all confidences above 0.001 at IoU 0.5.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.records import append_record, hardware, versions
from utils.boxes import xywhn2xyxy
from utils.data.images import imread_bgr
from utils.data.labels import image_to_label_path, read_label_file
from utils.data.listing import list_images
from utils.data.spec import load_data_spec
from utils.deploy.predictor import Predictor
from utils.evaluate.matching import process_batch
from utils.evaluate.metrics import ap_per_class
from utils.log import LOGGER

GROUND = 114
CONFIDENCE, LOWEST = 0.25, 0.001
SMALL_AREA = 32**2  # pixels of the canvas


@dataclass(frozen=True)
class Canvas:
    """A composed picture (H, W, 3) and its labels (G, 5) class x1 y1 x2 y2 in pixels."""

    image: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Figures:
    """Outcome of one way of detecting on all canvases."""

    recall: float
    recall_small: float
    precision: float
    ap50: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"recall {self.recall:.3f} (small {self.recall_small:.3f}), precision {self.precision:.3f}, "
            f"AP50 {self.ap50:.3f}, {self.seconds:.2f} s per canvas"
        )


def main() -> None:
    """Compose canvases, detect in them in each way, print one line per way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", type=Path, required=True, help="data-set YAML")
    parser.add_argument("--split", default="val", choices=["train", "val", "test"])
    parser.add_argument("--side", type=int, default=4000, help="height and width of a canvas in pixels")
    parser.add_argument("--canvases", type=int, default=3)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--slice", type=int, nargs="+", default=[640], help="sides of slices to try")
    parser.add_argument("--overlap", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="")
    parser.add_argument("--record", action="store_true", help="add a row to RECORDS.md")
    arguments = parser.parse_args()
    LOGGER.setLevel("WARNING")
    print(f"{hardware()}; {versions()}")
    spec = load_data_spec(arguments.data)
    images = list_images(spec.split(arguments.split)).files
    canvases = [compose(images, arguments.side, seed) for seed in range(arguments.canvases)]
    labels = sum(len(canvas.labels) for canvas in canvases)
    lines = [f"{len(canvases)} canvases of {arguments.side} px with {labels} labels"]
    print(lines[0])
    for side in [0, *arguments.slice]:
        options = {"slice_size": side, "slice_overlap": arguments.overlap, "max_det": 10_000, "conf_thres": LOWEST}
        detector = Predictor(
            arguments.weights, imgsz=arguments.imgsz, device=arguments.device, batch_size=arguments.batch, **options
        )
        title = f"slices of {side} px" if side else f"whole at {arguments.imgsz} px"
        lines.append(f"{title}: {measure(detector, canvases)}")
        print(lines[-1], flush=True)
    if arguments.record:
        append_record("; ".join(lines), 1)


def compose(images: list[str], side: int, seed: int) -> Canvas:
    """Lay pictures beside each other, row by row, as many as fit; each is used once before one comes again."""
    rng = np.random.default_rng(seed)
    canvas = np.full((side, side, 3), GROUND, np.uint8)
    labels = [np.zeros((0, 5))]
    left = top = row_height = 0
    supply = _endless(images, rng)
    while True:
        path = next(supply)
        image = imread_bgr(path)
        height, width = image.shape[:2]
        if left + width > side:
            left, top, row_height = 0, top + row_height, 0
        if top + height > side or width > side:
            return Canvas(canvas, np.concatenate(labels))
        canvas[top : top + height, left : left + width] = image
        boxes = _read_boxes(path)
        boxes[:, 1:] = xywhn2xyxy(boxes[:, 1:], width, height, left, top)
        labels.append(boxes)
        left, row_height = left + width, max(row_height, height)


def _endless(images: list[str], rng: np.random.Generator) -> Iterator[str]:
    while True:
        yield from rng.permutation(images).tolist()


def _read_boxes(path: str) -> np.ndarray:
    label = image_to_label_path(path)
    return read_label_file(label).boxes.astype(np.float64) if label.is_file() else np.zeros((0, 5))


def measure(detector: Predictor, canvases: list[Canvas]) -> Figures:
    """Detect in every canvas and compare with its labels."""
    correct, scores, classes, hit, small = [], [], [], [], []
    detector(canvases[0].image[:64, :64])  # loads kernels
    started = time.perf_counter()
    results = [detector(canvas.image) for canvas in canvases]
    seconds = (time.perf_counter() - started) / len(canvases)
    for found, canvas in zip(results, canvases, strict=True):
        rows = torch.from_numpy(np.column_stack((found.boxes, found.scores, found.classes)).astype(np.float32))
        labels = torch.from_numpy(canvas.labels).float()
        correct.append(process_batch(rows, labels, torch.tensor([0.5])).numpy())
        confident = rows[rows[:, 4] > CONFIDENCE]
        hit.append(_labels_hit(confident, labels))
        sides = canvas.labels[:, 3:] - canvas.labels[:, 1:3]
        small.append(sides.prod(1) < SMALL_AREA)
        scores.append(found.scores)
        classes.append(found.classes)
    tp, conf = np.concatenate(correct), np.concatenate(scores)
    targets = np.concatenate([canvas.labels[:, 0] for canvas in canvases])
    ap = ap_per_class(tp, conf, np.concatenate(classes), targets)[5]
    hits, is_small = np.concatenate(hit), np.concatenate(small)
    shown = conf > CONFIDENCE
    return Figures(
        float(hits.mean()),
        float(hits[is_small].mean()) if is_small.any() else float("nan"),
        float(tp[shown, 0].mean()) if shown.any() else 0.0,
        float(ap[:, 0].mean()) if len(ap) else 0.0,
        seconds,
    )


def _labels_hit(rows: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """Return for each label (G, 5) whether a detection of its own belongs to it, by asking the other way round."""
    as_detections = torch.cat((labels[:, 1:], torch.ones(len(labels), 1), labels[:, :1]), 1)
    as_labels = torch.cat((rows[:, 5:6], rows[:, :4]), 1)
    return process_batch(as_detections, as_labels, torch.tensor([0.5])).numpy()[:, 0]


if __name__ == "__main__":
    main()
