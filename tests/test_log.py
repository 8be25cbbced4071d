"""Lines of the logger on streams that cannot show every sign."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from utils.log import LOGGER


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
@pytest.mark.parametrize("name", ["图.jpg", "é.jpg", "caf\udce9.jpg", "plain.jpg", "🐟.png"], ids=ascii)
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
def test_no_line_is_lost_for_a_sign_that_cannot_be_shown(
    monkeypatch: pytest.MonkeyPatch, encoding: str, name: str, level: int
) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stderr" if level == logging.ERROR else "stdout", stream)
    record = LOGGER.makeRecord("yolov9", level, "", 0, f"found {name}, 2 red", (), None)
    LOGGER.handlers[0].handle(record)  # not through the logger: what pytest collects has to be UTF-8
    shown = written.getvalue().decode(encoding)
    assert "found " in shown and shown.endswith(", 2 red\n")
    assert name.encode(encoding, "backslashreplace").decode(encoding) in shown
