"""Twelve training steps of yolov9-t against recorded ones: model, loss, assignment, clipping and optimizer together."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.graph import DetectionModel
from utils.options import Hyp
from utils.train.loss import ComputeLoss
from utils.train.optim import smart_optimizer

# Largest relative deviations per step that rounding alone explains. The double series is chaotic from step 4 on.
TOLERANCES = {
    "slow": {"total": [1e-6] * 12, "norm": [1e-3] * 12},
    "double": {"total": [1e-9, 1e-8, 1e-6, 1e-3] + [0.05] * 8, "norm": [1e-8, 1e-6, 1e-4, 3e-2]},
    "plain": {"total": [1e-4, 1e-3] + [0.05] * 10, "norm": [1e-3]},
}


def plain_state_dict(state: dict[str, Tensor], salt: str = "") -> None:
    """Fill ``state`` in place: convolutions uniform in ±1/sqrt(fan-in), each a function of its key; norms neutral."""
    for key, tensor in state.items():
        if ".dfl" in key or not tensor.dtype.is_floating_point:
            continue
        if tensor.ndim == 4:
            generator = np.random.Generator(np.random.PCG64(zlib.crc32((salt + key).encode("ascii"))))
            values = (2 * generator.random(tuple(tensor.shape)) - 1) / math.sqrt(tensor[0].numel())
            tensor.copy_(torch.from_numpy(values.astype(np.float32)))
        else:
            is_one = key.endswith("running_var") or key.endswith("weight")
            tensor.fill_(1.0 if is_one else 0.0)


@dataclass
class Run:
    """What one series of steps produced."""

    totals: list[float]
    items: list[list[float]]
    norms: list[float]
    first_gradients: dict[str, float]
    model: DetectionModel


def train(record: np.lib.npyio.NpzFile, series: str, steps: int) -> Run:
    """Repeat the first ``steps`` steps of ``series``."""
    dtype = torch.float32 if series == "plain" else torch.float64
    torch.set_default_dtype(torch.float32)
    model = DetectionModel("yolov9-t.yaml", nc=80)
    plain_state_dict(model.state_dict())
    model = model.to(dtype)
    model.model[-1].bias_init()
    model.hyp = Hyp().to_dict()
    model.train()
    loss_fn = ComputeLoss(model)
    lr = 1e-4 if series == "slow" else 0.01
    optimizer = smart_optimizer(model, "SGD", lr, 0.937, 5e-4)
    run = Run([], [], [], {}, model)
    images, targets = record["images"], record["targets"]
    for step in range(steps):
        batch = torch.from_numpy(images[step]).to(dtype) / 255
        rows = torch.from_numpy(targets[targets[:, 0] == step][:, 1:]).to(dtype)
        total, items = loss_fn(model(batch), rows)
        total.backward()
        if step == 0:
            run.first_gradients = {
                n: float(p.grad.abs().sum()) for n, p in model.named_parameters() if p.grad is not None
            }
        norm: Tensor = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        run.totals.append(float(total.detach()))
        run.items.append(items.tolist())
        run.norms.append(float(norm))
    return run


def assert_follows(run: Run, record: np.lib.npyio.NpzFile, series: str) -> None:
    expected = record[f"{series}.total"], record[f"{series}.grad_norm"]
    for name, ours, theirs in zip(("total", "norm"), (run.totals, run.norms), expected, strict=True):
        for step, (tolerance, value) in enumerate(zip(TOLERANCES[series][name], ours, strict=False)):
            assert value == pytest.approx(theirs[step], rel=tolerance), f"{series} {name}, step {step}"


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> np.lib.npyio.NpzFile:
    golden: Callable[[str], Path] = request.getfixturevalue("golden")
    return np.load(golden("models/trajectory.npz"))


@pytest.mark.slow
def test_slow_series_in_float64_agrees_over_all_twelve_steps(record) -> None:
    run = train(record, "slow", 12)
    assert_follows(run, record, "slow")
    assert np.allclose(run.items, record["slow.items"], rtol=1e-5)
    parameters = [[sum(float(p.double().sum()) for p in layer.parameters()) for layer in run.model.model]]
    parameters.append([sum(float(p.double().abs().sum()) for p in layer.parameters()) for layer in run.model.model])
    assert np.allclose(np.array(parameters).T, record["slow.param_sums"], rtol=1e-8, atol=1e-8)
    buffers = [[float(b.double().sum()) for n, b in run.model.named_buffers() if n.endswith("running_mean")]]
    assert sum(buffers[0]) == pytest.approx(record["slow.bn_sums"][:, 0].sum(), rel=1e-7)


@pytest.mark.slow
def test_double_series_agrees_as_long_as_training_is_not_chaotic(record) -> None:
    run = train(record, "double", 6)
    assert_follows(run, record, "double")
    keys = record["double.grad0_keys"]
    assert set(keys) == set(run.first_gradients)
    ours = [run.first_gradients[key] for key in keys]
    assert np.allclose(ours, record["double.grad0_abssum"], rtol=1e-7, atol=1e-10)


@pytest.mark.slow
def test_float32_series_starts_alike_and_stays_near(record) -> None:
    run = train(record, "plain", 4)
    assert_follows(run, record, "plain")


@pytest.mark.parametrize("model_name", ["yolov9-t", "gelan-t"])
def test_parameter_groups_have_upstreams_order_and_sizes(model_name: str, golden) -> None:
    record = json.loads(golden("models/schedules.json").read_text())["optimizer_groups"][model_name]
    model = DetectionModel(f"{model_name}.yaml", nc=80)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = smart_optimizer(model, "SGD", 0.01, 0.937, 5e-4).param_groups
    assert [len(group["params"]) for group in groups] == record["tensors"]
    assert [sum(p.numel() for p in group["params"]) for group in groups] == record["elements"]
    assert [group["weight_decay"] for group in groups] == record["weight_decay"]
    digests = [hashlib.sha256("\n".join(names[id(p)] for p in g["params"]).encode()).hexdigest() for g in groups]
    assert digests == record["name_order_sha256"]
