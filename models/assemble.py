"""From a definition and tensors to a network: its layout without values, a comparison, and strict loading.

A definition may come out of a foreign file, so it is held against the tensors beside it before anything of it is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.graph import DetectionModel
from utils.log import LOGGER

USUAL_ARGUMENT = 1024
"""Channels up to which a row of a stored definition is believed without looking at the tensors."""
LARGEST_NUMBERS = {"depth_multiple": 16, "width_multiple": 16, "anchors": 1024, "ch": 1024}
"""Largest numbers of a stored definition; the shipped ones have multiples of at most 1 and 3 image channels."""
MOST_ROWS = 1000
"""Most rows of a stored definition; the longest shipped one has 50."""
DEFINITION_ERRORS = (TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)
"""What values of another kind than expected in a definition raise while it is read."""
LEAD_CLASS_BIAS = re.compile(r"model\.(\d+)\.cv([3579])\.0\.2\.bias$")


def assemble(definition: str | Path | Mapping[str, Any], state: Mapping[str, Tensor]) -> DetectionModel:
    """Build the network of ``definition`` and load ``state`` strictly, in float32 on the CPU.

    Raises:
        ValueError: tensors that do not fit the definition; the first differing keys are named.
    """
    model = skeleton(definition, state)
    _check_keys(model.state_dict(), state)
    _warn_of_values(state)
    _assign(model, state)
    return model


def skeleton(definition: str | Path | Mapping[str, Any], state: Mapping[str, Tensor]) -> DetectionModel:
    """Lay out the network for the tensors ``state`` without values.

    Initial weights would be thrown away, and a definition out of a file may claim any size.
    """
    num_classes = count_classes(state)
    try:
        if isinstance(definition, Mapping):
            _check_definition(definition, state)
        with torch.device("meta"):
            model = DetectionModel(definition, nc=num_classes)
    except DEFINITION_ERRORS as error:
        raise ValueError(
            f"the definition of the network is damaged ({type(error).__name__}: {error}); expected entries and rows "
            "as in models/detect/yolov9-s.yaml"
        ) from error
    _match_head_widths(model, state)
    return model.fuse() if is_fused(state) else model


def count_classes(state: Mapping[str, Tensor]) -> int:
    """Read the number of classes from the last class convolution of the lead branch.

    Raises:
        ValueError: no detection head of a known layout among the keys.
    """
    found = [(int(match[1]), int(match[2]), key) for key in state if (match := LEAD_CLASS_BIAS.match(key))]
    bias = state[max(found)[2]] if found else None
    if bias is None or bias.ndim != 1:
        raise ValueError("no detection head (model.N.cv3.0.2.bias) among the tensors; these are no detection weights")
    return bias.shape[0]


def is_fused(state: Mapping[str, Tensor]) -> bool:
    """Tell whether the batch norms were folded before the tensors were saved."""
    return not any(".bn." in key for key in state)


def _assign(model: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put copies of tensors, whose keys and shapes have been compared, in the places of those of ``model``."""
    modules = dict(model.named_modules())
    for key, tensor in state.items():
        owner, _, name = key.rpartition(".")
        value, present = _float_copy(tensor), getattr(modules[owner], name)
        if isinstance(present, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=present.requires_grad)
        setattr(modules[owner], name, value)


def _float_copy(tensor: Tensor) -> Tensor:
    """Copy to contiguous float32; counters stay whole numbers."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _check_definition(definition: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Refuse a definition whose numbers are out of all proportion to the tensors beside it.

    Rows are built one by one, so a hostile count would keep the program busy for ever.
    """
    for name, largest in LARGEST_NUMBERS.items():
        number = definition.get(name) or 1
        if name == "anchors" and isinstance(number, (list, tuple)):
            number = len(number) or 1
        if not isinstance(number, (int, float)) or not 0 < number <= largest:
            raise ValueError(f"the definition in the file has {name} {number!r}, expected a number up to {largest}")
    widest = max((size for tensor in state.values() for size in tensor.shape), default=0)
    limit = max(USUAL_ARGUMENT, 16 * widest)
    rows = [*(definition.get("backbone") or ()), *(definition.get("head") or ())]
    if len(rows) > MOST_ROWS:
        raise ValueError(f"the definition in the file has {len(rows):,} rows, at most {MOST_ROWS:,} are read")
    for row in rows:
        numbers = [row[1], *_flat(row[3])] if isinstance(row, (list, tuple)) and len(row) == 4 else []
        if any(isinstance(number, (int, float)) and number > limit for number in numbers):
            raise ValueError(f"the definition in the file asks for {row!r}, which its tensors cannot fill")


def _flat(value: object) -> Iterator[object]:
    """Give the values of nested lists."""
    if not isinstance(value, (list, tuple)):
        yield value
        return
    for item in value:
        yield from _flat(item)


def _match_head_widths(model: DetectionModel, state: Mapping[str, Tensor]) -> None:
    """Give head branches the hidden widths of the tensors; the published t weights are narrower than the rule."""
    try:
        if model.match_head_widths({key: tuple(tensor.shape) for key, tensor in state.items()}):
            LOGGER.info("the head takes its hidden widths from the weights")
    except (KeyError, IndexError):
        return  # not this kind of head: the comparison of keys that follows says so


def _check_keys(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Compare keys, shapes and kinds of numbers before loading, for a message of bearable length."""
    both = [key for key in own if key in given]
    problems = {
        "missing": [key for key in own if key not in given],
        "unknown": [key for key in given if key not in own],
        "of another shape": [
            f"{key} {tuple(given[key].shape)} instead of {tuple(own[key].shape)}"
            for key in both
            if own[key].shape != given[key].shape
        ],
        "of another number type": [
            f"{key} {_type_name(given[key])} instead of {_type_name(own[key])}"
            for key in both
            if own[key].is_floating_point() and not given[key].is_floating_point()
        ],
    }
    told = [f"{len(keys)} {kind}: {', '.join(keys[:3])}" for kind, keys in problems.items() if keys]
    if told:
        raise ValueError(
            f"the weights do not fit the network ({'; '.join(told)}); they are those of another definition: "
            "check --cfg, or take the file as it was saved"
        )


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _warn_of_values(state: Mapping[str, Tensor]) -> None:
    """Say that weights are not finite: such a network finds nothing, and nothing else would tell why."""
    faulty = [key for key, tensor in state.items() if tensor.is_floating_point() and not _is_finite(tensor)]
    if faulty:
        LOGGER.warning(
            f"{len(faulty)} of {len(state)} tensors of the weights hold values that are not finite "
            f"({', '.join(faulty[:2])}); the network will find nothing. Take the file of an earlier epoch"
        )


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; the sum tells it quickly, unless it is beyond the range itself."""
    return math.isfinite(tensor.sum(dtype=torch.float32)) or bool(torch.isfinite(tensor).all())
