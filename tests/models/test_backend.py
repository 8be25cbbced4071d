"""The backend: the same lead prediction from every kind of file, and clear words where that is impossible."""

from __future__ import annotations

import builtins
import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.backend import SUFFIXES, DetectMultiBackend
from models.checkpoint import build_model, load_checkpoint
from models.graph import DetectionModel
from models.heads import lead_prediction
from models.runners import lead_output
from tests.reference.tiny import save_tiny_dual
from utils.evaluate.validator import _evaluating
from utils.files import write_yaml

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

BOX_TOLERANCE_PX, SCORE_TOLERANCE = 1e-3, 1e-5
SIZE = (64, 96)


class BothBranches(nn.Module):
    """Export as upstream does it: auxiliary prediction first, lead second."""

    def __init__(self, model: DetectionModel) -> None:
        super().__init__()
        self.model = model
        model.head.export = True

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.model(images)


def noise(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dual(tmp_path_factory.mktemp("weights") / "dual.pt")


@pytest.fixture(scope="module")
def dual(weights: Path) -> DetectionModel:
    return build_model(load_checkpoint(weights)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def upstream_files(dual: DetectionModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two-output files as upstream writes them: ONNX with batch 2, TorchScript with batch 1."""
    folder = tmp_path_factory.mktemp("upstream")
    network = BothBranches(copy.deepcopy(dual)).eval()
    extra = {"config.txt": json.dumps({"shape": [1, 3, *SIZE], "stride": 32, "names": {"0": "a", "1": "b", "2": "c"}})}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(network, torch.zeros(1, 3, *SIZE), strict=False, check_trace=False)
        traced.save(str(folder / "both.torchscript"), _extra_files=extra)
        torch.onnx.export(
            network, (torch.zeros(2, 3, *SIZE),), str(folder / "both.onnx"), opset_version=12, dynamo=False,
            input_names=["images"], output_names=["output0"],
        )  # fmt: skip
    return {"torchscript": folder / "both.torchscript", "onnx": folder / "both.onnx"}


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found[:, :4] - expected[:, :4]).abs().max() <= BOX_TOLERANCE_PX
    assert (found[:, 4:] - expected[:, 4:]).abs().max() <= SCORE_TOLERANCE


def test_pt_file_gives_the_lead_prediction(weights: Path, dual: DetectionModel) -> None:
    images = noise(2, 3, *SIZE)
    detector = DetectMultiBackend(weights)
    found = detector(images)
    assert_same(found, lead_prediction(dual(images)))
    assert (detector.pt, detector.jit, detector.onnx) == (True, False, False)
    assert (detector.stride, detector.static_shape, detector.batch_size, detector.fp16) == (32, None, None, False)
    assert detector.names == {0: "bolt", 1: "nut", 2: "washer"}
    assert type(detector.runner.model.head).__name__ == "DDetect"


def test_a_validation_leaves_the_detector_ready(weights: Path) -> None:
    detector = DetectMultiBackend(weights)
    with _evaluating(detector):
        pass
    assert not any(module.training for module in detector.modules())


def test_unfused_pt_file_is_bit_equal(weights: Path, dual: DetectionModel) -> None:
    images = noise(1, 3, *SIZE)
    assert torch.equal(DetectMultiBackend(weights, fuse=False)(images), lead_prediction(dual(images)))


def test_augmentation_works_for_pt_only(weights: Path, upstream_files: dict[str, Path]) -> None:
    images = noise(1, 3, 64, 64)
    assert DetectMultiBackend(weights)(images, augment=True).shape[2] > DetectMultiBackend(weights)(images).shape[2]
    with pytest.raises(ValueError, match="needs a .pt file"):
        DetectMultiBackend(upstream_files["onnx"])(images, augment=True)


@pytest.mark.parametrize("kind", ["onnx", "torchscript"])
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_two_output_file_gives_its_second_output(
    upstream_files: dict[str, Path], dual: DetectionModel, kind: str, batch: int
) -> None:
    images = noise(batch, 3, *SIZE)
    detector = DetectMultiBackend(upstream_files[kind])
    found = detector(images)
    auxiliary, lead = dual(images)[0]
    assert_same(found, lead)
    assert (found[:, :4] - auxiliary[:, :4]).abs().max() > 1
    assert detector.batch_size == (2 if kind == "onnx" else None)


def test_opencv_reads_the_same_file(upstream_files: dict[str, Path], dual: DetectionModel) -> None:
    images = noise(3, 3, *SIZE)
    detector = DetectMultiBackend(upstream_files["onnx"], dnn=True)
    assert detector.batch_size == 2 and detector.static_shape == SIZE
    assert_same(detector(images), lead_prediction(dual(images)))


@pytest.mark.parametrize("kind", ["onnx", "torchscript"])
def test_other_size_than_the_file_is_told(upstream_files: dict[str, Path], kind: str) -> None:
    detector = DetectMultiBackend(upstream_files[kind])
    assert detector.static_shape == SIZE
    with pytest.raises(ValueError, match="128x128 given, but the file is made for 64x96; use --imgsz 64 96"):
        detector(noise(1, 3, 128, 128))


def test_names_come_from_file_then_data_then_numbers(upstream_files: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "data.yaml"
    write_yaml(data, {"names": {0: "x", 1: "y", 2: "z"}})
    assert DetectMultiBackend(upstream_files["torchscript"], data=data).names == {0: "a", 1: "b", 2: "c"}
    assert DetectMultiBackend(upstream_files["onnx"], data=data).names == {0: "x", 1: "y", 2: "z"}
    assert DetectMultiBackend(upstream_files["onnx"]).names == {0: "class0", 1: "class1", 2: "class2"}


@pytest.mark.parametrize("kind", ["pt", "torchscript"])
def test_data_file_that_is_missing_and_not_needed_is_told(
    weights: Path, upstream_files: dict[str, Path], kind: str, messages: list[str]
) -> None:
    path = weights if kind == "pt" else upstream_files[kind]
    names = DetectMultiBackend(path).names
    messages.clear()
    assert DetectMultiBackend(path, data="data/coco128.yaml").names == names
    (message,) = messages
    assert "--data 'data/coco128.yaml' not found" in message
    assert f"not needed, {path.name} names its classes" in message


def test_data_file_that_is_missing_and_needed_is_an_error(upstream_files: dict[str, Path]) -> None:
    with pytest.raises(FileNotFoundError, match=r"'data/coco128\.yaml' not found.*both\.onnx holds no class names"):
        DetectMultiBackend(upstream_files["onnx"], data="data/coco128.yaml")


@pytest.mark.parametrize("data", ["data/coco.yaml", "coco.yaml"])
def test_data_file_is_looked_for_as_in_training(
    upstream_files: dict[str, Path], data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert DetectMultiBackend(upstream_files["onnx"], data=data).names == {0: "person", 1: "bicycle", 2: "car"}


@pytest.mark.parametrize("kind", ["pt", "torchscript", "onnx"])
def test_opencv_is_asked_for_with_another_kind_of_file(
    weights: Path, upstream_files: dict[str, Path], kind: str, messages: list[str]
) -> None:
    path = weights if kind == "pt" else upstream_files[kind]
    DetectMultiBackend(path, dnn=True)
    told = [message for message in messages if message.startswith("--dnn has no effect on")]
    assert [path.name in message for message in told] == ([] if kind == "onnx" else [True])


@pytest.mark.parametrize("dnn", [False, True])
def test_names_in_metadata_are_never_run(upstream_files: dict[str, Path], tmp_path: Path, dnn: bool) -> None:
    marker = tmp_path / "ran"
    model = onnx.load(str(upstream_files["onnx"]))
    onnx.helper.set_model_props(model, {"names": f"open({str(marker)!r}, 'w')", "stride": "32"})
    onnx.save(model, str(tmp_path / "evil.onnx"))
    with pytest.raises(ValueError, match="class names are no literal"):
        DetectMultiBackend(tmp_path / "evil.onnx", dnn=dnn)
    assert not marker.exists()


def test_missing_onnxruntime_names_the_package(
    upstream_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == "onnxruntime":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install onnxruntime.*--dnn"):
        DetectMultiBackend(upstream_files["onnx"])
    assert DetectMultiBackend(upstream_files["onnx"], dnn=True).onnx


@pytest.mark.parametrize("suffix", [".mlmodel", ".tflite", ""])
def test_other_formats_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"best{suffix}"
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"not one of \.pt, \.torchscript, \.onnx"):
        DetectMultiBackend(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_and_broken_files_are_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"best{suffix}"
    with pytest.raises(FileNotFoundError, match="best"):
        DetectMultiBackend(path)
    path.write_bytes(b"\x08\x07nonsense")
    with pytest.raises(ValueError, match=f"best\\{suffix}"):
        DetectMultiBackend(path)


def test_outputs_without_a_prediction_are_told() -> None:
    with pytest.raises(ValueError, match=r"no output of shape \(B, 4 \+ nc, A\).*\(1, 2, 3, 4\)"):
        lead_output([torch.zeros(1, 2, 3, 4)])


def test_half_without_cuda_stays_in_float32(weights: Path) -> None:
    detector = DetectMultiBackend(weights, fp16=True)
    assert not detector.fp16 and detector(noise(1, 3, 64, 64)).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("fp16", [False, True])
def test_cuda_agrees_with_cpu(weights: Path, fp16: bool) -> None:
    images = noise(2, 3, *SIZE)
    detector = DetectMultiBackend(weights, device="cuda:0", fp16=fp16)
    detector.warmup((1, 3, *SIZE))
    found, expected = detector(images).cpu(), DetectMultiBackend(weights)(images)
    assert detector.fp16 == fp16 and found.dtype == torch.float32
    assert (found[:, :4] - expected[:, :4]).abs().max() < (2.0 if fp16 else 0.1)


def test_list_of_one_file_is_a_file(weights: Path, golden: Callable[[str], Path]) -> None:
    assert DetectMultiBackend([str(weights)]).pt
    with pytest.raises(ValueError, match="ensembles"):
        DetectMultiBackend([str(weights), str(weights)])
    detector = DetectMultiBackend(golden("models/upstream_gelan-t_stripped.pt"))
    assert len(detector.names) == 80


def onnx_file(path: Path, inputs: list, metadata: dict[str, str] | None = None) -> Path:
    """Write a graph that passes its first input on, with inputs as (number type, shape)."""
    sources = [onnx.helper.make_tensor_value_info(f"in{i}", kind, shape) for i, (kind, shape) in enumerate(inputs)]
    result = onnx.helper.make_tensor_value_info("output0", *inputs[0])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["in0"], ["output0"])], "g", sources, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.helper.set_model_props(model, metadata or {})
    onnx.save(model, str(path))
    return path


IMAGES = (onnx.TensorProto.FLOAT, [1, 3, 64, 64])


@pytest.mark.parametrize(
    "inputs", [[(onnx.TensorProto.FLOAT, [1, 10])], [(onnx.TensorProto.UINT8, [1, 3, 64, 64])], [IMAGES, IMAGES]]
)
def test_onnx_of_another_purpose_is_told(tmp_path: Path, inputs: list) -> None:
    with pytest.raises(ValueError, match=r"net\.onnx has the inputs in0 .*expected one, images"):
        DetectMultiBackend(onnx_file(tmp_path / "net.onnx", inputs))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"stride": "wide"}, "states the stride 'wide'"),
        ({"stride": "0"}, "states the stride '0'"),
        ({"names": "5"}, "class names are 5"),
        ({"names": "{'x': 'bolt'}"}, "not numbered"),
        ({"names": "__import__('os')"}, "no literal"),
    ],
)
def test_metadata_that_make_no_sense_name_the_file(tmp_path: Path, metadata: dict, words: str) -> None:
    with pytest.raises(ValueError, match=rf"net\.onnx.*{words}.*export it again"):
        DetectMultiBackend(onnx_file(tmp_path / "net.onnx", [IMAGES], metadata))


@pytest.mark.parametrize("config", [{"shape": 5}, {"shape": [1, 3]}, {"shape": [1, 3, "a", 2]}, {"stride": "x"}])
def test_torchscript_description_that_makes_no_sense_names_the_file(tmp_path: Path, config: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        program = torch.jit.trace(nn.Identity(), torch.zeros(1, 3, 64, 64))
        torch.jit.save(program, str(tmp_path / "net.torchscript"), _extra_files={"config.txt": json.dumps(config)})
    with pytest.raises(ValueError, match=r"net\.torchscript states the .*export it again"):
        DetectMultiBackend(tmp_path / "net.torchscript")


def test_folder_and_no_weights_at_all_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; name a file, for example .*best.pt"):
        DetectMultiBackend(tmp_path)
    with pytest.raises(ValueError, match="weights are missing"):
        DetectMultiBackend("")
