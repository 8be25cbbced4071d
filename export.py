"""Write a trained detector as TorchScript or ONNX, beside its weights.

python export.py --weights runs/train/exp/weights/best.pt --include onnx torchscript --imgsz 640 640 --simplify
"""

from __future__ import annotations

from utils.cli import run_script
from utils.deploy.exporter import export
from utils.log import LOGGER
from utils.options import ExportOptions


def main() -> int:
    """Export what the command line asks for; return 1 if any requested format failed."""
    files, failures = export(ExportOptions.from_cli())
    LOGGER.info(f"{len(files)} file(s) written, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    run_script(main)
