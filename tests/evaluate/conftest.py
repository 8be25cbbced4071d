"""Fixtures of the evaluation's tests."""

from __future__ import annotations

import logging

import pytest

from tests.evaluate.run_kit import make_run
from utils.log import LOGGER


@pytest.fixture
def log(monkeypatch, caplog):
    """Records of the project's logger."""
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, logger=LOGGER.name)
    return caplog


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished trainings of different length and size."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(folder / "first" / "exp"),
        make_run(folder / "second" / "exp", epochs=12, gain=0.7, imgsz=960, multi_scale=True),
    ]


@pytest.fixture(scope="module")
def browser():
    """A page in Chromium."""
    from tests.evaluate.browser import Browser, find_browser  # which needs a system of Unix's kind

    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with Browser(program) as page:
        yield page
