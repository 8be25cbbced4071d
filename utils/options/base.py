"""What the options of all scripts share: reading a command line, checks of ranges."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from numbers import Real
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

    def check_types(self) -> None:
        """Make switches and numbers, which may come from Python in other kinds, what their fields say they are.

        Raises:
            TypeError: a value is neither of the kind nor a number that equals one of it, such as 160.0 for 160.
        """
        for item in fields(self):
            if item.type in MAKERS:
                setattr(self, item.name, MAKERS[item.type](item.name, getattr(self, item.name), item.default))

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


def as_switch(name: str, value: object, example: object = None) -> bool:
    """Return True, False, 1 or 0 as bool; raise TypeError for anything else: the text "False" would be true."""
    if type(value).__name__ in ("bool", "bool_") or isinstance(value, Real) and value in (0, 1):  # also numpy's
        return bool(value)
    raise TypeError(f"{_told(name, value)}: expected True or False")


def as_whole_number(name: str, value: object, example: object, expected: str = "a whole number") -> int:
    """Return a number of any kind without a fraction as int; raise TypeError for anything else."""
    if isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer():
        return int(value)
    raise TypeError(f"{_told(name, value)}: expected {expected} such as {example}")


def as_number(name: str, value: object, example: object) -> float:
    """Return a number of any kind as float; raise TypeError for anything else."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{_told(name, value)}: expected a number such as {example}")


def _told(name: str, value: object) -> str:
    return f"{name} {value!r} ({type(value).__name__})"


MAKERS = {"bool": as_switch, "int": as_whole_number, "float": as_number}  # by the annotation of a field


def whole_numbers(name: str, value: object, expected: str, example: str) -> list[int]:
    """Return one number or several as a list of int; raise TypeError for anything else."""
    is_several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    return [as_whole_number(name, number, example, expected) for number in (value if is_several else [value])]


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
    """Return ``[height, width]`` of one or two sides.

    Raises:
        TypeError: something that is no number of pixels.
        ValueError: too small, or more than two.
    """
    sides = whole_numbers("imgsz", imgsz, "a side in pixels, or height and width,", "640 or [384, 640]")
    if len(sides) not in (1, 2) or any(side < 32 for side in sides):
        raise ValueError(
            f"--img {' '.join(map(str, sides))}: expected one side or height and width, at least 32 pixels"
        )
    return sides * 2 if len(sides) == 1 else sides
