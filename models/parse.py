"""From the rows of a model YAML to a ``Sequential`` of modules.

Names come from tables and nothing of a YAML is ever executed, because it may stem from a foreign checkpoint.
Errors name the row and what would be accepted.
"""

from __future__ import annotations

import ast
import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from models.blocks import (
    AConv,
    ADown,
    CBFuse,
    CBLinear,
    Concat,
    Conv,
    DWConv,
    Silence,
    Upsample,
)
from models.heads import HEADS, UNSUPPORTED_HEADS
from models.stages import ELAN1, SP, SPPELAN, Bottleneck, RepNCSPELAN4
from models.upstream import dotted_path

WIDTH_MULTIPLE_OF = 8
NORM_EPS = 1e-3
NORM_MOMENTUM = 0.03

# Modules that take (input channels, output channels, ...); only the output width of these is scaled and rounded.
CONVOLVING = {cls.__name__: cls for cls in (Conv, DWConv, AConv, ADown, ELAN1, RepNCSPELAN4, SPPELAN, Bottleneck)}
OTHERS: dict[str, type[nn.Module]] = {
    **{cls.__name__: cls for cls in (Concat, CBLinear, CBFuse, Silence, SP)},
    "nn.Upsample": Upsample,
    "nn.Identity": nn.Identity,
}
MODULES: dict[str, type[nn.Module]] = {**CONVOLVING, **OTHERS, **HEADS}

ACTIVATIONS: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        nn.ELU, nn.GELU, nn.Hardswish, nn.Identity, nn.LeakyReLU, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SiLU,
    )
}  # fmt: skip
PLAIN_STRINGS = frozenset({"nearest", "bilinear", "bicubic", "area", "nearest-exact", "linear", "trilinear"})
WORDS: dict[str, None | bool] = {"None": None, "True": True, "False": False}


@dataclass(frozen=True)
class Row:
    """One checked row: where its input comes from, how often it repeats, what it builds with which arguments."""

    index: int
    sources: tuple[int, ...]
    repeats: int
    name: str
    args: tuple[object, ...]
    is_list: bool

    @property
    def absolute_sources(self) -> tuple[int, ...]:
        """Row numbers read by this row; -1 is the image."""
        return tuple(self.index + source if source < 0 else source for source in self.sources)


def read_rows(cfg: Mapping[str, object]) -> list[Row]:
    """Check the ``backbone`` and ``head`` lists of a model YAML and number their rows through.

    Raises ValueError naming the first faulty row.
    """
    for key in ("backbone", "head"):
        if not isinstance(cfg.get(key), list):
            raise ValueError(
                f"model YAML: {key!r} must be a list of [from, number, module, args], got {cfg.get(key)!r}"
            )
    rows = [*cfg["backbone"], *cfg["head"]]
    if not rows:
        raise ValueError("model YAML: 'backbone' and 'head' hold no row")
    return [_read_row(index, row) for index, row in enumerate(rows)]


def _read_row(index: int, row: object) -> Row:
    if not isinstance(row, (list, tuple)) or len(row) != 4:
        raise ValueError(f"model YAML, row {index}: expected [from, number, module, args], got {row!r}")
    source, repeats, name, args = row
    sources = tuple(source) if isinstance(source, (list, tuple)) else (source,)
    is_int = all(isinstance(value, int) and not isinstance(value, bool) for value in (*sources, repeats))
    if not sources or not is_int or repeats < 1:
        raise ValueError(f"model YAML, row {index}: 'from' and 'number' must be whole numbers, got {row!r}")
    readable = range(-index, index) if index else (-1,)
    if any(value not in readable for value in sources):
        raise ValueError(f"model YAML, row {index}: 'from' {source!r} must point at an earlier row")
    if not isinstance(name, str) or not isinstance(args, (list, tuple)):
        raise ValueError(f"model YAML, row {index}: 'module' must be a name and 'args' a list, got {row!r}")
    return Row(index, sources, repeats, name, tuple(args), isinstance(source, (list, tuple)))


def parse_activation(text: str) -> nn.Module:
    """Build the activation that a YAML names, e.g. ``nn.ReLU()`` or ``nn.LeakyReLU(0.1)``."""
    match = re.fullmatch(r"\s*(?:torch\.)?(?:nn\.)?(\w+)\s*(?:\((.*)\))?\s*", str(text))
    kind = ACTIVATIONS.get(match.group(1)) if match else None
    if kind is None:
        known = ", ".join(f"nn.{name}()" for name in ACTIVATIONS)
        raise ValueError(f"model YAML: unknown activation {text!r}; expected one of {known}")
    options: dict[str, object] = {}
    numbers: list[object] = []
    try:
        for part in filter(None, (part.strip() for part in (match.group(2) or "").split(","))):
            name, separator, value = part.rpartition("=")
            if separator:
                options[name.strip()] = ast.literal_eval(value.strip())
            else:
                numbers.append(ast.literal_eval(part))
        return kind(*numbers, **options)
    except (ValueError, SyntaxError, TypeError) as error:
        raise ValueError(f"model YAML: cannot read the arguments of activation {text!r}: {error}") from error


def parse_model(cfg: Mapping[str, object], ch: int | Sequence[int]) -> tuple[nn.Sequential, list[int]]:
    """Build all rows of ``cfg`` for images of ``ch`` channels; return them and the rows whose output must be kept.

    Every row module carries ``i`` (row), ``f`` (from), ``type`` (dotted path of its class) and ``np`` (parameters).
    The activation named by ``cfg`` is set inside this network only.
    """
    builder = _RowBuilder(cfg, ch if isinstance(ch, int) else ch[0])
    rows = read_rows(cfg)
    layers = [builder.build(row) for row in rows]
    return nn.Sequential(*layers), kept_outputs(rows)


def kept_outputs(rows: Sequence[Row]) -> list[int]:
    """Return the rows whose output must be kept, because other rows than the next one read it."""
    return sorted(source % row.index for row in rows for source in row.sources if source != -1)


def number_row(module: nn.Module, row: Row) -> None:
    """Tell the module of a row its number and where its inputs come from."""
    module.i = row.index
    module.f = list(row.sources) if row.is_list else row.sources[0]


def set_network_constants(module: nn.Module) -> None:
    """Give every batch norm the constants of a finished model."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps, norm.momentum = NORM_EPS, NORM_MOMENTUM


def stride_factor(module: nn.Module) -> float:
    """Return by how much a row module coarsens its input: 2 halves the resolution, 0.5 doubles it."""
    if isinstance(module, nn.Sequential):
        return math.prod(stride_factor(part) for part in module)
    if isinstance(module, nn.Upsample):
        scale = module.scale_factor
        return 1 / (scale[0] if isinstance(scale, tuple) else scale)
    if isinstance(module, (AConv, ADown)):
        return stride_factor(module.cv1)
    stride = 1
    if isinstance(module, (Conv, CBLinear)):
        stride = module.conv.stride
    elif isinstance(module, SP):
        stride = module.m.stride
    return stride[0] if isinstance(stride, tuple) else stride


class _RowBuilder:
    """Builds rows in order and remembers the output width of each."""

    def __init__(self, cfg: Mapping[str, object], image_channels: int) -> None:
        anchors = cfg.get("anchors", 3)
        self.nc = int(cfg["nc"])
        self.depth = float(cfg.get("depth_multiple", 1.0))
        self.width = float(cfg.get("width_multiple", 1.0))
        self.anchors = anchors
        anchor_count = len(anchors[0]) // 2 if isinstance(anchors, list) else int(anchors or 0)
        self.unscaled_width = anchor_count * (self.nc + 5)
        self.image_channels = image_channels
        self.channels: list[int | list[int]] = []
        self.strides: list[float] = []

    def build(self, row: Row) -> nn.Module:
        kind = self._lookup(row)
        args = [self._resolve(row, value) for value in row.args]
        inputs = [self._channels_of(row, source, kind) for source in row.absolute_sources]
        repeats = max(round(row.repeats * self.depth), 1) if row.repeats > 1 else 1
        if row.name in CONVOLVING:
            args = [inputs[0], self._scaled(row, args), *args[1:]]
            out_channels = args[1]
        elif kind is CBLinear:
            out_channels = list(args[0]) if args and isinstance(args[0], list) else []
            args = [inputs[0], *args]
        elif row.name in HEADS:
            args = [*args, inputs]
            out_channels = 0
        else:
            out_channels = sum(inputs) if kind is Concat else inputs[-1]
        if kind is CBFuse:
            self._check_slices(row, args)
        module = self._construct(row, kind, args, repeats)
        self._track_stride(row, module)
        number_row(module, row)
        module.type = dotted_path(kind)
        module.np = sum(parameter.numel() for parameter in module.parameters())
        self.channels.append(out_channels)
        return module

    def _track_stride(self, row: Row, module: nn.Module) -> None:
        """Note how many image pixels one step in the output of ``row`` spans; a head learns its levels' strides.

        The set of modules is closed, so this needs no trial image, and batch statistics stay untouched.
        """
        inputs = [1.0 if source < 0 else self.strides[source] for source in row.absolute_sources]
        if row.name in HEADS:
            groups = [tuple(inputs[start : start + module.nl]) for start in range(0, len(inputs), module.nl)]
            if len(set(groups)) != 1:
                raise ValueError(f"model YAML, row {row.index}: the branches of {row.name} differ in stride: {groups}")
            module.stride = torch.tensor(groups[0], device="cpu")
        elif row.name == "Concat" and len(set(inputs)) != 1:
            raise ValueError(f"model YAML, row {row.index}: Concat of rows {row.sources} with strides {inputs}")
        self.strides.append(inputs[-1] * stride_factor(module))

    def _check_slices(self, row: Row, args: list[object]) -> None:
        """Refuse a CBFuse whose slices are not as wide as its last input (a width multiple other than 1 does that)."""
        target = self.channels[row.absolute_sources[-1]]
        indices = args[0] if args and isinstance(args[0], list) else []
        sliced = [self.channels[source] for source in row.absolute_sources[:-1]]
        fits = len(indices) == len(sliced) and all(
            isinstance(widths, list) and index in range(len(widths)) and widths[index] == target
            for index, widths in zip(indices, sliced, strict=True)
        )
        if not fits:
            raise ValueError(
                f"model YAML, row {row.index}: CBFuse {indices} takes slices of the widths {sliced} for an input of "
                f"{target} channels; models with CBFuse need width_multiple 1.0"
            )

    @staticmethod
    def _lookup(row: Row) -> type[nn.Module]:
        name = row.name.removeprefix("torch.")
        if name in UNSUPPORTED_HEADS:
            raise ValueError(
                f"model YAML, row {row.index}: head {name!r} is not supported; "
                f"this repository trains and runs {', '.join(HEADS)}"
            )
        if name not in MODULES:
            known = ", ".join(sorted(MODULES))
            raise ValueError(f"model YAML, row {row.index}: unknown module {name!r}; known: {known}")
        return MODULES[name]

    def _channels_of(self, row: Row, source: int, reader: type[nn.Module]) -> int:
        """Output width of a row that ``row`` reads; the tuple of a CBLinear row is for CBFuse alone."""
        width = self.image_channels if source < 0 else self.channels[source]
        if isinstance(width, list):
            if reader is not CBFuse:
                raise ValueError(
                    f"model YAML, row {row.index}: {row.name} cannot read row {source}, a CBLinear; only CBFuse can"
                )
            return 0
        return width

    def _scaled(self, row: Row, args: list[object]) -> int:
        """Scale the output width and round it up to a multiple of eight."""
        if not args or not isinstance(args[0], int) or args[0] < 1:
            raise ValueError(f"model YAML, row {row.index}: {row.name} needs its output channels first, got {args}")
        if args[0] == self.unscaled_width:
            return args[0]
        return math.ceil(args[0] * self.width / WIDTH_MULTIPLE_OF) * WIDTH_MULTIPLE_OF

    def _resolve(self, row: Row, value: object) -> object:
        """Replace the few words an argument may be; numbers pass, any other text is refused."""
        if isinstance(value, (list, tuple)):
            return [self._resolve(row, item) for item in value]
        if value is None or isinstance(value, (int, float)):
            return value
        if isinstance(value, str):
            if value in WORDS:
                return WORDS[value]
            if value in PLAIN_STRINGS:
                return value
            if value in ("nc", "anchors"):
                return getattr(self, value)
            if value.startswith(("nn.", "torch.nn.")):
                return parse_activation(value)
        raise ValueError(
            f"model YAML, row {row.index}: cannot use argument {value!r} of {row.name}; expected a number, "
            f"'nc', 'anchors', 'None', an activation such as 'nn.ReLU()' or one of {', '.join(sorted(PLAIN_STRINGS))}"
        )

    @staticmethod
    def _construct(row: Row, kind: type[nn.Module], args: list[object], repeats: int) -> nn.Module:
        try:
            if repeats == 1:
                return kind(*args)
            return nn.Sequential(*(kind(*copy.deepcopy(args)) for _ in range(repeats)))
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, ZeroDivisionError) as error:
            raise ValueError(
                f"model YAML, row {row.index}: cannot build {row.name} with arguments {args}: {error}"
            ) from error
