"""Command lines made from dataclasses: each field is one option, its type and help standing beside its default."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

from utils.log import LOGGER

Options = TypeVar("Options")


def option(default: Any, help: str, *flags: str, **argument: Any) -> Any:
    """Declare a dataclass field that is also a command-line option.

    Args:
        default: default value; a list is copied for every instance.
        help: one line for ``--help``.
        flags: further spellings. The first one is always ``--field-name``.
        argument: keywords for ``argparse.add_argument`` (``type``, ``nargs``, ``choices``, ``const`` …).
    """
    metadata = {"help": help, "flags": flags, "argument": argument}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def make_parser(options_class: type, description: str, *, has_defaults: bool = True) -> argparse.ArgumentParser:
    """Return a parser with one argument per field of ``options_class``; without defaults it gives what was typed."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=True
    )
    for item in fields(options_class):
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        argument = dict(item.metadata["argument"])
        primary = argument.pop("flag", "--" + item.name.replace("_", "-"))
        if isinstance(default, bool) and "action" not in argument and "nargs" not in argument:
            argument["action"] = "store_true"
        elif "action" not in argument and "type" not in argument:
            argument["type"] = type(default)
        argument |= {"dest": item.name, "help": item.metadata["help"]}
        argument["default"] = default if has_defaults else argparse.SUPPRESS
        parser.add_argument(primary, *item.metadata["flags"], **argument)
    return parser


def parse_options(options_class: type[Options], description: str, argv: Sequence[str] | None = None) -> Options:
    """Parse ``argv`` (default: the process's arguments); wrong values end the program with status 2 and a message.

    The result's attribute ``given`` names the fields that were typed, as opposed to left at their defaults.
    """
    parser = make_parser(options_class, description)
    namespace = parser.parse_args(argv)
    given = frozenset(vars(make_parser(options_class, description, has_defaults=False).parse_args(argv)))
    try:
        options = options_class(**vars(namespace))
    except ValueError as error:
        parser.error(str(error))
    options.given = given
    return options


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's ``main`` and exit with its status; a refused input is told in one line instead of a traceback.

    Set ``YOLO_DEBUG=1`` to see the traceback as well.
    """
    try:
        status = main()
    except KeyboardInterrupt:
        LOGGER.error("interrupted")
        status = 130
    except (ValueError, OSError, ImportError, ArithmeticError, MemoryError) as error:
        if os.environ.get("YOLO_DEBUG"):
            traceback.print_exc()
        LOGGER.error(f"{error} (YOLO_DEBUG=1 shows where)")
        status = 1
    sys.exit(status or 0)
