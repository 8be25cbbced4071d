"""Files for upstream's scripts: only upstream's names inside, the attributes its methods read, the same boxes."""

from __future__ import annotations

import pickletools
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint, build_model, load_checkpoint
from models.graph import DetectionModel
from models.heads import lead_prediction
from models.reparam import inference_form, to_single_head
from models.safe_reader import ForeignObject, WeightsFileError, foreign_state_dict, read_torch_file
from models.upstream_file import save_upstream
from tests.models.reference import random_images
from tests.reference.fill import fill_state_dict
from tests.reference.tiny import tiny_dual

REPO_ROOT = Path(__file__).resolve().parents[2]
BLOCKS = """Conv RepConvN RepNBottleneck RepNCSP RepNCSPELAN4 SPPELAN SP Concat DFL ELAN1 AConv ADown CBLinear CBFuse
Silence""".split()
TORCH_MODULES = """conv.Conv2d batchnorm.BatchNorm2d container.Sequential container.ModuleList linear.Identity
pooling.MaxPool2d upsampling.Upsample activation.SiLU activation.ReLU""".split()
UPSTREAM_GLOBALS = {
    *(f"models.common {name}" for name in BLOCKS),
    *(f"models.yolo {name}" for name in ("DetectionModel", "DDetect", "DualDDetect", "TripleDDetect")),
    *("torch.nn.modules." + " ".join(name.split(".")) for name in TORCH_MODULES),
    *("torch._utils " + name for name in ("_rebuild_tensor_v2", "_rebuild_parameter")),
    *(f"torch {name}" for name in ("HalfStorage", "FloatStorage", "LongStorage")),
    "collections OrderedDict",
    "__builtin__ set",
}
"""Everything that files of upstream were seen to name; its scripts can resolve these and no others."""


def globals_of(path: Path) -> set[str]:
    """Names in the pickle, read without following any."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        instructions = list(pickletools.genops(archive.read(name)))
    assert not {"STACK_GLOBAL", "INST"} & {instruction.name for instruction, _, _ in instructions}
    return {argument for instruction, argument, _ in instructions if instruction.name == "GLOBAL"}


def attribute_names(record: ForeignObject, place: str = "") -> dict[str, tuple[str, frozenset[str]]]:
    """Class and attribute names of every object below ``record``; what a forward pass caches is left out."""
    names = frozenset(record.attributes) - {"shape"}
    found = {place: (record.path, names)}
    for name, child in record.attributes["_modules"].items():
        if isinstance(child, ForeignObject):
            found |= attribute_names(child, f"{place}.{name}")
    return found


@pytest.mark.parametrize("name", ["epoch", "best_fitness", "updates", "optimizer", "opt", "date", "ema"])
@pytest.mark.parametrize("value", [torch.arange(3), torch.tensor(float("nan")), [[]], "x"], ids=str)
def test_entries_of_any_type_end_in_a_checkpoint_or_an_error_with_the_name(
    golden: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    content = read_torch_file(golden("models/upstream_yolov9-t_nc3_stripped.pt"))
    monkeypatch.setattr("models.checkpoint.read_torch_file", lambda _: {**content, name: value})
    try:
        assert load_checkpoint("a.pt").nc == 3
    except WeightsFileError as error:
        assert str(error).startswith("a.pt: ")


@pytest.mark.parametrize("name", ["yolov9-t_stripped", "gelan-t_stripped", "yolov9-t_nc3_stripped"])
def test_a_file_of_upstream_comes_back_the_same(golden: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    source = golden(f"models/upstream_{name}.pt")
    save_upstream(tmp_path / "back.pt", load_checkpoint(source))
    before, after = read_torch_file(source), read_torch_file(tmp_path / "back.pt")
    assert list(after) == list(before) and after["epoch"] == -1 and after["opt"] == before["opt"]
    assert attribute_names(after["model"]) == attribute_names(before["model"])
    old, new = foreign_state_dict(before["model"]), foreign_state_dict(after["model"])
    assert list(old) == list(new)
    assert all(torch.equal(old[key], new[key]) and old[key].dtype == new[key].dtype for key in old)
    for key in ("yaml", "save", "names", "nc", "inplace", "yaml_file", "training"):
        assert after["model"].attributes[key] == before["model"].attributes[key], key
    assert globals_of(tmp_path / "back.pt") <= globals_of(source)


@pytest.mark.parametrize("name", ["upstream_yolov9-t_stripped", "upstream_gelan-t_stripped"])
def test_reference_predictions_survive(golden: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    expected = np.load(golden("models/ckpt_forward.npz"))[f"{name}.model"]
    save_upstream(tmp_path / "back.pt", load_checkpoint(golden(f"models/{name}.pt")))
    generator = np.random.Generator(np.random.PCG64(11))
    images = torch.from_numpy(generator.random((1, 3, 160, 192)).astype(np.float32))
    with torch.no_grad():
        found = lead_prediction(build_model(load_checkpoint(tmp_path / "back.pt")).eval()(images)).numpy()
    assert np.abs(found[:, :4] - expected[:, :4]).max() <= 1e-2
    assert np.abs(found[:, 4:] - expected[:, 4:]).max() <= 1e-4


@pytest.mark.parametrize(
    "cfg",
    ["yolov9-t", "gelan-t", *(pytest.param(name, marks=pytest.mark.slow) for name in
     ("yolov9-m", "yolov9-c", "yolov9-e", "yolov9", "gelan-c", "gelan", "yolov9-cf"))],
)  # fmt: skip
def test_only_names_of_upstream(tmp_path: Path, cfg: str) -> None:
    model = DetectionModel(f"{cfg}.yaml", nc=4)
    save_upstream(tmp_path / "u.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=4))
    assert globals_of(tmp_path / "u.pt") <= UPSTREAM_GLOBALS
    assert load_checkpoint(tmp_path / "u.pt").origin == "upstream"


def test_attributes_that_methods_of_upstream_read(tmp_path: Path) -> None:
    model = tiny_dual()
    checkpoint = Checkpoint(model=model.state_dict(), yaml=model.yaml, names={0: "a", 1: "b", 2: "c"})
    checkpoint.hyp = {"box": 7.5}
    save_upstream(tmp_path / "u.pt", checkpoint)
    network = read_torch_file(tmp_path / "u.pt")["model"]
    values = network.attributes
    assert values["names"] == {0: "a", 1: "b", 2: "c"} and values["nc"] == 3 and not values["training"]
    assert values["hyp"] == {"label_smoothing": 0.0, "box": 7.5} and values["stride"].dtype == torch.float32
    rows = values["_modules"]["model"].attributes["_modules"]
    needed = {"3": "c", "5": "c", "6": "c", "9": "c", "11": "d", "13": "c2s", "17": "idx"}
    for row, attribute in needed.items():
        assert attribute in rows[row].attributes
    for index, row in rows.items():
        assert row.attributes["i"] == int(index) and {"f", "type", "np"} <= set(row.attributes)
    head = rows["18"].attributes
    assert {"nc", "nl", "no", "reg_max", "inplace", "stride", "anchors", "strides"} <= set(head)
    assert head["stride"].dtype == torch.float16 and "_input_channels" not in head
    floating = [tensor for tensor in foreign_state_dict(network).values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floating} == {torch.float16}


def test_converted_model_is_written_where_asked_for(tmp_path: Path) -> None:
    model = tiny_dual()
    single = to_single_head(model)
    save_upstream(tmp_path / "u.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml), single)
    back = build_model(load_checkpoint(tmp_path / "u.pt")).eval()
    assert type(back.head).__name__ == "DDetect" and back.yaml["head"] == single.yaml["head"]
    assert not any(value.dtype == torch.float16 for value in single.state_dict().values())  # the caller's stays


def test_folded_weights_are_refused(tmp_path: Path) -> None:
    lean = inference_form(tiny_dual())
    with pytest.raises(ValueError, match="folded"):
        save_upstream(tmp_path / "u.pt", Checkpoint(model=lean.state_dict(), yaml=lean.yaml))


@pytest.mark.slow
@pytest.mark.parametrize("cfg", ["yolov9-t", "gelan-t", "yolov9-c"])
def test_objects_come_to_life_under_the_names_of_upstream(tmp_path: Path, cfg: str) -> None:
    """Unpickled without any table, in a process where models.yolo and models.common are importable, it predicts."""
    model = DetectionModel(f"{cfg}.yaml", nc=4)
    fill_state_dict(model.state_dict())
    save_upstream(tmp_path / "u.pt", Checkpoint(model=model.state_dict(), yaml=model.yaml, nc=4))
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "model = torch.load(sys.argv[2], map_location='cpu', weights_only=False)['model'].float().fuse().eval()\n"
        "images = torch.load(sys.argv[3])\n"
        "with torch.no_grad(): output = model(images)[0]\n"
        "torch.save(output[-1] if isinstance(output, list) else output, sys.argv[4])\n"
    )
    images = random_images(1, (1, 3, 64, 64))
    torch.save(images, tmp_path / "images.pt")
    files = [str(tmp_path / name) for name in ("u.pt", "images.pt", "out.pt")]
    subprocess.run([sys.executable, "-c", code, str(REPO_ROOT), *files], check=True, cwd=tmp_path)
    with torch.no_grad():
        expected = lead_prediction(model.half().float().eval()(images))
    assert (torch.load(tmp_path / "out.pt") - expected).abs().max() < 1.0
