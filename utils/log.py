"""The project's logger and progress bars. Every library module reports through these, never through ``print``."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

BAR_FORMAT = "{l_bar}{bar:10}{r_bar}"
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
STYLES = {  # name -> number that terminals know it by
    **{name: 30 + index for index, name in enumerate(COLOURS)},
    **{f"bright_{name}": 90 + index for index, name in enumerate(COLOURS)},
    "bold": 1,
    "underline": 4,
    "end": 0,
}


class _BarSafeHandler(logging.Handler):
    """Write records to stdout, errors to stderr, without tearing a progress bar that is being drawn.

    A stream that is closed or whose reader has gone (``| head``) is passed over: the work goes on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
        if stream is None:
            return
        with contextlib.suppress(OSError, ValueError):
            tqdm.write(writable(self.format(record), stream), file=stream)
            stream.flush()


def writable(text: str, stream: TextIO) -> str:
    """Return ``text`` with what the stream's encoding has no sign for (a file's name, say) as ``\\u4e2d``."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class _PrefixFormatter(logging.Formatter):
    """Plain text for information, a word in front of everything more serious."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname}: {text}"


def _make_logger() -> logging.Logger:
    logger = logging.getLogger("yolov9")
    if not logger.handlers:
        handler = _BarSafeHandler()
        handler.setFormatter(_PrefixFormatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("YOLO_LOG_LEVEL", "INFO").upper())
        logger.propagate = False
    return logger


LOGGER = _make_logger()


class _PassedOver:
    """A stream whose failures to write (a closed terminal, ``2>&1 | head``) are passed over: the work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __eq__(self, other: object) -> bool:  # so that tqdm knows the terminal and clears the bar below a line
        return self.stream == getattr(other, "stream", other)

    def __hash__(self) -> int:
        return hash(self.stream)


def progress(
    iterable: Iterable[Any] | None = None, *, total: int | None = None, desc: str = "", unit: str = "it", **kwargs: Any
) -> tqdm:
    """Return a progress bar of the project's one format; further keywords go to ``tqdm``.

    Where the output is no terminal the bar is redrawn rarely, so that log files stay short.
    """
    kwargs.setdefault("disable", sys.stderr is None or sys.stderr.closed)
    is_terminal = not kwargs["disable"] and sys.stderr.isatty()
    kwargs.setdefault("mininterval", 0.2 if is_terminal else 10.0)
    kwargs.setdefault("file", None if kwargs["disable"] else _PassedOver(sys.stderr))
    kwargs.setdefault("bar_format", BAR_FORMAT)
    kwargs.setdefault("dynamic_ncols", True)
    return tqdm(iterable, total=total, desc=desc, unit=unit, **kwargs)


class CountedWarnings:
    """Say each kind of warning once, count its repetitions and sum them up at the end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def warn(self, kind: str, message: str) -> None:
        """Log ``message`` the first time ``kind`` occurs; later ones are only counted."""
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            LOGGER.warning(message)

    def summarise(self) -> None:
        """Log how often each repeated kind occurred, then forget the counts."""
        for kind, count in self.counts.items():
            if count > 1:
                LOGGER.warning(f"{kind}: {count} times")
        self.counts.clear()


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``number`` with ``noun``, in the plural (by default with an s) where it should be: 1 epoch, 2 epochs."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def first_line(error: BaseException) -> str:
    """Return what an error says in its first line; its kind where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def colorstr(*words: object) -> str:
    """Return text with a terminal's signs for colour and style around it: ``colorstr("red", "bold", "text")``.

    A text alone becomes blue and bold. For users' scripts; our own lines are plain, as they end up in files too.

    Raises:
        ValueError: a colour that terminals do not know.
    """
    *styles, text = words if len(words) > 1 else ("blue", "bold", *words)
    for style in styles:
        if style not in STYLES:
            raise ValueError(f"colour {style!r} is unknown; known are {', '.join(STYLES)}")
    return "".join(f"\033[{STYLES[style]}m" for style in styles) + f"{text}\033[{STYLES['end']}m"
