"""Rate of validation: its parts add up to a pass, and what is measured is what ``val_dual.py`` finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import val_dual
from bench import validation
from tests.reference.tiny import save_tiny_dual

NUMBER = r"([\d.]+)"


@pytest.mark.parametrize("how", [[], ["--cold"], ["--kept"]])
def test_parts_of_a_pass_add_up(
    how: list[str], shapes_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(validation, "WARM_UP", 1)
    weights = save_tiny_dual(tmp_path / "tiny.pt")
    words = ["--data", str(shapes_dataset), "--weights", str(weights), "--img", "64", "--batch", "5", "--device", "cpu"]
    validation.main([*words, "--workers", "2", "--passes", "2", "--rest", "0", *how])
    line = capsys.readouterr().out.strip().splitlines()[-1]
    median, least, most = map(float, re.search(rf"median {NUMBER} img/s \({NUMBER}-{NUMBER}\)", line).groups())
    assert 0 < least <= median <= most
    names = ("waiting", "copying", "network", "suppression", "matching")
    parts = [float(re.search(rf"{NUMBER} {name}", line)[1]) for name in names]
    whole = float(re.search(rf"{NUMBER} ms a pass", line)[1])
    assert min(parts) >= 0 and abs(sum(parts) - whole) <= 3  # each is rounded
    found = val_dual.run(
        data=str(shapes_dataset), weights=[str(weights)], imgsz=64, batch_size=5, device="cpu", project=str(tmp_path)
    )
    assert f"mAP50 {found.map50:.3f}" in line
