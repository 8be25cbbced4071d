"""Whole training steps on a CUDA device: none waits for it, recorded ones do what plain ones do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from utils.data.prefetch import DevicePrefetcher
from utils.options import TrainOptions
from utils.train.trainer import Trainer

MakeOptions = Callable[..., TrainOptions]
pytestmark = pytest.mark.gpu


@contextmanager
def waiting_forbidden() -> Any:
    """Let every operation of torch that waits for the device raise RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def first_batches(trainer: Trainer, count: int) -> list[tuple[Any, ...]]:
    batches = list(DevicePrefetcher(trainer.train_loader, trainer.device))
    return (batches * count)[:count]


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"amp": False},
        {"amp_dtype": "bf16"},
        {"optimizer": "AdamW"},
        {"optimizer": "LION"},
        {"grad_checkpoint": 2},
        {"freeze": ["backbone"], "label_smoothing": 0.1},
        {"plain_kernels": True},
    ],
    ids=lambda more: "-".join(map(str, more)) or "default",
)
def test_no_step_waits_for_the_device(
    make_options: MakeOptions, cuda_graphs: bool, accumulate: int, more: dict[str, Any]
) -> None:
    trainer = Trainer(make_options(device="0", epochs=1, cuda_graphs=cuda_graphs, accumulate=accumulate, **more))
    trainer.begin_epoch(0)
    trainer.step_index = 10_000  # past the warm-up: the wanted accumulation is in force
    batches = first_batches(trainer, 10)
    for images, targets, paths, _ in batches[:4]:  # cuDNN's trials, recording
        trainer.step(images, targets, paths)
    trainer.monitor.flush()
    before = {name: value.clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    with waiting_forbidden():
        for images, targets, paths, _ in batches[4:]:
            trainer.step(images, targets, paths)
    trainer.monitor.flush()
    trainer.skipped.read()
    assert any(
        not torch.equal(value, before[name]) for name, value in trainer.model.named_parameters() if name in before
    )
    assert bool(getattr(trainer.batch_pass, "recordings", None)) == cuda_graphs


def test_a_skipped_step_on_the_device_leaves_weights_and_average_alone(make_options: MakeOptions) -> None:
    trainer = Trainer(make_options(device="0", epochs=1))
    trainer.begin_epoch(0)
    batches = first_batches(trainer, 4)
    for images, targets, paths, _ in batches[:3]:
        trainer.step(images, targets, paths)
    done = trainer.ema.updates
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    averaged = {name: value.clone() for name, value in trainer.ema.ema.named_parameters()}
    for weight in trainer.update.trainable:
        weight.grad.fill_(float("nan"))
    trainer.pending = [("a.jpg",)]
    trainer.flush_gradients()
    assert trainer.ema.updates == done
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.named_parameters())
    assert all(torch.equal(value, averaged[name]) for name, value in trainer.ema.ema.named_parameters())
    trainer.step(*batches[3][:3])
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())


@pytest.mark.parametrize("more", [{}, {"multi_scale": True}, {"quad": True, "batch_size": 8}, {"optimizer": "Adam"}])
def test_recorded_training_follows_plain_training(make_options: MakeOptions, more: dict[str, Any]) -> None:
    losses = []
    for cuda_graphs in (False, True):
        trainer = Trainer(make_options(device="0", epochs=2, amp=False, cuda_graphs=cuda_graphs, **more))
        for epoch in range(2):
            trainer.begin_epoch(epoch)
            record = trainer.run_epoch()
        losses.append([record[f"train/{name}_loss"] for name in ("box", "cls", "dfl")])
        trainer.close()
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_run_goes_on_with_the_same_optimizer_and_loss_scale(make_options: MakeOptions) -> None:
    options = make_options(device="0", epochs=2)
    whole = Trainer(options)
    whole.fit()
    resumed = Trainer(TrainOptions.from_cli(["--resume", str(whole.last), "--epochs", "3"]))
    assert [group["fused"] for group in resumed.optimizer.param_groups] == [True] * 3
    assert resumed.ema.updates == whole.ema.updates
    assert resumed.scaler.get_scale() == whole.scaler.get_scale()
    resumed.fit()
    assert resumed.epoch == 2
