"""The weights that the authors of YOLOv9 published: which names there are, and fetching one that is missing.

This is the only place that opens a network connection. It does so for these names only, never in offline mode, and
what arrives is read by the safe reader before it gets its name.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from models.safe_reader import WeightsFileError, read_torch_file
from utils.files import atomic_write
from utils.log import LOGGER, progress

RELEASE = "https://github.com/WongKinYiu/yolov9/releases/download/v0.1"
ADDRESS_VARIABLE = "YOLO_WEIGHTS_URL"
"""Environment variable with another address in place of RELEASE, for a mirror."""
OFFLINE_VARIABLE = "YOLO_OFFLINE"

SIZES = "tsmce"
PUBLISHED: Mapping[str, str] = {
    **{f"yolov9-{size}.pt": "" for size in SIZES},
    **{f"yolov9-{size}-converted.pt": "" for size in SIZES},
    **{f"gelan-{size}.pt": "" for size in SIZES},
    "gelan-c-det.pt": "",
}
"""File name -> SHA-256 of its content, empty where it is not known."""

TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 20


def find_weights(name: str | Path, *, offline: bool = False) -> Path:
    """Return the weights file ``name``; one of the published files is fetched to that place if it is missing.

    ``offline``, or the environment variable YOLO_OFFLINE with any value but 0, forbids fetching.

    Raises:
        FileNotFoundError: no such file, and none that may be fetched.
        WeightsFileError: what was fetched is not a weights file.
        OSError: the file could not be fetched or written; the message says how to get it by hand.
    """
    path = Path(name)
    if path.exists():
        if not (path.is_file() or path.is_dir()):  # reading would wait for ever for whoever writes into it
            raise WeightsFileError(f"{path} is a pipe or a device, not a file; write what it gives to a file first")
        return path
    if path.name not in PUBLISHED:
        raise FileNotFoundError(
            f"weights file {path} does not exist (looked in {path.absolute().parent}); {_neighbours(path)}"
        )
    if offline or os.environ.get(OFFLINE_VARIABLE, "0") not in ("", "0"):
        raise FileNotFoundError(
            f"weights file {path} does not exist, and offline mode forbids to fetch it. {_by_hand(path)}"
        )
    return fetch(path)


def _neighbours(path: Path) -> str:
    """Say what else there is that was probably meant."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either; check --weights"
    names = [file.name for file in folder.iterdir() if file.suffix == path.suffix]
    similar = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"there is {' and '.join(similar)}; check --weights" if similar else "check --weights"


def fetch(path: Path) -> Path:
    """Fetch the published file of ``path``'s name to ``path``, under a temporary name until it is complete and read."""
    address = _address(path.name)
    LOGGER.info(f"{path} does not exist; fetching it from {address} (--offline or {OFFLINE_VARIABLE}=1 forbids this)")
    try:
        with atomic_write(path) as temporary:
            _download(address, temporary)
            _verify(temporary, path.name)
    except WeightsFileError as error:
        raise WeightsFileError(f"{address}: {error}. {_by_hand(path)}") from None
    except (OSError, HTTPException) as error:  # urllib's errors are OSErrors
        reason = getattr(error, "reason", None) or error
        raise OSError(f"{path} could not be fetched ({reason}). {_by_hand(path)}") from None
    LOGGER.info(f"{path}: {path.stat().st_size / 1e6:.1f} MB, readable")
    return path


def _address(name: str) -> str:
    base = os.environ.get(ADDRESS_VARIABLE) or RELEASE
    if not base.startswith(("https://", "http://")):
        raise ValueError(f"{ADDRESS_VARIABLE}={base}: expected an address that begins with https://")
    return f"{base.rstrip('/')}/{name}"


def _by_hand(path: Path) -> str:
    return f"Get {_address(path.name)} by other means and put it there as {path.absolute()}"


def _download(address: str, target: Path) -> None:
    request = urllib.request.Request(address, headers={"User-Agent": "yolov9-train"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response, target.open("wb") as stream:
        total = _expected_bytes(response)
        with progress(total=total or None, desc="fetching", unit="B", unit_scale=True) as bar:
            while chunk := response.read(CHUNK_BYTES):
                stream.write(chunk)
                bar.update(len(chunk))
        if total and stream.tell() != total:
            raise OSError(f"the connection ended after {stream.tell():,} of {total:,} bytes")


def _expected_bytes(response: HTTPResponse) -> int:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else 0


def _verify(file: Path, name: str) -> None:
    """Compare the checksum where it is known, and read the file as data."""
    expected = PUBLISHED[name]
    if expected:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest != expected:
            raise WeightsFileError(f"the file has SHA-256 {digest}, expected {expected}")
    try:
        read_torch_file(file)
    except WeightsFileError as error:
        raise WeightsFileError(f"what came {str(error).removeprefix(str(file)).lstrip(': ')}") from None
