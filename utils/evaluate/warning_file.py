"""``warnings.json``: every warning of a run, how often it came, and when first. The run report shows them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.files import write_text_atomic
from utils.log import LOGGER

FILE_NAME = "warnings.json"
MAX_KINDS = 200  # different texts that are kept; a run that says more repeats itself in other words


class WarningRecorder(logging.Handler):
    """Listens to the project's log until ``close`` or the next recorder; what comes before the folder exists is kept.

    recorder = WarningRecorder()
    ...                              # warnings are kept in memory
    recorder.write_to(run_folder)    # and from here on in run_folder/warnings.json
    recorder.close()
    """

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.entries: dict[str, dict[str, Any]] = {}
        self.folder: Path | None = None
        self.after_error: Callable[[], object] | None = None  # called when an error, the end of a run, was noted
        for earlier in [handler for handler in LOGGER.handlers if isinstance(handler, WarningRecorder)]:
            earlier.close()  # of a run that was broken off: what is said from now on is not its business
        LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; a disk that is full or gone does not end a run."""
        text = record.getMessage().strip()
        if text not in self.entries and len(self.entries) >= MAX_KINDS:
            return
        first = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        entry = self.entries.setdefault(text, {"text": text, "count": 0, "first": first})
        entry["count"] += 1
        self._write()
        if record.levelno >= logging.ERROR and self.after_error is not None:
            self.after_error()

    def write_to(self, folder: str | Path, *, keep: bool = False) -> None:
        """Write to ``folder`` from here on; ``keep`` what an earlier part of the same run left there."""
        self.folder = Path(folder)
        earlier = {entry["text"]: entry for entry in read_warnings(folder)} if keep else {}
        for text, entry in self.entries.items():
            if text in earlier:
                entry = {**earlier[text], "count": earlier[text]["count"] + entry["count"]}
            earlier[text] = entry
        self.entries = earlier
        self._write()

    def close(self) -> None:
        """Listen no longer."""
        LOGGER.removeHandler(self)
        super().close()

    def _write(self) -> None:
        if self.folder is None:
            return
        try:
            text = json.dumps(list(self.entries.values()), indent=1, ensure_ascii=False)
            write_text_atomic(self.folder / FILE_NAME, text + "\n")
        except OSError:  # nothing to say it with: a warning would come here again
            self.folder = None


def load_warnings(path: str | Path) -> list[dict[str, Any]]:
    """Return the warnings in a file as text, count, first.

    Raises:
        OSError, ValueError: it cannot be read, or has another form.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        return [{"text": str(e["text"]), "count": int(e["count"]), "first": str(e["first"])} for e in entries]
    except (TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError("it should hold a list of text, count and first") from error


def read_warnings(folder: str | Path) -> list[dict[str, Any]]:
    """Return the warnings kept in ``folder``; none where the file is absent or unreadable."""
    try:
        return load_warnings(Path(folder) / FILE_NAME)
    except (OSError, ValueError):
        return []
