"""What the options of all scripts share: reading a command line, checks of ranges."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.cli import own_option, parse_options

BOOLEAN = argparse.BooleanOptionalAction  # a flag with --no- in front of its opposite
SLICE_AS_INPUT = -1  # slices as large as the longer side of the network's input


class FromCli:
    """Adds ``from_cli`` and ``to_dict`` to an options dataclass."""

    description = ""
    given: frozenset[str] = frozenset()  # fields typed on the command line

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None):  # noqa: ANN206 - returns the subclass
        """Parse a command line; ends the program with status 2 on a wrong one."""
        return parse_options(cls, cls.description, argv)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values (text, numbers, lists) fit for a YAML file."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    def check_at_least(self, **bounds: float) -> None:
        for name, bound in bounds.items():
            if getattr(self, name) < bound:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {getattr(self, name)}: should be at least {bound}")

    def check_fractions(self, *names: str) -> None:
        for name in names:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: should lie between 0 and 1")

    def check_slices(self) -> None:
        if self.slice_size != SLICE_AS_INPUT and self.slice_size != 0 and self.slice_size < 32:
            raise ValueError(f"--slice {self.slice_size}: should be at least 32 pixels, or stand without a number")
        if not 0 <= self.slice_overlap <= 0.9:
            raise ValueError(f"--slice-overlap {self.slice_overlap}: should lie between 0 and 0.9")


def replay_option() -> Any:
    """``--no-cuda-graphs`` of detection and validation."""
    return own_option(True, "on CUDA: replay recorded passes of .pt files where a shape comes again", action=BOOLEAN)


def slice_option() -> Any:
    """``--slice`` of detection and validation; their ``check_slices`` judges its value."""
    return own_option(
        0,
        "look at large pictures in slices of this side (without a number: that of --imgsz), for small objects",
        flag="--slice",
        nargs="?",
        const=SLICE_AS_INPUT,
    )


def slice_overlap_option() -> Any:
    """``--slice-overlap`` of detection and validation."""
    return own_option(0.2, "share of their side that neighbouring slices have in common")


def height_width(imgsz: Sequence[int] | int) -> list[int]:
    """Return ``[height, width]`` of one or two sides; raise ValueError for anything else."""
    sides = [imgsz] if isinstance(imgsz, int) else list(imgsz)
    if len(sides) not in (1, 2) or any(side < 32 for side in sides):
        raise ValueError(
            f"--img {' '.join(map(str, sides))}: expected one side or height and width, at least 32 pixels"
        )
    return sides * 2 if len(sides) == 1 else sides
