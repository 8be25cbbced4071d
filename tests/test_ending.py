"""Scripts that the system asks to end: what they were doing ends as with Ctrl+C."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WORK = {  # what a script calls to do its work, and a command line
    "val_dual": ("utils.evaluate.tasks.evaluate", ["--weights", "best.pt"]),
    "detect_dual": ("utils.deploy.detector.Detector", ["--weights", "best.pt"]),
}


@pytest.fixture
def usual_signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal there")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("script", list(WORK))
def test_a_request_to_end_does_what_ctrl_c_does(
    script: str, name: str, monkeypatch: pytest.MonkeyPatch, usual_signals: None, tmp_path: Path
) -> None:
    place, words = WORK[script]
    is_tidied = []

    def work(*_: object) -> None:
        try:
            if signal.getsignal(getattr(signal, name)) is not signal.SIG_DFL:  # which would end the tests
                os.kill(os.getpid(), getattr(signal, name))
                time.sleep(5)
        finally:
            is_tidied.append(True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, work)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(script).main(words)
    assert is_tidied
