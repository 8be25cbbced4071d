"""Loader processes that do not end by themselves: stopped, or caught in a call that never returns."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.data.loader_kit import probe_loader
from utils.data import workers as workers_module

REPO_ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system has no such signals")

# Two loaders, as in a training: the process tells of their workers, then waits for a batch that does not come.
SCRIPT = """
    import signal, sys
    from tests.data.loader_kit import probe_loader
    from utils.cli import run_script
    from utils.data import workers

    workers.END_GRACE_S = 0.5

    def main():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        loaders = [probe_loader(2, length=4000) for _ in range(2)]
        passes = [iter(loader) for loader in loaders]
        for batches in passes:
            next(batches)
        print(*(pid for loader in loaders for pid in loader.worker_pids()), flush=True)
        try:
            while True:
                for batches in passes:
                    next(batches)
        finally:
            for loader in loaders[: int(sys.argv[1])]:
                loader.close()

    run_script(main)
"""


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "closed"), [(signal.SIGTERM, 1), (signal.SIGINT, 2), (signal.SIGTERM, 0)])
def test_one_signal_ends_a_run_whose_workers_are_stopped(wanted: signal.Signals, closed: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(closed)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=REPO_ROOT, start_new_session=True, **pipes) as run:
        pids = [int(text) for text in run.stdout.readline().split()]
        try:
            assert len(pids) == 4
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(run.pid, wanted)
            output, _ = run.communicate(timeout=100)
            assert run.returncode == 130
            assert "interrupted" in output
            assert "Traceback" not in output
            assert not [pid for pid in pids if is_alive(pid)]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def test_closing_kills_a_stopped_worker_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "END_GRACE_S", 0.3)
    loader = probe_loader(2, length=400)
    next(iter(loader))
    pids, started = loader.worker_pids(), time.monotonic()
    os.kill(pids[0], signal.SIGSTOP)
    loader.close()
    assert not [pid for pid in pids if is_alive(pid)]
    assert time.monotonic() - started < 5  # of the ten that torch alone would wait before it gave up


def test_closing_leaves_sound_workers_their_time() -> None:
    loader = probe_loader(2, length=400)
    next(iter(loader))
    processes = list(loader._watch.processes)
    loader.close()
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_forked_process_leaves_the_workers_alone() -> None:
    loader = probe_loader(2, length=400)
    next(iter(loader))
    pids = loader.worker_pids()
    child = os.fork()
    if not child:  # what a worker of a later loader does when its copy of this one is collected
        with contextlib.suppress(BaseException), loader._watch.ending():
            pass
        os._exit(0)
    os.waitpid(child, 0)
    assert all(is_alive(pid) for pid in pids)
    next(iter(loader))
    loader.close()


LEFT_OPEN = """
    import os, signal, sys
    from tests.data.loader_kit import probe_loader

    loader = probe_loader(2)
    batches = iter(loader)
    next(batches)
    if sys.argv[1] == "cycle":
        loader.myself = loader
    if sys.argv[1] == "kept":
        sys.kept = loader  # is taken down last
    if sys.argv[1] == "error":
        raise RuntimeError("on purpose")
    if sys.argv[1] == "killed":
        for pid in loader.worker_pids():
            os.kill(pid, signal.SIGKILL)
    print("over")
"""


@pytest.mark.parametrize("kind", ["global", "cycle", "kept", "error", "killed"])
def test_a_program_that_leaves_a_loader_open_ends(kind: str, tmp_path: Path) -> None:
    """The loader is taken down with the interpreter, where a new thread would never begin to run.

    Nothing is left in the folder for temporary files, also where workers were killed.
    """
    command = [sys.executable, "-c", textwrap.dedent(LEFT_OPEN), kind]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, timeout=100, env=environment)
    assert not list(tmp_path.iterdir())
    assert done.returncode == (1 if kind == "error" else 0)
    assert ("on purpose" in done.stderr) if kind == "error" else (done.stdout == "over\n" and not done.stderr)
