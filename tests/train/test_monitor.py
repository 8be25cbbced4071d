"""Running means, gradient log, tables, TensorBoard, and the monitor that fills them."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from utils.train import monitor as monitor_module
from utils.train.gpu_sampler import Sample
from utils.train.monitor import (
    EXTRA_COLUMNS,
    MONITOR_COLUMNS,
    RESULT_COLUMNS,
    Monitor,
    MonitorSetup,
    MonitorTable,
    ResultsTable,
    TensorBoardWriter,
    has_room,
    progress_header,
    progress_line,
    read_results,
)
from utils.train.readings import MACHINE_COLUMNS, SIZE_COLUMNS, DeviceSums

CPU = torch.device("cpu")


def test_results_table_keeps_upstreams_columns_first(tmp_path: Path) -> None:
    table = ResultsTable(tmp_path / "results.csv")
    table.append({"epoch": 0, "train/box_loss": 1.23456789, "x/lr2": 0.01, "gpu_gb": 2.5})
    lines = (tmp_path / "results.csv").read_text().splitlines()
    header = lines[0].split(",")
    assert [name.strip() for name in header] == [*RESULT_COLUMNS, *EXTRA_COLUMNS, *SIZE_COLUMNS]
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


def test_on_a_narrow_terminal_the_line_leaves_room_for_the_bar() -> None:
    line = progress_line(
        119, 300, 143.7, [0.012345, 12.345, 1.2345], 12345, 1280, data_wait=0.5, img_per_s=1234.5, is_wide=False
    )
    assert len(progress_header(is_wide=False)) == len(line) == 72
    assert line.split() == ["119/299", "144G", "0.0123", "12.3", "1.23", "12345", "1280", "50%", "1234"]
    assert not has_room(80)
    assert not has_room(126)
    assert has_room(127)


def test_progress_columns_line_up() -> None:
    line = progress_line(3, 100, 12.34, [1.5, 2.25, 0.125], 321, 640, data_wait=0.034, img_per_s=512.345)
    assert len(progress_header()) == len(line) == 99
    assert line.split() == ["3/99", "12.3G", "1.5", "2.25", "0.125", "321", "640", "3%", "512.3"]
    assert progress_header().split()[:7] == [
        "Epoch",
        "GPU_mem",
        "box_loss",
        "cls_loss",
        "dfl_loss",
        "Instances",
        "Size",
    ]
    unknown = progress_line(3, 100, 0.0, [1.0, 1.0, 1.0], 1, 640)
    assert len(unknown) == 99 and unknown.split()[-2:] == ["-", "-"]


def test_columns_are_named_once() -> None:
    for columns in (RESULT_COLUMNS + EXTRA_COLUMNS, MONITOR_COLUMNS):
        assert len(set(columns)) == len(columns)
    assert set(MACHINE_COLUMNS) <= set(EXTRA_COLUMNS) <= set(MONITOR_COLUMNS)


def test_device_sums_leave_out_what_is_not_finite() -> None:
    sums = DeviceSums(CPU, clip_limit=10.0)
    for items in ([1.0, 2.0, 3.0], [3.0, float("nan"), 1.0], [3.0, 4.0, 5.0]):
        sums.add_losses(torch.tensor(items))
    for norm in (2.0, float("inf"), float("nan"), 30.0, float("inf")):
        sums.add_norm(torch.tensor(norm, dtype=torch.float64))
    reading = sums.read()
    assert reading.losses == [4.0, 6.0, 8.0] and reading.batches == 2
    assert (reading.norm, reading.steps, reading.clipped, reading.skipped) == (32.0, 2, 1, 3)
    assert (reading.norm_max, reading.in_a_row) == (30.0, 2)
    sums.add_norm(torch.tensor(float("nan")))
    assert sums.read().in_a_row == 2  # the chain goes on across readings
    assert sums.read().batches == 0


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeSampler:
    """Three looks at a card in each stretch that is asked for."""

    def __init__(self, rates: tuple[float, ...] = (90.0, 95.0, 100.0), foreign: int = 0) -> None:
        self.rates, self.foreign, self.is_stopped = rates, foreign, False

    def since(self, time_s: float) -> list[Sample]:
        used = [8_000_000_000 + number * self.foreign for number in range(len(self.rates))]
        return [Sample(time_s, rate, size, 6_000_000_000) for rate, size in zip(self.rates, used, strict=True)]

    def forget_before(self, time_s: float) -> None:
        pass

    def others(self) -> str:
        return "process 10 (2.0 GB)"

    def stop(self) -> None:
        self.is_stopped = True


class FakeBoard:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def scalars(self, values, step) -> None:
        self.calls.append(("scalars", values, step))

    def image(self, name, image, step) -> None:
        self.calls.append(("image", image, step))

    def histogram(self, name, values, step) -> None:
        self.calls.append(("histogram", values, step))


def run_epoch(monitor: Monitor, clock: Clock, epoch: int = 0, batches: int = 6, norm: float = 80.0) -> dict[str, float]:
    """Six batches of 16 images, half a second each, 40 ms of it waiting; a step after every second batch."""
    monitor.begin_epoch(epoch)
    for number in range(batches):
        clock.now += 0.5
        monitor.add_batch(torch.tensor([2.0, 1.0, 0.5]) + number, images=16, wait_s=0.04)
        if number % 2:
            monitor.add_step(torch.tensor(norm), [0.1, 0.01, 0.01])
        if monitor.is_due:
            monitor.flush()
    return monitor.end_epoch()


def test_monitor_writes_rows_and_sums_up_the_epoch(tmp_path: Path) -> None:
    clock, board, sampler = Clock(), FakeBoard(), FakeSampler()
    setup = MonitorSetup(flush_every=4, forward_flops=1e12, peak_tflops=960.0)
    monitor = Monitor(tmp_path, CPU, setup, board=board, sampler=sampler, clock=clock)
    record = run_epoch(monitor, clock)

    assert record["train/box_loss"] == pytest.approx(4.5)
    assert record["train/grad_norm"] == 80.0 and record["train/clipped"] == 1.0 and record["train/skipped"] == 0.0
    assert record["train/grad_norm_per_image"] == pytest.approx(80 / 32)
    assert record["train/box_cls_ratio"] == pytest.approx(4.5 / 3.5)
    assert record["train/img_per_s"] == pytest.approx(32.0)
    assert record["train/data_wait"] == pytest.approx(0.08)
    assert record["train/mfu"] == pytest.approx(0.1)
    assert record["gpu/utilisation"] == 95.0 and record["gpu/device_gb"] == 8.0
    assert record["x/lr0"] == 0.1
    assert set(record) <= set(RESULT_COLUMNS + EXTRA_COLUMNS)

    table = read_results(tmp_path / "monitor.csv")
    assert tuple(table) == MONITOR_COLUMNS
    assert table["step"] == [4, 6] and table["epoch"] == [0, 0]
    assert table["train/box_loss"] == pytest.approx([3.5, 6.5])
    assert table["train/img_per_s"] == pytest.approx([32, 32])
    assert [call[0] for call in board.calls] == ["scalars", "scalars", "image", "histogram"]
    assert all(name.startswith("monitor/") for name in board.calls[0][1])
    assert "8%" in monitor.progress(3, 40, 640)
    monitor.close()
    assert sampler.is_stopped


def test_monitor_without_a_card_knows_what_it_does_not_know(tmp_path: Path) -> None:
    clock = Clock()
    monitor = Monitor(tmp_path, CPU, MonitorSetup(), clock=clock)
    record = run_epoch(monitor, clock)
    assert math.isnan(record["gpu/utilisation"]) and math.isnan(record["train/mfu"])
    assert record["gpu_gb"] == 0.0
    cells = (tmp_path / "monitor.csv").read_text().splitlines()[1].split(",")
    assert cells[MONITOR_COLUMNS.index("gpu/utilisation")] == ""
    empty = run_epoch(monitor, clock, epoch=1, batches=0)
    assert math.isnan(empty["train/box_loss"])


def test_norm_per_image_counts_the_images_of_the_steps(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, CPU, MonitorSetup(flush_every=3), clock=Clock())
    monitor.sums.add_losses(torch.full((3,), 9.0))  # work before the epoch does not belong to it
    monitor.begin_epoch(0)
    for number in range(6):
        monitor.add_batch(torch.ones(3), images=16)
        if number in (1, 5):  # steps over 2 and over 4 batches
            monitor.add_step(torch.tensor(96.0), [0.1])
        if monitor.is_due:
            monitor.flush()
    record = monitor.end_epoch()
    assert record["train/grad_norm_per_image"] == pytest.approx(2 * 96 / 96)
    assert record["train/box_loss"] == 1.0
    assert read_results(tmp_path / "monitor.csv")["train/grad_norm_per_image"] == pytest.approx([3.0, 1.5])


def test_an_optimizer_step_after_the_last_flush_counts(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, CPU, MonitorSetup(flush_every=1), clock=Clock())
    monitor.begin_epoch(0)
    monitor.add_batch(torch.ones(3), images=4)
    monitor.flush()
    monitor.add_step(torch.tensor(5.0), [0.1])
    assert monitor.end_epoch()["train/grad_norm"] == 5.0


def test_monitor_warns_once_a_kind_and_not_in_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("utils.log.LOGGER.warning", said.append)
    clock = Clock()
    setup = MonitorSetup(flush_every=4, warmup_steps=6)
    sampler = FakeSampler(rates=(20.0, 30.0), foreign=2_000_000_000)
    monitor = Monitor(tmp_path, CPU, setup, sampler=sampler, clock=clock)
    run_epoch(monitor, clock, 0, norm=2000.0)
    assert said == []
    run_epoch(monitor, clock, 1, norm=2000.0)
    run_epoch(monitor, clock, 2, norm=2000.0)
    assert len(said) == 3, said
    text = "\n".join(said)
    assert "62.5 per image" in text and "2.0 GB" in text and "process 10" in text and "busy 25 %" in text
    assert max(monitor.health.warnings.counts.values()) == 2


def test_chain_of_skipped_steps_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("utils.log.LOGGER.warning", said.append)
    monitor = Monitor(tmp_path, CPU, MonitorSetup(), clock=Clock())
    for _ in range(21):
        monitor.add_batch(torch.ones(3), images=4)
        monitor.add_step(torch.tensor(float("inf")), [0.1])
    assert monitor.flush()["train/skipped"] == 21
    assert len(said) == 1 and "21 optimizer steps in a row" in said[0]
    assert monitor.skipped_in_a_row == 21


def test_monitor_table_is_replaced_or_continued(tmp_path: Path) -> None:
    path = tmp_path / "monitor.csv"
    for step in (10, 20, 30):
        table = MonitorTable(path, resume_step=step - 1)
        table.append({"step": step})
    MonitorTable(path, resume_step=20).append({"step": 25})
    assert read_results(path)["step"] == [10, 20, 25]
    MonitorTable(path)
    assert read_results(path)["step"] == []


def test_a_table_of_the_monitor_that_cannot_grow_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = MonitorTable(tmp_path / "monitor.csv")
    table.path.unlink()
    table.path.mkdir()
    with caplog.at_level(logging.WARNING), patch.object(monitor_module.LOGGER, "propagate", True):
        table.append({"step": 1})
        assert "monitor.csv could not be written" in caplog.text
        caplog.clear()
        table.append({"step": 2})
    assert not caplog.text


@pytest.mark.parametrize("rest", ["   7", "\0\0\0", "  nonsense,1"])
def test_rows_that_were_cut_are_left_out_on_resuming(tmp_path: Path, rest: str) -> None:
    results, monitor = ResultsTable(tmp_path / "results.csv"), MonitorTable(tmp_path / "monitor.csv")
    for number in range(3):
        results.append({"epoch": number})
        monitor.append({"step": number + 1})
    for table in (results, monitor):
        table.path.write_text(table.path.read_text() + rest)
    ResultsTable(results.path, resume_epoch=3)
    MonitorTable(monitor.path, resume_step=3)
    assert read_results(results.path)["epoch"] == [0, 1, 2]
    assert read_results(monitor.path)["step"] == [1, 2, 3]


def test_older_tables_with_fewer_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("  epoch,  a,  b\n  0,  1\n  1,  2,  3\n")
    table = read_results(path)
    assert table["a"] == [1, 2] and math.isnan(table["b"][0]) and table["b"][1] == 3


def test_a_failing_board_is_switched_off_with_one_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr("utils.log.LOGGER.warning", said.append)

    class Full:
        def add_scalar(self, *_arguments) -> None:
            raise OSError("No space left on device")

    board = TensorBoardWriter(tmp_path)
    board.close()
    board.writer = Full()
    board.scalars({"a": 1.0, "b": 2.0}, 0)
    assert len(said) == 1 and "No space left" in said[0]
    board.image("c", np.zeros((8, 8, 3), np.uint8), 0)
    board.close()


def test_board_holds_scalars_and_pictures_and_no_graph(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardWriter(tmp_path)
    board.scalars({"train/box_loss": 1.5, "gpu/utilisation": math.nan}, 3)
    board.image("map", np.zeros((8, 8, 3), np.uint8), 0)
    board.histogram("rates", np.array([10.0, 20.0]), 0)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["train/box_loss"]
    assert events.Tags()["images"] == ["map"] and events.Tags()["histograms"] == ["rates"]
    assert not events.Tags()["graph"]
    assert not [warning for warning in recwarn if "graph" in str(warning.message)]


@pytest.mark.gpu
def test_nothing_waits_for_the_card_between_flushes(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    monitor = Monitor(tmp_path, device, MonitorSetup(flush_every=1000))
    items, norm = torch.ones(3, device=device), torch.tensor(5.0, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            monitor.add_batch(items, images=4)
            monitor.add_step(norm, [0.1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    time.sleep(0.01)
    row = monitor.flush()
    assert row["train/box_loss"] == 1.0 and row["train/grad_norm"] == 5.0
    assert row["gpu/allocated_gb"] > 0


@pytest.mark.parametrize("is_folder_gone", [False, True])
def test_tables_that_somebody_has_deleted_are_made_anew_with_their_head(tmp_path: Path, is_folder_gone: bool) -> None:
    folder = tmp_path / "run"
    results, monitor = ResultsTable(folder / "results.csv"), MonitorTable(folder / "monitor.csv")
    results.append({"epoch": 0, "train/box_loss": 1.5})
    monitor.append({"step": 10})
    for table in (results, monitor):
        table.path.unlink()
    if is_folder_gone:
        folder.rmdir()
    results.append({"epoch": 1, "train/box_loss": 2.5})
    monitor.append({"step": 20})
    columns = read_results(results.path)
    assert columns["epoch"] == [0, 1] and columns["train/box_loss"] == [1.5, 2.5]
    assert read_results(monitor.path)["step"] == [20]


@pytest.mark.parametrize("cut", ["1", "1,0.5", "2"])
def test_a_number_that_was_cut_is_not_taken_for_an_earlier_row(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "results.csv"
    table = ResultsTable(path)
    for epoch in range(12):
        table.append({"epoch": epoch})
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(cut)  # of 12 or 20
    ResultsTable(path, resume_epoch=12)
    assert read_results(path)["epoch"] == list(range(12))


@pytest.mark.parametrize("table", [ResultsTable, MonitorTable])
def test_a_table_that_cannot_be_read_on_resuming_says_what_to_do(
    tmp_path: Path, table: type[ResultsTable] | type[MonitorTable]
) -> None:
    path = tmp_path / "table.csv"
    path.mkdir()
    with pytest.raises(OSError, match=r"table\.csv cannot be read .*; move it away, then resume again"):
        table(path, 3)
