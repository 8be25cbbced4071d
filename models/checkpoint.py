"""Checkpoint files: our own format, upstream's format, and the way from either to a model.

Our files hold tensors and plain values only, so ``torch.load(path, weights_only=True)`` opens them anywhere, without
this repository. Upstream's files hold whole pickled objects; they are read as data by :mod:`models.safe_reader`.

``python -m models.checkpoint info FILE`` says what a file holds.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from models.assemble import assemble, count_classes, is_fused, skeleton
from models.describe import describe_file
from models.graph import DetectionModel
from models.safe_reader import ForeignObject, WeightsFileError, foreign_state_dict, read_torch_file
from utils.cli import run_script
from utils.files import atomic_write, write_error
from utils.log import LOGGER

__all__ = [
    "FORMAT",
    "PROGRAM",
    "VERSION",
    "Checkpoint",
    "attempt_load",
    "build_model",
    "complete_names",
    "count_classes",
    "info",
    "is_fused",
    "load_checkpoint",
    "save_checkpoint",
    "strip_optimizer",
]

FORMAT = "yolov9-checkpoint"
VERSION = 1
PROGRAM = "yolov9-train 1.0.0"
HEADER = ("origin", "version", "program", "source")
"""Fields that say how a file was written, not what it holds; they are set anew when it is written again."""
MODEL_CLASSES = ("DetectionModel", "Model")
DAMAGED = (TypeError, AttributeError, OverflowError, RuntimeError)
"""What values of another type than expected in a foreign file raise while they are taken over."""
WRAPPERS = ("module.", "_orig_mod.")
"""What torch puts before the keys of a model that runs on several devices or is compiled."""


@dataclass(kw_only=True)
class Checkpoint:
    """Everything a training or stripped file holds; tensors live on the CPU.

    Attributes:
        model: state dict of the network under training; of a stripped file the averaged one.
        ema: state dict of the averaged network, None in stripped files.
        yaml: network definition, empty when the file was a bare state dict.
        epoch: index of the last finished epoch, -1 in stripped files.
        updates: optimizer steps that the average has seen.
        trainer: whatever the training loop needs to continue (early stopping, random states, ...).
        kind: ``training``, ``stripped`` (averaged weights, training form kept) or ``inference`` (lead branch, folded).
        metrics: figures of the epoch that the weights are from.
        data: what they were trained on (file, number of images and boxes).
        program: name and version of this program and of torch that wrote the file.
        origin: FORMAT for our files, ``upstream`` or ``state_dict`` for the others.
        version: of the file's format.
        source: the file itself, for messages; empty if there is none.
    """

    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None = None
    kind: str = "training"
    yaml: dict[str, Any] = field(default_factory=dict)
    nc: int = 0
    names: dict[int, str] = field(default_factory=dict)
    stride: list[float] = field(default_factory=lambda: [8.0, 16.0, 32.0])
    epoch: int = -1
    best_fitness: float = 0.0
    updates: int = 0
    optimizer: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    trainer: dict[str, Any] | None = None
    hyp: dict[str, Any] = field(default_factory=dict)
    opt: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    date: str = field(default_factory=lambda: datetime.now().isoformat(timespec="seconds"))
    program: str = ""
    origin: str = FORMAT
    version: int = VERSION
    source: str = ""


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint in our format under a temporary name, then rename it.

    Raises:
        TypeError: a value is neither a tensor nor plain data; the message gives its place.
        OSError: it could not be written, for example because the disk is full; what was there before stays.
    """
    content = {item.name: getattr(checkpoint, item.name) for item in fields(checkpoint) if item.name not in HEADER}
    written_by = {"format": FORMAT, "version": VERSION, "program": f"{PROGRAM}, torch {torch.__version__}"}
    content = {**written_by, **content}
    content = _plain(content, "checkpoint")
    try:
        with atomic_write(path) as temporary:
            torch.save(content, temporary)
    except RuntimeError as error:  # torch reports a full disk as an error of its zip writer
        raise write_error(Path(path), error) from error


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a file of ours, an upstream checkpoint, a pickled upstream model or a bare state dict.

    Raises:
        FileNotFoundError: no such file.
        WeightsFileError: unreadable, unsafe, of a newer version, or without a network of a known kind.
    """
    content = read_torch_file(path)
    try:
        checkpoint = Checkpoint(**_checked(_fields_of(content)))
    except (ValueError, *DAMAGED) as error:
        kind = type(error) if isinstance(error, WeightsFileError) else WeightsFileError
        raise kind(f"{path}: {error}") from None
    checkpoint.source = str(path)
    return checkpoint


def build_model(
    checkpoint: Checkpoint, *, use_ema: bool = True, cfg: str | Path | dict | None = None, nc: int | None = None
) -> DetectionModel:
    """Build the network of a checkpoint and load its tensors strictly, in float32 on the CPU.

    Head branches of another width than the definition gives are rebuilt with the widths of the tensors.

    Args:
        checkpoint: what :func:`load_checkpoint` returned.
        use_ema: take the averaged weights if there are any.
        cfg: network definition to use instead of the stored one; needed for a bare state dict.
        nc: number of classes, for a check; it is read from the tensors.

    Raises:
        ValueError: no definition, or tensors that do not fit it; the first differing keys are named.
    """
    state = checkpoint.ema if use_ema and checkpoint.ema is not None else checkpoint.model
    definition = cfg if cfg is not None else copy.deepcopy(checkpoint.yaml)
    with _about(checkpoint):
        if not definition:
            raise ValueError(
                "these weights hold tensors only, not which network they belong to; train_dual.py takes them with a "
                "definition beside them, e.g. --cfg gelan-c.yaml, and writes files that hold both"
            )
        num_classes = count_classes(state)
        if nc is not None and nc != num_classes:
            raise ValueError(
                f"{nc} classes were asked for, but the weights have {num_classes}; train with them instead"
            )
        model = assemble(definition, state)
        model.names = complete_names(checkpoint.names, num_classes)
    model.nc = num_classes
    model.hyp = dict(checkpoint.hyp)
    return model


@contextmanager
def _about(checkpoint: Checkpoint) -> Iterator[None]:
    """Put the name of the file before what is wrong with its content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{checkpoint.source}: {error}" if checkpoint.source else str(error)) from error


def attempt_load(
    weights: str | Path | list, device: torch.device | str | None = None, inplace: bool = True, fuse: bool = True
) -> DetectionModel:
    """Load weights for inference: averaged network if there is one, float32, fused, eval mode.

    ``weights`` may be a list of one file; ensembles are not supported. ``inplace`` is kept for the interface.
    """
    if isinstance(weights, (list, tuple)):
        if len(weights) != 1:
            raise ValueError(f"expected one weights file, got {len(weights)}; ensembles are not supported")
        weights = weights[0]
    model = build_model(load_checkpoint(weights)).eval().requires_grad_(False)
    model.inplace = inplace
    if fuse:
        model.fuse()
    return model.to(device or "cpu")


def strip_optimizer(path: str | Path, target: str | Path | None = None) -> Path:
    """Reduce a training file to what inference needs: averaged weights in half precision, no optimizer.

    Writes to ``target`` or over the file itself (one atomic rename) and returns the path written. An upstream file
    comes out in our format.
    """
    source, target = Path(path), Path(target or path)
    checkpoint = load_checkpoint(source)
    state = checkpoint.ema if checkpoint.ema is not None else checkpoint.model
    checkpoint.model = {key: _to_half(tensor) for key, tensor in state.items()}
    checkpoint.kind, checkpoint.epoch, checkpoint.best_fitness, checkpoint.updates = "stripped", -1, 0.0, 0
    checkpoint.ema = checkpoint.optimizer = checkpoint.scaler = checkpoint.trainer = None
    save_checkpoint(target, checkpoint)
    LOGGER.info(f"Optimizer stripped from {source}, saved as {target}, {target.stat().st_size / 1e6:.1f} MB")
    return target


def complete_names(names: Mapping[Any, Any] | Sequence[Any] | None, num_classes: int | None) -> dict[int, str]:
    """Return one name per class: the given ones, the number as text where there is none.

    ``num_classes`` None means as many as there are names.

    Raises:
        ValueError: neither a list nor pairs of class number and name.
    """
    given = _numbered(names)
    return {index: given.get(index, str(index)) for index in range(len(given) if num_classes is None else num_classes)}


def _numbered(names: Any) -> dict[int, str]:
    """Return class number -> name of a list, or of a mapping whose numbers may be text (out of JSON)."""
    if not isinstance(names, (list, tuple, Mapping, type(None))):
        raise ValueError(f"the class names are {names!r:.60}, expected a list or number: name")
    pairs = enumerate(names) if isinstance(names, (list, tuple)) else (names or {}).items()
    try:
        return {int(index): str(name) for index, name in pairs}
    except (TypeError, ValueError) as error:
        raise ValueError(f"the class names {names!r:.60} are not numbered ({error})") from error


def _fields_of(content: Any) -> dict[str, Any]:
    """Return the fields of a Checkpoint that a file of any known kind holds."""
    if isinstance(content, dict) and content.get("format") == FORMAT:
        return _from_own_format(content)
    if isinstance(content, ForeignObject):
        content = {"model": content}
    if isinstance(content, dict):
        network = next((content[key] for key in ("model", "ema") if content.get(key) is not None), None)
        if isinstance(network, ForeignObject):
            return _from_upstream({**content, "model": network})
    return {"model": _bare_state_dict(content), "kind": "stripped", "origin": "state_dict"}


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse values of another type than the fields of Checkpoint have, so that everything behind may rely on them."""
    hints = get_type_hints(Checkpoint)
    for name, value in values.items():
        hint = hints[name]
        options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = tuple(get_origin(option) or option for option in options)
        if not isinstance(value, (*kinds, int) if float in kinds else kinds):
            found = type(value).__name__
            raise WeightsFileError(f"its entry {name!r} is of type {found}, expected {kinds[0].__name__}")
    for name in ("model", "ema"):
        state = values.get(name) or {}
        wrong = next((key for key in state if not (isinstance(key, str) and isinstance(state[key], Tensor))), None)
        if wrong is not None:
            raise WeightsFileError(f"its entry {name!r} should hold tensors by name, {wrong!r} is none")
    return values


def _from_own_format(content: dict[str, Any]) -> dict[str, Any]:
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise WeightsFileError(f"has format version {version!r}, expected a number from 1 to {VERSION}; save it again")
    if version > VERSION:
        raise WeightsFileError(f"has format version {version!r}, this program reads up to {VERSION}; update it")
    known = {item.name for item in fields(Checkpoint)} - {"origin", "source"}
    values = {key: value for key, value in content.items() if key in known and value is not None}
    if "model" not in values:
        values["model"] = values.pop("ema", None)
    if values["model"] is None:
        raise WeightsFileError("holds no tensors (neither entry 'model' nor entry 'ema'); take another file")
    values["names"] = _numbered(values.get("names"))
    return values


def _from_upstream(content: dict[str, Any]) -> dict[str, Any]:
    """Convert a dict with pickled model records; entries of converted files may be None or missing."""
    network: ForeignObject = content["model"]
    if network.class_name not in MODEL_CLASSES:
        raise WeightsFileError(f"holds a {network.path!r}; only detection models (models.yolo.DetectionModel) are read")
    values = network.attributes
    definition = values.get("yaml")
    if not isinstance(definition, dict):
        raise WeightsFileError("the network in it has no definition (attribute 'yaml')")
    average = content.get("ema")
    state = foreign_state_dict(network)
    num_classes = count_classes(state)  # the number written beside them might be any
    return {
        "model": state,
        "ema": foreign_state_dict(average) if isinstance(average, ForeignObject) and average is not network else None,
        "kind": "training" if content.get("optimizer") else "stripped",
        "yaml": definition,
        "nc": num_classes,
        "names": complete_names(values.get("names"), num_classes),
        "epoch": int(_or(content.get("epoch"), -1)),
        "best_fitness": float(_or(content.get("best_fitness"), 0.0)),
        "updates": int(_or(content.get("updates"), 0)),
        "optimizer": content.get("optimizer"),
        "hyp": _options(values.get("hyp")),
        "opt": _options(content.get("opt")),
        "date": str(content.get("date") or ""),
        "origin": "upstream",
    }


def _bare_state_dict(content: Any) -> dict[str, Tensor]:
    """Accept a state dict as it is or under a usual key."""
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    is_mapping = isinstance(content, dict)
    if not is_mapping or not content or not all(isinstance(value, Tensor) for value in content.values()):
        shown = f"keys {', '.join(map(str, list(content)[:5]))}" if is_mapping else type(content).__name__
        raise WeightsFileError(f"holds no network: expected a checkpoint or a state dict, found {shown}")
    while wrapper := next((text for text in WRAPPERS if all(str(key).startswith(text) for key in content)), None):
        content = {key.removeprefix(wrapper): value for key, value in content.items()}
    if not all(str(key).startswith("model.") for key in content):
        other = next(key for key in content if not str(key).startswith("model."))
        raise WeightsFileError(f"is a state dict of another network: its key {other!r} does not begin with 'model.'")
    return dict(content)


def _options(value: Any) -> dict[str, Any]:
    """Turn a dict or a recorded ``argparse.Namespace`` into a dict of plain values (recorded paths become text)."""
    pairs = value.attributes if isinstance(value, ForeignObject) else value or {}
    return {
        str(key): str(Path(*map(str, item.args))) if isinstance(item, ForeignObject) else item
        for key, item in pairs.items()
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _to_half(tensor: Tensor) -> Tensor:
    """Round to float16, except where a value would become infinite."""
    if not tensor.is_floating_point():
        return tensor
    half = tensor.half()
    return half if torch.isfinite(half).all() or not torch.isfinite(tensor).all() else tensor.float()


def _plain(value: Any, place: str) -> Any:
    """Copy nested data with tensors on the CPU, NumPy numbers as Python ones and paths as text."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone()  # a view would drag its whole storage into the file
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise TypeError(f"{place} is a {type(value).__name__}; a checkpoint holds tensors and plain values only")


def info(path: str | Path) -> list[str]:
    """Return lines that say what a weights file of ours or of upstream holds."""
    checkpoint = load_checkpoint(path)
    with _about(checkpoint):
        model = skeleton(copy.deepcopy(checkpoint.yaml), checkpoint.model) if checkpoint.yaml else None
    return describe_file(Path(path), checkpoint, model)


def main(argv: Sequence[str] | None = None) -> int:
    """Say what the files named behind ``info`` hold; 1 if one of them cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m models.checkpoint", description="Say what weights files hold.")
    parser.add_argument("command", choices=["info"])
    parser.add_argument("files", nargs="+", metavar="FILE")
    failures = 0
    for file in parser.parse_args(argv).files:
        try:
            LOGGER.info("\n".join(info(file)) + "\n")
        except (ValueError, OSError) as error:
            LOGGER.error(str(error))
            failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    run_script(main)
