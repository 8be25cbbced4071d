"""What a run shows while it trains: running means, the results table, TensorBoard scalars.

Means are kept on the device; nothing here waits for the GPU except :meth:`RunningMean.values`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from utils.log import LOGGER

LOSS_NAMES = ("box_loss", "cls_loss", "dfl_loss")
# Readers of results.csv use positions: upstream's columns first, ours after them.
RESULT_COLUMNS = (
    "epoch",
    *(f"train/{name}" for name in LOSS_NAMES),
    "metrics/precision",
    "metrics/recall",
    "metrics/mAP_0.5",
    "metrics/mAP_0.5:0.95",
    *(f"val/{name}" for name in LOSS_NAMES),
    "x/lr0",
    "x/lr1",
    "x/lr2",
)
EXTRA_COLUMNS = (
    "train/grad_norm",
    "train/grad_norm_max",
    "train/clipped",
    "train/skipped",
    "train/img_per_s",
    "gpu_gb",
)
HEADER = ("Epoch", "GPU_mem", *LOSS_NAMES, "Instances", "Size")


class RunningMean:
    """Mean of equally shaped tensors, accumulated where they live."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.total = torch.zeros(size, device=device)
        self.count = 0

    def add(self, values: Tensor) -> None:
        """Add one observation of shape (size,)."""
        self.total += values.detach().float()
        self.count += 1

    def values(self) -> list[float]:
        """Return the means; waits for the device."""
        return (self.total / max(self.count, 1)).tolist()


class GradientLog:
    """Raw gradient norms of an epoch's optimizer steps, and how many were clipped or skipped."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.norms: list[Tensor] = []

    def add(self, norm: Tensor) -> None:
        """Record the norm of one optimizer step before clipping; a 0-d tensor, left on its device."""
        self.norms.append(norm.detach())

    def summary(self) -> dict[str, float]:
        """Return mean and maximum of the finite norms, the clipped share, and the number of non-finite ones."""
        if not self.norms:
            return dict.fromkeys(EXTRA_COLUMNS[:4], 0.0)
        norms = torch.stack(self.norms).float().cpu()
        finite = norms[torch.isfinite(norms)]
        has_any = finite.numel() > 0
        values = (
            finite.mean().item() if has_any else float("nan"),
            finite.max().item() if has_any else float("nan"),
            (finite > self.limit).float().mean().item() if has_any else 0.0,
            float(norms.numel() - finite.numel()),
        )
        return dict(zip(EXTRA_COLUMNS[:4], values, strict=True))


class ResultsTable:
    """``results.csv``: one row per epoch, right-aligned in 20 characters.

    A table left by an older run in a reused folder is replaced; on ``resume_epoch`` the rows before it are kept.
    """

    def __init__(self, path: Path, resume_epoch: int = 0) -> None:
        self.path = path
        self.columns = RESULT_COLUMNS + EXTRA_COLUMNS
        rows = self._rows_before(resume_epoch) if resume_epoch and path.exists() else []
        lines = [",".join(f"{name:>20s}" for name in self.columns), *rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _rows_before(self, epoch: int) -> list[str]:
        lines = self.path.read_text(encoding="utf-8").splitlines()[1:]
        return [line for line in lines if line.strip() and int(float(line.split(",")[0])) < epoch]

    def append(self, values: Mapping[str, float]) -> None:
        """Add a row; columns without a value hold 0."""
        cells = [f"{values.get(name, 0.0):>20.5g}" for name in self.columns]
        with open(self.path, "a", encoding="utf-8") as handle:
            handle.write(",".join(cells) + "\n")


def read_results(path: str | Path) -> dict[str, list[float]]:
    """Read a results table as columns of numbers."""
    with open(path, encoding="utf-8", newline="") as handle:
        rows = list(csv.reader(handle, skipinitialspace=True))
    header = [name.strip() for name in rows[0]]
    return {name: [float(row[index]) for row in rows[1:]] for index, name in enumerate(header)}


class TensorBoardWriter:
    """Scalars for TensorBoard where that package is installed; silent otherwise."""

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
        """Write all ``values`` at ``step``."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        if self.writer is not None:
            self.writer.close()


def progress_header() -> str:
    """Return the line above the progress bar: seven right-aligned columns."""
    return ("%11s" * len(HEADER)) % HEADER


def progress_line(epoch: int, epochs: int, memory_gb: float, means: Sequence[float], instances: int, side: int) -> str:
    """Return the text in front of the progress bar."""
    return ("%11s" * 2 + "%11.4g" * 5) % (f"{epoch}/{epochs - 1}", f"{memory_gb:.3g}G", *means, instances, side)
