"""Find objects in pictures and videos: ``python detect_dual.py --weights best.pt --source pictures``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any

from utils.cli import run_script
from utils.options import DetectOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Detect as the command line says; return 0 when at least one input was processed."""
    options = DetectOptions.from_cli(argv)
    # after parsing, so that --help answers without loading torch
    from utils.deploy.detector import Detector

    if threading.current_thread() is threading.main_thread():
        # ended by the system like by Ctrl+C: otherwise videos would lack the index that players need
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    return Detector(options).run().exit_code


def run(**keywords: Any):  # noqa: ANN201 - DetectionSummary, whose module loads torch
    """Detect with options given as keywords, for example ``run(weights=["best.pt"], source="pictures")``."""
    from utils.deploy.detector import Detector

    options = DetectOptions(**keywords)
    return Detector(options).run()


if __name__ == "__main__":
    run_script(main)
