"""A network replayed from recorded passes gives what it gives when it is called."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from models import replay
from models.backend import DetectMultiBackend
from models.checkpoint import Checkpoint, save_checkpoint
from models.graph import DetectionModel
from models.replay import PLAIN_CALLS, Network, Recording, Replay, difference, has_room
from tests.models.reference import random_images
from tests.reference.fill import fill_state_dict
from utils.runtime import autocast, synchronise

RECORDED = PLAIN_CALLS + 1  # plain passes of a shape, the last of which is recorded as well


class Doubler:
    """Counts its calls; remembers a constant of the last shape, as the heads do."""

    def __init__(self) -> None:
        self.calls = 0
        self.offset = torch.zeros(0)

    def __call__(self, images: Tensor) -> Tensor:
        self.calls += 1
        if self.offset.shape != images.shape:
            self.offset = torch.full_like(images, float(images.shape[-1]))
        return 2 * images + self.offset

    def constants(self) -> tuple[Tensor]:
        return (self.offset,)


class StandIn(Replay):
    """Records without a graphics card: a graph that computes again from the tensors recorded with it."""

    failure: Exception | None = None
    fault = 0.0  # what a replayed pass is off by
    is_empty = False  # nothing was recorded, as on another device than the current one
    weights = 0

    def of(self, network: Doubler, images: Tensor) -> Tensor:
        return self(network, images, weights=self.weights, constants=network.constants)

    def _applies(self, images: Tensor) -> bool:
        return not self.is_off

    def _captured(self, network: Network, images: Tensor, constants: Sequence[Tensor]) -> Recording:
        if self.failure is not None:
            raise self.failure
        static, (offset,) = images.clone(), constants
        output = 2 * static + offset if self.is_empty else torch.empty_like(images)

        def run() -> None:
            if not self.is_empty:
                output.copy_(2 * static + offset + self.fault)

        return Recording(SimpleNamespace(replay=run), static, output, constants)


class Stream:
    """What is asked of a stream."""

    def wait_event(self, event: object) -> None:
        assert event == "done"

    def record_event(self) -> str:
        return "done"


@pytest.fixture
def doubler(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Doubler, StandIn]]:
    monkeypatch.setattr(replay.torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(replay.torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(replay, "has_room", lambda *_: True)
    yield Doubler(), StandIn()


def pictures(side: int, seed: int = 0, batch: int = 2) -> Tensor:
    return random_images(seed, (batch, 3, side, side))


def assert_right(network: Doubler, replayed: StandIn, batch: int = 2) -> None:
    """Results are those of the network before, while and after the pass of a shape is recorded."""
    for seed in range(RECORDED + 3):
        images = pictures(8, seed, batch)
        assert torch.equal(replayed.of(network, images), 2 * images + 8)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = DetectionModel("yolov9-t.yaml", nc=5)
    fill_state_dict(model.state_dict())
    path = tmp_path / "filled.pt"
    names = {index: f"class {index}" for index in range(5)}
    save_checkpoint(path, Checkpoint(model=model.state_dict(), yaml=dict(model.yaml), nc=5, names=names))
    return path


def test_a_shape_is_recorded_when_it_keeps_coming(doubler: tuple[Doubler, StandIn]) -> None:
    network, replayed = doubler
    assert_right(network, replayed)
    assert network.calls == RECORDED
    assert len(replayed.recordings) == 1


def test_recordings_of_several_shapes_keep_their_constants(doubler: tuple[Doubler, StandIn]) -> None:
    network, replayed = doubler
    for seed in range(3 * RECORDED):
        for side in (8, 16, 24):
            images = pictures(side, seed)
            assert torch.equal(replayed.of(network, images), 2 * images + side)
    assert len(replayed.recordings) == 3
    assert network.calls == 3 * RECORDED


def test_another_number_type_is_another_recording(doubler: tuple[Doubler, StandIn]) -> None:
    network, replayed = doubler
    for _ in range(RECORDED + 1):
        assert replayed.of(network, pictures(8).half()).dtype == torch.float16
        assert replayed.of(network, pictures(8)).dtype == torch.float32
    assert len(replayed.recordings) == 2


def test_results_stay_what_they_were(doubler: tuple[Doubler, StandIn]) -> None:
    network, replayed = doubler
    inputs = [pictures(8, seed) for seed in range(RECORDED + 4)]
    kept = [(images, replayed.of(network, images)) for images in inputs]
    for images, result in kept:
        assert torch.equal(result, 2 * images + 8)


def test_results_that_need_not_last_are_overwritten(doubler: tuple[Doubler, StandIn]) -> None:
    network, _ = doubler
    replayed = StandIn(keeps_results=False)
    results = [replayed.of(network, pictures(8, seed)) for seed in range(RECORDED + 2)]
    assert results[-1] is results[-2]
    assert torch.equal(results[-1], 2 * pictures(8, RECORDED + 1) + 8)


@pytest.mark.parametrize(("name", "value"), [("fault", 1.0), ("fault", float("nan")), ("is_empty", True)])
def test_a_recording_that_computes_something_else_or_nothing_is_not_used(
    doubler: tuple[Doubler, StandIn], name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(doubler[1], name, value)
    assert_right(*doubler)
    assert "CUDA graphs are off" in caplog.text


def test_values_that_are_not_finite_may_be_replayed(doubler: tuple[Doubler, StandIn]) -> None:
    network, replayed = doubler
    images = pictures(8)
    images[0, 0, 0, :2] = torch.tensor([float("nan"), float("inf")])
    for _ in range(RECORDED + 1):
        found = replayed.of(network, images)
    assert len(replayed.recordings) == 1
    assert torch.equal(found.isnan(), images.isnan())


def test_nested_results_are_compared_as_a_whole() -> None:
    wanted = ([torch.ones(3), torch.zeros(2)], {"map": torch.full((2, 2), 4.0)})
    assert difference(copy.deepcopy(wanted), wanted) == 0
    found = copy.deepcopy(wanted)
    found[1]["map"][0, 0] = 5
    assert difference(found, wanted) == 0.25
    found[0][1][0] = 1e-9  # where all should be 0
    assert difference(found, wanted) == 0.25


def test_there_are_only_so_many_recordings(doubler: tuple[Doubler, StandIn]) -> None:
    network, replayed = doubler
    for batch in range(1, replayed.most + 4):
        assert_right(network, replayed, batch)
    assert len(replayed.recordings) == replayed.most


def test_nothing_is_recorded_while_there_is_little_memory(
    doubler: tuple[Doubler, StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, replayed = doubler
    monkeypatch.setattr(replay, "has_room", lambda *_: False)
    for _ in range(2 * RECORDED):
        replayed.of(network, pictures(8))
    assert not replayed.recordings
    monkeypatch.setattr(replay, "has_room", lambda *_: True)
    replayed.of(network, pictures(8))
    assert replayed.recordings


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_room_is_what_is_free_on_the_card(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1 << 40))
    assert has_room(pictures(8), [pictures(8), (pictures(16),)]) == bool(free)


def test_without_luck_the_network_is_called_as_before(doubler: tuple[Doubler, StandIn], messages: list[str]) -> None:
    network, replayed = doubler
    replayed.failure = torch.OutOfMemoryError("out of memory\nmore")
    assert_right(network, replayed)
    assert network.calls == RECORDED + 3
    (line,) = messages
    assert line.startswith("CUDA graphs are off, inference goes on without them: out of memory. --no-cuda-graphs")
    assert replayed.is_off and not replayed.recordings


def test_faults_of_the_network_are_not_hidden(doubler: tuple[Doubler, StandIn]) -> None:
    network, replayed = doubler
    replayed.failure = ValueError("no such picture")
    with pytest.raises(ValueError, match="no such picture"):
        for _ in range(RECORDED):
            replayed.of(network, pictures(8))


def test_recordings_are_dropped_when_weights_have_moved(doubler: tuple[Doubler, StandIn]) -> None:
    network, replayed = doubler
    for _ in range(RECORDED + 1):
        replayed.of(network, pictures(8))
    replayed.weights = 1
    assert torch.equal(replayed.of(network, pictures(8)), 2 * pictures(8) + 8)
    assert not replayed.recordings
    assert network.calls == RECORDED + 1


def test_a_copy_starts_without_recordings(doubler: tuple[Doubler, StandIn]) -> None:
    network, replayed = doubler
    for _ in range(RECORDED + 1):
        replayed.of(network, pictures(8))
    for twin in (copy.deepcopy(replayed), pickle.loads(pickle.dumps(Replay(is_off=True, most=3)))):
        assert not twin.recordings
    assert twin.is_off
    assert twin.most == 3


def test_nothing_is_recorded_on_the_cpu() -> None:
    network, replayed = Doubler(), Replay()
    with torch.no_grad():
        for _ in range(2 * RECORDED):
            replayed(network, pictures(8), weights=0, constants=network.constants)
    assert network.calls == 2 * RECORDED


def test_a_backend_goes_with_its_last_name(weights: Path) -> None:
    """Without waiting for the garbage collector, which rarely comes: weights may take much of a card."""
    gc.disable()
    try:
        backend = DetectMultiBackend(weights)
        backend(pictures(64))
        runner = weakref.ref(backend.runner)
        del backend
        assert runner() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ on a graphics card


def on_the_card(weights: Path, *, graphs: bool, half: bool = False) -> DetectMultiBackend:
    return DetectMultiBackend(weights, device="cuda:0", fp16=half, cuda_graphs=graphs)


def assert_near(found: Tensor, wanted: Tensor, *, half: bool = False) -> None:
    difference = (found - wanted).abs()
    assert float(difference[:, :4].max()) < (1.0 if half else 0.05)
    assert float(difference[:, 4:].max()) < (0.01 if half else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
def test_shapes_in_turn_on_the_card(weights: Path, half: bool) -> None:
    plain, fast = on_the_card(weights, graphs=False, half=half), on_the_card(weights, graphs=True, half=half)
    kept = []
    for seed in range(RECORDED + 3):
        for shape in ((1, 3, 64, 96), (4, 3, 128, 128), (3, 3, 96, 64)):
            images = random_images(seed, shape).cuda()
            kept.append((fast(images), plain(images)))
    assert len(fast.runner.replay.recordings) == 3
    assert not plain.runner.replay.recordings
    for found, wanted in kept:
        assert_near(found, wanted, half=half)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_a_network_in_training_form_with_all_that_it_returns(dtype: torch.dtype | None) -> None:
    """As validation during training calls it: autocast inside, weights that change in place between the calls."""
    model = DetectionModel("yolov9-t.yaml", nc=5)
    fill_state_dict(model.state_dict())
    model = model.cuda().to(memory_format=torch.channels_last).eval()

    def network(images: Tensor) -> object:
        with autocast(images.device, dtype):
            return model(images)

    replayed = Replay(keeps_results=False)
    with torch.no_grad():
        for seed in range(RECORDED + 3):
            for shape in ((2, 3, 64, 96), (3, 3, 96, 64)):
                images = random_images(seed, shape).cuda()
                found, wanted = replayed(network, images, weights=0, constants=model.priors), network(images)
                assert difference(found, wanted) < 0.01
            for weight in model.parameters():
                weight.mul_(0.99)
    assert len(replayed.recordings) == 2
    assert not replayed.is_off


@pytest.mark.gpu
def test_weights_that_move_are_seen(weights: Path) -> None:
    fast, plain = on_the_card(weights, graphs=True), on_the_card(weights, graphs=False)
    images = random_images(1, (2, 3, 64, 64)).cuda()
    for _ in range(RECORDED + 1):
        fast(images)
    fast.double().float()
    for _ in range(RECORDED + 1):
        assert_near(fast(images), plain(images))
    state = {key: tensor.clone() for key, tensor in fast.state_dict().items()}
    fast.load_state_dict(state, assign=True)
    for _ in range(RECORDED + 1):
        assert_near(fast(images), plain(images))


@pytest.mark.gpu
def test_recorded_in_inference_mode_and_called_outside(weights: Path) -> None:
    fast, plain = on_the_card(weights, graphs=True), on_the_card(weights, graphs=False)
    images = random_images(1, (2, 3, 64, 64)).cuda()
    with torch.inference_mode():
        for _ in range(RECORDED + 1):
            fast(images)
    assert fast.runner.replay.recordings
    assert_near(fast(images), plain(images))


@pytest.mark.gpu
def test_threads_with_networks_of_their_own(weights: Path) -> None:
    """One waits for the whole device, again and again, while the others record."""
    plain = on_the_card(weights, graphs=False)
    sides = (64, 96, 128, 160)
    wanted = {side: plain(pictures(side).cuda()) for side in sides}
    faults: list[BaseException] = []
    is_over = threading.Event()

    def wait() -> None:
        while not is_over.is_set():
            synchronise(torch.device("cuda:0"))
            torch.zeros(1000, pin_memory=True).cuda()

    def detect(model: DetectMultiBackend) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(RECORDED + 3):
                    for side in sides:
                        assert_near(model(pictures(side).cuda()), wanted[side])
        except BaseException as fault:
            faults.append(fault)

    shared = on_the_card(weights, graphs=True)
    models = [on_the_card(weights, graphs=True), on_the_card(weights, graphs=True), shared, shared]
    waiting = threading.Thread(target=wait)
    threads = [threading.Thread(target=detect, args=(model,)) for model in models]
    for thread in (waiting, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    waiting.join()
    assert not faults, faults[0]
    assert all(len(model.runner.replay.recordings) == len(sides) and not model.runner.replay.is_off for model in models)


@pytest.mark.gpu
def test_autocast_goes_the_plain_way(weights: Path) -> None:
    fast = on_the_card(weights, graphs=True)
    images = random_images(1, (2, 3, 64, 64)).cuda()
    for _ in range(RECORDED + 1):
        with torch.autocast("cuda", torch.float16):
            fast(images)
    assert not fast.runner.replay.recordings
