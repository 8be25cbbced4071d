"""Files as ``torch.save`` writes them, around any pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path


def write_archive(path: Path, pickled: bytes, records: dict[str, bytes] | None = None) -> Path:
    """Write an archive with a pickle and with records by name, such as ``data/0``; return its path."""
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("archive/data.pkl", pickled)
        for name, content in (records or {}).items():
            target.writestr(f"archive/{name}", content)
    return path
