"""Videos to measure detection on, made here, and a line drawing of figures over frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import cv2
import numpy as np

from utils.data.frames import VideoFile
from utils.deploy.video import Codec, choose_codec

PLOT_WIDTH, PLOT_HEIGHT, PLOT_MARGIN = 800, 300, 50


def make_clip(path: Path, frames: int, width: int, height: int, source: Path | None = None, rate: float = 25.0) -> Path:
    """Write a video of ``frames`` frames: ``source`` scaled and repeated, or boxes that move over a textured ground.

    H.264 where an encoder is there, as cameras write it, else MPEG-4 Part 2.
    """
    images = repeated(source, frames) if source else moving_boxes(frames, width, height)
    writer = choose_codec("auto").open(path, rate, width, height)
    for image in images:
        if image.shape[:2] != (height, width):
            image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
        writer.write(image)
    writer.release()
    return path


def make_plain_clip(path: Path, frames: int, width: int, height: int) -> Path:
    """Write a long synthetic video in the codec that costs least."""
    writer = Codec(note="").open(path, 25.0, width, height)
    for image in moving_boxes(frames, width, height):
        writer.write(image)
    writer.release()
    return path


def repeated(source: Path, frames: int) -> Iterator[np.ndarray]:
    """Yield the frames of a video, from its beginning again when it ends."""
    count = 0
    while count < frames:
        for _, image in VideoFile(source):
            yield image
            count += 1
            if count == frames:
                return


def moving_boxes(frames: int, width: int, height: int, boxes: int = 12) -> Iterator[np.ndarray]:
    """Yield frames (H, W, 3) in which coloured boxes move at their own speeds over a ground of soft noise."""
    rng = np.random.default_rng(0)
    noise = rng.integers(60, 160, (max(height // 8, 1), max(width // 8, 1), 3), np.uint8)
    ground = cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
    sides = rng.uniform(0.04, 0.2, (boxes, 2)) * (width, height)
    starts, speeds = rng.uniform(0, 1, (boxes, 2)) * (width, height), rng.uniform(-6, 6, (boxes, 2))
    colours = rng.integers(0, 255, (boxes, 3)).tolist()
    for number in range(frames):
        image = ground.copy()
        corners = ((starts + number * speeds) % (width, height)).astype(int)
        for corner, side, colour in zip(corners, sides.astype(int), colours, strict=True):
            cv2.rectangle(image, corner.tolist(), (corner + side).tolist(), colour, cv2.FILLED)
        yield image


def write_plot(path: Path, points: Sequence[tuple[float, float]], title: str, x_label: str, y_label: str) -> None:
    """Write points as a line into an SVG file; the vertical axis begins at 0, so that flat looks flat."""
    x_end, y_end = max(x for x, _ in points), 1.2 * max(y for _, y in points)
    width, height = PLOT_WIDTH - 2 * PLOT_MARGIN, PLOT_HEIGHT - 2 * PLOT_MARGIN
    left, bottom = PLOT_MARGIN, PLOT_HEIGHT - PLOT_MARGIN
    line = " ".join(f"{left + width * x / x_end:.1f},{bottom - height * y / y_end:.1f}" for x, y in points)

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'

    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<path d="M{left} {PLOT_MARGIN} V{bottom} H{left + width}" fill="none" stroke="black"/>\n'
        f'<polyline points="{line}" fill="none" stroke="#1f5fbf" stroke-width="1.5"/>\n'
        + "\n".join(
            (
                text(PLOT_WIDTH / 2, 20, title),
                text(PLOT_WIDTH / 2, PLOT_HEIGHT - 12, x_label),
                text(left, PLOT_MARGIN - 10, y_label, "start"),
                text(left, bottom + 16, "0"),
                text(left + width, bottom + 16, f"{x_end:.0f}"),
                text(left - 6, PLOT_MARGIN + 4, f"{y_end:.0f}", "end"),
                text(left - 6, bottom, "0", "end"),
            )
        )
        + "\n</svg>\n",
        encoding="utf-8",
    )
