"""The optimizer step: unscale, clip, step, average; none from gradients that are not finite, decided on the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.log import CountedWarnings
from utils.train.ema import ModelEMA, joined_like

SHOWN_NAMES = 8  # of images in a warning
MAX_SKIPPED = 30  # optimizer steps in a row; a loss scale that settles needs fewer


class WeightUpdate:
    """Makes optimizer steps from the gradients at hand.

    On CUDA the fused optimizers decide by themselves whether a step is made, from a flag in device memory. Elsewhere
    reading the flag costs nothing.

    On CUDA gradients and averaged weights are joined as well (``is_joined``): with small batches the device would wait
    for a processor that hands it hundreds of tensors several times a step. Has to be made before graphs are recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        ema: ModelEMA,
        clip_limit: float,
        *,
        is_joined: bool | None = None,
    ) -> None:
        self.model, self.optimizer, self.scaler, self.ema = model, optimizer, scaler, ema
        self.clip_limit = clip_limit
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.statistics, self.averaged = join_statistics(model), join_statistics(ema.ema)
        self.is_deferred = getattr(optimizer, "_step_supports_amp_scaling", False)
        if is_joined is None:
            is_joined = self.is_deferred and all(weight.is_cuda for weight in model.parameters())
        self.gradients: JoinedGradients | None = None
        if is_joined and self.trainable and ema.join(model, self.averaged, self.statistics):
            self.gradients = JoinedGradients(self.trainable)

    def __call__(self) -> Tensor:
        """Make one step and clear the gradients; return their norm before clipping, 0-d, on the device."""
        joined = self.gradients if self.gradients is not None and self.gradients.are_in_place() else None
        if joined is None:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.trainable, self.clip_limit)
        else:
            self.scaler.unscale_(joined)  # type: ignore[arg-type]  # asks for nothing but groups of parameters
            norm = joined.clip(self.clip_limit)
        is_finite = torch.isfinite(norm)
        if self.is_deferred:
            self.optimizer.found_inf = (~is_finite).float()
            self.optimizer.step()
            self._mend_statistics()
            self.ema.update(self.model, is_finite)
        elif bool(is_finite):
            self.optimizer.step()
            self.ema.update(self.model)
        else:
            self._mend_statistics()
        self.scaler.update()
        # Kept where they are: recorded graphs write to these addresses.
        if joined is None:
            self.optimizer.zero_grad(set_to_none=not self.is_deferred)
        else:
            joined.flat.zero_()
        return norm

    @torch.no_grad()
    def _mend_statistics(self) -> None:
        """Give running statistics that an infinite activation has spoilt the values of the average."""
        torch.where(torch.isfinite(self.statistics), self.statistics, self.averaged, out=self.statistics)


class JoinedGradients:
    """The gradients of some float32 weights as parts of one tensor, ``flat``: what is done to all is done to that.

    Stands in for an optimizer in ``GradScaler.unscale_``, as one with a single parameter. A weight that nothing reads
    has a gradient of zeros, so that it decays, unlike where gradients are apart.
    """

    @torch.no_grad()
    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = weights
        self.flat, self.parts = joined_like(weights)
        for weight, part in zip(weights, self.parts, strict=True):
            if weight.grad is not None:
                part.copy_(weight.grad)
            weight.grad = part
        stand_in = self.flat.detach()
        stand_in.grad = self.flat
        self.param_groups = [{"params": [stand_in]}]

    def are_in_place(self) -> bool:
        """Whether all weights still have these gradients; others may have been given to them."""
        return all(weight.grad is part for weight, part in zip(self.weights, self.parts, strict=True))

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Scale to the norm ``limit`` what is longer; return the norm before, 0-d. As ``clip_grad_norm_`` does it."""
        norm = torch.linalg.vector_norm(self.flat)
        self.flat.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


def join_statistics(model: nn.Module) -> Tensor:
    """Move the running means and variances of a model into one tensor (N,), of which they are parts then."""
    owners = [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype == torch.float32
    ]
    parts = [module._buffers[name] for module, name in owners]
    if not parts:
        return torch.zeros(0)
    joined = torch.cat([part.flatten() for part in parts])
    views = joined.split([part.numel() for part in parts])
    for (module, name), part, view in zip(owners, parts, views, strict=True):
        module._buffers[name] = view.view_as(part)
    return joined


class SkippedSteps:
    """Says which optimizer steps were skipped, whenever figures are read from the device anyway.

    Raises FloatingPointError in :meth:`read` once ``limit`` steps in a row were.
    """

    def __init__(self, limit: int = MAX_SKIPPED) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.waiting: list[tuple[Tensor, Sequence[Sequence[str]]]] = []
        self.warnings = CountedWarnings()

    def add(self, norm: Tensor, batches: Sequence[Sequence[str]]) -> None:
        """Note a step: its gradient norm, 0-d, and the file names of its batches."""
        self.waiting.append((norm, tuple(batches)))

    def read(self, *, remark: str = "", kept: str = "") -> None:
        """Look at the steps since the last call. ``remark`` goes into warnings, ``kept`` into the error.

        Waits for the device, once.
        """
        if not self.waiting:
            return
        finite = torch.isfinite(torch.stack([norm for norm, _ in self.waiting])).tolist()
        waiting, self.waiting = self.waiting, []
        for is_finite, (_, batches) in zip(finite, waiting, strict=True):
            if is_finite:
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            names = shown_names(batches)
            self.warnings.warn(
                "optimizer steps skipped", f"gradients not finite, step skipped{remark}; images: {names}"
            )
            if self.in_a_row >= self.limit:
                raise FloatingPointError(
                    f"{self.limit} optimizer steps in a row had gradients that are not finite, the last one from "
                    f"{names}. {kept}. Try --no-amp, --amp-dtype bf16, a smaller lr0 in --hyp, or look for broken "
                    "labels"
                )


def shown_names(batches: Sequence[Sequence[str]]) -> str:
    """Return the first few file names of some batches as text."""
    files = [Path(path).name for batch in batches for path in batch]
    more = f" and {len(files) - SHOWN_NAMES} more" if len(files) > SHOWN_NAMES else ""
    return ", ".join(files[:SHOWN_NAMES]) + more
