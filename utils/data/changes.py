"""Whether a data set is still the one that a run was started with, told from what its data report holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from utils.data.cache_folder import data_set_of
from utils.data.scan import ScanResult


def fingerprint(scan: ScanResult) -> dict[str, str]:
    """Digests of the pictures (names below their common folder, sizes of the files) and of their labels."""
    root = data_set_of(scan.im_files) if len(scan) else ""
    pictures = hashlib.sha256(b"\0".join(os.fsencode(path[len(root) :]) for path in scan.im_files))
    pictures.update(scan.file_bytes.tobytes())
    labels = hashlib.sha256()
    for array in (scan.labels.values, scan.labels.offsets, scan.points.values, scan.points.offsets):
        labels.update(np.ascontiguousarray(array).tobytes())
    return {"pictures": pictures.hexdigest()[:16], "labels": labels.hexdigest()[:16]}


def changes(earlier_report: Path, reports: Mapping[str, Mapping]) -> list[str]:
    """One line for each split that differs from an earlier data report; none where that cannot be read."""
    try:
        earlier = json.loads(earlier_report.read_text(encoding="utf-8"))
        pairs = [(split, earlier[split], now) for split, now in reports.items() if split in earlier]
        return [line for split, before, now in pairs if (line := _change(split, before, now))]
    except (OSError, ValueError, KeyError, TypeError):  # of another version, or damaged
        return []


def _change(split: str, before: Mapping, now: Mapping) -> str:
    if before["fingerprint"] == now["fingerprint"]:
        return ""
    counts = [
        f"{now[key]:,} {key if key == 'objects' else 'pictures'} instead of {before[key]:,}"
        for key in ("used", "objects")
        if before[key] != now[key]
    ]
    if not counts:
        what = [name for name, digest in now["fingerprint"].items() if before["fingerprint"][name] != digest]
        counts = [f"as many as before, but other {' and '.join(what)}"]
    return (
        f"{split}: the data set has changed since this run was last started: {', '.join(counts)}. It goes on with what "
        "is there now; figures from before and after do not compare"
    )
