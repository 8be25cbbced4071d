"""Under which dotted name the original project pickles each of our classes.

A checkpoint of the original project stores whole objects, so its files name classes such as ``models.common.Conv``.
Our classes live elsewhere; this table is the only place where both names meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

ClassT = TypeVar("ClassT", bound=type)

UPSTREAM_CLASSES: dict[str, type] = {}
"""Dotted upstream path -> our class, filled while the modules of this package are imported."""


def known_as(module: str) -> Callable[[ClassT], ClassT]:
    """Record that upstream keeps the decorated class in ``module`` under the same class name.

    The path is stored on the class as ``upstream_path`` and in :data:`UPSTREAM_CLASSES`.
    """

    def record(cls: ClassT) -> ClassT:
        path = f"{module}.{cls.__name__}"
        cls.upstream_path = path
        UPSTREAM_CLASSES[path] = cls
        return cls

    return record


def dotted_path(cls: type) -> str:
    """Return the name that a layer table shows for a class: upstream's path, or its own for framework classes."""
    own_path = cls.__dict__.get("upstream_path")
    return own_path or f"{cls.__module__}.{cls.__qualname__}"
