"""Checkpoints: our format, upstream's files, the model built from either."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from models.checkpoint import (
    FORMAT,
    Checkpoint,
    attempt_load,
    build_model,
    complete_names,
    count_classes,
    is_fused,
    load_checkpoint,
    save_checkpoint,
    strip_optimizer,
)
from models.graph import DetectionModel
from models.heads import lead_prediction
from models.safe_reader import WeightsFileError, read_torch_file
from tests.reference.fill import fill_state_dict
from utils import files

FORWARDS = (
    "upstream_yolov9-t_train.model",
    "upstream_yolov9-t_train.ema",
    "upstream_yolov9-t_stripped.model",
    "upstream_gelan-t_stripped.model",
    "upstream_yolov9-t_nc3_stripped.model",
)
BOX_TOLERANCE_PX, SCORE_TOLERANCE = 1e-2, 1e-4


def random_images(seed: int, *shape: int) -> Tensor:
    generator = np.random.Generator(np.random.PCG64(seed))
    return torch.from_numpy(generator.random(shape).astype(np.float32))


@pytest.fixture(scope="module")
def model() -> DetectionModel:
    network = DetectionModel("gelan-t.yaml", nc=3)
    fill_state_dict(network.state_dict(), "ckpt.")
    network.names = {0: "bolt", 1: "螺母", 2: "washer"}
    return network.eval()


@pytest.fixture
def checkpoint(model: DetectionModel) -> Checkpoint:
    state = {key: value.clone() for key, value in model.state_dict().items()}
    average = {key: value * 0.5 if value.is_floating_point() else value for key, value in state.items()}
    return Checkpoint(
        model=state,
        ema=average,
        yaml=copy.deepcopy(model.yaml),
        nc=3,
        names=dict(model.names),
        epoch=4,
        best_fitness=np.float64(0.25),
        updates=np.int64(77),
        optimizer={"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": np.float32(0.5)}]},
        trainer={"rng": torch.get_rng_state(), "numpy": ("PCG64", [1, 2**70])},
        hyp={"lr0": 0.01},
        opt={"save_dir": Path("runs/exp"), "freeze": [0]},
        metrics={"map": np.array([0.5])},
    )


@pytest.mark.parametrize("name", FORWARDS)
def test_upstream_file_gives_upstream_predictions(golden: Callable[[str], Path], name: str) -> None:
    stem, part = name.rsplit(".", 1)
    expected = np.load(golden("models/ckpt_forward.npz"))[name]
    network = build_model(load_checkpoint(golden(f"models/{stem}.pt")), use_ema=part == "ema").eval()
    with torch.no_grad():
        found = lead_prediction(network(random_images(11, 1, 3, 160, 192))).numpy()
    assert np.abs(found[:, :4] - expected[:, :4]).max() <= BOX_TOLERANCE_PX
    assert np.abs(found[:, 4:] - expected[:, 4:]).max() <= SCORE_TOLERANCE


def test_attempt_load_fuses_and_prefers_the_average(golden: Callable[[str], Path]) -> None:
    expected = np.load(golden("models/ckpt_forward.npz"))["upstream_yolov9-t_train.ema"]
    network = attempt_load(golden("models/upstream_yolov9-t_train.pt"))
    assert not network.training and is_fused(network.state_dict())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    found = lead_prediction(network(random_images(11, 1, 3, 160, 192))).numpy()
    assert np.abs(found[:, :4] - expected[:, :4]).max() <= BOX_TOLERANCE_PX


def test_upstream_training_file_keeps_what_resuming_needs(golden: Callable[[str], Path]) -> None:
    loaded = load_checkpoint(golden("models/upstream_yolov9-t_train.pt"))
    assert (loaded.origin, loaded.kind, loaded.epoch, loaded.updates, loaded.nc) == ("upstream", "training", 3, 1, 80)
    assert loaded.best_fitness == pytest.approx(0.21) and type(loaded.best_fitness) is float
    assert loaded.names[0] == "person" and loaded.opt["freeze"] and loaded.hyp["lr0"] == 0.01
    assert [len(group["params"]) for group in loaded.optimizer["param_groups"]] == [303, 305, 291]


def test_stripped_upstream_file_has_defaults_for_what_is_gone(golden: Callable[[str], Path]) -> None:
    loaded = load_checkpoint(golden("models/upstream_yolov9-t_nc3_stripped.pt"))
    assert (loaded.kind, loaded.epoch, loaded.ema, loaded.optimizer, loaded.best_fitness) == (
        "stripped", -1, None, None, 0.0,
    )  # fmt: skip
    assert loaded.names == {0: "bolt", 1: "nut", 2: "washer"}


def test_upstream_file_survives_our_format(golden: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load_checkpoint(golden("models/upstream_yolov9-t_train.pt"))
    save_checkpoint(tmp_path / "ours.pt", loaded)
    again = load_checkpoint(tmp_path / "ours.pt")
    assert again.origin == FORMAT
    assert all(torch.equal(again.model[key], loaded.model[key]) for key in loaded.model)
    assert again.opt == loaded.opt and again.epoch == 3


def test_our_file_opens_with_weights_only(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last.pt", checkpoint)
    content = torch.load(tmp_path / "last.pt", weights_only=True)
    assert (content["format"], content["version"], content["kind"]) == ("yolov9-checkpoint", 1, "training")
    assert content["names"] == {0: "bolt", 1: "螺母", 2: "washer"}
    assert type(content["best_fitness"]) is float and type(content["updates"]) is int
    assert type(content["optimizer"]["param_groups"][0]["lr"]) is float
    assert content["opt"] == {"save_dir": str(Path("runs/exp")), "freeze": [0]} and content["metrics"] == {"map": 0.5}


def test_round_trip_is_exact(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last.pt", checkpoint)
    loaded = load_checkpoint(tmp_path / "last.pt")
    for part in ("model", "ema"):
        before, after = getattr(checkpoint, part), getattr(loaded, part)
        assert list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(loaded.trainer["rng"], torch.get_rng_state())
    assert loaded.trainer["numpy"] == ("PCG64", [1, 2**70])
    assert loaded.yaml == checkpoint.yaml and loaded.date == checkpoint.date and loaded.origin == FORMAT


def test_built_model_predicts_what_was_saved(model: DetectionModel, checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last.pt", checkpoint)
    rebuilt = build_model(load_checkpoint(tmp_path / "last.pt"), use_ema=False).eval()
    images = random_images(1, 2, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(lead_prediction(rebuilt(images)), lead_prediction(model(images)))
    assert rebuilt.names[1] == "螺母" and rebuilt.nc == 3 and rebuilt.hyp == {"lr0": 0.01}
    averaged = build_model(load_checkpoint(tmp_path / "last.pt"))
    assert torch.equal(averaged.state_dict()["model.0.conv.weight"], checkpoint.ema["model.0.conv.weight"])


def test_failed_save_leaves_the_old_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, checkpoint)
    before = path.read_bytes()
    checkpoint.trainer = {"stopper": {"best": object()}}
    with pytest.raises(TypeError, match=r"checkpoint\.trainer\.stopper\.best is a object"):
        save_checkpoint(path, checkpoint)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_failed_save_is_told_with_the_room_that_is_free_without_it(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer keeps its file open in the error it raises; a removed file keeps its room while it is open."""
    kept: list[weakref.ref] = []

    def save(content: object, path: Path) -> None:
        handle = open(path, "wb")  # noqa: SIM115 - as torch leaves its own
        kept.append(weakref.ref(handle))
        try:
            raise RuntimeError("PytorchStreamWriter failed writing file")
        except RuntimeError:
            raise RuntimeError("unexpected pos 1152 vs 1046")  # noqa: B904 - as torch does

    def measure(folder: Path) -> SimpleNamespace:
        assert list(folder.iterdir()) == [] and kept[0]() is None
        return SimpleNamespace(free=12_345_678)

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(files.shutil, "disk_usage", measure)
    with pytest.raises(OSError, match=r"last\.pt could not be written \(12 MB are free there\).*Make room"):
        save_checkpoint(tmp_path / "last.pt", checkpoint)


def test_view_does_not_drag_its_storage_along(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.model, checkpoint.ema = {"model.0.a": torch.zeros(1_000_000)[:10]}, None
    save_checkpoint(tmp_path / "small.pt", checkpoint)
    assert (tmp_path / "small.pt").stat().st_size < 100_000


def test_newer_version_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    torch.save({"format": FORMAT, "version": 2, "model": {}}, tmp_path / "new.pt")
    with pytest.raises(WeightsFileError, match="version 2.*reads up to 1"):
        load_checkpoint(tmp_path / "new.pt")


def test_unknown_entries_of_a_file_are_passed_over(checkpoint: Checkpoint, tmp_path: Path) -> None:
    torch.save({"format": FORMAT, "version": 1, "model": {}, "note": "x"}, tmp_path / "more.pt")
    assert load_checkpoint(tmp_path / "more.pt").kind == "training"


def test_strip_keeps_the_average_in_half(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last.pt", checkpoint)
    target = strip_optimizer(tmp_path / "last.pt", tmp_path / "small.pt")
    loaded = load_checkpoint(target)
    assert (loaded.kind, loaded.epoch, loaded.ema, loaded.optimizer, loaded.trainer) == (
        "stripped",
        -1,
        None,
        None,
        None,
    )
    assert loaded.model["model.0.conv.weight"].dtype == torch.float16
    assert torch.equal(loaded.model["model.0.conv.weight"], checkpoint.ema["model.0.conv.weight"].half())
    assert loaded.model["model.0.bn.num_batches_tracked"].dtype == torch.int64
    assert loaded.names == checkpoint.names and loaded.metrics == {"map": 0.5}
    assert load_checkpoint(tmp_path / "last.pt").kind == "training"


def test_strip_in_place_and_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    save_checkpoint(path, checkpoint)
    big = path.stat().st_size
    assert strip_optimizer(path) == path
    once = load_checkpoint(path)
    strip_optimizer(path)
    assert path.stat().st_size < 0.4 * big
    assert all(torch.equal(once.model[key], value) for key, value in load_checkpoint(path).model.items())


def test_strip_keeps_values_that_half_cannot_hold(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.ema["model.0.bn.running_var"][0] = 1e6
    save_checkpoint(tmp_path / "last.pt", checkpoint)
    stripped = load_checkpoint(strip_optimizer(tmp_path / "last.pt"))
    assert stripped.model["model.0.bn.running_var"][0] == 1e6


def test_bare_state_dict_needs_a_definition(model: DetectionModel, tmp_path: Path) -> None:
    for name, content in {"a": model.state_dict(), "b": {"state_dict": model.state_dict()}}.items():
        torch.save(content, tmp_path / f"{name}.pt")
        loaded = load_checkpoint(tmp_path / f"{name}.pt")
        assert loaded.origin == "state_dict"
        with pytest.raises(ValueError, match="--cfg"):
            build_model(loaded)
        rebuilt = build_model(loaded, cfg="gelan-t.yaml")
        assert rebuilt.nc == 3 and rebuilt.names == {0: "0", 1: "1", 2: "2"}


@pytest.mark.parametrize("content", [{}, [1], {"epoch": 3}, {"model": None}, {"layer1.weight": torch.zeros(1)}, 7])
def test_files_without_a_network_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(WeightsFileError, match="odd.pt"):
        load_checkpoint(tmp_path / "odd.pt")


def test_wrong_definition_names_the_first_keys(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"missing: model\.\d+\..*unknown: model\..*--cfg"):
        build_model(checkpoint, cfg="yolov9-t.yaml")
    with pytest.raises(ValueError, match=r"of another shape: model\.0\.conv\.weight \(16, 3, 3, 3\) instead"):
        build_model(checkpoint, cfg="gelan-s.yaml")


def test_class_count_is_read_from_the_tensors(checkpoint: Checkpoint) -> None:
    assert count_classes(checkpoint.model) == 3
    checkpoint.yaml["nc"], checkpoint.nc = 80, 80
    assert build_model(checkpoint).yaml["nc"] == 3
    with pytest.raises(ValueError, match="5 classes were asked for, but the weights have 3"):
        build_model(checkpoint, nc=5)
    with pytest.raises(ValueError, match="no detection head"):
        count_classes({"model.0.conv.weight": torch.zeros(1)})


def test_fused_tensors_load_into_a_fused_model(model: DetectionModel, checkpoint: Checkpoint) -> None:
    checkpoint.model, checkpoint.ema = copy.deepcopy(model).fuse().state_dict(), None
    rebuilt = build_model(checkpoint).eval()
    images = random_images(2, 1, 3, 64, 64)
    with torch.no_grad():
        difference = (lead_prediction(rebuilt(images)) - lead_prediction(model(images))).abs().max()
    assert difference < 1e-2


@pytest.mark.parametrize("fused", [False, True])
def test_head_takes_its_widths_from_the_tensors(fused: bool) -> None:
    published = DetectionModel("gelan-t.yaml", nc=80)
    published.head.set_hidden_widths([(64, 80)])
    published.finish_blocks()
    fill_state_dict(published.state_dict(), "ckpt.")
    published.eval()
    images = random_images(3, 1, 3, 64, 64)
    with torch.no_grad():
        expected = lead_prediction(published(images))
        state = (published.fuse() if fused else published).state_dict()
        rebuilt = build_model(Checkpoint(model=state, yaml=published.yaml)).eval()
        found = lead_prediction(rebuilt(images))
    assert sum(parameter.numel() for parameter in rebuilt.fuse().parameters()) == 2_001_840
    assert (found - expected).abs().max() < (1e-2 if fused else 1e-6)


def test_file_of_format_version_1_still_loads() -> None:
    # Written when the format was new; a later version of this program has to read it without any change to the file.
    loaded = load_checkpoint(Path(__file__).parent / "data" / "checkpoint_v1.pt")
    assert (loaded.kind, loaded.names, loaded.date) == ("stripped", {0: "bolt", 1: "螺母"}, "2025-01-01T00:00:00")
    assert loaded.hyp == {"lr0": 0.01} and loaded.opt == {"epochs": 10} and loaded.metrics == {"map": 0.5}
    images = (torch.arange(3 * 32 * 32).view(1, 3, 32, 32) % 7) / 7
    with torch.no_grad():
        found = lead_prediction(build_model(loaded).eval()(images))
    assert found.shape == (1, 6, 16)
    expected = torch.tensor([10.866821, 14.453106, 121.566833, 118.835304, 0.469737, 0.459497])
    assert torch.allclose(found[0, :, 5], expected, rtol=0, atol=1e-3)


def test_training_file_of_format_version_1_still_loads() -> None:
    # The same promise for what resuming needs.
    loaded = load_checkpoint(Path(__file__).parent / "data" / "checkpoint_v1_training.pt")
    assert (loaded.kind, loaded.epoch, loaded.updates, loaded.best_fitness) == ("training", 3, 40, 0.25)
    assert loaded.optimizer["param_groups"] == [{"lr": 0.01, "params": [0]}]
    assert torch.equal(loaded.optimizer["state"][0]["momentum_buffer"], torch.ones(3))
    assert loaded.trainer["stopper"] == {"best": 0.25} and loaded.trainer["pair"] == (1, "x")
    assert loaded.scaler["scale"] == 65536.0 and loaded.opt == {"epochs": 10, "freeze": [0], "weights": ""}
    assert loaded.data == {"yaml": "bolts.yaml", "train_images": 24, "val_images": 8}
    images = (torch.arange(3 * 32 * 32).view(1, 3, 32, 32) % 7) / 7
    expected = {
        False: [13.337643, 10.186655, 125.211861, 114.001984, 0.579149, 0.549785],
        True: [11.961872, 12.086229, 120.804604, 118.754089, 0.442797, 0.529163],
    }
    for use_ema, values in expected.items():
        with torch.no_grad():
            found = lead_prediction(build_model(loaded, use_ema=use_ema).eval()(images))
        assert torch.allclose(found[0, :, 5], torch.tensor(values), rtol=0, atol=1e-3)


def test_building_leaves_the_checkpoint_alone(checkpoint: Checkpoint) -> None:
    network = build_model(checkpoint, use_ema=False)
    key = "model.0.conv.weight"
    before = checkpoint.model[key].clone()
    with torch.no_grad():
        network.state_dict()[key].zero_()
    assert torch.equal(checkpoint.model[key], before)
    assert network.state_dict()[key].is_contiguous() and not any(t.is_meta for t in network.state_dict().values())
    assert network.model[0].conv.weight.requires_grad and not network.head.dfl.conv.weight.requires_grad


def test_names_are_completed() -> None:
    assert complete_names(["a", "b"], 3) == {0: "a", 1: "b", 2: "2"}
    assert complete_names({"0": "x"}, 1) == {0: "x"}
    assert complete_names(None, 2) == {0: "0", 1: "1"}


def test_ensembles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ensembles"):
        attempt_load(["a.pt", "b.pt"])


WRONG_TYPES = {
    "model": 5, "ema": [1], "yaml": ["Conv"], "names": 3, "nc": "three", "stride": "8", "epoch": "last",
    "best_fitness": "high", "updates": "many", "optimizer": [1], "scaler": 1, "trainer": "x", "hyp": 0.1, "opt": ["x"],
    "metrics": 0.5, "data": [1], "date": 20260101, "kind": 7, "program": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_entry_of_another_type_is_named(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """Nothing behind the reading has to ask again; what is foreign or damaged ends in one kind of error."""
    save_checkpoint(tmp_path / "a.pt", replace(checkpoint, ema=None))
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.save({**content, name: WRONG_TYPES[name]}, tmp_path / "a.pt")
    with pytest.raises(WeightsFileError, match=rf"a\.pt: .*{name}"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["model", "ema"])
@pytest.mark.parametrize("entry", [{"model.0.weight": 5}, {7: torch.zeros(1)}])
def test_states_hold_tensors_by_name(checkpoint: Checkpoint, tmp_path: Path, name: str, entry: dict) -> None:
    torch.save({"format": FORMAT, "version": 1, "model": checkpoint.model, name: entry}, tmp_path / "a.pt")
    with pytest.raises(WeightsFileError, match=f"a.pt: its entry '{name}' should hold tensors by name"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("version", [0, -1, True, "1", None, 1.0])
def test_version_is_a_number_from_1(checkpoint: Checkpoint, tmp_path: Path, version: object) -> None:
    torch.save({"format": FORMAT, "version": version, "model": checkpoint.model}, tmp_path / "a.pt")
    with pytest.raises(WeightsFileError, match="a.pt: has format version"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("entries", [{"model": None}, {}])
def test_average_alone_is_enough(checkpoint: Checkpoint, tmp_path: Path, entries: dict) -> None:
    content = {"format": FORMAT, "version": 1, "yaml": checkpoint.yaml, "ema": checkpoint.ema, **entries}
    torch.save(content, tmp_path / "a.pt")
    read = load_checkpoint(tmp_path / "a.pt")
    assert read.ema is None and all(torch.equal(read.model[key], value) for key, value in checkpoint.ema.items())
    torch.save({**content, "ema": None}, tmp_path / "b.pt")
    with pytest.raises(WeightsFileError, match="b.pt: holds no tensors"):
        load_checkpoint(tmp_path / "b.pt")


def test_upstream_file_with_the_average_alone(golden: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some programs drop the raw weights instead of the average."""
    path = golden("models/upstream_gelan-t_stripped.pt")
    expected, content = load_checkpoint(path), read_torch_file(path)
    monkeypatch.setattr(
        "models.checkpoint.read_torch_file", lambda _: {**content, "model": None, "ema": content["model"]}
    )
    read = load_checkpoint(path)
    assert read.ema is None and read.names == expected.names
    assert all(torch.equal(read.model[key], value) for key, value in expected.model.items())


@pytest.mark.parametrize("names", [["bolt", "nut", "washer"], {"0": "bolt", "1": "nut", "2": "washer"}])
def test_names_in_every_usual_form(checkpoint: Checkpoint, tmp_path: Path, names: object) -> None:
    torch.save({"format": FORMAT, "version": 1, "model": checkpoint.model, "names": names}, tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt").names == {0: "bolt", 1: "nut", 2: "washer"}


@pytest.mark.parametrize("names", [5, "abc", {"x": "bolt"}, {None: "bolt"}])
def test_names_that_are_none_are_told(names: object) -> None:
    with pytest.raises(ValueError, match="the class names"):
        complete_names(names, 3)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_state_dict_of_a_wrapped_model(model: DetectionModel, tmp_path: Path, wrapper: str) -> None:
    torch.save({f"{wrapper}{key}": value for key, value in model.state_dict().items()}, tmp_path / "a.pt")
    assert list(load_checkpoint(tmp_path / "a.pt").model) == list(model.state_dict())
