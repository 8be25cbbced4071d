"""The program that measures pictures put together on the GPU: it runs, and says what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import augment as bench
from tests.data.plan_kit import write_textured
from utils.log import LOGGER


@pytest.mark.slow
def test_both_pools_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "setLevel", lambda _: None)
    images = write_textured(tmp_path, [(80, 80)] * 12)
    words = f"--pictures {images} --workers 0 --imgsz 64 --batch 4 --slots 8 --seconds 0.1 --runs 2 --device cpu"
    assert bench.main(words.split()) == 0
    whole, ring = (line for line in capsys.readouterr().out.splitlines() if "feeding" in line)
    assert whole.startswith("whole (12 pictures")
    assert ring.startswith("ring (8 pictures")
    for line in (whole, ring):
        assert "ms a batch of 4" in line
        assert "CPU ms a picture" in line
        assert float(line.split("feeding ")[1].split()[0]) > 0


def test_nothing_to_load(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse([])
    assert "--make N" in capsys.readouterr().err


def test_time_of_work_on_the_cpu() -> None:
    calls: list[int] = []
    assert bench.milliseconds(torch.device("cpu"), lambda: calls.append(0)) >= 0
    assert len(calls) == 2
