"""Running means, gradient log, results table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from utils.train.monitor import (
    EXTRA_COLUMNS,
    RESULT_COLUMNS,
    GradientLog,
    ResultsTable,
    RunningMean,
    progress_header,
    progress_line,
    read_results,
)


def test_running_mean() -> None:
    mean = RunningMean(2, torch.device("cpu"))
    assert mean.values() == [0.0, 0.0]
    for values in ([1.0, 4.0], [3.0, 8.0]):
        mean.add(torch.tensor(values))
    assert mean.values() == [2.0, 6.0]


def test_gradient_log_counts_clipped_and_non_finite_steps() -> None:
    log = GradientLog(10.0)
    for norm in (2.0, 30.0, float("inf"), 4.0, float("nan")):
        log.add(torch.tensor(norm))
    summary = log.summary()
    assert summary["train/grad_norm"] == pytest.approx(12.0)
    assert summary["train/grad_norm_max"] == 30.0
    assert summary["train/clipped"] == pytest.approx(1 / 3)
    assert summary["train/skipped"] == 2.0
    assert GradientLog(10.0).summary()["train/grad_norm"] == 0.0


def test_results_table_keeps_upstreams_columns_first(tmp_path: Path) -> None:
    table = ResultsTable(tmp_path / "results.csv")
    table.append({"epoch": 0, "train/box_loss": 1.23456789, "x/lr2": 0.01, "gpu_gb": 2.5})
    lines = (tmp_path / "results.csv").read_text().splitlines()
    header = lines[0].split(",")
    assert [name.strip() for name in header] == list(RESULT_COLUMNS + EXTRA_COLUMNS)
    assert {len(name) for name in header} == {20, 24} or all(len(name) >= 20 for name in header)
    assert lines[1].split(",")[1] == f"{1.2346:>20}"
    assert RESULT_COLUMNS[:8] == (
        "epoch",
        "train/box_loss",
        "train/cls_loss",
        "train/dfl_loss",
        "metrics/precision",
        "metrics/recall",
        "metrics/mAP_0.5",
        "metrics/mAP_0.5:0.95",
    )
    columns = read_results(tmp_path / "results.csv")
    assert columns["train/box_loss"] == [1.2346]
    assert columns["gpu_gb"] == [2.5]


def test_a_reused_folder_starts_a_new_table_and_a_resumed_run_continues_its_own(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    table = ResultsTable(path)
    for epoch in range(4):
        table.append({"epoch": epoch})
    ResultsTable(path, resume_epoch=2).append({"epoch": 2, "x/lr0": 0.5})
    assert read_results(path)["epoch"] == [0, 1, 2]
    assert read_results(path)["x/lr0"] == [0, 0, 0.5]
    ResultsTable(path).append({"epoch": 0})
    assert read_results(path)["epoch"] == [0]


def test_progress_columns_line_up() -> None:
    line = progress_line(3, 100, 12.34, [1.5, 2.25, 0.125], 321, 640)
    assert len(progress_header()) == len(line) == 77
    assert line.split() == ["3/99", "12.3G", "1.5", "2.25", "0.125", "321", "640"]
