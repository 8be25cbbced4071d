"""The project's logger and progress bars. Every library module reports through these, never through ``print``."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

BAR_FORMAT = "{l_bar}{bar:10}{r_bar}"


class _BarSafeHandler(logging.Handler):
    """Write records to stdout without tearing a progress bar that is being drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except (OSError, ValueError):  # stdout closed or a broken pipe: nothing left to tell anybody
            self.handleError(record)


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


def progress(
    iterable: Iterable[Any] | None = None, *, total: int | None = None, desc: str = "", unit: str = "it", **kwargs: Any
) -> tqdm:
    """Return a progress bar of the project's one format; further keywords go to ``tqdm``.

    Where the output is no terminal the bar is redrawn rarely, so that log files stay short.
    """
    kwargs.setdefault("mininterval", 0.2 if sys.stderr.isatty() else 10.0)
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
