"""Optimizers with upstream's three parameter groups: biases, decayed weights, normalisation weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from utils.log import LOGGER
from utils.train.schedule import StepPlan

LARGE_SIGN_STEP = 1e-3  # a LION step moves every weight by the full learning rate
NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)


@dataclass
class ParameterGroups:
    """Parameters in order of registration. Only ``weights`` are decayed."""

    biases: list[nn.Parameter] = field(default_factory=list)
    weights: list[nn.Parameter] = field(default_factory=list)
    norms: list[nn.Parameter] = field(default_factory=list)


def parameter_groups(model: nn.Module) -> ParameterGroups:
    """Sort all parameters of ``model``, frozen ones too: the order is what optimizer states are stored by."""
    groups = ParameterGroups()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                groups.biases.append(parameter)
            elif isinstance(module, NORMALISATION):
                groups.norms.append(parameter)
            else:
                groups.weights.append(parameter)
    return groups


class Lion(torch.optim.Optimizer):
    """Sign descent on an interpolated momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

    With gradient g, average m (from 0), weight p: ``p <- p (1 - lr decay) - lr sign(b1 m + (1 - b1) g)``, then
    ``m <- b2 m + (1 - b2) g``. Every weight moves by the learning rate itself, so that this should be three to ten
    times smaller than Adam's and the decay as many times larger.

    Raises:
        ValueError: a negative learning rate or decay, or a beta outside 0 ... 1.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, object]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"Lion: learning rate {lr} and weight decay {weight_decay} should not be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lion: betas {betas} should be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        # As torch's fused optimizers do: where ``found_inf`` (0-d, on the device) is 1, a step changes nothing.
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Make one step from the present gradients, in a few kernels for all weights of a group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            averages = [self._average(weight) for weight in weights]
            (first, second), lr = group["betas"], group["lr"]
            if self.found_inf is not None:
                self._guarded_step(weights, gradients, averages, group)
                continue
            directions = torch._foreach_mul(averages, first)
            torch._foreach_add_(directions, gradients, alpha=1 - first)
            torch._foreach_sign_(directions)
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            torch._foreach_add_(weights, directions, alpha=-lr)
            torch._foreach_mul_(averages, second)
            torch._foreach_add_(averages, gradients, alpha=1 - second)
        return loss

    def _guarded_step(
        self, weights: list[Tensor], gradients: list[Tensor], averages: list[Tensor], group: dict[str, Any]
    ) -> None:
        """Make the step with every share multiplied by a flag, so that nobody has to wait for it."""
        (first, second), lr = group["betas"], group["lr"]
        is_made = 1 - self.found_inf  # 0-d
        gradients = [gradient.nan_to_num(0, 0, 0) for gradient in gradients]  # zero times infinity is no zero
        directions = torch._foreach_mul(averages, first)
        torch._foreach_add_(directions, gradients, alpha=1 - first)
        torch._foreach_sign_(directions)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - is_made * (lr * group["weight_decay"]))
        torch._foreach_add_(weights, torch._foreach_mul(directions, is_made * -lr))
        torch._foreach_mul_(averages, 1 - is_made * (1 - second))
        torch._foreach_add_(averages, torch._foreach_mul(gradients, is_made * (1 - second)))

    def _average(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["average"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state["average"]


def smart_optimizer(
    model: nn.Module, name: str = "Adam", lr: float = 0.001, momentum: float = 0.9, decay: float = 1e-5
) -> torch.optim.Optimizer:
    """Build the optimizer ``name`` over the three groups; fused on CUDA, so that a flag there can call a step off.

    Raises:
        ValueError: unknown name.
    """
    groups = parameter_groups(model)
    fused = True if all(weight.is_cuda for weight in model.parameters()) else None
    if name == "Adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(groups.biases, lr=lr, betas=(momentum, 0.999), fused=fused)
    elif name == "AdamW":
        optimizer = torch.optim.AdamW(
            groups.biases, lr=lr, betas=(momentum, 0.999), weight_decay=0.0, amsgrad=True, fused=fused
        )
    elif name == "SGD":
        optimizer = torch.optim.SGD(groups.biases, lr=lr, momentum=momentum, nesterov=True, fused=fused)
    elif name == "LION":
        optimizer = Lion(groups.biases, lr=lr, betas=(momentum, 0.99))
        if lr > LARGE_SIGN_STEP:
            LOGGER.warning(
                f"LION moves every weight by the learning rate itself, and lr0 {lr:g} is large for that: "
                "3e-4 or less is usual, with warmup_bias_lr no larger and ten times the weight_decay"
            )
    else:
        raise ValueError(f"optimizer '{name}': expected SGD, Adam, AdamW or LION")
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.add_param_group({"params": groups.weights, "weight_decay": decay})
    optimizer.add_param_group({"params": groups.norms, "weight_decay": 0.0})
    if name == "SGD" and fused:
        _begin_momentum(optimizer)
    LOGGER.info(
        f"Optimizer: {name}, lr {lr:g}, {len(groups.biases)} biases, "
        f"{len(groups.weights)} weights (decay {decay:g}), {len(groups.norms)} normalisation weights"
    )
    return optimizer


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Start all momentum at zero, which leaves the first step as it is.

    A fused first step that is called off would otherwise leave its momentum unset.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore ``state``, but keep how this optimizer computes: the state may come from another kind of device."""
    kept = [{key: group[key] for key in ("fused", "foreach") if key in group} for group in optimizer.param_groups]
    # Before loading: it decides where the counters of steps are put.
    groups = [{**group, **own} for group, own in zip(state["param_groups"], kept, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})


def apply_plan(optimizer: torch.optim.Optimizer, plan: StepPlan) -> None:
    """Set learning rates and, where the optimizer has one, the momentum of all groups."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = plan.lr_bias if index == 0 else plan.lr_other
        if "momentum" in group:
            group["momentum"] = plan.momentum
