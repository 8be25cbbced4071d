"""The detection model: rows of a YAML evaluated in order, with everything callers need around them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from models.activation_checkpointing import (
    IMAGE,
    CheckpointPlan,
    RowCall,
    call_row,
    make_plan,
    measure_rows,
    run_rows,
    run_segments,
)
from models.blocks import set_activation
from models.heads import HEADS
from models.parse import parse_activation, parse_model, set_network_constants
from models.reparam import fuse_modules
from models.summary import RowProfile, log_profile, log_summary, profile_row, save_feature_maps
from models.tta import augmented_prediction
from models.upstream import known_as
from utils.files import read_yaml

CONFIG_DIR = Path(__file__).resolve().parent / "detect"


@dataclass(frozen=True)
class Transfer:
    """What :meth:`DetectionModel.load_matching` did: tensors taken, tensors of the model, why others were not."""

    transferred: int
    total: int
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.transferred}/{self.total} tensors transferred"


def find_model_yaml(cfg: str | Path) -> Path:
    """Return the path of a model YAML given by path, by name, or by name without suffix.

    Raises FileNotFoundError naming the shipped models.
    """
    path = Path(cfg)
    for candidate in (path, CONFIG_DIR / path.name, CONFIG_DIR / f"{path.name}.yaml"):
        if candidate.is_file():
            return candidate
    shipped = ", ".join(sorted(file.name for file in CONFIG_DIR.glob("*.yaml")))
    raise FileNotFoundError(f"model YAML {str(cfg)!r} does not exist; give a path or one of: {shipped}")


@known_as("models.yolo")
class DetectionModel(nn.Module):
    """Detection network built from a model YAML.

    ``names`` is a list of '0', '1', ... until a trainer sets the dict of the data set; ``stride`` stays float32 on the
    CPU, while ``head.stride`` moves with the weights. Raises ValueError or FileNotFoundError for an unusable ``cfg``.

    ``grad_checkpoint`` = N above 1 makes training passes keep about 1/N of the activations and compute the others again
    for the gradients; 0 keeps them all. Set it after freezing: the first training pass makes the plan.
    """

    grad_checkpoint: float = 0
    _checkpoint_plan: CheckpointPlan | None = None

    def __init__(
        self,
        cfg: str | Path | Mapping[str, object] = "yolov9-s.yaml",
        ch: int = 3,
        nc: int | None = None,
        anchors: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(cfg, Mapping):
            self.yaml = copy.deepcopy(dict(cfg))
        else:
            path = find_model_yaml(cfg)
            self.yaml_file = path.name
            self.yaml = read_yaml(path)
        self._check_yaml(nc)
        self.yaml["ch"] = self.yaml.get("ch", ch)
        if nc:
            self.yaml["nc"] = nc
        if anchors:
            self.yaml["anchors"] = round(anchors)
        self.model, self.save = parse_model(copy.deepcopy(self.yaml), self.yaml["ch"])
        if type(self.head).__name__ not in HEADS:
            raise ValueError(f"the last row of a model YAML must be one of {', '.join(HEADS)}, not {self.head.type}")
        self.names = [str(index) for index in range(self.yaml["nc"])]
        self.inplace = self.yaml.get("inplace", True)
        self.head.inplace = self.inplace
        self.stride = self.head.stride.clone()
        self.head.bias_init()
        self.finish_blocks()

    def _check_yaml(self, nc: int | None) -> None:
        wanted = self.yaml.get("nc") if nc is None else nc
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
            raise ValueError(f"model {self.name}: the class count must be a whole number of at least 1, got {wanted!r}")

    def finish_blocks(self) -> None:
        """Set norm constants and the activation of this model in all blocks (again, after a head was rebuilt)."""
        named = self.yaml.get("activation")
        set_network_constants(self)
        set_activation(self, parse_activation(named) if named else None)

    @property
    def name(self) -> str:
        """Stem of the YAML file, or ``Model`` for a model built from a dict."""
        return Path(getattr(self, "yaml_file", None) or "Model").stem

    @property
    def head(self) -> nn.Module:
        """The last row."""
        return self.model[-1]

    def priors(self) -> tuple[Tensor, Tensor]:
        """The tensors besides weights that the last pass outside of training has read."""
        return self.head.anchors, self.head.strides

    def forward(
        self, x: Tensor, augment: bool = False, profile: bool = False, visualize: str | Path | bool = False
    ) -> object:
        """Return what the head returns (see models/heads.py) for images (B, C, H, W) in 0...1.

        ``augment`` gives ``(prediction, None)`` joined over scaled and mirrored passes; ``profile`` logs time and size
        of every row; ``visualize`` names a folder for pictures of every row's output.
        """
        if augment:
            return augmented_prediction(self, x), None
        if profile or visualize:
            return self._observed_forward(x, profile, visualize)
        if self.grad_checkpoint and self.training and torch.is_grad_enabled():
            return run_segments(self.model, self.checkpoint_plan(), self.save, x)
        return self._run_rows(x)

    def _run_rows(self, x: Tensor, call: RowCall = call_row) -> object:
        return run_rows(self.model, {IMAGE: x}, self.save, call)

    def checkpoint_plan(self) -> CheckpointPlan:
        """Return which rows are computed twice for the present ``grad_checkpoint``; ValueError unless above 1."""
        plan = self._checkpoint_plan
        if plan is None or plan.parts != self.grad_checkpoint:
            plan = self._checkpoint_plan = make_plan(measure_rows(self), self.grad_checkpoint)
        return plan

    def _observed_forward(self, x: Tensor, profile: bool, visualize: str | Path | bool) -> object:
        rows: list[RowProfile] = []

        def call(row: nn.Module, inputs: object) -> object:
            output, measured = profile_row(row, inputs)
            rows.append(measured)
            if visualize:
                save_feature_maps(output, row, Path(visualize))
            return output

        result = self._run_rows(x, call)
        if profile:
            log_profile(rows)
        return result

    def fuse(self) -> DetectionModel:
        """Fold every batch norm and both branches of every RepConvN into plain convolutions, in place.

        For inference only: the result has other keys, no norms and no gradients. Harmless when called again.
        """
        fuse_modules(self)
        return self.requires_grad_(False)

    def info(self, verbose: bool = True, imgsz: int = 640) -> None:
        """Log the layer table (if ``verbose``), the summary line and the size of the inference form."""
        log_summary(self, verbose=verbose, imgsz=imgsz)

    def load_matching(self, state_dict: Mapping[str, Tensor], exclude: Sequence[str] = ()) -> Transfer:
        """Copy every tensor whose key and shape agree; keys that contain a text of ``exclude`` are left alone."""
        own = self.state_dict()
        reasons: dict[str, str] = {}
        taken = 0
        with torch.no_grad():
            for key, target in own.items():
                source = state_dict.get(key)
                if any(text in key for text in exclude):
                    reasons[key] = "excluded"
                elif source is None:
                    reasons[key] = "not in the file"
                elif source.shape != target.shape:
                    reasons[key] = f"shape {tuple(source.shape)} in the file, {tuple(target.shape)} in the model"
                else:
                    target.copy_(source)
                    taken += 1
        for key in state_dict.keys() - own.keys():
            reasons[key] = "not in the model"
        return Transfer(taken, len(own), reasons)

    def match_head_widths(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Rebuild head branches whose hidden widths differ from those of a state dict's tensor shapes.

        True if any was rebuilt. Call it before loading; the new branches carry fresh weights.
        """
        prefix = f"model.{self.head.i}."
        changed = self.head.set_hidden_widths(self.head.widths_from_shapes(shapes, prefix))
        if changed:
            self.head.bias_init()
            self.finish_blocks()
            self.head.np = sum(parameter.numel() for parameter in self.head.parameters())
        return changed


Model = DetectionModel
