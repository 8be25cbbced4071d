"""What a run shows while it trains: running means, monitor.csv, results.csv, TensorBoard, the progress line.

Sums are kept on the device. Nothing here waits for it except :meth:`Monitor.flush` (one transfer every few steps, which
also makes the clock read beside it meaningful).
"""

from __future__ import annotations

import csv
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.files import append_line, write_text_atomic
from utils.log import LOGGER
from utils.train.gpu_sampler import GpuSampler, summarise, utilisation_map
from utils.train.health import HealthCheck, HealthyRanges
from utils.train.readings import (
    EXTRA_COLUMNS,
    LOSS_NAMES,
    MONITOR_COLUMNS,
    RESULT_COLUMNS,
    SIZE_COLUMNS,
    DeviceSums,
    Reading,
    ratio,
)
from utils.train.throughput import flop_utilisation

HEADER = ("Epoch", "GPU_mem", *LOSS_NAMES, "Instances", "Size", "data_wait", "img/s")
SHORT_HEADER = ("Epoch", "Mem", "box", "cls", "dfl", "Boxes", "Size", "wait", "img/s")
COLUMN, SHORT_COLUMN = 11, 8  # characters; the first is upstream's
BAR_WIDTH = 28  # of the bar with its counter and times, behind the columns
HEAT_MAP_EPOCHS = 100  # the last ones: enough to see a trend, small enough for a browser
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class MonitorSetup:
    """What the monitor has to know of a run.

    ``forward_flops`` of one image and ``peak_tflops`` of the card give the utilisation of its arithmetic; 0 or None
    leaves that out. No advice is given in epochs that end within the first ``warmup_steps`` batches. Where steps are
    recorded as CUDA graphs, torch does not know how much of their memory is in use.
    """

    clip_limit: float = 10.0
    flush_every: int = 10
    forward_flops: float = 0.0
    peak_tflops: float | None = None
    warmup_steps: int = 0
    is_recorded: bool = False
    ranges: HealthyRanges = field(default_factory=HealthyRanges)


class Monitor:
    """Collect what happens in steps, flush it to monitor.csv and TensorBoard, sum it up per epoch.

    Per epoch: ``begin_epoch``, then ``add_batch`` and ``add_step`` as they come, ``flush`` when ``is_due``, and
    ``end_epoch``, whose result goes into results.csv. ``close`` at the end of the run.
    """

    def __init__(
        self,
        save_dir: Path,
        device: torch.device,
        setup: MonitorSetup,
        *,
        board: TensorBoardWriter | None = None,
        sampler: GpuSampler | None = None,
        resume_step: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.setup, self.board, self.clock = device, setup, board, clock
        self.table = MonitorTable(save_dir / "monitor.csv", resume_step)
        self.sampler = sampler or GpuSampler(None)
        self.sums = DeviceSums(device, setup.clip_limit)
        self.health = HealthCheck(setup.ranges)
        self.step = resume_step
        self.latest: dict[str, float] = {}
        self.skipped_in_a_row = 0  # longest chain of skipped optimizer steps in the last flush
        self.unstepped_images = 0  # whose gradients wait for the next optimizer step
        self.heat_rows: list[list[float]] = []
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch's sums and its clock."""
        self.epoch, self.total, self.window = epoch, Reading(), Reading()
        self.lrs: list[float] = []
        self.pending = 0
        self.sums.reset()
        self.epoch_start = self.window_start = self.clock()
        self.sampler.forget_before(self.epoch_start)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def add_batch(self, items: Tensor, *, images: int, wait_s: float = 0.0) -> None:
        """Record a batch: its loss items (3,) on the device, its size, the seconds its pictures were waited for."""
        self.sums.add_losses(items)
        self.window.images += images
        self.unstepped_images += images
        self.window.wait_s += wait_s
        self.step += 1
        self.pending += 1

    def add_step(self, norm: Tensor, lrs: Sequence[float]) -> None:
        """Record an optimizer step, skipped or not: raw gradient norm on the device, learning rate of each group."""
        self.sums.add_norm(norm)
        self.window.stepped_images += self.unstepped_images
        self.unstepped_images = 0
        self.lrs = list(lrs)

    @property
    def is_due(self) -> bool:
        """Tell whether enough batches have passed since the last flush."""
        return self.pending >= self.setup.flush_every

    def flush(self) -> dict[str, float]:
        """Read the device once, write a row of monitor.csv and TensorBoard scalars, and return the row."""
        reading, start = self._close_window()
        if not self.pending:
            return self.latest
        self.pending = 0
        self.latest = {
            **reading.columns(),
            **self._machine(start, reading),
            **self._learning_rates(),
            "step": self.step,
            "epoch": self.epoch,
        }
        self.skipped_in_a_row = int(reading.in_a_row)
        self.health.check_skipped(self.skipped_in_a_row)
        self.table.append(self.latest)
        if self.board is not None:
            named = {f"monitor/{name}": self.latest[name] for name in MONITOR_COLUMNS[2:] if name in self.latest}
            self.board.scalars(named, self.step)
        return self.latest

    def end_epoch(self) -> dict[str, float]:
        """Flush and return the epoch's columns of results.csv; warn where they leave the healthy ranges."""
        self.flush()
        self.total.elapsed_s = self.clock() - self.epoch_start
        record = {**self.total.columns(), **self._machine(self.epoch_start, self.total), **self._learning_rates()}
        if self.step > self.setup.warmup_steps:
            is_crowded = record["gpu/swing_gb"] > self.setup.ranges.memory_swing_gb
            self.health.check_epoch(record, others=self.sampler.others() if is_crowded else "")
        self._draw_utilisation()
        return {name: record[name] for name in (*RESULT_COLUMNS, *EXTRA_COLUMNS) if name in record}

    def progress(self, epochs: int, instances: int, side: int) -> str:
        """Return the text in front of the progress bar: means over the epoch, speed of the last flush."""
        is_wide = has_room()
        means = [self.total.columns()[name] for name in RESULT_COLUMNS[1:4]]
        memory = torch.cuda.memory_reserved(self.device) / GB if self.device.type == "cuda" else 0.0
        wait, speed = (self.latest.get(name, math.nan) for name in ("train/data_wait", "train/img_per_s"))
        return progress_line(
            self.epoch, epochs, memory, means, instances, side, data_wait=wait, img_per_s=speed, is_wide=is_wide
        )

    def close(self) -> None:
        """Stop sampling and say which warnings came more than once."""
        self.sampler.stop()
        self.health.warnings.summarise()

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run needs; its value goes into ``resume_step``."""
        return {"step": self.step}

    def _close_window(self) -> tuple[Reading, float]:
        """Read the device, add the window to the epoch and begin the next one; return the window and its start."""
        window, start = self.window, self.window_start
        window.add(self.sums.read())
        self.window, self.window_start = Reading(), self.clock()
        window.elapsed_s = self.window_start - start
        self.total.add(window)
        return window, start

    def _machine(self, start_s: float, reading: Reading) -> dict[str, float]:
        usage = summarise(self.sampler.since(start_s))
        speed = ratio(reading.images, reading.elapsed_s)
        is_cuda = self.device.type == "cuda"
        values = {
            "train/mfu": flop_utilisation(speed, self.setup.forward_flops, self.setup.peak_tflops),
            "gpu/utilisation": usage.mean,
            "gpu/utilisation_min": usage.lowest,
            "gpu/utilisation_max": usage.highest,
            "gpu_gb": torch.cuda.memory_reserved(self.device) / GB if is_cuda else 0.0,
            "gpu/allocated_gb": self._allocated_gb() if is_cuda else 0.0,
            "gpu/device_gb": usage.device_gb,
            "gpu/swing_gb": usage.swing_gb,
        }
        return {name: math.nan if value is None else value for name, value in values.items()}

    def _allocated_gb(self) -> float:
        return math.nan if self.setup.is_recorded else torch.cuda.max_memory_allocated(self.device) / GB

    def _learning_rates(self) -> dict[str, float]:
        return dict(zip(RESULT_COLUMNS[-3:], self.lrs, strict=False))

    def _draw_utilisation(self) -> None:
        samples = self.sampler.since(self.epoch_start)
        rates = [sample.utilisation for sample in samples if sample.utilisation is not None]
        if rates and self.board is not None:
            self.heat_rows = [*self.heat_rows, rates][-HEAT_MAP_EPOCHS:]
            self.board.image("gpu/utilisation_map", utilisation_map(self.heat_rows), self.epoch)
            self.board.histogram("gpu/utilisation", np.array(rates), self.epoch)


class MonitorTable:
    """``monitor.csv``: one row per flush, an empty cell where a figure is not known.

    A table left by an older run in a reused folder is replaced; with ``resume_step`` the rows up to it are kept.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self.path = path
        self.is_writable = True
        kept = rows_up_to(path, resume_step) if resume_step and path.exists() else []
        self.head = ",".join(MONITOR_COLUMNS)
        write_text_atomic(path, "\n".join([self.head, *kept]) + "\n")

    def append(self, values: Mapping[str, float]) -> None:
        """Add a row. Where that fails, a warning says so and the table ends; training has no need of it."""
        if not self.is_writable:
            return
        cells = (values.get(name, math.nan) for name in MONITOR_COLUMNS)
        try:
            restore_table(self.path, [self.head])
            append_line(self.path, ",".join("" if math.isnan(cell) else f"{cell:.6g}" for cell in cells))
        except OSError as error:
            self.is_writable = False
            LOGGER.warning(f"training goes on without further rows of this table: {error}")


class ResultsTable:
    """``results.csv``: one row per epoch, right-aligned in 20 characters.

    A table left by an older run in a reused folder is replaced; on ``resume_epoch`` the rows before it are kept.
    """

    def __init__(self, path: Path, resume_epoch: int = 0) -> None:
        self.path = path
        self.columns = (*RESULT_COLUMNS, *EXTRA_COLUMNS, *SIZE_COLUMNS)
        rows = rows_up_to(path, resume_epoch - 1) if resume_epoch and path.exists() else []
        self.lines = [",".join(f"{name:>20s}" for name in self.columns), *rows]
        write_text_atomic(path, "\n".join(self.lines) + "\n")

    def append(self, values: Mapping[str, float]) -> None:
        """Add a row; columns without a value hold 0, figures that are not known ``nan``."""
        row = ",".join(f"{values.get(name, 0.0):>20.5g}" for name in self.columns)
        restore_table(self.path, self.lines)
        append_line(self.path, row)
        self.lines.append(row)


def restore_table(path: Path, lines: Sequence[str]) -> None:
    """Write a table anew where somebody has deleted it or its folder: rows without a head mean nothing."""
    if not path.exists():
        LOGGER.warning(f"{path} is gone, deleted by another program; it is made anew")
        write_text_atomic(path, "\n".join(lines) + "\n")


def rows_up_to(path: Path, last: float) -> list[str]:
    """Read the rows below the head of a table whose first cell rises, up to ``last``; other lines are left out.

    Raises:
        OSError: it cannot be read; the message says what to do.
    """
    kept, highest = [], -math.inf
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError as error:
        raise type(error)(f"{path} cannot be read ({error.strerror}); move it away, then resume again") from error
    for line in lines:
        with suppress(ValueError):  # a line that was cut when the machine lost power, perhaps within its first number
            if highest < (first := float(line.split(",")[0])) <= last:
                kept.append(line)
                highest = first
    return kept


def read_results(path: str | Path) -> dict[str, list[float]]:
    """Read a results table as columns of numbers; cells that are empty or missing in a row are NaN."""
    with open(path, encoding="utf-8", newline="") as handle:
        rows = [row for row in csv.reader(handle, skipinitialspace=True) if row]
    header = [name.strip() for name in rows[0]]
    cells = [[*row, *[""] * (len(header) - len(row))] for row in rows[1:]]
    return {name: [float(row[index] or "nan") for row in cells] for index, name in enumerate(header)}


class TensorBoardWriter:
    """Scalars, images and histograms for TensorBoard where that package is installed; silent otherwise.

    No model graph is written: tracing would run the training model on invented pictures and disturb its batch norms.
    """

    def __init__(self, folder: Path) -> None:
        self.writer = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        try:
            self.writer = SummaryWriter(str(folder))
            LOGGER.info(f"TensorBoard: tensorboard --logdir {folder.parent}")
        except Exception as error:  # an optional logger must not end a run
            LOGGER.warning(f"TensorBoard is off: {error}")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write all known ``values`` at ``step``."""
        for name, value in values.items():
            if not math.isnan(value):
                self._write("add_scalar", name, value, step)

    def image(self, name: str, image_rgb: np.ndarray, step: int) -> None:
        """Write a picture, (H, W, 3) uint8."""
        self._write("add_image", name, image_rgb, step, dataformats="HWC")

    def histogram(self, name: str, values: np.ndarray, step: int) -> None:
        """Write how often the ``values`` (n,) occur."""
        self._write("add_histogram", name, values, step)

    def close(self) -> None:
        """Flush and close; a full disk is told, it must not end a run."""
        self._write("close")

    def _write(self, method: str, *arguments: Any, **keywords: Any) -> None:
        if self.writer is None:
            return
        try:
            getattr(self.writer, method)(*arguments, **keywords)
        except Exception as error:  # a full disk or a missing package must not end a run
            LOGGER.warning(f"TensorBoard is off from here: {type(error).__name__}: {error}")
            self.writer = None


def has_room(columns: int | None = None) -> bool:
    """Tell whether a terminal of so many columns (default: this one) holds the wide progress line and the bar."""
    if columns is None:
        columns = shutil.get_terminal_size((200, 24)).columns
    return columns >= COLUMN * len(HEADER) + BAR_WIDTH


def progress_header(*, is_wide: bool = True) -> str:
    """Return the line above the progress bar: upstream's seven right-aligned columns and two of ours."""
    if is_wide:
        return "".join(f"{name:>{COLUMN}s}" for name in HEADER)
    return "".join(f"{name:>{SHORT_COLUMN}s}" for name in SHORT_HEADER)


def progress_line(
    epoch: int,
    epochs: int,
    memory_gb: float,
    means: Sequence[float],
    instances: int,
    side: int,
    *,
    data_wait: float = math.nan,
    img_per_s: float = math.nan,
    is_wide: bool = True,
) -> str:
    """Return the text in front of the progress bar; figures that are not known show as a dash."""
    width, digits = (COLUMN, 4) if is_wide else (SHORT_COLUMN, 3)
    cells = [
        f"{epoch}/{epochs - 1}",
        f"{memory_gb:.3g}G",
        *(f"{value:.{digits}g}" for value in (*means,)),
        f"{instances}",
        f"{side}",
        "-" if math.isnan(data_wait) else f"{data_wait:.0%}",
        "-" if math.isnan(img_per_s) else f"{img_per_s:.4g}",
    ]
    return "".join(f"{cell:>{width}s}" for cell in cells)
