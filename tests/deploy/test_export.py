"""Exported files: one output, the numbers of PyTorch, honest metadata, honest exit codes."""

from __future__ import annotations

import ast
import builtins
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.backend import DetectMultiBackend
from models.checkpoint import Checkpoint, save_checkpoint
from models.graph import DetectionModel
from models.heads import lead_prediction
from models.reparam import inference_form
from models.runners import ScriptRunner
from tests.reference.fill import fill_state_dict
from tests.reference.tiny import tiny_dual
from utils.deploy import formats
from utils.deploy.exporter import export
from utils.deploy.formats import FORMATS, InferenceNetwork, check_formats
from utils.options import ExportOptions

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

NAMES = {0: "bolt", 1: 'it\'s a "nut"', 2: "垫圈"}
BOX_TOLERANCE_PX, SCORE_TOLERANCE = 1e-3, 1e-5
HEIGHT, WIDTH = 64, 96
ANCHORS = 8 * 12 + 4 * 6 + 2 * 3
SHAPE_OPERATORS = {"Shape", "Gather", "Range", "Cast", "Expand", "Unsqueeze", "ConstantOfShape", "Slice"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dual model with weights that matter, in our format."""
    model = tiny_dual()
    path = tmp_path_factory.mktemp("weights") / "best.pt"
    save_checkpoint(path, Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, names=NAMES, kind="stripped"))
    return path


@pytest.fixture(scope="module")
def exported(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function that exports once per set of options and returns the folder with the files."""
    done: dict[str, Path] = {}

    def run(**options: object) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in done:
            folder = tmp_path_factory.mktemp("exported")
            copied = folder / "best.pt"
            copied.write_bytes(weights.read_bytes())
            settings = {"imgsz": [HEIGHT, WIDTH], "include": ["onnx", "torchscript"], **options}
            files, failures = export(ExportOptions(weights=[str(copied)], **settings))
            assert not failures and len(files) == len(settings["include"])
            done[key] = folder
        return done[key]

    return run


def noise(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found[:, :4] - expected[:, :4]).abs().max() <= BOX_TOLERANCE_PX
    assert (found[:, 4:] - expected[:, 4:]).abs().max() <= SCORE_TOLERANCE


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("suffix", ["onnx", "torchscript"])
@pytest.mark.parametrize("options", [{}, {"dynamic": True, "simplify": True}, {"dynamic_hw": True}], ids=str)
def test_exported_file_equals_pytorch(
    exported: Callable[..., Path], weights: Path, options: dict, suffix: str, batch: int
) -> None:
    detector = DetectMultiBackend(exported(**options) / f"best.{suffix}")
    images = noise(batch, 3, HEIGHT, WIDTH)
    assert_same(detector(images), DetectMultiBackend(weights)(images))
    # The predictions must differ between places and images, or the comparison would mean nothing.
    assert detector(images)[:, 4:].std() > 0.01


@pytest.mark.parametrize("suffix", ["onnx", "torchscript"])
def test_free_height_and_width(exported: Callable[..., Path], weights: Path, suffix: str) -> None:
    detector = DetectMultiBackend(exported(dynamic_hw=True) / f"best.{suffix}")
    assert detector.static_shape is None
    for size in ((64, 64), (128, 96)):
        images = noise(2, 3, *size)
        assert_same(detector(images), DetectMultiBackend(weights)(images))


def axes(value: onnx.ValueInfoProto) -> list[int | str]:
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize(
    ("options", "source", "result"),
    [
        ({}, [1, 3, HEIGHT, WIDTH], [1, 7, ANCHORS]),
        ({"dynamic": True, "simplify": True}, ["batch", 3, HEIGHT, WIDTH], ["batch", 7, ANCHORS]),
        ({"dynamic_hw": True}, ["batch", 3, "height", "width"], ["batch", 7, "anchors"]),
    ],
    ids=str,
)
def test_onnx_has_one_input_and_one_output_of_stated_shape(
    exported: Callable[..., Path], options: dict, source: list, result: list
) -> None:
    graph = onnx.load(str(exported(**options) / "best.onnx")).graph
    assert [(value.name, axes(value)) for value in graph.input] == [("images", source)]
    assert [(value.name, axes(value)) for value in graph.output] == [("output0", result)]


def test_onnx_is_plain_and_free_of_shape_arithmetic(exported: Callable[..., Path]) -> None:
    folder = exported(dynamic=True, simplify=True)
    model = onnx.load(str(folder / "best.onnx"))
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert not {node.op_type for node in model.graph.node} & SHAPE_OPERATORS
    assert [entry.version for entry in model.opset_import] == [17]
    assert all(all(isinstance(axis, str) or axis > 0 for axis in axes(value)) for value in model.graph.value_info)
    assert sorted(file.name for file in folder.iterdir()) == ["best.onnx", "best.pt", "best.torchscript"]


def test_static_onnx_computes_no_priors(exported: Callable[..., Path]) -> None:
    nodes = onnx.load(str(exported() / "best.onnx")).graph.node
    assert not {node.op_type for node in nodes} & {"Range", "Expand", "ConstantOfShape"}


def test_metadata_tell_names_stride_and_size(exported: Callable[..., Path]) -> None:
    model = onnx.load(str(exported(dynamic=True, simplify=True) / "best.onnx"))
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert metadata["stride"] == "32" and metadata["task"] == "detect"
    assert ast.literal_eval(metadata["names"]) == NAMES
    assert json.loads(metadata["imgsz"]) == [HEIGHT, WIDTH]


def test_torchscript_carries_its_description(exported: Callable[..., Path]) -> None:
    extra = {"config.txt": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        program = torch.jit.load(str(exported() / "best.torchscript"), _extra_files=extra)
    config = json.loads(extra["config.txt"])
    assert config["shape"] == [1, 3, HEIGHT, WIDTH] and config["stride"] == 32
    assert config["names"] == {str(index): name for index, name in NAMES.items()}
    assert isinstance(program(noise(1, 3, HEIGHT, WIDTH)), torch.Tensor)


def test_half_export_answers_in_float32(exported: Callable[..., Path], weights: Path) -> None:
    images = noise(1, 3, HEIGHT, WIDTH)
    expected = DetectMultiBackend(weights)(images)
    for suffix in ("onnx", "torchscript"):
        detector = DetectMultiBackend(exported(half=True) / f"best.{suffix}")
        found = detector(images)
        assert detector.fp16 and found.dtype == torch.float32
        assert (found[:, :4] - expected[:, :4]).abs().max() < 1.0
        # Coordinates are not on the coarse grid of half precision.
        assert not torch.equal(found[:, :4], found[:, :4].half().float())


def test_batch_size_and_input_name_are_taken(exported: Callable[..., Path]) -> None:
    folder = exported(batch_size=2, input_name="input", include=["onnx"], opset=12)
    model = onnx.load(str(folder / "best.onnx"))
    assert model.graph.input[0].name == "input" and axes(model.graph.input[0])[0] == 2
    assert model.opset_import[0].version == 12


def test_network_is_the_lead_branch_alone() -> None:
    model = tiny_dual()
    images = noise(1, 3, 64, 64)
    network = InferenceNetwork(inference_form(model)).eval()
    assert_same(network(images), lead_prediction(model(images)))
    assert type(network.model.head).__name__ == "DDetect"


def test_size_is_rounded_up_to_the_stride(exported: Callable[..., Path]) -> None:
    folder = exported(imgsz=[50, 70], include=["onnx"])
    assert axes(onnx.load(str(folder / "best.onnx")).graph.input[0]) == [1, 3, 64, 96]


def test_formats_are_checked_before_anything_is_read() -> None:
    assert check_formats(["onnx", "torchscript"]) == ["torchscript", "onnx"]
    assert check_formats(list(FORMATS)) == list(FORMATS)
    for name in ("coreml", "saved_model", "pb", "tflite", "edgetpu", "tfjs", "paddle"):
        with pytest.raises(ValueError, match=f"{name} is not available here"):
            export(ExportOptions(weights=["nowhere.pt"], include=["onnx", name]))
    with pytest.raises(ValueError, match="unknown format; expected one of torchscript, engine, onnx"):
        check_formats(["onyx"])


def test_one_failing_format_does_not_stop_the_other(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no space")

    monkeypatch.setitem(formats.FORMATS, "torchscript", replace(FORMATS["torchscript"], write=fail))
    files, failures = export(
        ExportOptions(weights=[str(weights)], imgsz=[HEIGHT, WIDTH], include=["torchscript", "onnx"])
    )
    assert [file.name for file in files] == ["best.onnx"]
    assert len(failures) == 1 and "no space" in failures[0]
    assert not weights.with_suffix(".torchscript").exists()


def test_deviating_file_is_not_kept(weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copied = tmp_path / "best.pt"
    copied.write_bytes(weights.read_bytes())

    class Shifted(ScriptRunner):
        def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
            return [output + 2.0 for output in super().forward(images)]

    monkeypatch.setitem(formats.FORMATS, "torchscript", replace(FORMATS["torchscript"], open=Shifted))
    _, failures = export(ExportOptions(weights=[str(copied)], imgsz=[HEIGHT, WIDTH]))
    assert len(failures) == 1 and "deviates from PyTorch by 2.0e+00 px" in failures[0]
    assert [file.name for file in tmp_path.iterdir()] == ["best.pt"]


@pytest.mark.parametrize("package", ["onnx", "onnxslim", "onnxruntime"])
def test_missing_package_is_told(weights: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    messages: list[str] = []
    monkeypatch.setattr("utils.log.LOGGER.warning", lambda text, *_: messages.append(str(text)))
    monkeypatch.setattr(builtins, "__import__", without)
    options = ExportOptions(weights=[str(weights)], imgsz=[HEIGHT, WIDTH], include=["onnx"], simplify=True)
    files, failures = export(options)
    if package == "onnx":
        assert not files and "pip install onnx" in failures[0]
    else:
        assert files and any(f"pip install {package}" in message for message in messages)


def test_wrong_operator_set_and_wrong_file(weights: Path) -> None:
    _, failures = export(ExportOptions(weights=[str(weights)], imgsz=[64, 64], include=["onnx"], opset=99))
    assert "--opset 99: expected 11 to 20" in failures[0]
    _, failures = export(ExportOptions(weights=["best.onnx", "nowhere.pt"], include=["onnx"]))
    assert "starts from a .pt file" in failures[0] and "does not exist" in failures[1]


def test_weights_that_are_not_finite_give_no_file(weights: Path, tmp_path: Path) -> None:
    """A file with NMS inside would hide it: no detections in the file, and none in PyTorch."""
    content = torch.load(weights, weights_only=True)
    state = {
        key: value * float("nan") if value.is_floating_point() else value for key, value in content["model"].items()
    }
    torch.save({**content, "model": state}, tmp_path / "best.pt")
    formats_wanted = ["torchscript", "onnx", "onnx_end2end", "reparam"]
    files, failures = export(
        ExportOptions(weights=[str(tmp_path / "best.pt")], imgsz=[HEIGHT, WIDTH], include=formats_wanted)
    )
    assert not files and [file.name for file in tmp_path.iterdir()] == ["best.pt"]
    (failure,) = failures  # of the weights, not of each format
    assert "best.pt" in failure and "not finite" in failure


@pytest.mark.parametrize("name", ["", " ", "output0", "boxes"])
def test_input_has_a_name_of_its_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"--input-name '{name}': expected a name that no output has"):
        ExportOptions(input_name=name)


def test_size_beyond_the_memory_is_told(weights: Path) -> None:
    _, failures = export(ExportOptions(weights=[str(weights)], imgsz=[2**20, 2**20], include=["onnx"]))
    assert len(failures) == 1 and "--imgsz 1048576 1048576: one image of that size does not fit" in failures[0]


def test_export_leaves_the_weights_alone(exported: Callable[..., Path], weights: Path) -> None:
    assert (exported() / "best.pt").read_bytes() == weights.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("cfg", ["yolov9-t.yaml", "gelan-t.yaml"])
def test_published_networks_export_exactly(cfg: str, tmp_path: Path) -> None:
    model = DetectionModel(cfg, nc=3)
    fill_state_dict(model.state_dict(), "ckpt.")
    save_checkpoint(tmp_path / "best.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml, names=NAMES))
    options = ExportOptions(
        weights=[str(tmp_path / "best.pt")],
        imgsz=[64, 96],
        include=["onnx", "torchscript"],
        dynamic=True,
        simplify=True,
    )
    files, failures = export(options)
    assert not failures
    nodes = onnx.load(str(tmp_path / "best.onnx")).graph.node
    assert not {node.op_type for node in nodes} & SHAPE_OPERATORS
    for batch in (1, 3):
        images = noise(batch, 3, 64, 96)
        expected = DetectMultiBackend(tmp_path / "best.pt")(images)
        for file in files:
            assert_same(DetectMultiBackend(file)(images), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["upstream_yolov9-t_stripped", "upstream_gelan-t_stripped"])
def test_upstream_weights_export_to_upstream_numbers(golden: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    expected = torch.from_numpy(np.load(golden("models/ckpt_forward.npz"))[f"{name}.model"])
    (tmp_path / "best.pt").write_bytes(golden(f"models/{name}.pt").read_bytes())
    generator = np.random.Generator(np.random.PCG64(11))
    images = torch.from_numpy(generator.random((1, 3, 160, 192)).astype(np.float32))
    options = ExportOptions(
        weights=[str(tmp_path / "best.pt")], imgsz=[160, 192], include=["onnx", "torchscript"], simplify=True
    )
    files, failures = export(options)
    assert not failures
    for file in files:
        found = DetectMultiBackend(file)(images)
        assert (found[:, :4] - expected[:, :4]).abs().max() < 1e-2
        assert (found[:, 4:] - expected[:, 4:]).abs().max() < 1e-4
