"""The comparison with another program: it is started, watched by its results table, and stopped."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from bench import compare
from utils.train.gpu_sampler import GpuSampler

PROGRAM = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1]) / "exp"
folder.mkdir(parents=True)
with open(folder / "results.csv", "w") as table:
    table.write("epoch, loss\\n")
    for epoch in range(int(sys.argv[2])):
        time.sleep(0.3)
        table.write(f"{epoch}, 1.0\\n")
        table.flush()
print("over", flush=True)
time.sleep(float(sys.argv[3]))
"""


def start(tmp_path: Path, rows: int, rest_s: float, *, epochs: int) -> compare.Outcome:
    program = tmp_path / "other.py"
    program.write_text(PROGRAM, encoding="utf-8")
    project = tmp_path / "project"
    command = [sys.executable, str(program), str(project), str(rows), str(rest_s)]
    return compare.watch(
        command, tmp_path, project, epochs=epochs, sampler=GpuSampler(None), log=tmp_path / "output.txt"
    )


def test_epochs_are_the_times_between_rows_and_the_program_is_stopped(tmp_path: Path) -> None:
    outcome = start(tmp_path, rows=4, rest_s=600, epochs=4)
    assert len(outcome.epochs_s) == 3
    assert all(seconds > 0.2 for seconds in outcome.epochs_s)
    assert outcome.utilisation is None


def test_a_program_that_ends_too_early_is_shown_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"wrote 2 rows.*at least 3 epochs[\s\S]*over"):
        start(tmp_path, rows=2, rest_s=0, epochs=4)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such folder"):
        compare.main(["--checkout", str(tmp_path / "missing")])


def test_both_are_measured_on_the_same_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "other.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "data.yaml").write_text("train: a.txt\nval: a.txt\nnames: [x]\n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("a.jpg\nb.jpg\n", encoding="utf-8")
    for name in ("a.jpg", "b.jpg"):
        cv2.imwrite(str(tmp_path / name), np.zeros((32, 32, 3), np.uint8))
    given = []
    signature = inspect.signature(compare.train_e2e.measure_ways)

    def note(*arguments: object) -> list[str]:
        given.append(signature.bind(*arguments).arguments)
        return ["ours: fast"]

    monkeypatch.setattr(compare.train_e2e, "measure_ways", note)
    command = "{python} other.py {project} {epochs} 600 {workers}"
    words = ["--checkout", str(tmp_path), "--command", command, "--data", str(tmp_path / "data.yaml")]
    compare.main([*words, "--workers", "2", "--epochs", "2"])
    assert given[0]["data"] == str(tmp_path / "data.yaml") and given[0]["arguments"].workers == [2]
    assert tmp_path.name in capsys.readouterr().out


def test_flags_of_the_own_measurement_go_through() -> None:
    arguments = compare.parse(["--checkout", "x", "--batch", "32", "--make", "64"])
    assert (arguments.ours.batch, arguments.ours.make, arguments.name) == (32, 64, "")
