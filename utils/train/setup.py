"""What is decided before the first batch: which run, which model, what is frozen, which schedule."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.checkpoint import Checkpoint, load_checkpoint
from models.graph import DetectionModel
from utils.data.spec import DataSpec, load_data_spec
from utils.files import find_file
from utils.log import LOGGER
from utils.options import YAML_SUFFIXES, Hyp, TrainOptions
from utils.train.schedule import Schedule, accumulation, warmup_steps


def prepare_run(options: TrainOptions) -> tuple[TrainOptions, Checkpoint | None, Path | None]:
    """Return the options in force, and the checkpoint and folder of the run to continue (None for a new run).

    Raises:
        FileNotFoundError, ValueError: ``--resume`` without a run that can be continued.
    """
    if not options.resume:
        return options, None, None
    path = Path(options.resume) if isinstance(options.resume, str) else newest_last_checkpoint(Path.cwd())
    if path is None:
        if not options.weights:
            raise FileNotFoundError(
                f"--resume: no last*.pt below {Path.cwd()}; give the path, --resume RUN/weights/last.pt"
            )
        LOGGER.warning(
            f"--resume: no run to continue below {Path.cwd()}; training starts from {options.weights} instead"
        )
        return options, None, None
    checkpoint = load_checkpoint(path)
    if checkpoint.optimizer is None or checkpoint.epoch < 0:
        raise ValueError(
            f"--resume {path}: this training is finished, nothing to resume. "
            f"To train further, start a new run with --weights {path}"
        )
    resumed = options_from_mapping(checkpoint.opt)
    if checkpoint.epoch + 1 >= resumed.epochs:
        raise ValueError(
            f"--resume {path}: all {resumed.epochs} epochs are done; start a new run with --weights {path}"
        )
    resumed.resume, resumed.weights = str(path), str(path)
    return resumed, checkpoint, path.resolve().parent.parent


def newest_last_checkpoint(folder: Path) -> Path | None:
    """Return the most recently written ``last*.pt`` below ``folder``."""
    found = [path for path in folder.rglob("last*.pt") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def options_from_mapping(mapping: dict[str, Any]) -> TrainOptions:
    """Rebuild options from a checkpoint's ``opt``; entries that are no option are passed over."""
    known = {item.name for item in fields(TrainOptions)}
    return TrainOptions(**{key: value for key, value in mapping.items() if key in known})


def load_data(options: TrainOptions) -> DataSpec:
    """Read the data-set YAML; with ``--single-cls`` all its classes become one called ``item``."""
    spec = load_data_spec(options.data)
    return replace(spec, nc=1, names={0: "item"}) if options.single_cls else spec


def build_training_model(options: TrainOptions, spec: DataSpec, resume: Checkpoint | None) -> DetectionModel:
    """Build the model for ``spec.nc`` classes and fill in the starting weights.

    Raises:
        ValueError: neither ``--cfg`` nor ``--weights``.
    """
    start = resume or (load_checkpoint(find_file(options.weights)) if options.weights else None)
    if options.cfg and resume is None:
        cfg: Any = find_file(options.cfg, roots=("models", "data", "utils"), suffixes=YAML_SUFFIXES)
    elif start is not None and start.yaml:
        cfg = start.yaml
    else:
        raise ValueError("--cfg is missing: name a model, for example --cfg yolov9-s.yaml, or give --weights")
    model = DetectionModel(cfg, nc=spec.nc)
    if start is not None:
        transfer = model.load_matching(start.model)
        LOGGER.info(f"Weights: {transfer.transferred}/{transfer.total} entries taken from {options.weights}")
        for key, reason in list(transfer.reasons.items())[:5]:
            LOGGER.info(f"  left as initialised: {key} ({reason})")
        if len(transfer.reasons) > 5:
            LOGGER.info(f"  … and {len(transfer.reasons) - 5} more")
        if transfer.transferred == 0:
            raise ValueError(f"--weights {options.weights}: nothing fits the model {options.cfg}; is it another size?")
    model.nc, model.names = spec.nc, dict(spec.names)
    return model


def frozen_layers(freeze: list[int]) -> list[int]:
    """Return the layer numbers that ``--freeze`` means: N → 0 … N−1, several → exactly these."""
    return list(range(freeze[0])) if len(freeze) == 1 else sorted(set(freeze))


def freeze_model(model: DetectionModel, freeze: list[int]) -> list[nn.Module]:
    """Stop the gradients of the layers named by ``--freeze`` and return them.

    Raises:
        ValueError: a layer the model does not have, or all of them.
    """
    numbers = frozen_layers(freeze)
    if not numbers:
        return []
    if numbers[-1] >= len(model.model):
        raise ValueError(f"--freeze: layer {numbers[-1]} does not exist, the model has 0 to {len(model.model) - 1}")
    if len(numbers) == len(model.model):
        raise ValueError("--freeze: all layers would be frozen, nothing could be learnt")
    layers = [model.model[number] for number in numbers]
    for layer in layers:
        layer.requires_grad_(False)
    tensors = sum(1 for layer in layers for _ in layer.parameters())
    LOGGER.info(f"Freeze: layers {', '.join(map(str, numbers))} stand still ({tensors} tensors, batch norm included)")
    return layers


def keep_batch_norm_still(layers: list[nn.Module]) -> None:
    """Put the batch norms of frozen layers in evaluation mode; to be called after every ``model.train()``."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def make_schedule(options: TrainOptions, hyp: Hyp, batch_size: int, batches_per_epoch: int) -> Schedule:
    """Build the run's schedule and say what it means."""
    accumulate = options.accumulate or accumulation(batch_size)
    steps = warmup_steps(hyp.warmup_epochs, batches_per_epoch)
    LOGGER.info(
        f"Schedule: {options.schedule}, lr {hyp.lr0:g} to {hyp.lr0 * hyp.lrf:g}, warm-up {steps} batches, "
        f"batch {batch_size} x accumulate {accumulate} = {batch_size * accumulate} images per optimizer step"
    )
    if steps > options.epochs * batches_per_epoch / 2:
        LOGGER.warning(
            f"warm-up takes {steps} of the run's {options.epochs * batches_per_epoch} batches; more epochs would help"
        )
    return Schedule(
        kind=options.schedule,
        epochs=options.epochs,
        lr0=hyp.lr0,
        lrf=hyp.lrf,
        momentum=hyp.momentum,
        warmup_steps=steps,
        warmup_bias_lr=hyp.warmup_bias_lr,
        warmup_momentum=hyp.warmup_momentum,
        accumulate=accumulate,
    )


def amp_dtype(device: torch.device, is_wanted: bool) -> torch.dtype | None:
    """Return float16 on CUDA when mixed precision is wanted, else None (float32)."""
    return torch.float16 if is_wanted and device.type == "cuda" else None
