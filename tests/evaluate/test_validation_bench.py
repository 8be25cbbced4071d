"""Rate of validation: what a pass consists of, and when its pictures are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import validation
from tests.reference.tiny import save_tiny_dual
from utils.data.loader import EpochLoader
from utils.log import LOGGER

NUMBER = r"(-?[\d.]+)"


@pytest.fixture(autouse=True)
def loud_again() -> Iterator[None]:
    """The program silences the log of its process."""
    level = LOGGER.level
    yield
    LOGGER.setLevel(level)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ([], ["begin", "rest"] * 3),
        (["--cold"], ["rest", "begin"] * 3),
        (["--kept"], ["rest", "begin", "rest", "rest"]),
    ],
)
def test_a_pass_and_its_parts(
    how: list[str],
    expected: list[str],
    shapes_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    steps, begin = [], EpochLoader.begin
    monkeypatch.setattr(validation, "WARM_UP", 1)
    monkeypatch.setattr(validation.time, "sleep", lambda _: steps.append("rest"))
    monkeypatch.setattr(EpochLoader, "begin", lambda loader: (steps.append("begin"), begin(loader))[1])
    weights = save_tiny_dual(tmp_path / "tiny.pt")
    words = ["--data", str(shapes_dataset), "--weights", str(weights), "--img", "64", "--batch", "5", "--device", "cpu"]
    validation.main([*words, "--workers", "0", "--passes", "2", *how])
    assert steps == expected
    line = capsys.readouterr().out.strip().splitlines()[-1]
    median, least, most = map(float, re.search(rf"median {NUMBER} img/s \({NUMBER}-{NUMBER}\)", line).groups())
    assert 0 < least <= median <= most
    names = ("waiting", "copying", "network", "suppression", "matching")
    assert min(float(re.search(rf"{NUMBER} {name}", line)[1]) for name in names) >= 0
