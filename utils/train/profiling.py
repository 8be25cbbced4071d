"""``--profile-loader``: some steps of a real training, timed part by part, in a folder that is thrown away."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace

import torch
from torch import Tensor

from utils.data.batching import Batch
from utils.data.prefetch import DevicePrefetcher, count_images
from utils.options import TrainOptions
from utils.runtime import autocast
from utils.train.batch_pass import prepare_images
from utils.train.probe import Diagnosis, StepParts, print_profile, profile_loader
from utils.train.trainer import Trainer


def profile_training(options: TrainOptions) -> list[Diagnosis]:
    """Run a few dozen steps of the training that ``options`` describe; print a table and advice, and return that."""
    with tempfile.TemporaryDirectory(prefix="yolov9-profile-") as folder:
        changes = {"project": folder, "noplots": True, "epochs": max(options.epochs, 2)}
        with contextlib.closing(Trainer(replace(options, **changes))) as trainer:
            trainer.begin_epoch(0)
            trainer.train_loader.set_epoch(0)
            profile = profile_loader(
                trainer.train_loader, step_parts(trainer), trainer.device, workers=trainer.train_loader.num_workers
            )
    return print_profile(profile, trainer.device)


def step_parts(trainer: Trainer) -> StepParts:
    """Cut the trainer's step into its parts; an optimizer step follows every batch."""

    place = DevicePrefetcher(trainer.train_loader, trainer.device).place

    def copy(batch: Batch) -> tuple[Tensor, Tensor]:
        images, targets = place(batch)[:2]
        return prepare_images(images, trainer.amp_dtype or torch.float32), targets

    def forward(inputs: tuple[Tensor, Tensor]) -> object:
        with autocast(trainer.device, trainer.amp_dtype):
            return trainer.model(inputs[0])

    def backward(loss: Tensor) -> None:
        trainer.scaler.scale(loss).backward()
        trainer.pending.append(())

    return StepParts(
        copy=copy,
        forward=forward,
        loss=lambda predictions, inputs: trainer.loss_fn(predictions, inputs[1])[0],
        backward=backward,
        optimise=trainer.flush_gradients,
        count=count_images,
    )
