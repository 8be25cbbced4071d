"""Starting weights for training: which tensors of a file go where in a model, and why others do not.

Files in training form (two branches) start models in inference form (one branch) and the other way round: the lead
branch of the one is the only branch of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.checkpoint import Checkpoint, count_classes, is_fused
from models.graph import DetectionModel
from models.identify import counterpart, shipped_name
from models.reparam import plan_single_head


@dataclass(frozen=True)
class WeightReport:
    """What starting weights filled.

    Attributes:
        filled, total: tensors of the model that took their values from the file, and all of them.
        used, given: tensors of the file that went somewhere, and all of them.
        conversion: which change of form happened, empty if none.
        gaps: reason -> keys of the model that keep their initial values.
        unused: reason -> keys of the file that went nowhere.
    """

    filled: int
    total: int
    used: int
    given: int
    conversion: str = ""
    gaps: Mapping[str, list[str]] = field(default_factory=dict)
    unused: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Share of the file or of the model, whichever is larger: a part that the other does not have is no loss."""
        return max(self.filled / self.total, self.used / max(self.given, 1))

    def lines(self, source: str) -> list[str]:
        """Return the report as lines for the log; ``source`` names the file."""
        form = f", {self.conversion}" if self.conversion else ""
        head = f"Weights: {self.filled}/{self.total} tensors of the model taken from {source}"
        lines = [f"{head} ({self.used}/{self.given} of the file{form})"]
        for title, groups in (("left as initialised", self.gaps), ("of the file not used", self.unused)):
            lines += [f"  {len(keys)} {title}: {reason} ({_examples(keys)})" for reason, keys in groups.items()]
        return lines


def transfer_weights(model: DetectionModel, checkpoint: Checkpoint) -> WeightReport:
    """Copy the tensors of ``checkpoint.model`` that fit into ``model``, between training and inference form too.

    Raises:
        ValueError: the file holds folded weights, which cannot be trained.
    """
    state = checkpoint.model
    if is_fused(state):
        raise ValueError(
            "these weights are folded for inference (no batch norm is left), so training cannot start from them; "
            "give the file that they were made from (best.pt, or the original's -converted.pt)"
        )
    targets, conversion = _targets(model, checkpoint)
    renamed = {targets[key]: tensor for key, tensor in state.items() if key in targets}
    transfer = model.load_matching(renamed)
    gaps: dict[str, list[str]] = {}
    for key, reason in transfer.reasons.items():
        if reason != "not in the model":
            gaps.setdefault(_reason(key, reason, model, state), []).append(key)
    unused: dict[str, list[str]] = {}
    own = model.state_dict()
    for key in state:
        if targets.get(key) not in own:
            reason = "auxiliary branch, which the model does not have" if key not in targets else "not in the model"
            unused.setdefault(reason, []).append(key)
    return WeightReport(
        transfer.transferred, transfer.total, transfer.transferred, len(state), conversion, gaps, unused
    )


def _targets(model: DetectionModel, checkpoint: Checkpoint) -> tuple[dict[str, str], str]:
    """Return file key -> model key, and what conversion that is."""
    state = checkpoint.model
    identity = {key: key for key in state}
    model_branches, file_branches = len(model.head.branch_names), _count_branches(state)
    if model_branches > 1 and file_branches == 1:
        plan = plan_single_head(model)
        if _last_row(state) == len(plan.rows) - 1:
            return {key: plan.source_key(key) for key in state}, "inference form into training form"
    if model_branches == 1 and file_branches > 1 and checkpoint.yaml:
        with torch.device("meta"):
            source = DetectionModel(checkpoint.yaml, nc=count_classes(state))
        plan = plan_single_head(source)
        if len(plan.rows) == len(model.model):
            return {plan.source_key(key): key for key in model.state_dict()}, "lead branch of the training form"
    return identity, ""


def _last_row(state: Mapping[str, Tensor]) -> int:
    return max(int(key.split(".")[1]) for key in state)


def _count_branches(state: Mapping[str, Tensor]) -> int:
    """Count the decoders of the head, which is the last row."""
    prefix = f"model.{_last_row(state)}.dfl"
    return sum(key.startswith(prefix) for key in state)


def _reason(key: str, reason: str, model: DetectionModel, state: Mapping[str, Tensor]) -> str:
    """Say in words of the user why a tensor of the model was not filled."""
    head = f"model.{model.head.i}."
    class_branches = tuple(f"{head}{name}." for _, name in model.head.branch_names)
    if reason == "not in the file":
        is_lead_only = len(model.head.branch_names) > 1 and _count_branches(state) == 1
        return (
            "auxiliary branch, which the file does not have" if is_lead_only and _is_auxiliary(key, model) else reason
        )
    if key.startswith(class_branches):
        there, here = count_classes(state), model.head.nc
        if there != here:
            return f"class branch made for {there} classes, here are {here}"
    return "other shape"


def _is_auxiliary(key: str, model: DetectionModel) -> bool:
    plan = plan_single_head(model)
    _, row, name, *_ = key.split(".")
    return int(row) not in plan.rows or (int(row) == model.head.i and name not in plan.head_names.values())


def _examples(keys: list[str]) -> str:
    return ", ".join(keys[:2]) + (", …" if len(keys) > 2 else "")


def advice(model: DetectionModel, checkpoint: Checkpoint) -> str:
    """Say which network the weights belong to, where that is known and is not the model's; else an empty text."""
    wanted, given = shipped_name(model.yaml), shipped_name(checkpoint.yaml) if checkpoint.yaml else None
    if given is None or given in (wanted, counterpart(wanted or "")):
        return ""
    return f"the weights are those of {given}, the model is {wanted or model.name}; use --cfg {given}.yaml"


def name_differences(names: Mapping[int, str], wanted: Mapping[int, str]) -> list[str]:
    """Return ``0: person -> bolt`` for every class number whose name differs, if both have as many classes."""
    if len(names) != len(wanted) or all(names.get(index) == str(index) for index in names):
        return []  # other classes altogether, or none recorded
    return [f"{index}: {names.get(index)} -> {wanted[index]}" for index in wanted if names.get(index) != wanted[index]]
