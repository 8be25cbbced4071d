"""Optimizers with upstream's three parameter groups: biases, decayed weights, normalisation weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from utils.log import LOGGER
from utils.train.schedule import StepPlan

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


def smart_optimizer(
    model: nn.Module, name: str = "Adam", lr: float = 0.001, momentum: float = 0.9, decay: float = 1e-5
) -> torch.optim.Optimizer:
    """Build the optimizer ``name`` over the three groups.

    Raises:
        ValueError: unknown name.
    """
    groups = parameter_groups(model)
    if name == "Adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(groups.biases, lr=lr, betas=(momentum, 0.999))
    elif name == "AdamW":
        optimizer = torch.optim.AdamW(groups.biases, lr=lr, betas=(momentum, 0.999), weight_decay=0.0, amsgrad=True)
    elif name == "SGD":
        optimizer = torch.optim.SGD(groups.biases, lr=lr, momentum=momentum, nesterov=True)
    else:
        raise ValueError(f"optimizer '{name}': expected SGD, Adam or AdamW")
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.add_param_group({"params": groups.weights, "weight_decay": decay})
    optimizer.add_param_group({"params": groups.norms, "weight_decay": 0.0})
    LOGGER.info(
        f"Optimizer: {name}, lr {lr:g}, {len(groups.biases)} biases, "
        f"{len(groups.weights)} weights (decay {decay:g}), {len(groups.norms)} normalisation weights"
    )
    return optimizer


def apply_plan(optimizer: torch.optim.Optimizer, plan: StepPlan) -> None:
    """Set learning rates and, where the optimizer has one, the momentum of all groups."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = plan.lr_bias if index == 0 else plan.lr_other
        if "momentum" in group:
            group["momentum"] = plan.momentum
