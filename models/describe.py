"""What a weights file is, in a few lines: for ``python -m models.checkpoint info FILE`` and for the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.identify import published_size, shipped_name
from models.reparam import is_fused
from models.summary import inference_size, model_size

if TYPE_CHECKING:
    from models.checkpoint import Checkpoint
    from models.graph import DetectionModel

SHOWN_NAMES = 10
LONGEST_LINE = 1000
"""Letters of one entry that are shown."""
SHOWN_OPTIONS = ("data", "cfg", "weights", "imgsz", "batch_size", "epochs", "optimizer", "hyp")
ORIGINS = {
    "upstream": "the original's format (pickled objects, read as data)",
    "state_dict": "state dict (tensors only)",
}


def describe_file(path: Path, checkpoint: Checkpoint, model: DetectionModel | None) -> list[str]:
    """Return lines that say what the file at ``path`` holds.

    ``model`` is the network without values, None where the file has no definition.
    """
    entries: dict[str, str] = {"file": f"{path}, {path.stat().st_size / 1e6:.1f} MB"}
    entries["format"] = ORIGINS.get(checkpoint.origin, f"{checkpoint.origin}, version {checkpoint.version}")
    entries["kind"] = _kind(checkpoint, model)
    if model is not None:
        entries |= describe_network(model)
    entries["classes"] = _names(checkpoint.names)
    entries["tensors"] = _tensors(checkpoint)
    if checkpoint.epoch >= 0:
        entries["training"] = f"{checkpoint.epoch + 1} epochs done, {checkpoint.updates} optimizer steps"
    if checkpoint.best_fitness:
        entries["best fitness"] = f"{checkpoint.best_fitness:.4f}"
    entries["figures"] = _values(_results(checkpoint.metrics))
    entries["data"] = _values(checkpoint.data)
    entries["options"] = _values({key: checkpoint.opt[key] for key in SHOWN_OPTIONS if key in checkpoint.opt})
    entries["hyper-parameters"] = _values(checkpoint.hyp)
    entries["written"] = ", ".join(filter(None, (checkpoint.date, checkpoint.program)))
    return [f"{title:<17}{_printable(text)}" for title, text in entries.items() if text]


def describe_network(model: DetectionModel) -> dict[str, str]:
    """Return name and sizes of a network in its present and its inference form, beside the published figures."""
    name = shipped_name(model.yaml)
    whole = model_size(model)
    entries = {
        "network": f"{name or model.name} ({type(model.head).__name__}), strides {_list(model.stride.tolist())}",
        "size": f"{whole.parameters:,} parameters, {whole.flops / 1e9:.1f} GFLOPs at 640 px",
    }
    if len(model.head.branch_names) > 1 or not is_fused(model):
        lean = inference_size(model)
        entries["for inference"] = f"{lean.parameters:,} parameters, {lean.flops / 1e9:.1f} GFLOPs"
    if published := published_size(name):
        note = "" if model.head.nc == 80 else ", with 80 classes"
        entries["published"] = f"{published.parameters_m} M parameters, {published.gflops} GFLOPs{note}"
    return entries


def _kind(checkpoint: Checkpoint, model: DetectionModel | None) -> str:
    if model is None:
        return f"{checkpoint.kind}, network not stored (for training, say which with --cfg)"
    branches = len(model.head.branch_names)
    form = f"training form ({branches} branches)" if branches > 1 else "inference form (lead branch only)"
    folded = ", batch norm folded" if is_fused(model) else ""
    return f"{checkpoint.kind}, {form}{folded}"


def _names(names: Mapping[int, str]) -> str:
    shown = ", ".join(f"{index} {name}" for index, name in list(names.items())[:SHOWN_NAMES])
    return f"{len(names)}: {shown}{', …' if len(names) > SHOWN_NAMES else ''}" if names else ""


def _tensors(checkpoint: Checkpoint) -> str:
    parts = []
    for title, state in (("model", checkpoint.model), ("average", checkpoint.ema)):
        if state:
            dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in state.values())
            parts.append(f"{title} {len(state)} ({', '.join(f'{count} {dtype}' for dtype, count in dtypes.items())})")
    if checkpoint.optimizer:
        states = checkpoint.optimizer.get("state")
        parts.append(f"optimizer state of {len(states) if isinstance(states, dict) else 0} parameters")
    return "; ".join(parts)


def _results(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what is about the course of training, where results are told apart from it by their names."""
    results = {key.removeprefix("metrics/"): value for key, value in metrics.items() if key.startswith("metrics/")}
    return results or metrics


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
        if not isinstance(value, (dict, list, tuple)) and value not in (None, "")
    )


def _printable(text: str) -> str:
    """Shorten a text out of a file and spell out control characters, which could rewrite the terminal's lines."""
    shown = text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}…"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in shown)


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
