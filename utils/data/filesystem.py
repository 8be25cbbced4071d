"""On what kind of file system a path lies, and the plain form of a path.

Pictures on network disks are what training most often waits for.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

MOUNTS_FILE = Path("/proc/mounts")
# as the kernel names them; 9p is what virtual machines and WSL share folders with
_NETWORK_TYPES = frozenset(
    ("nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "gpfs", "beegfs",
     "glusterfs", "9p", "virtiofs", "davfs", "fuse")
)  # fmt: skip
_LOCAL_FUSE = frozenset(("fuse.lxcfs", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.portal", "fuse.gvfsd-fuse"))
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system: where, and of which type."""

    point: str
    kind: str

    @property
    def is_network(self) -> bool:
        """Whether reading a file means asking another machine (or a program that may do so)."""
        return self.kind in _NETWORK_TYPES or (self.kind.startswith("fuse.") and self.kind not in _LOCAL_FUSE)


def parse_mounts(text: str) -> list[Mount]:
    """Mounts in the order of a text such as /proc/mounts: device, mount point, type, options, two numbers."""
    mounts = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 3:
            point = _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), fields[1])
            mounts.append(Mount(point, fields[2]))
    return mounts


def mount_of(path: str | Path, mounts_text: str) -> Mount | None:
    """The mount that holds an absolute path: the longest mount point above it, of equals the last one mounted."""
    text = os.fspath(path)
    best: Mount | None = None
    for mount in parse_mounts(mounts_text):
        point = mount.point.rstrip("/")
        is_above = text == point or text.startswith(point + "/")
        if is_above and (best is None or len(point) >= len(best.point.rstrip("/"))):
            best = mount
    return best


def network_mount(path: str | Path) -> Mount | None:
    """The network file system a path lies on, or None for local disks and where the system does not tell."""
    try:
        text = MOUNTS_FILE.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    mount = mount_of(os.path.realpath(path), text)
    return mount if mount is not None and mount.is_network else None


def plain_path(path: str | Path) -> str:
    """Absolute path without '.' and '..', of the same file or folder; links are kept as they are named where they can.

    A link in front of '..' has to be followed: the system takes '..' from where it leads. Folders that do not exist are
    left out with the '..' behind them.
    """
    plain, *parts = Path(path).absolute().parts
    for part in parts:
        if part == os.pardir:
            plain = os.path.dirname(os.path.realpath(plain) if os.path.islink(plain) else plain)
        else:
            plain = os.path.join(plain, part)
    return plain


class PlainPaths:
    """`plain_path` of many paths, each of their folders looked at once."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}

    def of(self, path: str | Path) -> str:
        """Plain form of a path."""
        folder, name = os.path.split(path)
        if name in ("", os.curdir, os.pardir):
            return plain_path(path)
        if folder not in self._folders:
            self._folders[folder] = plain_path(folder)
        return os.path.join(self._folders[folder], name)
