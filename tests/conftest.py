"""Fixtures and marker rules shared by all tests."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from scripts.make_shapes import make_shapes

REPO_ROOT = Path(__file__).resolve().parents[1]
# tests assert results, never how long something takes: a busy machine would fail them
settings.register_profile("results", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("results")


@pytest.hookimpl(hookwrapper=True)
def pytest_report_to_serializable(report: object) -> Iterator[None]:
    """Spell out what no other process can be told: file names that are no text stand in what a test has logged."""
    outcome = yield
    outcome.force_result(_spelt_out(outcome.get_result()))


def _spelt_out(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _spelt_out(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_spelt_out(item) for item in value)
    return value


def pytest_configure() -> None:
    """Let signals mean what they mean in a terminal.

    A background job ignores Ctrl+C, one under ``nohup`` the end of the terminal, and so would all that tests start.
    """
    usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    for name, handler in usual.items():
        number = getattr(signal, name, None)  # SIGHUP is missing on Windows
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` where no CUDA device answers."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # here, so that collecting tests of plain files does not wait for it

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def new_threads() -> Callable[[], list[str]]:
    """Return a function that lists the names of the threads started since the test began and still alive.

    A plain count would also see threads of earlier tests that end meanwhile.
    """
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All log messages of a test."""
    from utils.log import LOGGER

    seen: list[str] = []
    monkeypatch.setattr(LOGGER, "handle", lambda record: seen.append(record.getMessage()))
    LOGGER.setLevel(logging.INFO)
    return seen


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Let a GPU compute float32 as such and always in the same way; other tests may have chosen faster ones."""
    import torch  # as above

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    saved = cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32
    cudnn.allow_tf32 = cudnn.benchmark = matmul.allow_tf32 = False
    cudnn.deterministic = True
    yield
    cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32 = saved


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with reference material beside the repository (or the one named by YOLO_SHARED)."""
    folder = Path(os.environ.get("YOLO_SHARED") or REPO_ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no reference material at {folder} (set YOLO_SHARED to its folder)")
    return folder


@pytest.fixture(scope="session")
def golden(shared_dir: Path) -> Callable[[str], Path]:
    """Return a function that maps ``"ops/nms.npz"`` to that reference file, or skips where it is absent."""

    def find(name: str) -> Path:
        file = shared_dir / "golden" / name
        if not file.exists():
            pytest.skip(f"no reference file {file}")
        return file

    return find


@pytest.fixture(scope="session")
def shapes_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data YAML of a small rendered picture set: 24 train, 8 val, 4 test, 128 px, 3 classes."""
    folder = tmp_path_factory.mktemp("shapes")
    return make_shapes(folder, {"train": 24, "val": 8, "test": 4}, size=128, seed=0, num_classes=3)
