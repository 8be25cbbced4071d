"""Writing of weights files that upstream's own scripts open.

They unpickle whole objects of ``models.yolo.DetectionModel`` and ``models.common.*``. Our objects have the same
attributes, so they are pickled as they are, and the names of our classes in the pickle are replaced by upstream's.
This is the one place that writes a pickle of objects; nothing here ever reads one.
"""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import pickletools
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from models.checkpoint import Checkpoint, build_model
from models.graph import DetectionModel
from models.heads import HEADS
from models.identify import shipped_name
from models.upstream import UPSTREAM_CLASSES

PROTOCOL = 2
OWN_ATTRIBUTES = ("_input_channels", "_checkpoint_plan", "grad_checkpoint")
"""Attributes of our objects that upstream's classes do not have."""


def save_upstream(path: str | Path, checkpoint: Checkpoint, model: DetectionModel | None = None) -> None:
    """Write the network of ``checkpoint`` in half precision with the nine entries of a stripped file of upstream.

    ``model`` is written instead if given; both branches of a training form are kept, or the one of a converted model.

    Raises:
        ValueError: batch norms were folded; upstream's classes cannot hold that.
    """
    model = build_model(checkpoint) if model is None else copy.deepcopy(model)
    if not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()):
        raise ValueError("the weights are folded for inference, which upstream's classes cannot hold; give the best.pt")
    content = {
        "epoch": -1,
        "best_fitness": None,
        "model": _as_upstream_keeps_it(model, checkpoint.hyp),
        "ema": None,
        "updates": None,
        "optimizer": None,
        "opt": dict(checkpoint.opt) or None,
        "git": None,
        "date": checkpoint.date,
    }
    renaming = SimpleNamespace(__name__=__name__, Pickler=_RenamingPickler)
    archive = io.BytesIO()
    torch.save(content, archive, pickle_module=renaming, pickle_protocol=PROTOCOL)
    Path(path).write_bytes(archive.getbuffer())  # not by torch, which does not say that a disk is full


def _as_upstream_keeps_it(model: DetectionModel, hyp: dict[str, Any]) -> DetectionModel:
    """Give the model the attributes that upstream's methods read, in half precision and without gradients."""
    model = model.cpu().eval().requires_grad_(False).half()
    model.names = dict(model.names) if isinstance(model.names, dict) else dict(enumerate(model.names))
    model.nc = model.head.nc
    model.hyp = {"label_smoothing": 0.0, **hyp}
    model.class_weights = torch.ones(model.nc)
    model.yaml_file = f"{shipped_name(model.yaml) or model.name}.yaml"
    model.head.anchors = model.head.strides = torch.empty(0, dtype=torch.float16)
    for module in model.modules():
        for name in OWN_ATTRIBUTES:
            module.__dict__.pop(name, None)
    return model


class _RenamingPickler(pickle.Pickler):
    """Pickler whose output names upstream's classes in place of ours."""

    def __init__(self, target: IO[bytes], protocol: int = PROTOCOL) -> None:
        self._target, self._buffer = target, io.BytesIO()
        super().__init__(self._buffer, PROTOCOL)

    def reducer_override(self, value: object) -> object:
        """Keep the (empty) priors of a head, which its own copies leave out."""
        if isinstance(value, tuple(HEADS.values())):
            return copyreg.__newobj__, (type(value),), vars(value)
        return NotImplemented

    def dump(self, value: object) -> None:
        super().dump(value)
        self._target.write(renamed(self._buffer.getvalue()))


def renamed(pickled: bytes) -> bytes:
    """Replace the names of our classes in a pickle of protocol 2, where each stands in an instruction of its own."""
    theirs = {f"{cls.__module__} {cls.__qualname__}": path for path, cls in UPSTREAM_CLASSES.items()}
    parts, end = [], 0
    for instruction, argument, position in pickletools.genops(pickled):
        if instruction.name == "GLOBAL" and argument in theirs:
            module, _, name = theirs[argument].rpartition(".")
            parts += [pickled[end:position], f"c{module}\n{name}\n".encode()]
            end = position + len(f"c{argument}\n")  # the blank in the argument stands for a line end
    return b"".join([*parts, pickled[end:]])
