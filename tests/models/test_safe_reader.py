"""Reading weights files as data: what upstream wrote comes out whole, and nothing in a file ever runs."""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.safe_reader import (
    ForeignObject,
    UnsafeWeightsError,
    WeightsFileError,
    describe_foreign_file,
    foreign_state_dict,
    read_torch_file,
)
from tests.models.archives import write_archive

UPSTREAM_FILES = ("yolov9-t_train", "yolov9-t_stripped", "gelan-t_stripped", "yolov9-t_nc3_stripped")


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable, *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple:
        return self.function, self.args


@pytest.mark.parametrize("name", UPSTREAM_FILES)
def test_upstream_file_gives_the_published_tensors(golden: Callable[[str], Path], name: str) -> None:
    info = json.loads(golden("models/ckpt_info.json").read_text())["files"][f"upstream_{name}.pt"]
    content = read_torch_file(golden(f"models/upstream_{name}.pt"))
    assert set(content) == set(info["keys"])
    for part in ("model", "ema"):
        if part not in info:
            continue
        state = foreign_state_dict(content[part])
        floating = [tensor for tensor in state.values() if tensor.is_floating_point()]
        assert len(state) == info[part]["keys"]
        assert {tensor.dtype for tensor in floating} == {torch.float16}
        parameters = [state[key] for key in state if key.endswith((".weight", ".bias"))]
        total = sum(tensor.double().abs().sum().item() for tensor in parameters)
        assert total == pytest.approx(info[part]["sum_abs"], rel=1e-12)


def test_training_file_has_plain_numbers_and_a_whole_optimizer(golden: Callable[[str], Path]) -> None:
    info = json.loads(golden("models/ckpt_info.json").read_text())["files"]["upstream_yolov9-t_train.pt"]
    content = read_torch_file(golden("models/upstream_yolov9-t_train.pt"))
    assert type(content["best_fitness"]) is float
    assert content["best_fitness"] == pytest.approx(info["best_fitness"][0])
    assert [len(group["params"]) for group in content["optimizer"]["param_groups"]] == info["optimizer_groups"]
    buffers = {index: state["momentum_buffer"] for index, state in content["optimizer"]["state"].items()}
    buffers = {index: buffer for index, buffer in buffers.items() if buffer is not None}
    assert len(buffers) == info["optimizer_state_entries"]
    for index, buffer in buffers.items():
        assert buffer.double().abs().sum().item() == pytest.approx(info["momentum_abssum"][str(index)], rel=1e-6)


def test_upstream_objects_are_inert_records(golden: Callable[[str], Path]) -> None:
    network = read_torch_file(golden("models/upstream_gelan-t_stripped.pt"))["model"]
    assert isinstance(network, ForeignObject)
    assert (network.path, network.class_name) == ("models.yolo.DetectionModel", "DetectionModel")
    assert not callable(network)
    assert network.attributes["names"][0] == "person"


def test_every_number_type_and_layout_survives(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
    content: dict[str, object] = {str(dtype): torch.arange(12).to(dtype) for dtype in dtypes}
    content["bool"] = torch.tensor([True, False])
    content["transposed"] = torch.arange(6.0).view(2, 3).t()
    content["slice"] = torch.arange(10.0)[3:7]
    content["empty"] = torch.empty(0, 3)
    content["scalar"] = torch.tensor(4.5)
    content["parameter"] = torch.nn.Parameter(torch.ones(2))
    torch.save(content, tmp_path / "all.pt")
    read = read_torch_file(tmp_path / "all.pt")
    for key, expected in content.items():
        assert read[key].dtype == expected.dtype and torch.equal(read[key], expected.detach()), key


def test_state_dict_of_a_module_survives(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    read = read_torch_file(tmp_path / "state.pt")
    assert list(read) == list(module.state_dict())
    assert all(torch.equal(read[key], value) for key, value in module.state_dict().items())


def test_tensors_that_share_memory_still_do(tmp_path: Path) -> None:
    base = torch.zeros(4)
    torch.save({"a": base, "b": base[:2]}, tmp_path / "shared.pt")
    read = read_torch_file(tmp_path / "shared.pt")
    read["a"][0] = 7
    assert read["b"][0] == 7


@pytest.mark.parametrize("protocol", [2, 4])
def test_numpy_values_become_python_numbers(tmp_path: Path, protocol: int) -> None:
    content = {
        "float": np.float64(0.25),
        "int": np.int64(3),
        "array": np.array([0.5]),
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "nested": [{"x": np.array([1, 2])}, (np.float32(2.0),)],
    }
    read = read_torch_file(write_archive(tmp_path / "n.pt", pickle.dumps(content, protocol)))
    assert read["float"] == 0.25 and type(read["float"]) is float
    assert read["int"] == 3 and type(read["int"]) is int
    assert read["array"] == 0.5 and read["matrix"] == [[0, 1, 2], [3, 4, 5]]
    assert read["nested"] == [{"x": [1, 2]}, (2.0,)]


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])  # the second one in Python 3.13
@pytest.mark.parametrize("system", ["Posix", "Windows"])
def test_paths_of_any_system_and_python_become_records(tmp_path: Path, module: str, system: str) -> None:
    pickled = f"c{module}\n{system}Path\n(Vdata\nVset.yaml\ntR.".encode()
    assert read_torch_file(write_archive(tmp_path / "x.pt", pickled)).args == ("data", "set.yaml")


def test_options_of_older_forks_become_records(tmp_path: Path) -> None:
    options = argparse.Namespace(epochs=3, save_dir=Path("runs/x"))
    read = read_torch_file(write_archive(tmp_path / "o.pt", pickle.dumps({"opt": options}, 2)))
    assert read["opt"].attributes["epochs"] == 3
    assert read["opt"].attributes["save_dir"].args == ("runs", "x")


HOSTILE = {
    "os.system": Call(os.system, "echo ran > {marker}"),
    "builtins.eval": Call(eval, "open({marker!r}, 'w')"),
    "builtins.exec": Call(exec, "open({marker!r}, 'w')"),
    "builtins.getattr": Call(getattr, "text", "upper"),
    "builtins.open": Call(open, "{marker}", "w"),
    "torch.load": Call(torch.load, "{marker}"),
    "pathlib.Path.write_text": Call(Path.write_text, Path("{marker}"), "x"),
    "collections.defaultdict": collections.defaultdict(list),
    "subprocess.Popen": None,
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_name_is_refused_and_nothing_runs(tmp_path: Path, name: str, protocol: int) -> None:
    marker = tmp_path / "ran"
    payload = HOSTILE[name]
    if name == "subprocess.Popen":
        import subprocess

        payload = Call(subprocess.Popen, ["touch", str(marker)])
    if isinstance(payload, Call):
        filled = [arg.format(marker=str(marker)) if isinstance(arg, str) else arg for arg in payload.args]
        payload = Call(payload.function, *filled)
    try:
        pickled = pickle.dumps({"model": [{"deep": (payload,)}]}, protocol)
    except (pickle.PicklingError, AttributeError):
        pytest.skip("this Python cannot pickle that call in that protocol")
    path = write_archive(tmp_path / "evil.pt", pickled)
    # os.system and the like are pickled under the name of the module that defines them.
    last = name.rsplit(".", 1)[-1]
    with pytest.raises(UnsafeWeightsError, match=rf"evil\.pt.*{last}|evil\.pt.*getattr"):
        read_torch_file(path)
    assert not marker.exists()


def test_fused_pickle_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "fused.pt", pickle.dumps(Call(getattr, "x", "upper"), 2))
    with pytest.raises(UnsafeWeightsError, match="fused"):
        read_torch_file(path)


@pytest.mark.parametrize(
    "reference",
    [
        "models.common\nConv.__init__.__globals__",
        "models.common\nsystem",
        "torch.nn.modules.module\n_global_forward_hooks",
    ],
)
def test_names_below_allowed_modules_are_records_too(tmp_path: Path, reference: str) -> None:
    module, name = reference.split("\n")
    pickled = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93."
    assert issubclass(read_torch_file(write_archive(tmp_path / "x.pt", pickled)), ForeignObject)


@pytest.mark.parametrize(
    "target", ["ctorch._utils\n_rebuild_tensor_v2\n", "c_codecs\nencode\n", "ccollections\nOrderedDict\n"]
)
def test_a_file_cannot_alter_the_reader(tmp_path: Path, target: str) -> None:
    # GLOBAL target, then BUILD with (None, {"__defaults__": None}), which sets attributes on the target.
    pickled = b"\x80\x02" + target.encode() + b"N}X\x0c\x00\x00\x00__defaults__Ns\x86b."
    with pytest.raises(WeightsFileError):
        read_torch_file(write_archive(tmp_path / "alter.pt", pickled))


def test_extension_codes_are_not_followed(tmp_path: Path) -> None:
    with pytest.raises(WeightsFileError):
        read_torch_file(write_archive(tmp_path / "ext.pt", b"\x80\x02\x82\x01."))


def test_tensor_outside_its_storage_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(4)}, buffer)
    source = zipfile.ZipFile(buffer)
    records = {name.split("/", 1)[1]: source.read(name) for name in source.namelist()}
    # The size (4,) is written as BININT1 4, TUPLE1.
    pickled = records.pop("data.pkl").replace(b"K\x04\x85", b"K\x40\x85")
    with pytest.raises(WeightsFileError, match="does not fit"):
        read_torch_file(write_archive(tmp_path / "outside.pt", pickled, records))


def test_ring_of_modules_is_refused(tmp_path: Path) -> None:
    ring = type("Ring", (ForeignObject,), {"__slots__": (), "path": "models.x"})()
    ring.attributes["_modules"] = {"self": ring}
    with pytest.raises(WeightsFileError, match="ring"):
        foreign_state_dict(ring)


FOREIGN_HEADS = {
    b"": "empty",
    b"\n<!DOCTYPE html><html>": "web page",
    b"<html><body>404": "web page",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1": "git lfs pull",
    b"\x08\x07\x12\x07pytorch\x1a": "ONNX",
    b"\x80\x02\x8a\nl\xfc\x9cF": "before 1.6",
    b"\x1f\x8b\x08": "gzip",
    b'\x10\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F32"}}': "safetensors",
    b"\xff\xd8\xff\xe0": "not a weights file",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\x00\x00": "xz-compressed",
    b"7z\xbc\xaf\x27\x1c\x00": "7-Zip",
    b"Rar!\x1a\x07": "RAR",
    b"PK\x05\x06" + bytes(18): "empty zip",
    b"\x89HDF\r\n\x1a\n": "HDF5",
    b"GGUF\x03\x00": "GGUF",
    b"\x14\x00\x00\x00" + b'{"stride": 32}': "TensorRT engine",
    b"README.md".ljust(257, b"\x00") + b"ustar  ": "tar archive",
    b'{"message":"Not Found"}': "not a weights file",
}


@pytest.mark.parametrize(("head", "word"), FOREIGN_HEADS.items())
def test_other_files_are_recognised(tmp_path: Path, head: bytes, word: str) -> None:
    path = tmp_path / "best.pt"
    path.write_bytes(head)
    with pytest.raises(WeightsFileError, match=word) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)


def test_suffix_alone_tells_an_onnx_file() -> None:
    assert "ONNX" in describe_foreign_file(b"\x0a\x01", ".onnx")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.pt"):
        read_torch_file(tmp_path / "nowhere.pt")
    with pytest.raises(WeightsFileError, match="folder"):
        read_torch_file(tmp_path)


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.99])
def test_truncated_file_says_so(tmp_path: Path, kept: float) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(WeightsFileError, match="cut off at"):
        read_torch_file(tmp_path / "cut.pt")


def test_zip_without_weights_and_torchscript(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "photos.pt", "w") as archive:
        archive.writestr("photos/a.jpg", b"x")
    with pytest.raises(WeightsFileError, match="without weights.*photos/a.jpg"):
        read_torch_file(tmp_path / "photos.pt")
    torch.jit.trace(torch.nn.ReLU(), torch.zeros(1)).save(str(tmp_path / "script.pt"))
    with pytest.raises(WeightsFileError, match="TorchScript"):
        read_torch_file(tmp_path / "script.pt")


@pytest.mark.parametrize("pickled", [b"", b"\x80\x02", b"\x80\x02}q\x00(", b"garbage", b"\x80\x02K\x01K\x02b."])
def test_malformed_pickle_is_one_kind_of_error(tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(WeightsFileError, match="bad.pt"):
        read_torch_file(write_archive(tmp_path / "bad.pt", pickled))


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("name", ["data.pkl", "data/0"])
def test_entry_that_stands_twice_is_refused(tmp_path: Path, name: str) -> None:
    """Which of the two is read differs between programs, so a checked file could be another one elsewhere."""
    path = saved(tmp_path / "twice.pt", {"model.0.weight": torch.zeros(3)})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(f"twice/{name}", b"x")
    with pytest.raises(UnsafeWeightsError, match=f"twice/{name}' twice"):
        read_torch_file(path)


def test_two_pickles_and_another_byte_order(tmp_path: Path) -> None:
    path = saved(tmp_path / "two.pt", {"model.0.weight": torch.zeros(3)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"x")
    with pytest.raises(WeightsFileError, match="two.pt: holds 2 files data.pkl, expected one"):
        read_torch_file(path)
    for order in ("big", "", "middle"):
        path = write_archive(tmp_path / "order.pt", pickle.dumps({}, 2), {"byteorder": order.encode()})
        with pytest.raises(WeightsFileError, match=f"the byte order '{order}'; only 'little'"):
            read_torch_file(path)


def test_instructions_without_end_are_not_read(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "long.pt", b"\x80\x02" + b"N0" * 5_000_000 + b"N.")
    with pytest.raises(UnsafeWeightsError, match="bytes of instructions, the most that is read"):
        read_torch_file(path)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "weights.pt")
    with pytest.raises(WeightsFileError, match="weights.pt is a pipe or a device"):
        read_torch_file(tmp_path / "weights.pt")
    with pytest.raises(WeightsFileError, match="/dev/null is a pipe or a device"):
        read_torch_file("/dev/null")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex numbers"),
        (torch.zeros(2, dtype=torch.uint16), "number type"),
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.zeros(2, device="meta"), "without values"),
    ],
)
def test_tensors_of_other_kinds_are_named(tmp_path: Path, tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(WeightsFileError, match=words):
        read_torch_file(saved(tmp_path / "kind.pt", {"model.0.weight": tensor}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_quantized_tensors_are_named(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(WeightsFileError, match="before quantization"):
        read_torch_file(saved(tmp_path / "kind.pt", {"model.0.weight": quantized}))
