"""What is decided before the first batch: which run, which model, what is frozen, which schedule."""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.blocks import use_fused_kernels
from models.checkpoint import Checkpoint, load_checkpoint
from models.graph import DetectionModel
from models.published import find_weights
from models.transfer import advice, name_differences, transfer_weights
from utils.data.spec import DataSpec, load_data_spec
from utils.driver import is_automatic
from utils.files import REPO_ROOT, find_file
from utils.kernels.check import fused_kernels_work
from utils.log import LOGGER, counted
from utils.options import YAML_SUFFIXES, Hyp, TrainOptions
from utils.preflight import apply_alloc_conf, preflight
from utils.runtime import refuse_distributed, select_device
from utils.train.loaders import check_device
from utils.train.loss import ComputeLoss
from utils.train.loss_check import kernel_obstacle
from utils.train.schedule import Restarts, Schedule, accumulation, describe_restarts, warmup_steps

FEW_UPDATES = 300  # optimizer steps in which a network does not get far from random weights
MAX_NAME = 255  # bytes that usual file systems allow for a name
SHOWN_NAMES = 5  # of the classes that are called otherwise in the starting weights
# Of the tensors of a file or a model that should find their place; batch counters fit anywhere and make up a fifth.
MIN_SHARE, LOW_SHARE = 0.25, 0.5
# May be typed beside --resume: they change how long or where a run goes on, not what it computes.
CHANGEABLE = (
    "data",
    "epochs",
    "workers",
    "device",
    "cache",
    "cache_dir",
    "augment",
    "patience",
    "noplots",
    "noval",
    "nosave",
    "save_period",
)


def prepare_run(options: TrainOptions) -> tuple[TrainOptions, Checkpoint | None, Path | None]:
    """Return the options in force, and the checkpoint and folder of the run to continue (None for a new run).

    Raises:
        FileNotFoundError, ValueError: ``--resume`` without a run that can be continued, or a new run whose folder
            cannot be made, or several processes of one training.
    """
    refuse_distributed()
    if not options.resume:
        check_run_path(options)
        return options, None, None
    path = Path(options.resume) if isinstance(options.resume, str) else newest_run(Path.cwd(), bool(options.weights))
    if path is None:
        if not options.weights:
            raise FileNotFoundError(
                f"--resume: no last*.pt below {Path.cwd()}; give the path, --resume RUN/weights/last.pt"
            )
        LOGGER.warning(
            f"--resume: no unfinished run below {Path.cwd()}; training starts from {options.weights} instead"
        )
        check_run_path(options)
        return options, None, None
    if path.is_dir():
        path = last_of_folder(path)
    if not path.is_file():
        raise FileNotFoundError(f"--resume {path} not found; give the path of a run's weights/last.pt")
    if path.resolve().parent.name != "weights":
        raise ValueError(f"--resume {path}: expected RUN/weights/last.pt, so that results go on in the folder RUN")
    checkpoint = load_checkpoint(path)
    if checkpoint.optimizer is None or checkpoint.epoch < 0:
        raise ValueError(
            f"--resume {path}: this file holds weights only, nothing to resume. Give the run's last.pt, "
            f"or start a new run with --weights {path}"
        )
    resumed = resumed_options(options, checkpoint)
    if checkpoint.epoch + 1 >= resumed.epochs:
        raise ValueError(
            f"--resume {path}: all {resumed.epochs} epochs are done. "
            f"--resume {path} --epochs N extends the run, --weights {path} starts a new one from its weights. If it "
            f"was stopped in its final validation: python val_dual.py --weights {path.with_name('best.pt')} --data "
            f"{resumed.data} makes up for that"
        )
    resumed.resume = str(path)
    return resumed, checkpoint, path.resolve().parent.parent


def last_of_folder(folder: Path) -> Path:
    """Return the checkpoint to continue from where ``--resume`` names the folder of a run, or its weights folder.

    Raises:
        FileNotFoundError: no last.pt in either place.
    """
    places = (folder / "weights" / "last.pt", folder / "last.pt")
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"--resume {folder} is a folder, and {places[0]} is not there; give the folder of a run that has one, "
            "or the path of its weights/last.pt"
        )
    LOGGER.info(f"--resume {folder}: the run goes on from {found}")
    return found


def resumed_options(options: TrainOptions, checkpoint: Checkpoint) -> TrainOptions:
    """Return the checkpoint's options with those of ``CHANGEABLE`` that were typed beside ``--resume``.

    Raises:
        ValueError: what was typed does not go with an option that the run keeps.
    """
    resumed = options_from_mapping(checkpoint.opt)
    for name in sorted(options.given - {"resume"}):
        flag = "--" + name.replace("_", "-")
        if getattr(options, name) == getattr(resumed, name):
            continue
        if name in CHANGEABLE:
            LOGGER.info(f"--resume: {flag} {getattr(options, name)} replaces {getattr(resumed, name)}")
            setattr(resumed, name, getattr(options, name))
        else:
            LOGGER.warning(f"--resume: {flag} is ignored, the run keeps {getattr(resumed, name)}")
    return replace(resumed)  # checks them anew, together


def newest_run(folder: Path, only_unfinished: bool = False) -> Path | None:
    """Return the newest ``weights/last*.pt`` below ``folder`` with epochs left.

    Else the newest of all, unless ``only_unfinished``; else None.
    """
    found = sorted(folder.rglob("weights/last*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found:
        try:
            checkpoint = load_checkpoint(path)
        except ValueError as error:
            LOGGER.warning(f"--resume: {path} is passed over: {error}")
            continue
        if checkpoint.optimizer is not None and checkpoint.epoch + 1 < int(checkpoint.opt.get("epochs", 0)):
            return path
    return found[0] if found and not only_unfinished else None


def options_from_mapping(mapping: dict[str, Any]) -> TrainOptions:
    """Rebuild options from a checkpoint's ``opt``; entries that are no option are passed over."""
    known = {item.name for item in fields(TrainOptions)}
    return TrainOptions(**{key: value for key, value in mapping.items() if key in known})


def run_path(options: TrainOptions) -> Path:
    """Return the folder that ``--project`` and ``--name`` mean; the name ``cfg`` stands for the model's."""
    name = Path(options.cfg or options.weights).stem if options.name == "cfg" else options.name
    return Path(options.project) / name


def check_run_path(options: TrainOptions) -> None:
    """Find out before the work begins whether the run's folder can be made; nothing is made here.

    Raises:
        ValueError: a name too long for the file system, a file where a folder should be, or no right to write.
    """
    path, typed = run_path(options), f"--project {options.project} --name {options.name}"
    long = next((part for part in path.parts if len(os.fsencode(part)) > MAX_NAME), None)
    if long is not None:
        flag = "--name" if long == path.name else "--project"
        raise ValueError(
            f"{flag} {long[:20]}…: {len(os.fsencode(long))} bytes, a folder's name may have {MAX_NAME}; choose a "
            "shorter one"
        )
    folder = (path if options.exist_ok else path.parent).absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{typed}: {existing} is a file, not a folder; choose another --project or --name")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{typed}: {existing} may not be written to; choose another --project")


def prepare_device(options: TrainOptions, hyp: Hyp) -> torch.device:
    """Set up the allocator, choose the device and try it.

    Raises what ``select_device`` and :func:`check_demands` raise.
    """
    LOGGER.info(apply_alloc_conf(options.alloc_conf))
    device = select_device(options.device)
    check_demands(options, hyp, device)
    preflight(device, is_wanted=not is_automatic(options.device)).log()
    return device


def check_demands(options: TrainOptions, hyp: Hyp, device: torch.device) -> None:
    """Refuse what device and hyper-parameters rule out, before anything is built.

    Raises:
        ValueError: an option that needs a CUDA device without one, or restarts that fall to more than their peak.
    """
    check_device(options, device)
    if options.cos_restarts is not None:
        make_restarts(options).check_peak(hyp.lr0)


def load_data(options: TrainOptions) -> DataSpec:
    """Read the data-set YAML; with ``--single-cls`` all its classes become one called ``item``."""
    spec = load_data_spec(options.data)
    return replace(spec, nc=1, names={0: "item"}) if options.single_cls else spec


def build_training_model(options: TrainOptions, spec: DataSpec, resume: Checkpoint | None) -> DetectionModel:
    """Build the model for ``spec.nc`` classes and fill in the starting weights.

    Raises:
        ValueError: neither ``--cfg`` nor ``--weights``.
    """
    start = resume or (load_start(options) if options.weights else None)
    if resume is not None and resume.nc != spec.nc:
        raise ValueError(
            f"{options.resume} was trained on {resume.nc} classes, {spec.yaml_file} names {spec.nc}; "
            f"start a new run with --weights {options.resume}"
        )
    if options.cfg and resume is None:
        cfg: Any = find_file(options.cfg, roots=("models", "data", "utils"), suffixes=YAML_SUFFIXES)
    elif start is not None and start.yaml:
        cfg = start.yaml
    else:
        raise ValueError("--cfg is missing: name a model, for example --cfg yolov9-s.yaml, or give --weights")
    model = DetectionModel(cfg, nc=spec.nc)
    if start is not None:
        _fill(model, start, options, spec, flag="--weights" if resume is None else "--resume")
    model.nc, model.names = spec.nc, dict(spec.names)
    return model


def load_start(options: TrainOptions) -> Checkpoint:
    """Read the starting weights; one of the published files is fetched if it is missing.

    Raises:
        FileNotFoundError, ValueError: no such file, or it holds no weights; the message says what to do.
    """
    name = options.weights
    if Path(name).is_dir():
        raise ValueError(f"--weights {name} is a folder; name a file, for example {Path(name) / 'best.pt'}")
    if not Path(name).is_file() and (REPO_ROOT / name).is_file():
        name = str(REPO_ROOT / name)
    try:
        return load_checkpoint(find_weights(name, offline=options.offline))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"--weights {name}: {error}. Give the path of a .pt file of this program or the original "
            "YOLOv9, or --weights '' to start from random weights"
        ) from error


def _fill(model: DetectionModel, start: Checkpoint, options: TrainOptions, spec: DataSpec, *, flag: str) -> None:
    """Copy the starting weights into ``model``, report what fitted, refuse weights of which next to nothing does.

    ``flag`` named their file on the command line.
    """
    file = options.weights if flag == "--weights" else options.resume
    try:
        report = transfer_weights(model, start)
    except ValueError as error:
        raise ValueError(f"{flag} {file}: {error}") from error
    for line in report.lines(str(file)):
        LOGGER.info(line)
    cause = advice(model, start) or (
        f"--cfg {options.cfg} and {flag} {file} seem to be models of different size or kind"
    )
    if report.share < MIN_SHARE:
        raise ValueError(f"only {report.share:.0%} of the weights could be used: {cause}; nothing fits the model")
    if report.share < LOW_SHARE:
        LOGGER.warning(f"{report.share:.0%} of the weights are used: {cause}")
    if differing := name_differences(start.names, spec.names):
        shown = ", ".join(differing[:SHOWN_NAMES]) + (", …" if len(differing) > SHOWN_NAMES else "")
        LOGGER.warning(f"{len(differing)} classes are called otherwise in the weights than in the data: {shown}")


def frozen_layers(freeze: list[int | str], backbone: int) -> list[int]:
    """Return the layer numbers that ``--freeze`` means: N → 0 … N−1, several → exactly these, or the backbone's."""
    if freeze == ["backbone"]:
        return list(range(backbone))
    return list(range(freeze[0])) if len(freeze) == 1 else sorted(set(freeze))


def freeze_model(model: DetectionModel, freeze: list[int | str]) -> list[nn.Module]:
    """Stop the gradients of the layers named by ``--freeze`` and return them.

    Raises:
        ValueError: a layer the model does not have, or all of them.
    """
    typed, count = f"--freeze {' '.join(map(str, freeze))}", len(model.model)
    if freeze != ["backbone"] and max(freeze) >= count + (len(freeze) == 1):  # a single number is one past the last
        raise ValueError(
            f"{typed}: this model has {count} layers, 0 to {count - 1}; --freeze 10 freezes the first ten, "
            "--freeze backbone the backbone"
        )
    numbers = frozen_layers(freeze, len(model.yaml["backbone"]))
    if not numbers:
        LOGGER.info("Freeze: 0 layers stand still (--freeze 10 freezes the first ten, --freeze backbone the backbone)")
        return []
    if len(numbers) == count:
        raise ValueError(f"{typed}: all layers would be frozen (this model has {count}), nothing could be learnt")
    left = [layer for number, layer in enumerate(model.model) if number not in numbers]
    if not any(True for layer in left for _ in layer.parameters()):
        raise ValueError(f"{typed}: the layers left have no weights, nothing could be learnt; freeze fewer layers")
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
    schedule = Schedule(
        kind=options.schedule,
        epochs=options.epochs,
        lr0=hyp.lr0,
        lrf=hyp.lrf,
        momentum=hyp.momentum,
        warmup_steps=steps,
        warmup_bias_lr=hyp.warmup_bias_lr,
        warmup_momentum=hyp.warmup_momentum,
        accumulate=accumulate,
        restarts=make_restarts(options),
    )
    LOGGER.info(
        f"Schedule: {options.schedule}, lr {hyp.lr0:g} to {schedule.final_lr:g}, warm-up {steps} batches, "
        f"batch {batch_size} x accumulate {accumulate} = {batch_size * accumulate} images per optimizer step"
    )
    if ignored := options.schedule_flags[1:]:
        LOGGER.warning(f"{options.schedule_flags[0]} is used, {' and '.join(ignored)} ignored: one schedule at a time")
    if options.accumulate > batches_per_epoch:
        LOGGER.warning(
            f"--accumulate {options.accumulate}: an epoch has only {counted(batches_per_epoch, 'batch', 'batches')} "
            f"and ends with an optimizer step. --accumulate {batches_per_epoch} makes the same steps, with a weight "
            "decay that fits them"
        )
    batches, updates = options.epochs * batches_per_epoch, options.epochs * math.ceil(batches_per_epoch / accumulate)
    if steps > batches / 2 or (updates < FEW_UPDATES and not options.weights):
        LOGGER.warning(
            f"the run has {counted(batches, 'batch', 'batches')}, {min(steps, batches)} of them warm-up, and makes "
            f"about {counted(updates, 'optimizer step')}; a new model needs at least {FEW_UPDATES}. More --epochs, "
            "--accumulate 1 or pretrained --weights help"
        )
    if warning := describe_restarts(schedule):
        LOGGER.warning(warning)
    return schedule


def make_restarts(options: TrainOptions) -> Restarts:
    """Read ``--cos-restarts T_0 T_mult eta_min``; missing numbers keep their defaults."""
    names = ("first_cycle", "growth", "lr_min")
    given = dict(zip(names, options.cos_restarts or (), strict=False))
    return Restarts(**given, stretch_last_cycle=options.stretch_last_cycle)


def amp_dtype(device: torch.device, options: TrainOptions) -> torch.dtype | None:
    """Return the number type of mixed precision on CUDA, None for float32."""
    if not options.amp or device.type != "cuda":
        return None
    return torch.bfloat16 if options.amp_dtype == "bf16" else torch.float16


def switch_kernels(model: DetectionModel, device: torch.device, options: TrainOptions) -> bool:
    """Let the model train with this repository's kernels where they win; return whether it does.

    They need CUDA graphs: launched one by one from Python they would be slower than torch's.
    """
    if device.type != "cuda" or options.plain_kernels or not options.cuda_graphs:
        return False
    obstacle = fused_kernels_work(device, amp_dtype(device, options))
    if obstacle:
        LOGGER.info(f"{obstacle} Training goes on with torch's own kernels")
        return False
    LOGGER.info(f"Fused kernels in {use_fused_kernels(model)} blocks (--plain-kernels switches them off)")
    return True


def make_loss(
    model: DetectionModel, device: torch.device, dtype: torch.dtype | None, uses_kernels: bool
) -> ComputeLoss:
    """Return the loss of ``model``, with fused kernels where these are wanted and work for maps of ``dtype``."""
    loss = ComputeLoss(model, use_kernels=uses_kernels)
    obstacle = kernel_obstacle(loss, device, dtype or torch.float32) if uses_kernels else ""
    if obstacle:
        LOGGER.info(f"{obstacle} The loss goes the plain way")
        loss.use_kernels = False
    return loss
