"""Detection with an exported ONNX file without torch: everything around the network in NumPy.

A reference for ports to other languages: each step is one short function. It gives the boxes that detect_dual.py gives.

    python export.py --weights best.pt --include onnx
    python examples/onnx_numpy.py best.onnx picture.jpg more/*.jpg

Needs numpy, onnxruntime, and opencv-python or pillow to read picture files.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import numpy as np

GREY = 114
"""Colour of the border that fills a picture up to the size of the network."""


def read_picture(path: str | Path) -> np.ndarray:
    """Return a picture as (H, W, 3) uint8, red first, turned as its EXIF entry says."""
    try:
        import cv2
    except ImportError:
        return _read_with_pillow(path)
    content = np.fromfile(path, np.uint8)
    image = cv2.imdecode(content, cv2.IMREAD_COLOR) if content.size else None
    if image is None:
        raise ValueError(f"{path} is no picture that OpenCV can read")
    return image[..., ::-1]


def _read_with_pillow(path: str | Path) -> np.ndarray:
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I"):  # 16 bits, which Pillow itself would cut off at 255
        return np.repeat((np.asarray(image) // 256).astype(np.uint8)[..., None], 3, 2)
    return np.asarray(image.convert("RGB"))


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize (H, W, 3) uint8 by linear interpolation between pixel centres, without smoothing beforehand.

    Weights are whole numbers of 1/2048 and halves are rounded up, which gives the very pixels of OpenCV.
    """
    upper, lower, upper_weight, lower_weight = _neighbours(image.shape[0], height)
    left, right, left_weight, right_weight = _neighbours(image.shape[1], width)
    pixels = image.astype(np.int32)
    across = pixels[:, left] * left_weight[:, None] + pixels[:, right] * right_weight[:, None]
    above = across[upper] // 16 * upper_weight[:, None, None] // 65536
    below = across[lower] // 16 * lower_weight[:, None, None] // 65536
    return ((above + below + 2) // 4).astype(np.uint8)


def _neighbours(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each of ``new`` positions: the two old ones around it, and the weight of each in 1/2048."""
    position = ((np.arange(new) + 0.5) * (old / new) - 0.5).astype(np.float32)
    position = np.clip(position, 0, old - 1)
    first = np.floor(position).astype(np.int32)
    share = position - first
    weights = (np.rint(part * 2048).astype(np.int32) for part in (1 - share, share))
    return first, np.minimum(first + 1, old - 1), *weights


def letterbox(image: np.ndarray, height: int, width: int) -> tuple[np.ndarray, float, float, float]:
    """Fit a picture into (height, width) with grey borders; return it with scale and offsets (left, top)."""
    old_height, old_width = image.shape[:2]
    scale = min(height / old_height, width / old_width)
    new_height, new_width = max(1, round(old_height * scale)), max(1, round(old_width * scale))
    if (new_height, new_width) != (old_height, old_width):
        image = resize(image, new_height, new_width)
    # Half the border on each side; where it is odd, the pixel more goes to the right and to the bottom.
    left, top = (width - new_width) // 2, (height - new_height) // 2
    canvas = np.full((height, width, 3), GREY, np.uint8)
    canvas[top : top + new_height, left : left + new_width] = image
    return canvas, scale, (width - old_width * scale) / 2, (height - old_height * scale) / 2


def to_input(image: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 -> (1, 3, H, W) float32 in 0...1."""
    return np.ascontiguousarray(image.transpose(2, 0, 1)[None], np.float32) / 255


def decode(prediction: np.ndarray, confidence: float) -> np.ndarray:
    """(4 + nc, A) centre, size and class scores -> (N, 6) x1, y1, x2, y2, score, class of the best class each."""
    centre, size, scores = prediction[:2], prediction[2:4], prediction[4:]
    classes, best = scores.argmax(0), scores.max(0)
    rows = np.concatenate((centre - size / 2, centre + size / 2, best[None], classes[None].astype(np.float32))).T
    rows = rows[best > confidence]
    return rows[np.argsort(-rows[:, 4], kind="stable")]


def suppress(rows: np.ndarray, iou_limit: float, max_detections: int) -> np.ndarray:
    """Drop every box that overlaps a better one of its class by more than ``iou_limit``; rows come best first."""
    kept: list[int] = []
    left = np.arange(len(rows))
    while len(left) and len(kept) < max_detections:
        best, left = left[0], left[1:]
        kept.append(int(best))
        same_class = rows[left, 5] == rows[best, 5]
        left = left[~(same_class & (_iou(rows[best, :4], rows[left, :4]) > iou_limit))]
    return rows[kept]


def _iou(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    overlap = np.clip(np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2]), 0, None).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (box[2:] - box[:2]).prod()
    return overlap / np.maximum(areas - overlap, 1e-12)


def to_picture(rows: np.ndarray, scale: float, left: float, top: float, height: int, width: int) -> np.ndarray:
    """Move boxes from the network's input back into the picture and round them to whole pixels."""
    rows = rows.copy()
    rows[:, [0, 2]] = np.clip((rows[:, [0, 2]] - left) / scale, 0, width)
    rows[:, [1, 3]] = np.clip((rows[:, [1, 3]] - top) / scale, 0, height)
    rows[:, :4] = np.rint(rows[:, :4])
    return rows


class Detector:
    """An ONNX file of export.py, run by ONNX Runtime on the CPU."""

    def __init__(self, path: str | Path, size: int = 640) -> None:
        """Open ``path``; ``size`` is the input's side where the file leaves it free, rounded up to the stride."""
        import onnxruntime

        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        source = self.session.get_inputs()[0]
        self.input = source.name
        self.dtype = np.float16 if source.type == "tensor(float16)" else np.float32
        metadata = self.session.get_modelmeta().custom_metadata_map
        stride = int(metadata.get("stride", 32))
        free = (size + stride - 1) // stride * stride
        batch, _, height, width = source.shape
        self.batch = batch if isinstance(batch, int) else 1
        self.height, self.width = (side if isinstance(side, int) else free for side in (height, width))
        outputs = self.session.get_outputs()
        if len(outputs) != 1 or len(outputs[0].shape) != 3:
            found = ", ".join(output.name for output in outputs)
            raise ValueError(f"{path} gives {found}, expected one output (B, 4 + nc, A); export without --end2end")
        self.names: dict[int, str] = ast.literal_eval(metadata.get("names", "{}"))

    def __call__(
        self, image: np.ndarray, confidence: float = 0.25, iou_limit: float = 0.45, max_detections: int = 1000
    ) -> np.ndarray:
        """Return detections (N, 6) of a picture (H, W, 3), red first: x1, y1, x2, y2 in its pixels, score, class."""
        boxed, scale, left, top = letterbox(image, self.height, self.width)
        images = np.repeat(to_input(boxed), self.batch, 0)  # a file made for more pictures gets this one for each
        (prediction,) = self.session.run(None, {self.input: images.astype(self.dtype)})
        rows = suppress(decode(prediction[0], confidence), iou_limit, max_detections)
        return to_picture(rows, scale, left, top, *image.shape[:2])


def main() -> None:
    """Print one line per detection: picture, class, score, corners."""
    parser = argparse.ArgumentParser(description="Detect objects with an ONNX file, without torch.")
    parser.add_argument("weights", help="ONNX file of export.py (without --end2end)")
    parser.add_argument("pictures", nargs="+")
    parser.add_argument("--conf", type=float, default=0.25, help="lowest confidence shown")
    parser.add_argument("--iou", type=float, default=0.45, help="IoU above which the weaker box is dropped")
    parser.add_argument("--size", type=int, default=640, help="input side, where the file leaves it free")
    options = parser.parse_args()
    detector = Detector(options.weights, options.size)
    for picture in options.pictures:
        for *box, score, number in detector(read_picture(picture), options.conf, options.iou):
            corners = " ".join(f"{value:.0f}" for value in box)
            print(f"{picture}\t{detector.names.get(int(number), int(number))}\t{score:.4f}\t{corners}")


if __name__ == "__main__":
    main()
