"""A whole training whose loader processes are started anew (``spawn``, as Windows and macOS do) instead of forked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from utils.options import TrainOptions
from utils.train.monitor import read_results
from utils.train.readings import MACHINE_COLUMNS
from utils.train.trainer import Trainer

REPO_ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import multiprocessing, sys
from train_dual import main

if __name__ == "__main__":  # a spawned process imports this file
    multiprocessing.set_start_method("spawn")
    status = main(sys.argv[1:])
    assert multiprocessing.get_start_method() == "spawn"
    sys.exit(status)
"""


@pytest.mark.slow
def test_spawned_workers_train_as_the_main_process_does(
    make_options: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    options = make_options(name="alone", mosaic=0.5)
    Trainer(options).fit()

    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    typed = f"--data {options.data} --cfg {options.cfg} --hyp {options.hyp} --project {options.project} --name spawned "
    typed += "--epochs 2 --batch 8 --img 64 --workers 2 --device cpu --noplots --mosaic 0.5"
    done = subprocess.run(
        [sys.executable, str(program), *typed.split()],
        cwd=REPO_ROOT,
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 workers" in done.stdout
    folder = Path(options.project)
    alone, spawned = (read_results(folder / name / "results.csv") for name in ("alone", "spawned"))
    for column, values in alone.items():
        if column not in MACHINE_COLUMNS:
            assert np.array_equal(values, spawned[column], equal_nan=True), column
