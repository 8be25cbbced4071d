"""How scripts end: asked by the system, as with Ctrl+C; and at once, without anything being lost."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from utils.files import REPO_ROOT

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


LEAVING = """
import atexit, sys, threading, time
from utils.cli import run_script

class Kept:
    def __del__(self):
        print("taken apart", file=sys.stderr)

kept = Kept()

def late():
    time.sleep(0.3)
    print("thread")

def main():
    threading.Thread(target=late).start()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    atexit.register(print, "registered")
    print("done")
    {how}

run_script(main, leaves_at_once={at_once})
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("return 3", 3),
        ("return None", 0),
        ("raise ValueError('no such thing')", 1),
        ("raise KeyboardInterrupt", 130),
        ("sys.exit(4)", 4),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_leaving_at_once_keeps_all_but_the_taking_apart(how: str, status: int, at_once: bool) -> None:
    script = [sys.executable, "-c", LEAVING.format(how=how, at_once=at_once)]
    ended = subprocess.run(script, cwd=REPO_ROOT, capture_output=True, text=True, timeout=50)
    assert ended.returncode == status
    assert ended.stdout.split() == ["done", "thread", "registered"]
    assert "Traceback" not in ended.stderr
    if not how.startswith("sys.exit"):
        assert ("taken apart" in ended.stderr) != at_once


@pytest.mark.parametrize("at_once", [True, False])
def test_output_that_nobody_reads_is_not_passed_over(at_once: bool) -> None:
    script = [sys.executable, "-c", LEAVING.format(how="return 0", at_once=at_once)]
    kept_back = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    started = subprocess.Popen(
        script, cwd=REPO_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=kept_back
    )
    started.stdout.close()
    _, said = started.communicate(timeout=50)
    assert started.returncode == 120 and "BrokenPipeError" in said  # as Python itself ends
