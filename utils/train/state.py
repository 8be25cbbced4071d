"""From a running trainer to a checkpoint and back: everything that a resumed run needs to go on bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from models.checkpoint import Checkpoint
from utils.files import increment_path
from utils.log import LOGGER
from utils.train.optim import load_optimizer_state

if TYPE_CHECKING:
    from utils.train.trainer import Trainer


def make_checkpoint(trainer: Trainer, metrics: Mapping[str, float]) -> Checkpoint:
    """Return the run's state after ``trainer.epoch``; ``metrics`` are that epoch's figures.

    Data order and augmentation follow from (seed, epoch), so no random state has to be kept.
    """
    return Checkpoint(
        kind="training",
        yaml=trainer.model.yaml,
        nc=trainer.spec.nc,
        names=dict(trainer.spec.names),
        stride=[float(stride) for stride in trainer.model.stride],
        epoch=trainer.epoch,
        best_fitness=trainer.best_fitness,
        model=trainer.model.state_dict(),
        ema=trainer.ema.ema.state_dict(),
        updates=trainer.ema.updates,
        optimizer=trainer.optimizer.state_dict(),
        scaler=trainer.scaler.state_dict() or None,
        trainer={
            "stopper": trainer.stopper.state_dict(),
            "step_index": trainer.step_index,
            "closing_epoch": trainer.closing_epoch,
            "final_epoch": trainer.final_epoch,
            "class_maps": [float(value) for value in trainer.class_maps],
        },
        hyp=trainer.hyp.to_dict(),
        opt=trainer.recorded_options,
        date=datetime.now().isoformat(timespec="seconds"),
        metrics={name: float(value) for name, value in metrics.items()},
        data={
            "yaml": str(trainer.spec.yaml_file),
            "train_images": len(trainer.train_set),
            "train_boxes": len(trainer.train_set.labels.values),
            "val_images": len(trainer.val_set),
        },
    )


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put optimizer, average, loss scale, early stopping and the run's own plan back to ``checkpoint``."""
    load_optimizer_state(trainer.optimizer, checkpoint.optimizer)
    if checkpoint.ema is not None:
        trainer.ema.ema.load_state_dict(checkpoint.ema)
    trainer.ema.updates = checkpoint.updates
    if checkpoint.scaler and trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(checkpoint.scaler)
    state = checkpoint.trainer or {}
    known = (checkpoint.data or {}).get("val_images", len(trainer.val_set))
    trainer.is_other_data = known != len(trainer.val_set)
    trainer.best_fitness = 0.0 if trainer.is_other_data else checkpoint.best_fitness or 0.0
    if "stopper" in state and not trainer.is_other_data:
        trainer.stopper.load_state_dict(state["stopper"])
    trainer.step_index = state.get("step_index", trainer.step_index)
    if state.get("closing_epoch", -1) >= 0:  # early stopping had begun the closing epochs
        trainer.closing_epoch, trainer.final_epoch = state["closing_epoch"], state["final_epoch"]
    if len(state.get("class_maps", ())) == trainer.spec.nc:
        trainer.class_maps = state["class_maps"]


def set_best_aside(best: Path) -> None:
    """Keep the best weights so far under another name: their fitness comes from other validation pictures."""
    aside = increment_path(best.with_name("best_before.pt"))
    best.rename(aside)
    LOGGER.warning(
        "the validation pictures are others than before, so the search for the best epoch begins anew; "
        f"the best weights so far are kept as {aside}"
    )
