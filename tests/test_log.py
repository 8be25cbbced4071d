"""Lines of the logger on streams that cannot show every sign."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from utils.log import LOGGER, first_line, progress


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


def test_a_bar_whose_reader_has_gone_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    assert list(progress(range(3), mininterval=0)) == [0, 1, 2]


def test_a_line_clears_the_bar_on_the_same_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    for _ in progress(range(2), mininterval=0):
        LOGGER.info("a line")
    lines = terminal.getvalue().replace("\x1b[A", "").replace("\r", "\n").split("\n")
    assert lines.count("a line") == 2  # none of them behind the rest of a bar


@pytest.mark.parametrize("text", ["one line", "\n one line \nand more", "one line\r\nmore\r\n"])
def test_the_first_line_of_an_error_is_what_is_told(text: str) -> None:
    assert first_line(RuntimeError(text)).strip() == "one line"


@pytest.mark.parametrize("silent", [RuntimeError(), ValueError(""), OSError("\n  ")], ids=repr)
def test_an_error_that_says_nothing_is_told_by_its_kind(silent: Exception) -> None:
    assert first_line(silent) == type(silent).__name__
