"""Hyper-parameters of training, as the files below hyp/ hold them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from utils.files import read_yaml
from utils.log import LOGGER

NOT_NEGATIVE = (
    "lr0",
    "lrf",
    "weight_decay",
    "warmup_epochs",
    "warmup_bias_lr",
    "box",
    "cls",
    "dfl",
    "cls_pw",
    "fl_gamma",
)
LARGEST = {"degrees": 360.0, "shear": 90.0, "perspective": 1.0}  # far beyond what helps; nothing overflows below


@dataclass(kw_only=True)
class Hyp:
    """Hyper-parameters of training; the defaults are those of ``hyp/hyp.scratch-high.yaml``, which explains each."""

    lr0: float = 0.01
    lrf: float = 0.01
    momentum: float = 0.937
    weight_decay: float = 0.0005
    warmup_epochs: float = 3.0
    warmup_momentum: float = 0.8
    warmup_bias_lr: float = 0.1
    box: float = 7.5
    cls: float = 0.5
    cls_pw: float = 1.0
    dfl: float = 1.5
    obj: float = 0.7
    obj_pw: float = 1.0
    iou_t: float = 0.2
    anchor_t: float = 5.0
    fl_gamma: float = 0.0
    hsv_h: float = 0.015
    hsv_s: float = 0.7
    hsv_v: float = 0.4
    degrees: float = 0.0
    translate: float = 0.1
    scale: float = 0.9
    shear: float = 0.0
    perspective: float = 0.0
    flipud: float = 0.0
    fliplr: float = 0.5
    mosaic: float = 1.0
    mixup: float = 0.15
    copy_paste: float = 0.3

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not math.isfinite(value):
                raise ValueError(f"hyper-parameter {item.name}: {value} is not a finite number")
        for name in ("hsv_h", "hsv_s", "hsv_v", "translate", "flipud", "fliplr", "mosaic", "mixup", "copy_paste"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"hyper-parameter {name}: {getattr(self, name)} should lie between 0 and 1")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"hyper-parameter {name}: {getattr(self, name)} should not be negative")
        for name in ("momentum", "warmup_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"hyper-parameter {name}: {getattr(self, name)} should be at least 0 and below 1")
        for name, limit in LARGEST.items():
            if abs(getattr(self, name)) > limit:
                raise ValueError(
                    f"hyper-parameter {name}: {getattr(self, name):g} should lie between -{limit:g} and {limit:g}"
                )
        if not 0.0 <= self.scale < 1.0:
            raise ValueError(
                f"hyper-parameter scale: {self.scale} should be at least 0 and below 1 (0.9 = factors 0.1-1.9)"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "hyper-parameters") -> Hyp:
        """Build from a mapping: missing keys get their defaults, unknown ones are named and ignored.

        Raises:
            ValueError: a value that is no number (``1e-3`` is one, although YAML reads it as text; yes and no are
                none, a learning rate of yes would be 1), or one out of its range; the message names ``source``.
        """
        known = {item.name for item in fields(cls)}
        values: dict[str, float] = {}
        for key, value in mapping.items():
            if key not in known:
                if key not in ("anchors", "label_smoothing"):  # written by upstream, without effect there
                    near = difflib.get_close_matches(str(key), known, 1)
                    hint = f"; is '{near[0]}' meant?" if near else ""
                    LOGGER.warning(f"{source}: unknown key '{key}' is ignored{hint}")
                continue
            try:
                if isinstance(value, bool):
                    raise TypeError("a truth value")
                values[key] = float(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{source}: '{key}: {value}' should be a number") from error
        if mapping and not values:
            raise ValueError(
                f"{source}: none of its keys ({', '.join(map(str, list(mapping)[:5]))}) is a hyper-parameter; give a "
                "file like hyp/hyp.scratch-high.yaml with --hyp"
            )
        missing = sorted(known - values.keys())
        if missing:
            LOGGER.info(f"{source}: defaults are used for {', '.join(missing)}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}; hyp/hyp.scratch-high.yaml explains the key") from error

    @classmethod
    def from_yaml(cls, path: str | Path) -> Hyp:
        """Read a hyper-parameter file; see :meth:`from_mapping`."""
        return cls.from_mapping(read_yaml(path), str(path))

    def to_dict(self) -> dict[str, float]:
        """Return all values by name."""
        return asdict(self)
