"""Room for prepared batches: loader processes hand them over in shared memory, which containers often limit to 64 MB.

Also what a process holds and has used, for messages and measurements.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from utils.data.memory import GIB, UNKNOWN, available_memory_bytes, size_text
from utils.log import LOGGER

SHARED_MEMORY = Path("/dev/shm")
PREFETCH = 2  # batches a worker may be ahead
BATCH_SLACK = 1.3  # shared memory a batch needs beyond its pixels: other shapes of rectangular batches, labels
IN_HAND = 2  # batches that the trainer holds: the one it works on and the one being copied to the device


def shared_bytes(workers: int, batch_bytes: int, prefetch: int = PREFETCH) -> int:
    """Shared memory that a loader uses at most."""
    return round((workers * prefetch + IN_HAND) * batch_bytes * BATCH_SLACK) if workers else 0


def fit_shared_memory(
    workers: int, batch_bytes: int, *, share: float = 1.0, prefix: str = "", free_bytes: int | None = None
) -> tuple[int, int]:
    """Workers and prefetched batches per worker that there is room for; says so where it had to reduce.

    share is the part of the free space that this loader may plan with: training and validation loaders live at the
    same time, so each takes half. free_bytes replaces the measured free space of /dev/shm.
    """
    if not workers:
        return 0, 0
    what = "shared memory (/dev/shm)"
    if free_bytes is None:
        if not SHARED_MEMORY.is_dir():
            return workers, PREFETCH
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
        if available_memory_bytes() < free_bytes:  # shared memory takes its pages from main memory
            what, free_bytes = "main memory", available_memory_bytes()
    slots = int(share * free_bytes / (batch_bytes * BATCH_SLACK)) - IN_HAND
    kept_workers = max(0, min(workers, slots))
    prefetch = min(PREFETCH, slots // kept_workers) if kept_workers else 0
    if (kept_workers, prefetch) != (workers, PREFETCH):
        need = shared_bytes(workers, batch_bytes)
        part = f", of which this loader may use {share:.0%}" if share < 1 else ""
        LOGGER.warning(
            f"{prefix}{what} has {free_bytes / 2**20:.0f} MB free{part}, {workers} workers would use up to "
            f"{need / 2**20:.0f} MB: going on with {kept_workers} workers, {prefetch} batches ahead each. "
            + _remedy(what, need / share)
        )
    return kept_workers, prefetch


def _remedy(what: str, need: float) -> str:
    if what == "main memory":
        return "A smaller --batch, or no --cache, needs less"
    return f"A container gets more with --shm-size={max(1, round(need / GIB + 0.5))}g or --ipc=host"


def process_memory_bytes(pid: int | None = None, field: str = "VmRSS") -> int:
    """Memory of a process (default: this one) as the kernel counts it under `field`; 0 where unknown."""
    try:
        for line in (
            Path(f"/proc/{os.getpid() if pid is None else pid}/status").read_text(encoding="utf-8").splitlines()
        ):
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def processor_seconds(pid: int | None = None) -> float:
    """Processor time that a process (default: this one) has used; 0 where unknown."""
    try:
        text = Path(f"/proc/{os.getpid() if pid is None else pid}/stat").read_text(encoding="utf-8")
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def memory_figures(worker_pids: Iterable[int] = ()) -> str:
    """One line for messages: what is free, and what this process and its loader processes hold."""
    workers = [size for size in map(process_memory_bytes, worker_pids) if size]
    parts = [f"{size_text(available_memory_bytes())} of main memory free"] if available_memory_bytes() < UNKNOWN else []
    if SHARED_MEMORY.is_dir():
        parts.append(f"{size_text(shutil.disk_usage(SHARED_MEMORY).free)} of shared memory free")
    if process_memory_bytes():
        parts.append(f"this process holds {size_text(process_memory_bytes())}")
    if workers:
        held = size_text(sum(workers))
        parts.append(f"its {len(workers)} living loader processes {held} (shared parts counted in each)")
    return ", ".join(parts)
