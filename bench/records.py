"""RECORDS.md: one row per measurement, with everything that is needed to repeat it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
RECORDS = REPO_ROOT / "bench" / "RECORDS.md"
PACKAGES = ("torch", "numpy", "opencv-python-headless", "opencv-python")
HEADER = """# Records

Measured by the programs of this folder (`--record` adds a row). Compare rows of one machine only; the load is the
number of busy processes when the measurement began, so a row with a high load says little.

| date | commit | hardware | versions | command | figures | runs |
|---|---|---|---|---|---|---|
"""


def append_record(figures: str, runs: int, *, command: str | None = None, file: Path = RECORDS) -> str:
    """Add a row to the table and return it; command defaults to how this process was started."""
    fields = [
        datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        commit(),
        hardware(),
        versions(),
        f"`{command_line() if command is None else command}`",
        figures,
        str(runs),
    ]
    row = "| " + " | ".join(field.replace("|", "/").replace("\n", " ") for field in fields) + " |\n"
    text = file.read_text(encoding="utf-8") if file.exists() else HEADER
    file.write_text(text.rstrip("\n") + "\n" + row, encoding="utf-8")
    return row


def commit() -> str:
    """Short name of the commit, with a plus where files differ from it; '?' outside a git checkout."""
    words = [["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
    try:
        runs = [subprocess.run(["git", *w], cwd=REPO_ROOT, capture_output=True, text=True, check=True) for w in words]
    except (OSError, subprocess.CalledProcessError):
        return "?"
    return runs[0].stdout.strip() + ("+" if runs[1].stdout.strip() else "")


def hardware() -> str:
    """Processor, usable cores and the load at this moment."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{name}, {cores} cores{load}"


def versions() -> str:
    """Python and the packages that matter."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def command_line() -> str:
    """How this process was started, without the places of this machine."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(REPO_ROOT).as_posix() if script.is_relative_to(REPO_ROOT) else script.name
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return " ".join(["python -m", name.removesuffix(".py").replace("/", "."), *words])
