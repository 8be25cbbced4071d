"""Anchor-free detection heads with one, two or three branches, and how to read what they return.

A branch turns one map per level into box logits (4 sides x 16 bins) and class logits. Branches in front of the last
one exist for training only; every consumer of predictions uses the last, which :func:`lead_prediction` picks out of
any output. Boxes are decoded at least in float32, whatever the precision of the weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from models.blocks import DFL, Conv, without_autocast
from models.fast_paths import level_map
from models.upstream import known_as

Maps = list[Tensor]
"""The raw maps of one branch, one (B, 4 * reg_max + nc, H, W) per level."""

PRIOR_BOX_BIAS = 1.0
OBJECTS_PER_IMAGE = 5
REFERENCE_SIZE = 640
"""The class bias starts at the log of the chance that one cell holds one of 5 objects in a 640-pixel image."""

UNSUPPORTED_HEADS = ("Detect", "DualDetect", "TripleDetect", "Segment", "Panoptic")


def box_hidden_width(first_channels: int, reg_max: int) -> int:
    """Hidden width of a box branch, a multiple of its four convolution groups."""
    return math.ceil(max(first_channels // 4, reg_max * 4, 16) / 4) * 4


def class_hidden_width(first_channels: int, nc: int) -> int:
    """Hidden width of a class branch; it depends on the class count as long as that is small."""
    return max(first_channels, min(2 * nc, 128))


class _BranchedHead(nn.Module):
    """Everything the heads share; a subclass only names its branches, auxiliary ones first."""

    branch_names: ClassVar[tuple[tuple[str, str], ...]]
    decoder_names: ClassVar[tuple[str, ...]]

    dynamic = False
    export = False
    shape = None
    anchors = torch.empty(0)
    strides = torch.empty(0)

    def __init__(self, nc: int = 80, ch: Sequence[int] = (), inplace: bool = True) -> None:
        """Build branches for ``nc`` classes; ``ch`` lists the input channels, all levels of one branch in a row."""
        super().__init__()
        branches = len(self.branch_names)
        if not ch or len(ch) % branches:
            raise ValueError(
                f"{type(self).__name__} reads {branches} group(s) of maps of equal length, but got {len(ch)} inputs: "
                f"{list(ch)}"
            )
        self.nc = nc
        self.nl = len(ch) // branches
        self.reg_max = 16
        self.no = nc + 4 * self.reg_max
        self.inplace = inplace
        self.stride = torch.zeros(self.nl, device="cpu")
        self._input_channels = tuple(ch)
        for index in range(branches):
            self._build_branch(index)
        for name in self.decoder_names:
            setattr(self, name, DFL(self.reg_max))

    @property
    def branches(self) -> list[tuple[nn.ModuleList, nn.ModuleList, DFL]]:
        """(box convolutions, class convolutions, decoder) of every branch, the lead branch last."""
        return [
            (getattr(self, box), getattr(self, cls), getattr(self, decoder))
            for (box, cls), decoder in zip(self.branch_names, self.decoder_names, strict=True)
        ]

    def _build_branch(self, index: int, box_width: int | None = None, class_width: int | None = None) -> None:
        """Create the box and class convolutions of one branch; widths follow from the first level unless given."""
        channels = self._input_channels[index * self.nl : (index + 1) * self.nl]
        box_width = box_width or box_hidden_width(channels[0], self.reg_max)
        class_width = class_width or class_hidden_width(channels[0], self.nc)
        box_name, class_name = self.branch_names[index]
        boxes = (
            nn.Sequential(
                Conv(width, box_width, 3),
                Conv(box_width, box_width, 3, g=4),
                nn.Conv2d(box_width, 4 * self.reg_max, 1, groups=4),
            )
            for width in channels
        )
        classes = (
            nn.Sequential(
                Conv(width, class_width, 3), Conv(class_width, class_width, 3), nn.Conv2d(class_width, self.nc, 1)
            )
            for width in channels
        )
        setattr(self, box_name, nn.ModuleList(boxes))
        setattr(self, class_name, nn.ModuleList(classes))

    def hidden_widths(self) -> list[tuple[int, int]]:
        """Return (box, class) hidden width of every branch, the lead branch last."""
        return [(boxes[0][0].conv.out_channels, classes[0][0].conv.out_channels) for boxes, classes, _ in self.branches]

    def set_hidden_widths(self, widths: Sequence[tuple[int, int]]) -> bool:
        """Rebuild branches (with fresh weights) whose (box, class) hidden widths differ; True if any did.

        Released weight files may carry other widths than the ones that follow from the YAML. Norm constants and
        activations of a rebuilt branch are the defaults of a fresh block: the model has to set them again.
        """
        example = self.branches[-1][0][0][-1].weight
        differing = [
            index
            for index, (wanted, present) in enumerate(zip(widths, self.hidden_widths(), strict=True))
            if tuple(wanted) != present
        ]
        for index in differing:
            self._build_branch(index, *widths[index])
            for name in self.branch_names[index]:
                getattr(self, name).to(device=example.device, dtype=example.dtype).train(self.training)
        return bool(differing)

    def widths_from_shapes(self, shapes: Mapping[str, Sequence[int]], prefix: str) -> list[tuple[int, int]]:
        """Read hidden widths off the tensor shapes of a state dict; ``prefix`` is the head's, e.g. ``model.29.``.

        Raises KeyError if a branch is missing there.
        """
        return [
            (int(shapes[f"{prefix}{box}.0.0.conv.weight"][0]), int(shapes[f"{prefix}{cls}.0.0.conv.weight"][0]))
            for box, cls in self.branch_names
        ]

    def bias_init(self) -> None:
        """Set the last biases: boxes to one bin, classes to the rarity of objects at each stride."""
        with torch.no_grad():
            for boxes, classes, _ in self.branches:
                for box, cls, stride in zip(boxes, classes, self.stride.tolist(), strict=True):
                    box[-1].bias.fill_(PRIOR_BOX_BIAS)
                    cls[-1].bias.fill_(math.log(OBJECTS_PER_IMAGE / self.nc / (REFERENCE_SIZE / stride) ** 2))

    def raw_branches(self, inputs: Sequence[Tensor], first: int = 0) -> list[Maps]:
        """Return the raw maps of the branches ``first`` and later; ``inputs`` holds the maps of all branches."""
        result = []
        for index, (boxes, classes, _) in list(enumerate(self.branches))[first:]:
            levels = inputs[index * self.nl : (index + 1) * self.nl]
            result.append([level_map(x, box, cls) for x, box, cls in zip(levels, boxes, classes, strict=True)])
        return result

    def decode(self, maps: Maps, decoder: DFL) -> Tensor:
        """Turn the raw maps of one branch into (B, 4 + nc, A): cx, cy, w, h in input pixels, then class scores."""
        with without_autocast(maps[0].device.type):
            flat = torch.cat([self._flatten(level) for level in maps], 2)  # (B, 4 * reg_max + nc, A)
            if flat.dtype in (torch.float16, torch.bfloat16):
                flat = flat.float()
            box_logits, class_logits = flat.split((4 * self.reg_max, self.nc), 1)
            points, strides = self._priors(maps, flat.dtype)
            left_top, right_bottom = decoder(box_logits).split((2, 2), 1)
            top_left, bottom_right = points - left_top, points + right_bottom
            boxes = torch.cat(((top_left + bottom_right) / 2, bottom_right - top_left), 1) * strides
            return torch.cat((boxes, class_logits.sigmoid()), 1)

    def _flatten(self, level: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H * W), in an exported graph with every size but the batch as a constant."""
        if self.dynamic:
            return level.flatten(2)
        with silent_tracer():
            return level.reshape(-1, self.no, int(level.shape[2]) * int(level.shape[3]))

    def _priors(self, maps: Maps, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cell centres (2, A) in grid units and strides (1, A); cached unless ``dynamic``."""
        if self.dynamic:
            return traced_priors(maps, self.stride, dtype)
        with silent_tracer():
            sizes = tuple((int(level.shape[2]), int(level.shape[3])) for level in maps)
            key = (sizes, dtype, maps[0].device)
            if self.shape == key:
                return self.anchors, self.strides
            # Outside of inference mode, or a later pass with gradients could not use the cached tensors.
            with torch.inference_mode(False):
                points, strides = (
                    torch.as_tensor(values, dtype=dtype, device=maps[0].device)
                    for values in constant_priors(sizes, self.stride.tolist())
                )
        if not torch.jit.is_tracing():  # a second trace, which checks the first one, must see the same graph
            self.anchors, self.strides, self.shape = points, strides, key
        return points, strides

    def forget_priors(self) -> None:
        """Drop the cached priors; the next decoding makes them anew."""
        for name in ("anchors", "strides", "shape"):
            self.__dict__.pop(name, None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move the strides along with the weights; the priors are cheap enough to be made anew."""
        super()._apply(fn, recurse)
        self.stride = fn(self.stride)
        self.forget_priors()
        return self

    def __getstate__(self) -> dict[str, object]:
        """Leave the cached priors out of copies and pickles."""
        return {name: value for name, value in self.__dict__.items() if name not in ("anchors", "strides", "shape")}


@known_as("models.yolo")
class DDetect(_BranchedHead):
    """Single-branch head.

    Training: list of maps. Eval: ``(prediction, maps)``; with ``export`` the prediction alone.
    """

    branch_names = (("cv2", "cv3"),)
    decoder_names = ("dfl",)

    def forward(self, x: Sequence[Tensor]) -> Maps | Tensor | tuple[Tensor, Maps]:
        (maps,) = self.raw_branches(x)
        if self.training:
            return maps
        prediction = self.decode(maps, self.dfl)
        return prediction if self.export else (prediction, maps)


@known_as("models.yolo")
class DualDDetect(_BranchedHead):
    """Two-branch head: auxiliary first, lead second.

    Training: ``[maps_aux, maps_lead]``. Eval: ``([aux, lead], [maps_aux, maps_lead])``; with ``export`` only
    ``[aux, lead]``.
    """

    branch_names = (("cv2", "cv3"), ("cv4", "cv5"))
    decoder_names = ("dfl", "dfl2")

    def forward(self, x: Sequence[Tensor]) -> list[Maps] | list[Tensor] | tuple[list[Tensor], list[Maps]]:
        branches = self.raw_branches(x)
        if self.training:
            return branches
        predictions = [
            self.decode(maps, decoder) for maps, decoder in zip(branches, (self.dfl, self.dfl2), strict=True)
        ]
        return predictions if self.export else (predictions, branches)


@known_as("models.yolo")
class TripleDDetect(_BranchedHead):
    """Three-branch head that computes only the last branch when it is not training.

    Training: three lists of maps. Eval: ``(prediction, maps)`` of the last branch; with ``export`` the prediction.
    """

    branch_names = (("cv2", "cv3"), ("cv4", "cv5"), ("cv6", "cv7"))
    decoder_names = ("dfl", "dfl2", "dfl3")

    def forward(self, x: Sequence[Tensor]) -> list[Maps] | Tensor | tuple[Tensor, Maps]:
        if self.training:
            return self.raw_branches(x)
        (maps,) = self.raw_branches(x, first=2)
        prediction = self.decode(maps, self.dfl3)
        return prediction if self.export else (prediction, maps)


HEADS: dict[str, type[_BranchedHead]] = {head.__name__: head for head in (DDetect, DualDDetect, TripleDDetect)}


@contextmanager
def silent_tracer() -> Iterator[None]:
    """Silence the tracer's warning that sizes become constants, where that is the intention."""
    if not torch.jit.is_tracing():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        yield


def constant_priors(sizes: Sequence[tuple[int, int]], strides: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Compute cell centres (2, A) in grid units and strides (1, A), levels in order, each level row by row.

    NumPy rather than torch, so that a tracer sees finished constants instead of the steps that made them.
    """
    centres, steps = [], []
    for (height, width), stride in zip(sizes, strides, strict=True):
        y, x = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij")
        centres.append(np.stack((x.ravel(), y.ravel())))
        steps.append(np.full((1, height * width), stride))
    return np.concatenate(centres, 1), np.concatenate(steps, 1)


def traced_priors(maps: Maps, strides: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same as :func:`constant_priors` in tensor operations, so that height and width stay free in a graph."""
    centres, steps = [], []
    for level, stride in zip(maps, strides.to(device=maps[0].device, dtype=dtype), strict=True):
        height, width = level.shape[2], level.shape[3]
        x = torch.arange(width, device=level.device, dtype=dtype) + 0.5
        y = torch.arange(height, device=level.device, dtype=dtype) + 0.5
        centres.append(
            torch.stack((x.view(1, -1).expand(height, width), y.view(-1, 1).expand(height, width))).flatten(1)
        )
        steps.append(stride.expand(1, height * width))
    return torch.cat(centres, 1), torch.cat(steps, 1)


def lead_prediction(output: object) -> Tensor:
    """Pick the lead branch's (B, 4 + nc, A) out of any eval or export output of any head.

    Raises ValueError for the output of a model in training mode, which holds no decoded prediction.
    """
    while isinstance(output, (list, tuple)) and output:
        decoded_with_maps = isinstance(output, tuple) and len(output) == 2 and not isinstance(output[1], Tensor)
        # (prediction, maps) holds the prediction first; a plain list of predictions holds the lead last.
        output = output[0] if decoded_with_maps else output[-1]
    if isinstance(output, Tensor) and output.ndim == 3:
        return output
    found = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ValueError(f"no decoded prediction (B, 4 + nc, A) in this output, found {found}; call model.eval() first")


def head_branches(output: object) -> list[Maps]:
    """Return the raw maps of every branch, lead last, out of a training or eval output of any head.

    Raises ValueError for an export output, which carries no maps.
    """
    if isinstance(output, tuple) and len(output) == 2:
        output = output[1]
    if isinstance(output, (list, tuple)) and output:
        if all(isinstance(level, Tensor) and level.ndim == 4 for level in output):
            return [list(output)]
        if all(isinstance(branch, (list, tuple)) for branch in output):
            return [list(branch) for branch in output]
    raise ValueError(
        "this output holds no raw maps (B, 4 * reg_max + nc, H, W); use the model in training mode or in eval mode "
        "without export"
    )
