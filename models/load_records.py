"""What stands in for the objects of a weights file while it is read, and the settling of it afterwards.

Records hold what the file says and do nothing. Settling turns array records into numbers and makes sure that whoever
walks, copies or prints what was read comes to an end: containers that share their parts can unfold to any size.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from torch import Tensor

from models.load_claims import MAX_KEY_BYTES, MAX_KEY_INTEGER_BYTES, UnsafeWeightsError, WeightsFileError

MAX_UNFOLDED = 10_000_000
"""Values and letters of one entry, shared ones counted wherever they stand; instructions of 8 MB spell out fewer."""
MAX_LEVELS = 100
"""Containers inside each other; a definition has 5 levels. Copying takes Python two calls a level of its 1,000."""
MAX_DIMENSIONS = 64
"""Dimensions of a tensor or array, as in torch and NumPy."""
PLAIN_CODE = re.compile(r"[biuf]\d{1,2}")
"""Number types of NumPy: bool, integers, floating point; anything longer describes fields."""

ENTRY_BYTES, NUMBER_BYTES, LIST_BYTES = 100, 32, 80
"""Memory for one more entry of a dictionary or set, one number in a list, and an empty list, rounded up."""
SCALARS = frozenset({int, float, bool, type(None), Tensor})
TEXTS = frozenset({str, bytes, bytearray})
CONTAINERS = (tuple, list, dict)


class Allowance:
    """Memory that copies of what a file holds may take; without copies of copies a fraction of it is used."""

    def __init__(self, instruction_bytes: int) -> None:
        self.left_bytes = 100 * instruction_bytes + 16_000_000

    def spend(self, size_bytes: int) -> None:
        """Count ``size_bytes``, and refuse the file if that is too much."""
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise UnsafeWeightsError("has the same data copied again and again, more than its size can explain")


class ForeignObject:
    """Inert record of a pickled instance whose class is not ours.

    Attributes:
        path: dotted name of the class in the file, such as ``models.common.Conv``.
        allowance: memory for state that comes in parts; set for the classes of one file.
        args: positional arguments the pickle would have given to the constructor.
        attributes: the instance attributes stored in the file.
    """

    __slots__ = ("args", "attributes")
    path = ""
    allowance: Allowance | None = None

    def __new__(cls, *args: object) -> ForeignObject:
        record = object.__new__(cls)
        record.args = args
        record.attributes = {}
        return record

    def __init__(self, *args: object) -> None:
        """Accept what the pickle passes; :meth:`__new__` has stored it."""

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):  # copied once: check_claims lets no object have a dictionary that is elsewhere too
            self.attributes.update(state)
        for part in state if isinstance(state, tuple) else ():
            if isinstance(part, dict):
                if self.allowance is not None:
                    self.allowance.spend(ENTRY_BYTES * len(part))
                self.attributes.update(part)

    def __repr__(self) -> str:
        return f"<{self.path} from a file, {len(self.attributes)} attributes>"

    @property
    def class_name(self) -> str:
        """Last part of the class path."""
        return self.path.rsplit(".", 1)[-1]


class ArrayType:
    """Substitute for ``numpy.dtype``: a checked type code and its byte order."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or not PLAIN_CODE.fullmatch(code):
            shown = repr(code[:20]) if isinstance(code, str) else f"a {type(code).__name__}"
            raise WeightsFileError(f"NumPy values of type {shown} are not plain numbers")
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1] if state[1] in ("<", ">") else "="

    def decode(self, raw: bytes) -> np.ndarray:
        """Interpret raw bytes as a flat array."""
        return np.frombuffer(raw, dtype=np.dtype(self.code).newbyteorder(self.order))


class ArrayRecord:
    """Substitute for ``numpy.ndarray``: filled by the pickle, turned into numbers afterwards."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance
        self.shape: tuple[int, ...] = ()
        self.flat = np.zeros(0)

    def __setstate__(self, state: tuple) -> None:
        _, shape, array_type, column_major, raw = state
        if not isinstance(array_type, ArrayType) or not is_shape(shape):
            raise WeightsFileError("a NumPy array has no plain type and shape")
        if column_major and len(shape) > 1:
            raise WeightsFileError("column-major NumPy arrays are not expected in a weights file")
        self.allowance.spend(len(raw))
        self.shape = shape
        self.flat = array_type.decode(raw.encode("latin1") if isinstance(raw, str) else raw)

    def plain(self) -> float | int | list:
        """One number for an array of one element, else nested lists."""
        if self.flat.size == 1:
            return self.flat.item()
        lists = sum(math.prod(self.shape[:dimension]) for dimension in range(len(self.shape)))
        self.allowance.spend(lists * LIST_BYTES + self.flat.size * NUMBER_BYTES)
        return self.flat.reshape(self.shape).tolist()


def is_shape(value: object) -> bool:
    """Whether a value out of a file is a tuple of a few non-negative integers."""
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_DIMENSIONS
        and all(type(number) is int and number >= 0 for number in value)
    )


def is_key(value: object) -> bool:
    """Whether a value out of a file is quickly hashed, compared and printed."""
    if isinstance(value, (str, bytes)):
        return len(value) <= MAX_KEY_BYTES
    if type(value) is int:
        return value.bit_length() <= 8 * MAX_KEY_INTEGER_BYTES
    return value is None or isinstance(value, (bool, float))


def settle(value: Any) -> Any:
    """Turn array records into numbers throughout; containers are changed in place, tuples with arrays rebuilt.

    Raises:
        UnsafeWeightsError: containers are nested too deeply, in a ring, or unfold to more than MAX_UNFOLDED values.
    """
    settling = _Settling()
    value = settling.visit(value, 0)[0]
    while settling.records:
        record = settling.records.pop()
        record.args = settling.visit(record.args, 0)[0]
        settling.visit(record.attributes, 0)
    return value


class _Settling:
    """One passage through everything that a file holds.

    Objects are visited one after the other, each for itself: they may refer to each other in rings, and whoever follows
    them has to be prepared for that. Lists, tuples and dictionaries are measured with all that is inside.

    Attributes:
        sizes: identity of a container -> values and letters in it, and its levels; zeros while it is being visited.
        replaced: identity of a tuple or array record -> itself, so that the identity stays taken, and its replacement.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[int, int]] = {}
        self.replaced: dict[int, tuple[Any, Any]] = {}
        self.records: list[ForeignObject] = []
        self.known_records: set[int] = set()

    def visit(self, value: Any, level: int) -> tuple[Any, int, int]:
        """Return the value or its replacement, how much it unfolds to, and its levels."""
        if isinstance(value, CONTAINERS):
            if not value:
                return value, 1, 1
            if id(value) not in self.sizes and level < MAX_LEVELS:
                self._enter(value, level)
            size, levels = self.sizes.get(id(value), (1, 1))
            if level + levels > MAX_LEVELS:
                raise UnsafeWeightsError(f"holds containers nested in more than {MAX_LEVELS} levels")
            if not size:
                raise UnsafeWeightsError("holds containers that hold themselves")
            return self.replaced.get(id(value), (None, value))[1], size, levels
        if isinstance(value, ForeignObject):
            if id(value) not in self.known_records:
                self.known_records.add(id(value))
                self.records.append(value)
        elif isinstance(value, ArrayRecord):
            if id(value) not in self.replaced:
                self.replaced[id(value)] = value, value.plain()
            return self.replaced[id(value)][1], 1 + value.flat.size + sum(value.shape), 1 + len(value.shape)
        elif isinstance(value, (set, frozenset)):
            return value, 1 + _letters(value), 1
        return value, 1 + (len(value) if type(value) in TEXTS else 0), 1

    def _enter(self, value: Any, level: int) -> None:
        """Visit what is inside a container, and note its size."""
        self.sizes[id(value)] = 0, 0
        size, levels, changed = len(value), 0, {}
        if isinstance(value, dict):
            size += _letters(value)
        for place, item in value.items() if isinstance(value, dict) else enumerate(value):
            kind = type(item)
            if kind in SCALARS:  # as in visit; most items are such, and a call for each takes longer
                continue
            if kind in TEXTS:
                size += len(item)
                continue
            new, size_inside, levels_inside = self.visit(item, level + 1)
            size += size_inside
            levels = max(levels, levels_inside)
            if new is not item:
                changed[place] = new
        if size > MAX_UNFOLDED:
            raise UnsafeWeightsError(
                f"holds containers that share their parts and unfold to over {MAX_UNFOLDED:,} values"
            )
        self.sizes[id(value)] = size, levels + 1
        if changed:
            self._replace(value, changed)

    def _replace(self, value: Any, changed: dict[Any, Any]) -> None:
        if isinstance(value, tuple):
            self.replaced[id(value)] = value, tuple(changed.get(place, item) for place, item in enumerate(value))
        else:
            for place, item in changed.items():
                value[place] = item


def _letters(keys: Any) -> int:
    """Return the letters of keys or members that are text; nearly always all are."""
    try:
        return sum(map(len, keys))
    except TypeError:  # a number among them
        return sum(len(key) for key in keys if type(key) in TEXTS)
