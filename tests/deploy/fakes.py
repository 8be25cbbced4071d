"""A detector that needs no weights, and the pictures and videos it understands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

NAMES = {0: "red", 1: "green", 2: "blue"}
BOX = (20, 10, 60, 40)  # x1 y1 x2 y2 of the red box in every picture made here


class ColourBackend:
    """Finds the envelope of red, green and blue pixels in each image; confidences 0.9, 0.8 and 0.7."""

    names = NAMES
    stride = 32
    pt = True
    device = torch.device("cpu")

    def __init__(self, static_shape: tuple[int, int] | None = None, fail_on_call: int = 0) -> None:
        self.static_shape, self.fail_on_call = static_shape, fail_on_call
        self.shapes: list[tuple[int, ...]] = []  # of the batches it was given
        self.augmented: list[bool] = []

    def __call__(self, images: Tensor, augment: bool = False) -> Tensor:
        self.shapes.append(tuple(images.shape))
        self.augmented.append(augment)
        if len(self.shapes) == self.fail_on_call:
            raise KeyboardInterrupt
        rows = torch.zeros(len(images), 7, 3)
        for index, image in enumerate(images):
            for channel in range(3):
                others = image[[other for other in range(3) if other != channel]].amax(0)
                ys, xs = torch.nonzero((image[channel] > 0.6) & (others < 0.4), as_tuple=True)
                if len(xs) < 4:
                    continue
                x1, y1, x2, y2 = xs.min().item(), ys.min().item(), xs.max().item() + 1, ys.max().item() + 1
                rows[index, :4, channel] = torch.tensor([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1])
                rows[index, 4 + channel, channel] = 0.9 - 0.1 * channel
        return rows

    def warmup(self, imgsz: Sequence[int]) -> None:
        pass


def picture(
    width: int = 96, height: int = 64, box: tuple[int, int, int, int] | None = BOX, green: bool = False
) -> np.ndarray:
    """Dark BGR picture with a red box, and a green one in its lower right corner if asked for."""
    image = np.full((height, width, 3), 20, np.uint8)
    if box:
        image[box[1] : box[3], box[0] : box[2]] = (0, 0, 255)
    if green:
        image[height - 16 : height - 4, width - 24 : width - 4] = (0, 255, 0)
    return image


def write_picture(path: Path, image: np.ndarray | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = cv2.imencode(path.suffix, picture() if image is None else image)[1]
    path.write_bytes(data.tobytes())
    return path


def write_video(path: Path, frames: int = 10, rate: float = 25.0, width: int = 96, height: int = 64) -> Path:
    """Video whose red box moves right by two pixels a frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    codec = cv2.VideoWriter_fourcc(*("MJPG" if path.suffix == ".avi" else "mp4v"))
    writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, codec, rate, (width, height))
    for number in range(frames):
        writer.write(picture(width, height, (10 + 2 * number, 10, 40 + 2 * number, 40)))
    writer.release()
    return path


def read_video(path: Path) -> tuple[list[np.ndarray], float]:
    """All frames and the rate."""
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    rate, frames = capture.get(cv2.CAP_PROP_FPS), []
    while True:
        done, image = capture.read()
        if not done:
            return frames, rate
        frames.append(image)
