"""Boxes, labels and picture grids drawn with OpenCV. No matplotlib here: detection draws every frame through this.

Class names of any script are drawn where a font of this machine has the glyphs (see ``fonts.py``); other names give way
to the number of the class.
"""

from __future__ import annotations

import colorsys
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from utils.boxes import xywh2xyxy, xyxy2xywh
from utils.evaluate.fonts import GLYPH_HEIGHT, can_draw, text_mask
from utils.files import atomic_write
from utils.log import CountedWarnings

Color = tuple[int, int, int]
Names = Mapping[int, str] | Sequence[str]

GRID_LONGEST_SIDE = 1920  # pixels of a picture grid
GRID_IMAGES = 16
GRID_MIN_CONFIDENCE = 0.25  # predictions below are not drawn into grids
CAPITAL_HEIGHT = 22  # pixels of a capital letter of OpenCV's plain font at scale 1
_failures = CountedWarnings()


def harmless(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a failing plot end in one warning: a picture is never worth a training run."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # anything a plot library, a font or a full disk may come up with
            name = function.__name__
            _failures.warn(name, f"{name}: no picture written, the run goes on ({type(error).__name__}: {error})")
            return None

    return guarded


class Colors:
    """Twenty colours, neighbours far apart in hue and dark enough for white text; class numbers wrap around."""

    LIMIT = 150  # brightest luminance (0 … 255) on which white text is easy to read

    def __init__(self) -> None:
        self.n = 20
        self.palette = [self._make(number) for number in range(self.n)]

    def __call__(self, i: int, bgr: bool = False) -> Color:
        """Return the colour of class ``i`` as RGB, or as BGR for OpenCV."""
        red, green, blue = self.palette[int(i) % self.n]
        return (blue, green, red) if bgr else (red, green, blue)

    @classmethod
    def _make(cls, number: int) -> Color:
        golden_ratio = (math.sqrt(5) - 1) / 2  # successive steps of it never come close to each other on the circle
        red, green, blue = colorsys.hsv_to_rgb(number * golden_ratio % 1, (0.9, 0.65)[number // 2 % 2], 0.95)
        luminance = 255 * (0.299 * red + 0.587 * green + 0.114 * blue)
        scale = 255 * min(1.0, cls.LIMIT / luminance)
        return round(red * scale), round(green * scale), round(blue * scale)


colors = Colors()


def class_name(number: int, names: Names) -> str:
    """Return the name of a class as it can be drawn: its number where the name is absent or beyond the font."""
    known = names if isinstance(names, Mapping) else dict(enumerate(names))
    name = str(known.get(int(number), ""))
    return name if name and can_draw(name) else str(int(number))


class Annotator:
    """Draw boxes and text on one BGR image (H, W, 3) uint8.

    The array is drawn on in place where it is contiguous and writable; ``result`` returns what was drawn on.
    ``font``, ``pil`` and ``example`` are accepted for compatibility: the font is chosen by what the text needs.
    """

    def __init__(
        self,
        im: np.ndarray,
        line_width: int | None = None,
        font_size: float | None = None,
        font: str = "",
        pil: bool = False,
        example: str = "",
    ) -> None:
        image = np.ascontiguousarray(im)
        self.im = image if image.flags.writeable else image.copy()
        self.lw = line_width or max(round(sum(self.im.shape[:2]) / 2 * 0.003), 2)
        self.capital = font_size * GLYPH_HEIGHT if font_size else self.lw * CAPITAL_HEIGHT / 3  # pixels
        self.stroke = max(self.lw - 1, 1) if font_size is None else max(round(self.capital / 10), 1)

    def box_label(
        self, box: Sequence[float], label: str = "", color: Color = (128, 128, 128), txt_color: Color = (255, 255, 255)
    ) -> None:
        """Draw the frame x1 y1 x2 y2 (pixels) and ``label`` on a filled strip above it, inside where it is cramped."""
        left, top, right, bottom = (int(value) for value in box)
        cv2.rectangle(self.im, (left, top), (right, bottom), color, thickness=self.lw)
        if not label:
            return
        width, height = self.text_size(label)
        left = max(min(left, self.im.shape[1] - width), 0)
        upper = top - height - 3 if top - height - 3 >= 0 else max(top, 0)
        cv2.rectangle(self.im, (left, upper), (left + width, upper + height + 3), color, thickness=cv2.FILLED)
        self._write((left, upper + 2), label, txt_color)

    def rectangle(
        self, xy: Sequence[float], fill: Color | None = None, outline: Color | None = None, width: int = 1
    ) -> None:
        """Draw a plain rectangle x1 y1 x2 y2 (pixels)."""
        left, top, right, bottom = (int(value) for value in xy)
        if fill is not None:
            cv2.rectangle(self.im, (left, top), (right, bottom), fill, thickness=cv2.FILLED)
        if outline is not None:
            cv2.rectangle(self.im, (left, top), (right, bottom), outline, thickness=width)

    def text(self, xy: Sequence[float], text: str, txt_color: Color = (255, 255, 255), anchor: str = "top") -> None:
        """Write ``text`` with its upper (``anchor`` 'top') or lower ('bottom') left corner at ``xy``."""
        left, top = int(xy[0]), int(xy[1])
        self._write((left, top - self.text_size(text)[1] if anchor == "bottom" else top), text, txt_color)

    def text_size(self, text: str) -> tuple[int, int]:
        """Return width and height of ``text`` in pixels."""
        if not text.isascii():
            mask, above = text_mask(text, self._font_size)
            return mask.shape[1], mask.shape[0] + above
        (width, height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, self._scale, self.stroke)
        return width, height

    def result(self) -> np.ndarray:
        """Return the image with everything drawn so far."""
        return self.im

    @property
    def _scale(self) -> float:
        return self.capital / CAPITAL_HEIGHT

    @property
    def _font_size(self) -> int:
        return max(round(self.capital / GLYPH_HEIGHT), 8)

    def _write(self, corner: tuple[int, int], text: str, color: Color) -> None:
        left, top = corner
        if text.isascii():
            foot = (left, top + self.text_size(text)[1])
            cv2.putText(self.im, text, foot, cv2.FONT_HERSHEY_SIMPLEX, self._scale, color, self.stroke, cv2.LINE_AA)
            return
        mask, above = text_mask(text, self._font_size)
        _blend(self.im, mask, left, top + above, color)


def _blend(image: np.ndarray, opacity: np.ndarray, left: int, top: int, color: Color) -> None:
    """Lay ``color`` over ``image`` in place, as strongly as ``opacity`` says; parts outside the image are cut off."""
    height, width = image.shape[:2]
    y1, x1 = max(top, 0), max(left, 0)
    y2, x2 = min(top + opacity.shape[0], height), min(left + opacity.shape[1], width)
    if y2 <= y1 or x2 <= x1:
        return
    weight = opacity[y1 - top : y2 - top, x1 - left : x2 - left, None]
    region = image[y1:y2, x1:x2]
    region[:] = (region * (1 - weight) + np.array(color) * weight).round().astype(np.uint8)


def draw_boxes(
    image: np.ndarray,
    detections: Tensor | np.ndarray,
    names: Names = (),
    *,
    line_width: int | None = None,
    hide_labels: bool = False,
    hide_conf: bool = False,
) -> np.ndarray:
    """Draw detections (N, 6) x1 y1 x2 y2 confidence class on a BGR image; return it, the most confident box on top."""
    annotator = Annotator(image, line_width=line_width)
    rows = np.asarray(detections.cpu() if isinstance(detections, Tensor) else detections, dtype=np.float64)
    for *box, confidence, number in rows[rows[:, 4].argsort(kind="stable")].tolist() if len(rows) else []:
        name = class_name(int(number), names)
        label = "" if hide_labels else name if hide_conf else f"{name} {confidence:.2f}"
        annotator.box_label(box, label, colors(int(number), bgr=True))
    return annotator.result()


def output_to_target(output: Sequence[Tensor], max_det: int = 300) -> np.ndarray:
    """Return detections of a batch, each (N, 6) x1 y1 x2 y2 confidence class, as rows for ``plot_images``.

    The result is (Σ N, 7): image, class, x, y, w, h in pixels, confidence; at most ``max_det`` rows of an image.
    """
    rows = []
    for index, detections in enumerate(output):
        kept = detections[:max_det].float().cpu()
        image = torch.full((len(kept), 1), float(index))
        rows.append(torch.cat((image, kept[:, 5:6], xyxy2xywh(kept[:, :4]), kept[:, 4:5]), 1))
    return torch.cat(rows).numpy() if rows else np.zeros((0, 7), np.float32)


@harmless
def plot_images(
    images: Tensor | np.ndarray,
    targets: Tensor | np.ndarray,
    paths: Sequence[str] | None = None,
    fname: str | Path = "images.jpg",
    names: Names | None = None,
) -> None:
    """Write a grid of the first 16 images of a batch with their boxes, filled column by column.

    Args:
        images: (B, 3, H, W) RGB, uint8 or float 0 … 1.
        targets: (T, 6) image, class, x, y, w, h – normalised or pixels – or (T, 7) with the confidence.
        paths: file names, written into the cells.
        names: class names.
    """
    pixels = torch.as_tensor(images)[:GRID_IMAGES].cpu()
    if pixels.is_floating_point():
        pixels = (pixels.float() * 255).clamp(0, 255).to(torch.uint8)
    rows = np.asarray(targets.cpu() if isinstance(targets, Tensor) else targets, dtype=np.float64)
    count, _, height, width = pixels.shape
    side = math.ceil(math.sqrt(count))
    scale = min(1.0, GRID_LONGEST_SIDE / side / max(height, width))
    cell = (math.ceil(scale * height), math.ceil(scale * width))
    canvas = np.full((side * cell[0], side * cell[1], 3), 255, np.uint8)
    annotator = Annotator(canvas, line_width=max(round(max(cell) * 0.004), 1), font_size=max(max(cell) * 0.03, 9))
    for index, image in enumerate(pixels.permute(0, 2, 3, 1).numpy()):
        left, top = cell[1] * (index // side), cell[0] * (index % side)
        bgr = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
        if scale < 1:
            bgr = cv2.resize(bgr, cell[::-1], interpolation=cv2.INTER_AREA)
        canvas[top : top + cell[0], left : left + cell[1]] = bgr
        _draw_cell(annotator, rows[rows[:, 0] == index], (left, top), cell, scale, names or ())
        annotator.rectangle((left, top, left + cell[1], top + cell[0]), outline=(255, 255, 255), width=2)
        if paths:
            title = Path(paths[index]).name[:40]
            title = title if can_draw(title) else title.encode("ascii", "replace").decode()
            annotator.text((left + 5, top + 5), title, txt_color=(220, 220, 220))
    write_image(fname, canvas)


def _draw_cell(
    annotator: Annotator,
    rows: np.ndarray,
    corner: tuple[int, int],
    cell: tuple[int, int],
    scale: float,
    names: Names,
) -> None:
    """Draw the boxes of one image into its cell of the grid, the most confident last."""
    if rows.shape[1] > 6:
        rows = rows[rows[:, 6] > GRID_MIN_CONFIDENCE]
        rows = rows[rows[:, 6].argsort(kind="stable")]
    if not len(rows):
        return
    boxes = xywh2xyxy(rows[:, 2:6])
    normalised = boxes.max() <= 1.01  # a little over 1: rounding of boxes that touch the border
    boxes = boxes * np.tile(cell[::-1], 2) if normalised else boxes * scale
    boxes += np.tile(corner, 2)
    for box, row in zip(boxes.tolist(), rows, strict=True):
        name = class_name(int(row[1]), names)
        label = f"{name} {row[6]:.1f}" if len(row) > 6 else name
        annotator.box_label(box, label, colors(int(row[1]), bgr=True))


def write_image(path: str | Path, image: np.ndarray) -> None:
    """Write a BGR image; the suffix decides the format. Paths of any script work.

    Raises:
        ValueError: the image could not be encoded, for example because it is empty.
    """
    path = Path(path)
    try:
        done, encoded = cv2.imencode(path.suffix or ".jpg", image)
    except cv2.error as error:
        raise ValueError(f"{path}: an image of shape {image.shape} cannot be encoded") from error
    if not done:
        raise ValueError(f"{path}: an image of shape {image.shape} cannot be encoded as {path.suffix}")
    with atomic_write(path) as temporary:
        temporary.write_bytes(encoded.tobytes())
