"""TensorRT engines: what each generation of the package is asked for, the file around an engine, running one.

The package itself needs a GPU; a stand-in takes its place, and one test at the end uses the real one where it is.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models.backend import DetectMultiBackend
from models.checkpoint import Checkpoint, save_checkpoint
from models.runners import EngineRunner, pack_engine, unpack_engine
from tests.deploy import fake_tensorrt
from tests.reference.tiny import tiny_dual
from utils.deploy.description import ExportDescription
from utils.deploy.exporter import export
from utils.deploy.tensorrt_engine import batch_profile, build_engine, trtexec_line, workspace_mib
from utils.options import ExportOptions

onnx = pytest.importorskip("onnx")
NAMES = {0: "bolt", 1: "螺母", 2: "washer"}


def description(**options: object) -> ExportDescription:
    return ExportDescription(**{"names": NAMES, "stride": 32, "shape": (1, 3, 64, 96), **options})


def test_profile_is_1_4_16_unless_a_batch_is_given() -> None:
    assert [batch_profile(batch) for batch in (1, 2, 8, 16, 32)] == [
        (1, 4, 16), (1, 1, 2), (1, 2, 8), (1, 4, 16), (1, 8, 32),
    ]  # fmt: skip
    assert [workspace_mib(value) for value in (4, 0.5, 4096)] == [4096, 512, 4096]


def test_trtexec_line_uses_current_flags() -> None:
    head = "trtexec --onnx=a.onnx --saveEngine=a.engine --fp16 --memPoolSize=workspace:4096 --skipInference"
    assert trtexec_line(Path("a.onnx"), description()) == head
    assert trtexec_line(Path("a.onnx"), description(dynamic=True), "input") == (
        f"{head} --minShapes=input:1x3x64x96 --optShapes=input:4x3x64x96 --maxShapes=input:16x3x64x96"
    )


def test_trtexec_line_can_be_typed_whatever_the_folder_is_called() -> None:
    for folder in ("runs/a b", "it's", "$(touch ran)", "数据;ls"):
        words = shlex.split(trtexec_line(Path(folder) / "best.onnx", description(dynamic=True), "my images"))
        assert words[1:3] == [f"--onnx={folder}/best.onnx", f"--saveEngine={folder}/best.engine"]
        assert words[-1] == "--maxShapes=my images:16x3x64x96"


@pytest.mark.parametrize(("version", "flags"), [("8.6.1", 1), ("10.9.0", 0), ("11.0.0", 0)])
@pytest.mark.parametrize("half", [False, True])
def test_building(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, flags: int, half: bool) -> None:
    trt = fake_tensorrt.make(version)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    (tmp_path / "a.onnx").write_bytes(b"graph")
    build_engine(tmp_path / "a.onnx", tmp_path / "a.engine", description(half=half, dynamic=True), workspace=2)
    assert ("network", flags) in trt.calls and ("parse", b"graph") in trt.calls
    assert ("workspace", "workspace", 2 << 30) in trt.calls
    assert ("set_shape", "images", (1, 3, 64, 96), (4, 3, 64, 96), (16, 3, 64, 96)) in trt.calls
    assert (("flag", "fp16") in trt.calls) == (half and version < "11" or half and version.startswith("8"))
    assert (("clear", "tf32") in trt.calls) != half
    metadata, program = unpack_engine((tmp_path / "a.engine").read_bytes())
    assert program == b"ftrt-program"
    assert metadata["names"] == {str(key): name for key, name in NAMES.items()} and metadata["stride"] == 32


@pytest.mark.parametrize(
    ("trouble", "words"),
    [({"parses": False}, "cannot read the graph: fault 0; fault 1"), ({"builds": False}, "could not build")],
)
def test_trouble_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trouble: dict, words: str) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.make("10.9.0", **trouble))
    (tmp_path / "a.onnx").write_bytes(b"graph")
    with pytest.raises(ValueError, match=words):
        build_engine(tmp_path / "a.onnx", tmp_path / "a.engine", description(dynamic=True))
    assert not (tmp_path / "a.engine").exists()


def test_engine_of_trtexec_has_no_description() -> None:
    assert unpack_engine(b"ftrt\x01\x02{rest") == ({}, b"ftrt\x01\x02{rest")
    assert unpack_engine(pack_engine({"stride": 32}, b"ftrt")) == ({"stride": 32}, b"ftrt")


@pytest.mark.parametrize("packed", [False, True])
def test_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: bool) -> None:
    trt = fake_tensorrt.make("10.9.0", largest=4)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    content = pack_engine({"names": NAMES, "stride": 32}, b"program") if packed else b"program"
    (tmp_path / "a.engine").write_bytes(content)
    runner = EngineRunner(tmp_path / "a.engine", SimpleNamespace(type="cuda"), {0: "x", 1: "y", 2: "z"})
    assert ("deserialize", b"program") in trt.calls
    assert runner.names == (NAMES if packed else {0: "x", 1: "y", 2: "z"})
    assert (runner.batch_size, runner.static_shape, runner.stride, runner.fp16) == (None, (8, 8), 32, False)
    images = torch.rand(6, 3, 8, 8)
    (output,) = runner(images)
    assert runner.context.batches == [4, 2]
    assert torch.allclose(output[:, 3, 2], 2 * images[:, 0].sum((1, 2)))


def test_engine_of_another_machine_and_without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.make("10.9.0", fits=False))
    (tmp_path / "a.engine").write_bytes(b"program")
    with pytest.raises(ValueError, match=r"does not fit this TensorRT \(10.9.0\) or this GPU.*--include engine"):
        EngineRunner(tmp_path / "a.engine", SimpleNamespace(type="cuda"))
    with pytest.raises(ValueError, match="needs a CUDA device: --device 0"):
        DetectMultiBackend(tmp_path / "a.engine", device="cpu")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = tiny_dual()
    save_checkpoint(tmp_path / "best.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, names=NAMES))
    return tmp_path / "best.pt"


def test_missing_package_fails_that_format_only(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    options = ExportOptions(weights=[str(weights)], imgsz=[64, 64], include=["engine", "torchscript"])
    files, failures = export(options)
    assert [file.name for file in files] == ["best.torchscript"]
    assert "pip install tensorrt" in failures[0]
    assert sorted(file.name for file in weights.parent.iterdir()) == ["best.pt", "best.torchscript"]


@pytest.mark.parametrize("version", ["10.9.0", "11.0.0"])
def test_graph_for_the_engine(weights: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A free batch and fixed sides; weights in half precision only for versions that know no flag for it."""
    trt = fake_tensorrt.make(version)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    _, failures = export(ExportOptions(weights=[str(weights)], imgsz=[64, 96], include=["engine"], half=True))
    assert "needs a CUDA device" in failures[0]  # the check after building
    graph = onnx.load_from_string(next(call[1] for call in trt.calls if call[0] == "parse")).graph
    axes = graph.input[0].type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in axes] == ["batch", 3, 64, 96]
    is_half = graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert is_half == (version == "11.0.0")
    assert [file.name for file in weights.parent.iterdir()] == ["best.pt"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_real_engine_gives_the_same_boxes(weights: Path, half: bool) -> None:
    pytest.importorskip("tensorrt")
    settings = {"imgsz": [64, 96], "include": ["engine"], "half": half, "device": "0"}
    files, failures = export(ExportOptions(weights=[str(weights)], **settings))
    assert not failures
    for batch in (1, 3, 17):
        images = torch.rand(batch, 3, 64, 96)
        found = DetectMultiBackend(files[0], device="cuda:0")(images).cpu()
        difference = (found - DetectMultiBackend(weights)(images)).abs()
        assert difference[:, :4].max() < (2.0 if half else 0.5) and difference[:, 4:].max() < 0.02
