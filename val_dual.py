"""Measure a detector on a labelled data set: ``python val_dual.py --data data.yaml --weights best.pt``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from utils.cli import end_like_interrupt, run_script
from utils.options import ValOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the command line says."""
    options = ValOptions.from_cli(argv)
    # after parsing, so that --help answers without loading torch
    from utils.evaluate.tasks import evaluate

    end_like_interrupt("SIGTERM", "SIGHUP")  # otherwise loader processes and their temporary folders would be left
    results = evaluate(options)
    # files that could not be written were named; the figures are printed all the same
    return int(any(result.unwritten for result in (results if isinstance(results, list) else [results])))


def run(**keywords: Any):  # noqa: ANN201 - ValResult or a list of them, whose module loads torch
    """Measure with options given as keywords, for example ``run(data="data.yaml", weights="best.pt")``."""
    from utils.evaluate.tasks import evaluate

    return evaluate(ValOptions(**keywords))


if __name__ == "__main__":
    run_script(main)
