"""What the tests of detection share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from utils.log import LOGGER


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged during the test."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    texts: list[str] = []
    collector = Collector()
    LOGGER.addHandler(collector)
    yield texts
    LOGGER.removeHandler(collector)
