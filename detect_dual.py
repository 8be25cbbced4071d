"""Find objects in pictures and videos: ``python detect_dual.py --weights best.pt --source pictures``."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from utils.cli import end_like_interrupt, run_script
from utils.driver import begin_context
from utils.options import DetectOptions


def main(argv: Sequence[str] | None = None, *, is_script: bool = False) -> int:
    """Detect as the command line says; return 0 when at least one input was processed.

    A script of its own keeps what it loads out of the search for garbage, which would take 0.1 s.
    """
    options = DetectOptions.from_cli(argv)
    is_torch_file = all(Path(name).suffix == ".pt" for name in options.weights)
    if is_script:
        gc.disable()
        if is_torch_file:
            begin_context(options.device)  # beside the loading of torch
    # after parsing, so that --help answers without loading torch
    from utils.nms import rehearse_suppression
    from utils.runtime import foreseen_device, wake

    if is_torch_file:
        wake(foreseen_device(options.device), rehearse_suppression)  # beside the loading of what follows
    from utils.deploy.detector import Detector

    if is_script:
        gc.freeze()
        gc.enable()
    end_like_interrupt("SIGTERM", "SIGHUP")  # otherwise videos would lack the index that players need
    return Detector(options).run().exit_code


def run(**keywords: Any):  # noqa: ANN201 - DetectionSummary, whose module loads torch
    """Detect with options given as keywords, for example ``run(weights=["best.pt"], source="pictures")``."""
    from utils.deploy.detector import Detector

    options = DetectOptions(**keywords)
    return Detector(options).run()


if __name__ == "__main__":
    run_script(partial(main, is_script=True), leaves_at_once=True)
