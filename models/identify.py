"""Which shipped network a definition is, whatever its file was called, and what was published about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from utils.files import read_yaml

CONFIG_DIR = Path(__file__).resolve().parent / "detect"


@dataclass(frozen=True)
class PublishedSize:
    """Figures of the authors' table for 80 classes at 640 px: million parameters and GFLOPs of the inference form."""

    parameters_m: float
    gflops: float


PUBLISHED_SIZES: Mapping[str, PublishedSize] = {
    "t": PublishedSize(2.0, 7.7),
    "s": PublishedSize(7.1, 26.4),
    "m": PublishedSize(20.0, 76.3),
    "c": PublishedSize(25.3, 102.1),
    "e": PublishedSize(57.3, 189.0),
}
"""Size letter -> published figures; YOLOv9-X and GELAN-X have one inference form. The published t has narrower class
branches (80 channels) than its YAML gives (128), so a t built from the YAML is larger."""


def shipped_name(definition: Mapping[str, object]) -> str | None:
    """Return the name (``yolov9-s``) of the shipped YAML whose rows and multiples ``definition`` has, else None."""
    return _names_by_rows().get(_fingerprint(definition))


def published_size(name: str | None) -> PublishedSize | None:
    """Return the published figures of the network called ``yolov9-s``, ``gelan-s``, …; None for any other."""
    family, _, size = (name or "").partition("-")
    return PUBLISHED_SIZES.get(size) if family in ("yolov9", "gelan") else None


def counterpart(name: str) -> str:
    """Return the network that shares its inference form with ``name``: yolov9-s for gelan-s and the other way round."""
    family, dash, size = name.partition("-")
    return {"yolov9": "gelan", "gelan": "yolov9"}.get(family, family) + dash + size


@cache
def _names_by_rows() -> dict[str, str]:
    return {_fingerprint(read_yaml(file)): file.stem for file in sorted(CONFIG_DIR.glob("*.yaml"))}


def _fingerprint(definition: Mapping[str, object]) -> str:
    """Text of everything that decides the layers except for the class count."""
    rows = [*(definition.get("backbone") or ()), *(definition.get("head") or ())]
    multiples = [float(definition.get(key) or 1.0) for key in ("depth_multiple", "width_multiple")]
    return repr((_plain(rows), multiples, str(definition.get("activation") or "")))


def _plain(value: object) -> object:
    """Lists throughout, and None for the words that YAML files write for it."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if value == "None" else value
