"""Starting weights: every tensor finds its place in both forms, and what does not is told with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from models.graph import DetectionModel
from models.heads import lead_prediction
from models.identify import CONFIG_DIR, counterpart, published_size, shipped_name
from models.reparam import inference_form, to_single_head
from models.transfer import advice, name_differences, transfer_weights
from tests.models.reference import PAIRS, random_images
from tests.reference.fill import fill_state_dict
from tests.reference.tiny import tiny_dual
from utils.data.spec import DataSpec
from utils.log import LOGGER
from utils.options import TrainOptions
from utils.train.setup import build_training_model

each_pair = pytest.mark.parametrize(
    ("dual", "single"),
    [pair if pair[0][-1] in "ts" else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS.items()],
)


def filled(name: str, nc: int = 80) -> DetectionModel:
    model = DetectionModel(f"{name}.yaml", nc=nc).eval()
    fill_state_dict(model.state_dict())
    return model


def checkpoint_of(model: DetectionModel, **entries: object) -> Checkpoint:
    return Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=model.head.nc, **entries)


def same_prediction(one: DetectionModel, other: DetectionModel) -> bool:
    images = random_images(3, (1, 3, 64, 64))
    with torch.no_grad():
        return torch.equal(lead_prediction(one.eval()(images)), lead_prediction(other.eval()(images)))


@each_pair
def test_inference_form_starts_from_training_form(dual: str, single: str) -> None:
    source, target = filled(dual), DetectionModel(f"{single}.yaml")
    report = transfer_weights(target, checkpoint_of(source))
    assert report.filled == report.total == len(target.state_dict()) and not report.gaps
    assert same_prediction(source, target)
    assert list(report.unused) == ["auxiliary branch, which the model does not have"]
    assert report.used + sum(map(len, report.unused.values())) == report.given == len(source.state_dict())


@each_pair
def test_training_form_starts_from_inference_form(dual: str, single: str) -> None:
    source, target = filled(single), DetectionModel(f"{dual}.yaml")
    report = transfer_weights(target, checkpoint_of(source))
    assert report.used == report.given and not report.unused and report.share == 1.0
    assert same_prediction(source, target)
    assert list(report.gaps) == ["auxiliary branch, which the file does not have"]
    assert report.filled + sum(map(len, report.gaps.values())) == report.total


def test_a_state_dict_alone_starts_the_training_form(tmp_path: Path) -> None:
    torch.save(filled("gelan-t").state_dict(), tmp_path / "plain.pt")
    report = transfer_weights(DetectionModel("yolov9-t.yaml"), load_checkpoint(tmp_path / "plain.pt"))
    assert report.share == 1.0 and report.conversion == "inference form into training form"


@pytest.mark.parametrize("name", ["yolov9-t", "gelan-t", "yolov9-s"])
def test_other_class_count_is_named(name: str) -> None:
    source, target = filled(name, 80), DetectionModel(f"{name}.yaml", nc=4)
    report = transfer_weights(target, checkpoint_of(source))
    assert report.share > 0.95
    (reason,) = report.gaps
    assert reason == "class branch made for 80 classes, here are 4"
    assert all(f"model.{target.head.i}.cv" in key for key in report.gaps[reason])
    assert torch.equal(target.state_dict()["model.0.conv.weight"], source.state_dict()["model.0.conv.weight"])


@pytest.mark.parametrize("name", ["upstream_yolov9-t_train", "upstream_gelan-t_stripped"])
def test_files_of_the_original_start_both_forms(golden: Callable[[str], Path], name: str) -> None:
    checkpoint = load_checkpoint(golden(f"models/{name}.pt"))
    for cfg in ("yolov9-t.yaml", "gelan-t.yaml"):
        assert transfer_weights(DetectionModel(cfg), checkpoint).share == 1.0
        assert transfer_weights(DetectionModel(cfg, nc=4), checkpoint).share > 0.95


def test_another_network_is_named() -> None:
    checkpoint = checkpoint_of(DetectionModel("yolov9-s.yaml"))
    target = DetectionModel("gelan-t.yaml")
    report = transfer_weights(target, checkpoint)
    assert report.share < 0.5
    assert (
        advice(target, checkpoint) == "the weights are those of yolov9-s, the model is gelan-t; use --cfg yolov9-s.yaml"
    )
    assert not advice(DetectionModel("gelan-s.yaml"), checkpoint)


def test_folded_weights_are_refused() -> None:
    folded = inference_form(tiny_dual())
    with pytest.raises(ValueError, match="folded for inference.*best.pt"):
        transfer_weights(tiny_dual(), checkpoint_of(folded))


def test_every_shipped_network_is_recognised() -> None:
    names = sorted(file.stem for file in CONFIG_DIR.glob("*.yaml"))
    assert [shipped_name(DetectionModel(f"{name}.yaml", nc=7).yaml) for name in names] == names
    assert shipped_name(to_single_head(DetectionModel("yolov9-t.yaml")).yaml) == "gelan-t"
    assert shipped_name(tiny_dual().yaml) is None
    assert (counterpart("yolov9-e"), counterpart("gelan-c"), counterpart("yolov9")) == ("gelan-e", "yolov9-c", "gelan")
    assert published_size("gelan-c").gflops == 102.1 and published_size("yolov9-cf") is None


def test_definition_of_the_original_is_recognised(golden: Callable[[str], Path]) -> None:
    for name in ("yolov9-t", "gelan-t"):
        assert shipped_name(load_checkpoint(golden(f"models/upstream_{name}_stripped.pt")).yaml) == name


def test_other_class_names_are_listed() -> None:
    assert name_differences({0: "cat", 1: "dog"}, {0: "cat", 1: "horse"}) == ["1: dog -> horse"]
    assert not name_differences({0: "0", 1: "1"}, {0: "cat", 1: "dog"})
    assert not name_differences({0: "cat"}, {0: "cat", 1: "dog"})


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    names = {0: "a", 1: "b", 2: "x"}
    return DataSpec(path=tmp_path, train=[], val=[], nc=3, names=names, yaml_file=tmp_path / "d.yaml")


def test_training_tells_what_it_took(tmp_path: Path, spec: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(LOGGER, "info", lambda text: messages.append(text))
    monkeypatch.setattr(LOGGER, "warning", lambda text: messages.append(f"WARNING {text}"))
    source = DetectionModel("gelan-t.yaml", nc=3)
    save_checkpoint(tmp_path / "w.pt", checkpoint_of(source, names={0: "a", 1: "b", 2: "c"}, kind="stripped"))
    options = TrainOptions(weights=str(tmp_path / "w.pt"), cfg="yolov9-t.yaml")
    model = build_training_model(options, spec, None)
    assert model.names == {0: "a", 1: "b", 2: "x"}
    assert messages == [
        f"Weights: 1339/1772 tensors of the model taken from {tmp_path / 'w.pt'} "
        "(1339/1339 of the file, inference form into training form)",
        "  433 left as initialised: auxiliary branch, which the file does not have (model.22.cv1.conv.weight, "
        "model.22.cv1.bn.weight, …)",
        "WARNING 1 classes are called otherwise in the weights than in the data: 2: c -> x",
    ]


def test_another_network_is_named_in_training(tmp_path: Path, spec: DataSpec) -> None:
    save_checkpoint(tmp_path / "w.pt", checkpoint_of(DetectionModel("gelan-m.yaml", nc=3)))
    named = "20% of the weights could.*weights are those of gelan-m, the model is yolov9-s; use --cfg gelan-m.yaml"
    with pytest.raises(ValueError, match=named):
        build_training_model(TrainOptions(weights=str(tmp_path / "w.pt"), cfg="yolov9-s.yaml"), spec, None)


def test_folded_weights_are_refused_in_training(tmp_path: Path, spec: DataSpec) -> None:
    save_checkpoint(tmp_path / "lean.pt", checkpoint_of(inference_form(tiny_dual())))
    with pytest.raises(ValueError, match="--weights .*lean.pt: these weights are folded"):
        build_training_model(TrainOptions(weights=str(tmp_path / "lean.pt"), cfg="yolov9-t.yaml"), spec, None)
