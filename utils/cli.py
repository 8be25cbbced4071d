"""Command lines made from dataclasses: each field is one option, its type and help standing beside its default."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from utils.log import LOGGER

Options = TypeVar("Options")

COLLECTED_FROM = 100_000
"""New objects after which Python looks for garbage: by default 700, a seventh of the time to load torch and a model."""


class OptionParser(argparse.ArgumentParser):
    """Parser in which an abbreviation means what it means upstream.

    ``argparse`` finds a beginning such as ``--bat`` ambiguous as soon as it fits two spellings of one option, or an
    option that upstream lacks. Here it is looked up among upstream's options first, then among the others.
    """

    def __init__(self, **settings: Any) -> None:
        self.upstream_flags: dict[str, str] = {}  # flag -> field
        self.own_flags: dict[str, str] = {}
        super().__init__(**settings)
        self.upstream_flags["--help"] = "help"

    def add_field(self, item: Field, *, has_default: bool) -> None:
        """Add the option of a dataclass field; without its default the field is only set where it is typed."""
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        argument = {key: value for key, value in item.metadata["argument"].items() if key != "flag"}
        if isinstance(default, bool) and "action" not in argument and "nargs" not in argument:
            argument["action"] = "store_true"
        elif "action" not in argument and "type" not in argument:
            argument["type"] = type(default)
        argument |= {"dest": item.name, "help": item.metadata["help"]}
        argument["default"] = default if has_default else argparse.SUPPRESS
        action = self.add_argument(flag_of(item), *item.metadata["flags"], **argument)
        known = self.own_flags if item.metadata["is_own"] else self.upstream_flags
        known |= dict.fromkeys(action.option_strings, item.name)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as ``argparse`` does, abbreviations spelled out before."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)  # what stands behind it is no flag
        return super().parse_known_args([*map(self.spelled_out, words[:end]), *words[end:]], namespace)

    def spelled_out(self, word: str) -> str:
        """Return the flag that ``word`` (perhaps with ``=value``) begins; other words are returned as they are."""
        start, *value = word.split("=", 1)
        if not start.startswith("--") or start in self.upstream_flags or start in self.own_flags:
            return word
        for flags in (self.upstream_flags, self.own_flags):
            matches = {name: flag for flag, name in flags.items() if flag.startswith(start)}
            if matches:
                return "=".join([*matches.values(), *value]) if len(matches) == 1 else word
        return word


def option(default: Any, help: str, *flags: str, is_own: bool = False, is_idle: bool = False, **argument: Any) -> Any:
    """Declare a dataclass field that is also a command-line option.

    Args:
        default: default value; a list is copied for every instance.
        help: one line for ``--help``.
        flags: further spellings. The first one is always ``--field-name``.
        is_own: upstream lacks it; see :func:`own_option`.
        is_idle: it has no effect; see :func:`idle_option`.
        argument: keywords for ``argparse.add_argument`` (``type``, ``nargs``, ``choices``, ``const`` …).
    """
    metadata = {"help": help, "flags": flags, "is_own": is_own, "is_idle": is_idle, "argument": argument}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def own_option(default: Any, help: str, *flags: str, **argument: Any) -> Any:
    """Declare an option that upstream lacks: it never makes an abbreviation of upstream's options ambiguous."""
    return option(default, help, *flags, is_own=True, **argument)


def idle_option(default: Any, reason: str = "", *flags: str, **argument: Any) -> Any:
    """Declare an option of upstream that is accepted without effect, which is told to those who type it."""
    help_text = f"accepted without effect ({reason})" if reason else "accepted without effect"
    return option(default, help_text, *flags, is_idle=True, **argument)


def flag_of(item: Field) -> str:
    """Return the first spelling of the option that a dataclass field is."""
    return item.metadata["argument"].get("flag", "--" + item.name.replace("_", "-"))


def make_parser(options_class: type, description: str, *, has_defaults: bool = True) -> OptionParser:
    """Return a parser with one argument per field of ``options_class``; without defaults it gives what was typed."""
    parser = OptionParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=True
    )
    for item in fields(options_class):
        parser.add_field(item, has_default=has_defaults)
    return parser


def parse_options(options_class: type[Options], description: str, argv: Sequence[str] | None = None) -> Options:
    """Parse ``argv`` (default: the process's arguments); wrong values end the program with status 2 and a message.

    The result's attribute ``given`` names the fields that were typed, as opposed to left at their defaults. Typed
    options without effect are told in one line.
    """
    parser = make_parser(options_class, description)
    namespace = parser.parse_args(argv)
    given = frozenset(vars(make_parser(options_class, description, has_defaults=False).parse_args(argv)))
    try:
        options = options_class(**vars(namespace))
    except ValueError as error:
        parser.error(str(error))
    options.given = given
    idle = [flag_of(item) for item in fields(options_class) if item.metadata["is_idle"] and item.name in given]
    if idle:
        LOGGER.warning(f"accepted without effect: {', '.join(idle)}")
    return options


def end_like_interrupt(*names: str) -> None:
    """Let signals (``SIGTERM``, the system's request to end; ``SIGHUP``, a closed terminal) do what Ctrl+C does.

    A signal that was meant to be ignored (``nohup``) still is. Outside of the main thread nothing can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in names:
        number = getattr(signal, name, None)  # SIGHUP is missing on Windows
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def run_script(main: Callable[[], int | None], *, leaves_at_once: bool = False) -> None:
    """Run a script's ``main`` and exit with its status; a refused input is told in one line instead of a traceback.

    Set ``YOLO_DEBUG=1`` to see the traceback as well. ``leaves_at_once`` is for scripts that close all they open:
    see :func:`leave`.
    """
    gc.set_threshold(COLLECTED_FROM)
    try:
        status = main()
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):  # pressed again: what listens to the log takes a moment
            LOGGER.error("interrupted")
        status = 130
    except (ValueError, OSError, ImportError, ArithmeticError, MemoryError) as error:
        if os.environ.get("YOLO_DEBUG"):
            traceback.print_exc()
        LOGGER.error(f"{error} (YOLO_DEBUG=1 shows where)")
        status = 1
    if leaves_at_once:
        leave(status or 0)
    sys.exit(status or 0)


def leave(status: int) -> None:
    """End the process without taking apart what it has loaded, 0.15 s and more with torch.

    Threads are waited for and what was registered with ``atexit`` is called, as always. Returns where what was written
    cannot be delivered: Python's own ending says so.
    """
    with contextlib.suppress(KeyboardInterrupt):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)
