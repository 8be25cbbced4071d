"""Fixtures that several tests of the data path share."""

from __future__ import annotations

import logging

import pytest

from utils.log import LOGGER


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All log messages of a test."""
    seen: list[str] = []
    monkeypatch.setattr(LOGGER, "handle", lambda record: seen.append(record.getMessage()))
    LOGGER.setLevel(logging.INFO)
    return seen
