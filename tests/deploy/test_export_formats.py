"""The lean .pt, the file for upstream and OpenVINO: same boxes, nothing half written, figures in the log."""

from __future__ import annotations

import copy
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.backend import DetectMultiBackend
from models.checkpoint import Checkpoint, info, load_checkpoint, save_checkpoint
from models.graph import DetectionModel
from models.heads import lead_prediction
from tests.models.reference import PAIRS
from tests.reference.fill import fill_in_key_order
from tests.reference.tiny import tiny_dual
from utils.deploy import formats
from utils.deploy.exporter import atomic_folder, export
from utils.deploy.formats import FORMATS
from utils.log import LOGGER
from utils.options import ExportOptions

REPO_ROOT = Path(__file__).resolve().parents[2]
NAMES = {0: "bolt", 1: "螺母", 2: "washer"}
SIZE = [64, 96]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = tiny_dual()
    checkpoint = Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=3, names=NAMES, hyp={"lr0": 0.01})
    save_checkpoint(tmp_path / "best.pt", replace(checkpoint, ema=None, metrics={"map": 0.5}))
    return tmp_path / "best.pt"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    collected: list[str] = []
    monkeypatch.setattr(LOGGER, "info", lambda text: collected.append(str(text)))
    return collected


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5))


def run_export(weights: Path, *include: str, **options: object) -> list[Path]:
    files, failures = export(ExportOptions(weights=[str(weights)], imgsz=SIZE, include=list(include), **options))
    assert not failures
    return files


def test_lean_file_holds_the_inference_form(weights: Path) -> None:
    (file,) = run_export(weights, "reparam")
    assert file.name == "best-reparam.pt"
    lean = load_checkpoint(file)
    assert (lean.kind, lean.names, lean.nc, lean.hyp, lean.metrics) == (
        "inference",
        NAMES,
        3,
        {"lr0": 0.01},
        {"map": 0.5},
    )
    assert not any(".bn." in key or ".conv1." in key or ".dfl2." in key for key in lean.model)
    assert lean.yaml["head"][-1][2] == "DDetect"
    images = noise(2, 3, *SIZE)
    assert torch.equal(DetectMultiBackend(file)(images), DetectMultiBackend(weights)(images))
    assert "inference, inference form (lead branch only), batch norm folded" in "\n".join(info(file))
    assert file.stat().st_size < weights.stat().st_size


def test_lean_file_in_half_precision(weights: Path) -> None:
    whole, half = run_export(weights, "reparam")[0].stat().st_size, run_export(weights, "reparam", half=True)[0]
    assert {tensor.dtype for tensor in load_checkpoint(half).model.values()} == {torch.float16}
    assert half.stat().st_size < 0.6 * whole
    images = noise(1, 3, *SIZE)
    assert (DetectMultiBackend(half)(images) - DetectMultiBackend(weights)(images))[:, :4].abs().max() < 1.0


def test_lean_file_can_be_exported_again(weights: Path) -> None:
    (lean,) = run_export(weights, "reparam")
    images = noise(1, 3, *SIZE)
    (script,) = run_export(lean, "torchscript")
    assert script.name == "best-reparam.torchscript"
    assert (DetectMultiBackend(script)(images) - DetectMultiBackend(weights)(images)).abs().max() < 1e-3
    _, failures = export(ExportOptions(weights=[str(lean)], imgsz=SIZE, include=["upstream"]))
    assert "folded for inference" in failures[0]


@pytest.mark.parametrize(
    "dual", [name if name[-1] == "t" else pytest.param(name, marks=pytest.mark.slow) for name in PAIRS]
)
@pytest.mark.parametrize("classes", [1, 4])
def test_every_size_and_class_count(tmp_path: Path, dual: str, classes: int) -> None:
    model = DetectionModel(f"{dual}.yaml", nc=classes).eval()
    fill_in_key_order(model.state_dict(), seed=7)
    save_checkpoint(tmp_path / "best.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml))
    (file,) = run_export(tmp_path / "best.pt", "reparam")
    images = noise(1, 3, 64, 64)
    with torch.no_grad():
        difference = (DetectMultiBackend(file)(images) - lead_prediction(model(images))).abs()
    assert difference[:, :4].max() <= 1e-3 and difference[:, 4:].max() <= 1e-5


def test_sizes_stand_beside_the_published_ones(tmp_path: Path, messages: list[str]) -> None:
    model = DetectionModel("yolov9-s.yaml")
    save_checkpoint(tmp_path / "best.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml))
    run_export(tmp_path / "best.pt", "reparam")
    text = "\n".join(messages)
    assert "yolov9-s (DualDDetect), strides 8, 16, 32" in text
    assert "9,804,512 parameters, 39.9 GFLOPs at 640 px" in text
    assert "7,105,888 parameters, 26.4 GFLOPs" in text
    assert "7.1 M parameters, 26.4 GFLOPs" in text


@pytest.mark.parametrize("reparam", [False, True])
def test_file_for_upstream_keeps_its_form_unless_asked(weights: Path, reparam: bool) -> None:
    (file,) = run_export(weights, "upstream", reparam=reparam)
    loaded = load_checkpoint(file)
    assert file.name == "best-upstream.pt" and loaded.origin == "upstream" and loaded.names == NAMES
    assert loaded.yaml["head"][-1][2] == ("DDetect" if reparam else "DualDDetect")
    images = noise(1, 3, *SIZE)
    assert (DetectMultiBackend(file)(images) - DetectMultiBackend(weights)(images))[:, :4].abs().max() < 1.0


def test_wrong_conversion_is_not_written(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = formats.save_checkpoint

    def spoiled(path: Path, checkpoint: Checkpoint) -> None:
        changed = copy.deepcopy(checkpoint)
        key = next(key for key in changed.model if key.endswith("cv3.0.2.bias"))
        changed.model[key] += 0.5
        real(path, changed)

    monkeypatch.setattr(formats, "save_checkpoint", spoiled)
    files, failures = export(ExportOptions(weights=[str(weights)], imgsz=SIZE, include=["reparam"]))
    assert not files and "deviates from PyTorch" in failures[0]
    assert [file.name for file in weights.parent.iterdir()] == ["best.pt"]


def test_table_lists_every_file(weights: Path, messages: list[str]) -> None:
    run_export(weights, "torchscript", "reparam", benchmark=True)
    start = next(index for index, line in enumerate(messages) if line.startswith("format"))
    rows = [line.split() for line in messages[start + 1 : start + 4]]
    assert [row[0] for row in rows] == ["PyTorch", "torchscript", "reparam"]
    assert float(rows[0][1]) > 0
    for row in rows[1:]:
        assert float(row[1]) > 0 and float(row[2]) < 1e-3 and float(row[3]) < 1e-5 and float(row[4]) > 0


def test_a_failing_format_makes_the_exit_status(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import export as script

    def fail(*_: object) -> None:
        raise RuntimeError("no space")

    line = ["--weights", str(weights), "--img", "64", "--include", "reparam", "torchscript"]
    assert script.main(line) == 0
    monkeypatch.setitem(formats.FORMATS, "torchscript", replace(FORMATS["torchscript"], write=fail))
    assert script.main(line) == 1
    assert script.main(["--weights", "nowhere.pt"]) == 1


@pytest.mark.slow
def test_torchscript_needs_nothing_of_this_repository(weights: Path, tmp_path: Path) -> None:
    (file,) = run_export(weights, "torchscript")
    code = (
        "import sys, torch\n"
        "program = torch.jit.load(sys.argv[1])\n"
        "output = program(torch.rand(2, 3, 64, 96))\n"
        "print(tuple(output.shape), [name for name in sys.modules if name.split('.')[0] in ('models', 'utils')])\n"
    )
    line = [sys.executable, "-W", "ignore", "-c", code, str(file)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(2, 7, 126) []"


# --- OpenVINO ---


@pytest.fixture
def openvino() -> object:
    return pytest.importorskip("openvino")


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"dynamic_hw": True}, {"half": True}], ids=str)
def test_openvino_gives_the_same_boxes(openvino: object, weights: Path, options: dict) -> None:
    (folder,) = run_export(weights, "openvino", **options)
    assert folder.name == "best_openvino_model"
    assert sorted(file.name for file in folder.iterdir()) == ["best.bin", "best.xml", "best.yaml"]
    detector = DetectMultiBackend(folder)
    assert detector.xml and detector.names == NAMES and detector.stride == 32
    assert detector.batch_size == (None if options.get("dynamic") or options.get("dynamic_hw") else 1)
    for size in [SIZE, [96, 64]] if options.get("dynamic_hw") else [SIZE]:
        images = noise(3, 3, *size)
        difference = (detector(images) - DetectMultiBackend(weights)(images)).abs()
        is_half = "half" in options
        assert difference[:, :4].max() < (1.0 if is_half else 1e-2)
        assert difference[:, 4:].max() < (1e-2 if is_half else 1e-4)


def test_two_weights_files_do_not_mix(openvino: object, weights: Path) -> None:
    other = weights.with_name("other.pt")
    other.write_bytes(weights.read_bytes())
    options = ExportOptions(weights=[str(weights), str(other)], imgsz=SIZE, include=["openvino", "reparam"])
    files, failures = export(options)
    names = ["best_openvino_model", "best-reparam.pt", "other_openvino_model", "other-reparam.pt"]
    assert not failures and [file.name for file in files] == names
    assert sorted(file.name for file in files[2].iterdir()) == ["other.bin", "other.xml", "other.yaml"]


def test_openvino_folder_is_replaced_as_a_whole(openvino: object, weights: Path) -> None:
    (folder,) = run_export(weights, "openvino")
    (folder / "stale.xml").write_text("")
    run_export(weights, "openvino")
    assert sorted(file.suffix for file in folder.iterdir()) == [".bin", ".xml", ".yaml"]
    assert sorted(file.name for file in weights.parent.iterdir()) == ["best.pt", "best_openvino_model"]


def test_missing_openvino_is_told(weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    _, failures = export(ExportOptions(weights=[str(weights)], imgsz=SIZE, include=["openvino"]))
    assert "pip install openvino" in failures[0]
    assert [file.name for file in tmp_path.iterdir()] == ["best.pt"]
    (tmp_path / "a_openvino_model").mkdir()
    with pytest.raises(ImportError, match="pip install openvino"):
        DetectMultiBackend(tmp_path / "a_openvino_model")


def test_odd_folders_are_named(openvino: object, tmp_path: Path) -> None:
    folder = tmp_path / "a_openvino_model"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds 0 .xml files"):
        DetectMultiBackend(folder)
    (folder / "a.xml").write_text("<html>")
    with pytest.raises(ValueError, match="no readable OpenVINO network"):
        DetectMultiBackend(folder)


def test_failed_folder_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "x_openvino_model"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("first")
    with pytest.raises(RuntimeError), atomic_folder(target) as folder:
        (folder / "a").write_text("second")
        raise RuntimeError("full disk")
    assert (target / "a").read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["x_openvino_model"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["upstream_yolov9-t_stripped", "upstream_gelan-t_stripped"])
def test_weights_of_the_original_in_every_format(
    openvino: object, golden: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    (tmp_path / "best.pt").write_bytes(golden(f"models/{name}.pt").read_bytes())
    images = noise(1, 3, *SIZE)
    expected = DetectMultiBackend(tmp_path / "best.pt")(images)
    for file in run_export(tmp_path / "best.pt", "openvino", "onnx", "reparam", "upstream", "torchscript"):
        difference = (DetectMultiBackend(file)(images) - expected).abs()
        assert difference[:, :4].max() < 0.05 and difference[:, 4:].max() < 1e-4, file


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchscript", "openvino"])
def test_terminated_export_leaves_nothing_half_written(weights: Path, name: str) -> None:
    """Queues and containers end programs with SIGTERM; what stood under the final name before stays."""
    old = weights.with_name(weights.stem + FORMATS[name].suffix)
    content = old / "old.xml" if FORMATS[name].is_folder else old
    content.parent.mkdir(exist_ok=True)
    content.write_text("old")
    code = (
        "import os, runpy, signal, sys; from dataclasses import replace; from utils.deploy import formats\n"
        "def write(job, path):\n"
        "    (path / 'part' if path.is_dir() else path).write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"formats.FORMATS[{name!r}] = replace(formats.FORMATS[{name!r}], write=write)\n"
        f"sys.argv = ['export.py', '--weights', {str(weights)!r}, '--include', {name!r}, '--imgsz', '64']\n"
        "runpy.run_path('export.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr
    assert {file.name for file in weights.parent.iterdir()} == {"best.pt", old.name}
    assert content.read_text() == "old"


def test_folder_that_may_not_be_written_to(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.deploy.exporter.os.access", lambda path, mode: Path(path) != weights.parent)
    files, failures = export(ExportOptions(weights=[str(weights)], imgsz=SIZE, include=["reparam", "torchscript"]))
    assert not files and len(failures) == 1
    assert f"{weights.parent} may not be written to; copy the weights" in failures[0]


@pytest.fixture
def little_room() -> Iterator[None]:
    """Let no file grow beyond 60 KB, which fails like a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("name", ["torchscript", "onnx", "onnx_end2end", "openvino", "reparam", "upstream"])
def test_full_disk_is_told_and_leaves_nothing(weights: Path, little_room: None, name: str) -> None:
    """Torch's own writer of TorchScript would end the whole process."""
    if name.startswith("o"):
        pytest.importorskip("openvino" if name == "openvino" else "onnx")
    files, failures = export(ExportOptions(weights=[str(weights)], imgsz=SIZE, include=[name]))
    assert not files and len(failures) == 1
    assert "could not be written" in failures[0] and "MB are free there" in failures[0]
    assert [file.name for file in weights.parent.iterdir()] == ["best.pt"]


@pytest.mark.parametrize(("name", "words"), [("torchscript", "is a folder"), ("openvino", "is a file")])
def test_target_of_another_kind_is_left_alone(weights: Path, name: str, words: str) -> None:
    target = weights.with_name(weights.stem + FORMATS[name].suffix)
    target.mkdir() if name == "torchscript" else target.write_text("mine")
    files, failures = export(ExportOptions(weights=[str(weights)], imgsz=SIZE, include=[name]))
    assert not files and words in failures[0] and "move it away" in failures[0]
    assert {file.name for file in weights.parent.iterdir()} == {"best.pt", target.name}
    assert target.is_dir() if name == "torchscript" else target.read_text() == "mine"
