"""Find objects in pictures and videos: ``python detect_dual.py --weights best.pt --source pictures``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from utils.cli import end_like_interrupt, run_script
from utils.options import DetectOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Detect as the command line says; return 0 when at least one input was processed."""
    options = DetectOptions.from_cli(argv)
    # after parsing, so that --help answers without loading torch
    from utils.deploy.detector import Detector

    end_like_interrupt("SIGTERM", "SIGHUP")  # otherwise videos would lack the index that players need
    return Detector(options).run().exit_code


def run(**keywords: Any):  # noqa: ANN201 - DetectionSummary, whose module loads torch
    """Detect with options given as keywords, for example ``run(weights=["best.pt"], source="pictures")``."""
    from utils.deploy.detector import Detector

    options = DetectOptions(**keywords)
    return Detector(options).run()


if __name__ == "__main__":
    run_script(main)
