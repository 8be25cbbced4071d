"""Fixtures of the evaluation's tests."""

from __future__ import annotations

import logging

import pytest

from utils.log import LOGGER


@pytest.fixture
def log(monkeypatch, caplog):
    """Records of the project's logger."""
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, logger=LOGGER.name)
    return caplog
