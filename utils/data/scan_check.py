"""Whether the arrays of a label cache can be true: what a scan writes never contradicts itself.

A cache file may be whole and yet hold nonsense, such as after an edit or a fault in another program. What contradicts
itself is told by `contradiction`, what was changed in any other way by `checksum`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from utils.data.images import MAX_PIXELS, MIN_SIDE
from utils.data.labels import LARGEST_CLASS

ROUNDING = 1e-5  # of corners that are computed from float32 values
POLYGON_POINTS = 3  # at least
# name -> type, columns (0: a flat array)
FORMS = {
    "images": ("uint8", 0),
    "images_lengths": ("int64", 0),
    "labels": ("uint8", 0),
    "labels_lengths": ("int64", 0),
    "stamps": ("int64", 6),
    "figures": ("int64", 6),
    "boxes": ("float32", 5),
    "box_offsets": ("int64", 0),
    "points": ("float32", 2),
    "point_offsets": ("int64", 0),
    "point_counts": ("int64", 0),
    "texts": ("uint8", 0),
}

Arrays = Mapping[str, np.ndarray]


def checksum(arrays: Arrays) -> int:
    """One number for the contents of all arrays."""
    value = 0
    for name in FORMS:
        value = zlib.crc32(
            np.ascontiguousarray(arrays[name]), zlib.crc32(f"{name}{arrays[name].shape}".encode(), value)
        )
    return value


def contradiction(arrays: Arrays) -> str:
    """What cannot be true about the arrays of a label cache, '' where nothing is. Raises KeyError for a missing one."""
    return next(_contradictions(arrays), "")


def _contradictions(arrays: Arrays) -> Iterator[str]:
    """Reasons, each check counting on those before it."""
    for name, (kind, columns) in FORMS.items():
        array = arrays[name]
        if array.dtype != kind or array.shape[1:] != ((columns,) if columns else ()):
            yield f"{name} is of type {array.dtype} and shape {array.shape}"
    count = len(arrays["stamps"])
    for name in ("images", "labels"):
        lengths = arrays[f"{name}_lengths"]
        if len(lengths) != count or (lengths < 0).any() or lengths.sum() != len(arrays[name]):
            yield f"the names of its {name} do not fit their lengths"
    for name, rows in (("box_offsets", "boxes"), ("point_offsets", "points")):
        offsets = arrays[name]
        is_ordered = len(offsets) == count + 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all()
        if not is_ordered or offsets[-1] != len(arrays[rows]):
            yield f"its offsets of {rows} do not fit their number"
    yield from _about_points(arrays)
    yield from _about_boxes(arrays["boxes"])
    yield from _about_pictures(arrays, count)


def _about_points(arrays: Arrays) -> Iterator[str]:
    counts, points = arrays["point_counts"], arrays["points"]
    if len(counts) != len(arrays["boxes"]) or not ((counts == 0) | (counts >= POLYGON_POINTS)).all():
        yield "its counts of points are no polygons"
    before = np.concatenate(([0], np.cumsum(counts)))  # points before each row
    if not np.array_equal(before[arrays["box_offsets"]], arrays["point_offsets"]):
        yield "its points do not belong to its boxes"
    if not ((points >= 0) & (points <= 1)).all():  # what is not a number is neither
        yield "its points lie outside the pictures"


def _about_boxes(boxes: np.ndarray) -> Iterator[str]:
    classes, centres, sides = boxes[:, 0], boxes[:, 1:3], boxes[:, 3:]
    if not ((classes >= 0) & (classes <= LARGEST_CLASS) & (classes == np.floor(classes))).all():
        yield "it holds a class that is no class number"
    is_inside = (centres - sides / 2 >= -ROUNDING) & (centres + sides / 2 <= 1 + ROUNDING) & (sides > 0)
    if not is_inside.all():
        yield "its boxes do not lie inside the pictures"


def _about_pictures(arrays: Arrays, count: int) -> Iterator[str]:
    figures = arrays["figures"]
    if len(figures) != count:
        yield "its sizes do not fit the number of pictures"
    reason, left_out = _about_texts(arrays["texts"], count)
    if reason:
        yield reason
    sizes, has_label, rows = figures[:, :2], figures[:, 2], np.diff(arrays["box_offsets"])
    is_used = np.ones(count, bool)
    is_used[left_out] = False
    used = sizes[is_used]
    if (sizes < 0).any() or (sizes > MAX_PIXELS).any() or (used < MIN_SIDE).any() or (used.prod(1) > MAX_PIXELS).any():
        yield "its sizes of pictures cannot be"
    if (figures[:, 3:] < 0).any():
        yield "its counts of rows are negative"
    if not np.isin(has_label, (0, 1)).all() or rows[has_label == 0].any():
        yield "it has boxes of pictures without a label file"
    if rows[left_out].any():
        yield "it has boxes of pictures that are left out"


def _about_texts(data: np.ndarray, count: int) -> tuple[str, list[int]]:
    """What is wrong with the remarks, '' where nothing is, and the numbers of pictures that are left out."""
    try:
        texts = {int(key): (str(e), kind, rest) for key, (e, kind, rest) in json.loads(data.tobytes()).items()}
        is_sound = all(0 <= number < count for number in texts) and all(
            isinstance(line, int) and line >= 0 and where in ("image", "label") and isinstance(kind + text, str)
            for _, _, remarks in texts.values()
            for line, where, kind, text in remarks
        )
    except (ValueError, TypeError, AttributeError):
        return "its remarks cannot be read", []
    if not is_sound:
        return "its remarks belong to no picture or are none", []
    return "", [number for number, (error, _, _) in texts.items() if error]
