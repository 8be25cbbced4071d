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


@pytest.fixture(scope="module")
def browser():
    """A page in Chromium."""
    from tests.evaluate.browser import Browser, find_browser  # which needs a system of Unix's kind

    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with Browser(program) as page:
        yield page
