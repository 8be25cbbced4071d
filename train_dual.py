"""Train a detector: ``python train_dual.py --data data.yaml --cfg yolov9-s.yaml --weights ''``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any

from utils.cli import run_script
from utils.options import TrainOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says."""
    options = TrainOptions.from_cli(argv)
    # after parsing, so that --help answers without loading torch
    from utils.train.profiling import profile_training
    from utils.train.trainer import Trainer

    if threading.current_thread() is threading.main_thread():
        end_like_interrupt()
    if options.profile_loader:
        profile_training(options)
    else:
        Trainer(options).fit()
    return 0


def end_like_interrupt() -> None:
    """Let the system's request to end and a closed terminal do what Ctrl+C does: the run says how to go on.

    A signal that was meant to be ignored (``nohup``) still is.
    """
    for name in ("SIGTERM", "SIGHUP"):  # the latter is missing on Windows
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def run(**keywords: Any):  # noqa: ANN201 - ValResult, whose module loads torch
    """Train with options given as keywords, for example ``run(data="data.yaml", cfg="gelan-t.yaml", epochs=3)``."""
    from utils.train.trainer import Trainer

    return Trainer(TrainOptions(**keywords)).fit()


if __name__ == "__main__":
    run_script(main)
