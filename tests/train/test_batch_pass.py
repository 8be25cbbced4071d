"""Forward, loss and backward of a batch: number types, working weights, recorded graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from models.blocks import DFL
from models.graph import DetectionModel
from tests.reference.tiny import tiny_dual
from utils.train import batch_pass
from utils.train.batch_pass import (
    BatchPass,
    CapturedPass,
    Kind,
    Recording,
    WorkingWeights,
    align_gradients,
    prepare_images,
    row_capacity,
)
from utils.train.loss import ComputeLoss

NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


def random_batch(seed: int, rows: int = 9, size: int = 64, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, generator=generator)
    boxes = torch.rand(rows, 4, generator=generator) * 0.4 + 0.2
    index = torch.arange(rows) % batch
    return images, torch.cat((index[:, None].float(), torch.zeros(rows, 1), boxes), 1)


def learning_model() -> DetectionModel:
    model = tiny_dual().train().requires_grad_(True)
    for module in model.modules():
        if isinstance(module, DFL):
            module.requires_grad_(False)
    return model


def make_pass(kind: type[BatchPass] = BatchPass, device: str = "cpu", dtype: torch.dtype | None = None) -> BatchPass:
    torch.manual_seed(0)
    model = learning_model().to(device)
    if device == "cuda":
        model.to(memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16, init_scale=16.0)
    return kind(model, ComputeLoss(model), scaler, device=torch.device(device), amp_dtype=dtype)


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_level_has_the_same_value_in_every_number_type(dtype: torch.dtype) -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    assert torch.equal(prepare_images(levels, dtype), (levels.float() / 255).to(dtype))


def test_pictures_are_brought_to_the_wanted_size() -> None:
    images, _ = random_batch(0)
    resized = prepare_images(images, size=(96, 32))
    assert resized.shape == (2, 3, 96, 32)
    assert 0 <= resized.min() <= resized.max() <= 1


@given(st.integers(0, 200_000))
def test_capacity_is_enough_and_not_far_too_much(rows: int) -> None:
    capacity = row_capacity(rows)
    assert capacity >= rows
    assert capacity % 64 == 0
    assert capacity <= max(256, rows * 1.25 + 64)


@pytest.mark.parametrize("has_gradients", [False, True])
def test_working_weights_give_the_gradients_of_autocast(has_gradients: bool) -> None:
    images, targets = random_batch(1)
    plain = make_pass(dtype=torch.bfloat16)
    plain(images, targets)
    if has_gradients:
        plain(*random_batch(2))
    working = make_pass(dtype=torch.bfloat16)
    for weight in working.model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    if has_gradients:
        working(images, targets)
        images, targets = random_batch(2)
    weights = dict(working.model.named_parameters())
    with WorkingWeights(working.model, torch.bfloat16):
        short = [weight.dtype for weight in working.model.parameters()]
        working(images, targets)
    assert torch.bfloat16 in short
    assert all(weight is weights[name] for name, weight in working.model.named_parameters())
    expected = {name: weight.grad for name, weight in plain.model.named_parameters() if weight.grad is not None}
    assert expected
    for name, gradient in expected.items():
        torch.testing.assert_close(weights[name].grad, gradient, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_get_the_layout_of_their_weights(size: int) -> None:
    layer = nn.Conv2d(8, 4, size).to(memory_format=torch.channels_last)
    values = torch.randn(4, 8, size, size)
    layer.weight.grad = values.clone()
    align_gradients(layer)
    assert layer.weight.grad.stride() == layer.weight.stride()
    assert torch.equal(layer.weight.grad, values)


def test_working_weights_are_taken_back_after_an_error() -> None:
    model = learning_model()
    before = dict(model.named_parameters())
    for weight in before.values():
        weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="halfway"), WorkingWeights(model, torch.bfloat16):
        raise RuntimeError("halfway")
    assert all(weight is before[name] for name, weight in model.named_parameters())
    assert all(bool((weight.grad == 1).all()) for weight in before.values())


def test_the_loss_weight_multiplies_the_gradients() -> None:
    images, targets = random_batch(3)
    one, four = make_pass(), make_pass()
    four.loss_weight = 4.0
    items = one(images, targets), four(images, targets)
    assert torch.equal(*items)
    for a, b in zip(gradients(one.model), gradients(four.model), strict=True):
        torch.testing.assert_close(4 * a, b)


def test_padding_rows_change_nothing() -> None:
    images, targets = random_batch(4)
    exact, padded = make_pass(), make_pass()
    rows = torch.cat((targets, torch.zeros(50, 6)))
    # but for the order in which sums are taken, which depends on the number of threads too
    torch.testing.assert_close(exact(images, targets), padded(images, rows), rtol=1e-6, atol=0)
    for a, b in zip(gradients(exact.model), gradients(padded.model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def clear_gradients(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.zero_()


class StandIn(CapturedPass):
    """Recordings without CUDA: nothing is changed while one is made, and replaying computes it once more."""

    def _captured(self, kind: Kind, images: Tensor, capacity: int) -> Recording:
        recording = super()._captured(kind, images, capacity)
        _, size, is_smoothed = kind

        def replay() -> None:
            with self.working:
                smoothing = self.smoothing if is_smoothed else 0.0
                items = BatchPass.__call__(self, recording.images, recording.targets, size=size, smoothing=smoothing)
                recording.items.copy_(items)

        recording.graph.replay = replay
        return recording


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A pass whose calls of torch.cuda lead nowhere."""
    stand_in = make_pass(StandIn)

    @contextlib.contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        before = {key: tensor.clone() for key, tensor in stand_in.model.state_dict().items()}
        gradients_before = [
            (weight.grad, weight.grad.clone()) for weight in stand_in.model.parameters() if weight.requires_grad
        ]
        yield
        stand_in.model.load_state_dict(before)
        for gradient, values in gradients_before:
            gradient.copy_(values)

    for name, value in {
        "graph": graph,
        "CUDAGraph": SimpleNamespace,
        "graph_pool_handle": object,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(batch_pass.torch.cuda, name, value)
    return stand_in


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_batches_find_the_recording_of_their_kind(without_cuda: StandIn, smoothing: float) -> None:
    plain, recorded = make_pass(BatchPass), without_cuda
    seen = []
    # Rows of targets and the wanted size of each batch.
    for seed, (rows, size) in enumerate([(3, None), (0, None), (700, None), (5, None), (4, (96, 96)), (9, (96, 96))]):
        images, targets = random_batch(seed, rows)
        results = [each(images, targets, size=size, smoothing=smoothing).clone() for each in (plain, recorded)]
        torch.testing.assert_close(*results)
        seen.append(len(recorded.recordings))
        for a, b in zip(gradients(plain.model), gradients(recorded.model), strict=True):
            torch.testing.assert_close(a, b)
    assert seen == [0, 1, 2, 2, 2, 3]  # the first of a size runs the plain way
    recorded(*random_batch(9, 300), smoothing=smoothing)
    assert len(recorded.recordings) == 4  # room for 256 is too little, and for 700 far too much
    for _ in range(2):
        recorded(*random_batch(9), smoothing=0.0 if smoothing else 0.1)
    assert len(recorded.recordings) == 5  # smoothed labels are another kind than plain ones


def test_recordings_are_bounded(without_cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_pass, "MAX_GRAPHS", 2)
    plain = make_pass(BatchPass)
    for seed, side in enumerate((32, 32, 64, 64, 96, 96, 96, 32)):
        images, targets = random_batch(seed, size=side)
        torch.testing.assert_close(without_cuda(images, targets), plain(images, targets))
    assert [kind[0][-1] for kind, _ in without_cuda.recordings] == [32, 64]


def test_a_recording_that_fails_ends_recording(
    without_cuda: StandIn, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    plain = make_pass(BatchPass)
    monkeypatch.setattr(batch_pass.torch.cuda, "graph", fail)
    for seed in range(4):
        images, targets = random_batch(seed)
        torch.testing.assert_close(without_cuda(images, targets), plain(images, targets))
    assert without_cuda.is_off and not without_cuda.recordings
    (line,) = messages
    assert line.startswith("CUDA graphs are off, training goes on") and "stream is capturing. --no-cuda-graphs" in line


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_recorded_passes_equal_plain_ones(dtype: torch.dtype | None, smoothing: float) -> None:
    plain, recorded = make_pass(BatchPass, "cuda", dtype), make_pass(CapturedPass, "cuda", dtype)
    sizes = (None, None, None, (96, 96), (96, 96), None)
    for seed, size in enumerate(sizes):
        rows = 700 if seed == 2 else seed  # one that needs a graph of its own, one empty batch
        images, targets = (tensor.cuda() for tensor in random_batch(seed, rows))
        results = [each(images, targets, size=size, smoothing=smoothing).clone() for each in (plain, recorded)]
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
        for a, b in zip(gradients(plain.model), gradients(recorded.model), strict=True):
            scale = a.abs().max().clamp(min=1e-3)
            torch.testing.assert_close(a / scale, b / scale, rtol=0, atol=1e-4 if dtype is None else 3e-2)
        if seed % 2:  # in between, gradients of two batches add up
            clear_gradients(plain.model)
            clear_gradients(recorded.model)
    assert {(kind[1], rows) for kind, rows in recorded.recordings} == {
        (None, 256),
        (None, row_capacity(700)),
        ((96, 96), 256),
    }


@pytest.mark.gpu
def test_a_pass_that_cannot_be_recorded_goes_on_the_plain_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = make_pass(CapturedPass, "cuda")
    images, targets = (tensor.cuda() for tensor in random_batch(0))
    original = batch_pass.BatchPass.__call__

    def reading(self: BatchPass, *arguments: object, **keywords: object) -> Tensor:
        items = original(self, *arguments, **keywords)
        items.tolist()
        return items

    monkeypatch.setattr(batch_pass.BatchPass, "__call__", reading)
    with caplog.at_level("INFO", logger="yolov9"):
        results = [recorded(images, targets).tolist() for _ in range(3)]
    assert recorded.is_off
    assert "--no-cuda-graphs" in caplog.text
    assert results[0][0] > 0
    assert torch.isfinite(torch.tensor(results)).all()
