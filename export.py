"""Write a trained detector as TorchScript or ONNX, beside its weights.

python export.py --weights runs/train/exp/weights/best.pt --include onnx torchscript --imgsz 640 640 --simplify
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

from utils.cli import run_script
from utils.log import LOGGER
from utils.options import ExportOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Export what the command line asks for; return 1 if any requested format failed."""
    options = ExportOptions.from_cli(argv)
    # after parsing, so that --help answers without loading torch
    from utils.deploy.exporter import export

    files, failures = export(options)
    LOGGER.info(f"{len(files)} file(s) written, {len(failures)} failed")
    return 1 if failures else 0


def run(**keywords: Any) -> list[str]:
    """Export with options given as keywords; return the files written. A format that fails is logged and left out."""
    from utils.deploy.exporter import export

    return [str(file) for file in export(ExportOptions(**keywords))[0]]


def end_cleanly(number: int, _: object) -> None:
    """Leave by an exception where a signal would end the process at once, so that half-written files are removed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_cleanly)
    run_script(main)
