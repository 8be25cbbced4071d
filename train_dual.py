"""Train a detector: ``python train_dual.py --data data.yaml --cfg yolov9-s.yaml --weights ''``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from utils.cli import end_like_interrupt, run_script
from utils.options import TrainOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says."""
    options = TrainOptions.from_cli(argv)
    # after parsing, so that --help answers without loading torch
    from utils.train.profiling import profile_training
    from utils.train.trainer import Trainer

    end_like_interrupt("SIGTERM", "SIGHUP")  # the run says how to go on, also when the terminal is closed
    if options.profile_loader:
        profile_training(options)
    else:
        Trainer(options).fit()
    return 0


def run(**keywords: Any):  # noqa: ANN201 - ValResult, whose module loads torch
    """Train with options given as keywords, for example ``run(data="data.yaml", cfg="gelan-t.yaml", epochs=3)``."""
    from utils.train.trainer import Trainer

    return Trainer(TrainOptions(**keywords)).fit()


if __name__ == "__main__":
    run_script(main)
