"""Detection from Python: load a detector once, call it on pictures, get arrays.

Example::

    detector = Predictor("best.pt")
    found = detector("street.jpg")
    print(found.boxes, found.scores, found.classes, found.names)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from models.backend import DetectMultiBackend
from utils.data.addresses import without_password
from utils.data.frames import Frame
from utils.data.images import imread_bgr
from utils.data.sources import DECODERS, VIDEO_SUFFIXES, read_frames, resolve_source
from utils.deploy.engine import Backend, Engine, Settings
from utils.deploy.views import Done
from utils.log import LOGGER
from utils.options import DetectOptions
from utils.runtime import select_device

Image = str | Path | np.ndarray
OPTIONS = frozenset(  # of DetectOptions, those that concern finding boxes
    ("device", "imgsz", "conf_thres", "iou_thres", "max_det", "classes", "agnostic_nms", "augment", "half")
    + ("slice_size", "slice_overlap", "data", "dnn", "offline", "cuda_graphs")
)


@dataclass(frozen=True)
class Detections:
    """What was found in one picture, most confident first.

    Attributes:
        boxes: (N, 4) float32, x1 y1 x2 y2 in pixels of the picture, not rounded.
        scores: (N,) float32, 0 … 1.
        classes: (N,) int64.
        names: (N,) class names, array of text.
        shape: height and width of the picture.
        path: file it came from, None for an array.
        frame: number of a video's frame from 1, 0 for a picture.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    names: np.ndarray
    shape: tuple[int, int]
    path: Path | None = None
    frame: int = 0

    def __len__(self) -> int:
        return len(self.scores)


class Predictor:
    """A detector to be called with pictures.

    Args:
        weights: file of any format that ``detect_dual.py`` takes, or a loaded model.
        batch_size: pictures per step of the network; the result does not depend on it.
        options: any of ``OPTIONS``, as ``DetectOptions`` explains them.

    Raises:
        ValueError, FileNotFoundError: weights or options that cannot be used.
        TypeError: an unknown option, one that concerns the writing of files, or a value of the wrong kind.
    """

    def __init__(self, weights: str | Path | Backend, *, batch_size: int = 16, **options: object) -> None:
        for name in sorted(set(options) - OPTIONS):
            raise TypeError(f"Predictor: {name} has no effect here; options are {', '.join(sorted(OPTIONS))}")
        chosen = DetectOptions(batch_size=batch_size, **options)
        if isinstance(weights, (str, Path, list, tuple)):
            model = DetectMultiBackend(
                weights,
                device=select_device(chosen.device),
                dnn=chosen.dnn,
                data=chosen.data or None,
                fp16=chosen.half,
                offline=chosen.offline,
                cuda_graphs=chosen.cuda_graphs,
            )
        elif callable(weights):
            model = weights
        else:
            raise TypeError(f"weights {weights!r}: expected a file such as best.pt, or a loaded model")
        self.engine = Engine(model, Settings.of(chosen))
        self.batch_size = chosen.batch_size

    @property
    def names(self) -> dict[int, str]:
        """Class number → name."""
        return self.engine.model.names

    def __call__(self, images: Image | Sequence[Image]) -> Detections | list[Detections]:
        """Find objects in a picture, or in each of several.

        Args:
            images: a path, an array (H, W, 3) uint8 BGR as OpenCV reads it, or (H, W) grey, gives one result; several
                of these, or an array (B, H, W, 3), give a list in the same order.

        Raises:
            ValueError, OSError: a file is no picture or cannot be read, or an array is of another form.
        """
        is_single = isinstance(images, (str, Path, bytes, Mapping)) or not isinstance(images, Iterable)
        is_single = is_single or (isinstance(images, np.ndarray) and images.ndim < 4)
        several = [images] if is_single else list(images)
        paths = [Path(image) if isinstance(image, (str, Path)) else None for image in several]
        frames = (Frame(_pixels(image), item) for item, image in enumerate(several))
        found = [self._result(done, paths[done.frame.item]) for done in self.engine.detect(frames, self.batch_size)]
        return found[0] if is_single else found

    def stream(self, source: str | Path, vid_stride: int = 1) -> Iterator[Detections]:
        """Yield a result for every picture and video frame of a source (file, folder, pattern, list) in its order.

        Memory does not grow with the length of a video. Files that cannot be read are logged and left out.

        Raises:
            FileNotFoundError, ValueError: there is no such source, or it is a live stream.
        """
        resolved = resolve_source(source)
        try:
            if resolved.streams:
                shown = without_password(str(source))
                raise ValueError(f"{shown} is a live stream; use detect_dual.py or utils.data.sources.LoadStreams")
            resolved.report()
            frames = read_frames(resolved.files, vid_stride, decoders=DECODERS)
            for done in self.engine.detect(frames, self.batch_size):
                if isinstance(done, Done):
                    yield self._result(done, resolved.files[done.frame.item].path)
                else:
                    LOGGER.warning(f"{resolved.files[done.item].title}: {done.reason}, left out")
        finally:
            resolved.close()

    def _result(self, done: Done, path: Path | None) -> Detections:
        classes = done.rows[:, 5].astype(np.int64)
        names = np.array([self.names.get(number, str(number)) for number in classes.tolist()], dtype=np.str_)
        height, width = done.frame.image_bgr.shape[:2]
        return Detections(
            done.rows[:, :4].copy(), done.rows[:, 4].copy(), classes, names, (height, width), path, done.frame.number
        )


def _pixels(image: Image) -> np.ndarray:
    """Return (H, W, 3) uint8 BGR of a path or an array."""
    if isinstance(image, (str, Path)):
        if Path(image).is_dir() or Path(image).suffix.lower() in VIDEO_SUFFIXES:
            raise ValueError(f"{image} is no picture; stream('{image}') takes folders and videos")
        return imread_bgr(image)
    is_array = isinstance(image, np.ndarray)
    is_bytes = is_array and image.dtype == np.uint8 and image.size > 0
    if is_bytes and (image.ndim == 2 or image.ndim == 3 and image.shape[2] == 1):
        return cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)
    if is_bytes and image.ndim == 3 and image.shape[2] == 3:
        return image
    given = f"{image.dtype} array of shape {image.shape}" if is_array else type(image).__name__
    remedy = (
        "; np.asarray(image.convert('RGB'))[..., ::-1] makes one of a PIL image" if hasattr(image, "convert") else ""
    )
    raise ValueError(f"a picture is a path or a uint8 array (H, W, 3) in BGR order, not {given}{remedy}")
