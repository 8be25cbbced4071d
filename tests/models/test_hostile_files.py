"""Files made to do harm: each is refused with a sentence that names what was found, and nothing of it runs.

Proof that nothing ran: the interpreter's own audit events are recorded during the reading. Whatever a file could do
(start a process, import, evaluate, open another file, connect) raises one of them.
"""

from __future__ import annotations

import collections
import importlib
import io
import os
import pickle
import resource
import runpy
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from models.checkpoint import build_model, load_checkpoint
from models.safe_reader import UnsafeWeightsError, WeightsFileError, read_torch_file
from tests.models.archives import write_archive
from tests.reference.tiny import TINY_DUAL, save_tiny_dual, tiny_dual

REPO_ROOT = Path(__file__).resolve().parents[2]
HARMFUL = ("exec", "import", "socket.", "ctypes.", "pickle.find_class", "shutil.", "os.", "subprocess.", "urllib.")
MEMORY_LIMIT_BYTES = 300_000_000

events: list[str] | None = None


def _record(event: str, arguments: tuple) -> None:
    if events is not None and (event.startswith(HARMFUL) or event == "open"):
        events.append(f"{event} {arguments[:1]}")


sys.addaudithook(_record)


@contextmanager
def nothing_may_run(file: Path) -> Iterator[None]:
    """Fail if anything but opening ``file`` and looking at it happens inside the block."""
    global events
    events = []
    try:
        yield
    finally:
        seen, events = events, None
    # The unpickler announces every name it meets; the table answers, so meeting one is harmless.
    harmful = [text for text in seen if not text.startswith("pickle.find_class") and str(file) not in text]
    assert not harmful, harmful


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable, *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple:
        return self.function, self.args


def upstream_with(path: Path, **attributes: object) -> Path:
    """Write a small upstream-like file whose network object carries further attributes."""
    sound = {"training": False, "_parameters": {}, "_buffers": {}, "_modules": {}, "yaml": TINY_DUAL}
    network = b"\x80\x02cmodels.yolo\nDetectionModel\n)\x81" + pickle.dumps(sound | attributes, 2)[2:-1] + b"b"
    head = b"\x80\x02}X\x05\x00\x00\x00model"
    return write_archive(path, head + network[2:] + b"s.")


@pytest.fixture(scope="module", autouse=True)
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Read one sound file, so that what Python imports lazily is not taken for the work of a hostile one."""
    path = tmp_path_factory.mktemp("sound") / "sound.pt"
    torch.save({"model.0.weight": torch.zeros(3)}, path)
    with zipfile.ZipFile(path, "a") as target:
        target.writestr("archive/note", b"")  # Python reads names of its own entries with another codec
    load_checkpoint(path)
    subprocess.run([sys.executable, "-c", ""], check=True)


CALLS: dict[str, Call] = {
    "system": Call(os.system, "touch ran"),
    "Popen": Call(subprocess.Popen, ["touch", "ran"]),
    "eval": Call(eval, "open('ran', 'w')"),
    "exec": Call(exec, "open('ran', 'w')"),
    "__import__": Call(__import__, "this"),
    "import_module": Call(importlib.import_module, "antigravity"),
    "run_path": Call(runpy.run_path, "ran.py"),
    "getattr": Call(getattr, "text", "upper"),
    "open": Call(open, "ran", "w"),
    "load": Call(torch.load, "ran"),
    "loads": Call(pickle.loads, b"."),
    "partial": Call(importlib.import_module("functools").partial, print, "ran"),
    "defaultdict": Call(collections.defaultdict, list),
    "_rebuild_from_type_v2": Call(torch._tensor._rebuild_from_type_v2, print, int, (), None),
    "_load_from_bytes": Call(torch.storage._load_from_bytes, b"ran"),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, protocol: int) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_archive(tmp_path / "evil.pt", pickle.dumps({"model": [{"deep": (CALLS[name],)}]}, protocol))
    with nothing_may_run(path), pytest.raises(UnsafeWeightsError, match=rf"evil\.pt.*{name}.*nothing in the file"):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("reference", ["os\nsystem", "builtins\neval", "importlib\nimport_module"])
@pytest.mark.parametrize("table", ["_state_dict_hooks", "_load_state_dict_post_hooks", "_forward_pre_hooks", "forward"])
def test_hooks_of_a_network_are_refused(tmp_path: Path, table: str, reference: str) -> None:
    """A module restored as an object would call these later; here even the reference to the function is refused."""
    marked = upstream_with(tmp_path / "evil.pt", **{table: "@@HOOK@@"})
    content = zipfile.ZipFile(marked).read("archive/data.pkl")
    text = b"X\x08\x00\x00\x00@@HOOK@@"
    assert text in content
    path = write_archive(marked, content.replace(text, b"c" + reference.encode() + b"\n"))
    with nothing_may_run(path), pytest.raises(UnsafeWeightsError, match=reference.split("\n")[1]):
        load_checkpoint(path)


def test_functions_of_network_modules_are_inert(tmp_path: Path) -> None:
    """What stands under an allowed module is a record: calling it stores the arguments and does nothing."""
    pickled = b"\x80\x02cmodels.common\nos.system\n(X\x09\x00\x00\x00touch rantR."
    path = write_archive(tmp_path / "evil.pt", pickled)
    with nothing_may_run(path):
        record = read_torch_file(path)
    assert record.args == ("touch ran",) and not callable(record)


@pytest.mark.parametrize(
    "name", ["../../etc/cron.d/x", "/etc/passwd", "archive/../../x", "C:\\x", "archive\\..\\..\\x"]
)
def test_paths_out_of_the_archive(tmp_path: Path, name: str) -> None:
    torch.save({"model.0.weight": torch.zeros(3)}, tmp_path / "evil.pt")
    with zipfile.ZipFile(tmp_path / "evil.pt", "a") as target:
        target.writestr(name, b"x")
    with (
        nothing_may_run(tmp_path / "evil.pt"),
        pytest.raises(UnsafeWeightsError, match="points outside of the archive"),
    ):
        load_checkpoint(tmp_path / "evil.pt")


def test_folder_of_the_data_may_not_be_a_path(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as target:
        target.writestr("../data.pkl", pickle.dumps({}))
    with pytest.raises(UnsafeWeightsError, match="points outside"):
        load_checkpoint(tmp_path / "evil.pt")


# --- claims of sizes that are not there ---


@contextmanager
def little_memory() -> Iterator[None]:
    """Fail if the block makes the process grow by more than MEMORY_LIMIT_BYTES."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY_LIMIT_BYTES, f"{grown:,} bytes"


CLAIMS = {
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**32) + b"x.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 2**32) + b"x.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**32) + b"x.",
    "integer": b"\x80\x02\x8b" + struct.pack("<I", 2**31 - 1) + b"x.",
    "stored object": b"\x80\x02]r" + struct.pack("<I", 2**27) + b".",
    "buffer": b"\x80\x05\x96" + struct.pack("<Q", 2**32) + b"x.",
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_pickles_that_claim_gigabytes(tmp_path: Path, claim: str) -> None:
    path = write_archive(tmp_path / "bomb.pt", CLAIMS[claim])
    with little_memory(), nothing_may_run(path), pytest.raises(WeightsFileError, match="damaged|claims"):
        load_checkpoint(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("position", [0.2, 0.5, 0.8])
def test_repacked_file_whose_data_are_damaged(tmp_path: Path, method: int, position: float) -> None:
    """Each kind of compression fails in a way of its own; all are told with the name of the file."""
    save_tiny_dual(tmp_path / "sound.pt")
    with (
        zipfile.ZipFile(tmp_path / "sound.pt") as source,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", method) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    content = bytearray((tmp_path / "packed.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "packed.pt") as packed:
        entry = next(entry for entry in packed.infolist() if entry.filename.endswith("data.pkl"))
    start = entry.header_offset + 30 + len(entry.filename) + int(position * entry.compress_size)
    for place in range(start, start + 40):
        content[place] ^= 0xFF
    (tmp_path / "packed.pt").write_bytes(content)
    with pytest.raises(WeightsFileError, match="packed.pt"):
        load_checkpoint(tmp_path / "packed.pt")


def test_entry_at_a_place_that_does_not_exist(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "odd.pt", pickle.dumps({}, 2))
    content = bytearray(path.read_bytes())
    end = content.rindex(b"PK\x05\x06")  # of the directory, which says where that begins
    (start,) = struct.unpack_from("<I", content, end + 16)
    struct.pack_into("<I", content, end + 16, start + 60)
    path.write_bytes(content)
    with pytest.raises(WeightsFileError, match="odd.pt"):
        load_checkpoint(path)


def test_zip_that_unpacks_to_far_more_than_it_is(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("archive/data.pkl", pickle.dumps({}, 2) + bytes(400_000_000))
    assert (tmp_path / "bomb.pt").stat().st_size < 1_000_000
    with little_memory(), pytest.raises(UnsafeWeightsError, match="claims to hold 400,000.* but the file has"):
        load_checkpoint(tmp_path / "bomb.pt")


def test_entry_whose_header_claims_4_gb(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "bomb.pt", pickle.dumps({}, 2))
    content = path.read_bytes()
    size = struct.pack("<I", len(pickle.dumps({}, 2)))
    path.write_bytes(content.replace(size + size, struct.pack("<II", 2**32 - 2, 2**32 - 2)))
    with little_memory(), pytest.raises(UnsafeWeightsError, match="claims to hold 4,294,967,294 bytes"):
        load_checkpoint(path)


def test_tensor_that_claims_4_gb(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"model.0.weight": torch.zeros(7)}, buffer)
    source = zipfile.ZipFile(buffer)
    records = {name.split("/", 1)[1]: source.read(name) for name in source.namelist()}
    pickled = records.pop("data.pkl")
    shape = pickled.replace(b"K\x07\x85", b"J" + struct.pack("<i", 2**30) + b"\x85")
    storage = pickled.replace(b"K\x07tq", b"J" + struct.pack("<i", 2**30) + b"tq")
    assert shape != pickled and storage != pickled
    for changed, words in ((shape, "does not fit its storage of 7 numbers"), (storage, "has 28 bytes instead of")):
        path = write_archive(tmp_path / "bomb.pt", changed, records)
        with little_memory(), pytest.raises(WeightsFileError, match=words):
            load_checkpoint(path)


def test_network_that_claims_billions_of_weights(tmp_path: Path) -> None:
    """The definition inside a file is not believed: what it describes is compared before any of it is made."""
    model = tiny_dual()
    for row in (
        [-1, 1, "Conv", [2**20, 3, 2]],
        [-1, 2**30, "Conv", [8, 3, 2]],
        [-1, 1, "RepNCSPELAN4", [16, 16, 8, 2**30]],
    ):
        definition = {**TINY_DUAL, "backbone": [*TINY_DUAL["backbone"][:1], row, *TINY_DUAL["backbone"][2:]]}
        content = {"format": "yolov9-checkpoint", "version": 1, "model": model.state_dict(), "yaml": definition}
        torch.save(content, tmp_path / "bomb.pt")
        with little_memory(), pytest.raises(ValueError, match="do not fit|the definition in the file"):
            build_model(load_checkpoint(tmp_path / "bomb.pt"))


def shared_twice(depth: int, empty: bytes, pair: bytes) -> bytes:
    """A pickle of ``depth`` containers, each of which holds the one below it twice."""
    program = b"\x80\x02" + empty + b"q\x00"
    for level in range(depth):
        program += b"0" + pair.replace(b"@", bytes([level])) + b"q" + bytes([level + 1])
    return program + b"."


@pytest.mark.parametrize("pair", [b"h@h@\x86", b"](h@h@e"])
def test_containers_that_double_at_every_level(tmp_path: Path, pair: bytes) -> None:
    path = write_archive(tmp_path / "bomb.pt", shared_twice(80, b"K\x01", pair))
    with pytest.raises(WeightsFileError, match="share their parts and unfold"):
        load_checkpoint(path)


def test_modules_that_double_at_every_level(tmp_path: Path) -> None:
    module = b"cmodels.common\nConv\n)\x81}X\x08\x00\x00\x00_modules}(X\x01\x00\x00\x00ah@X\x01\x00\x00\x00bh@usb"
    program = shared_twice(80, b"cmodels.common\nConv\n)\x81", module)
    network = b"0cmodels.yolo\nDetectionModel\n)\x81}(X\x08\x00\x00\x00_modules}X\x01\x00\x00\x00mh\x50s"
    network += b"X\x04\x00\x00\x00yaml}ub."
    path = write_archive(tmp_path / "bomb.pt", program[:-1] + network)
    with pytest.raises(WeightsFileError, match="more than 100,000 modules"):
        load_checkpoint(path)


@pytest.mark.parametrize("level", [b"\x85", b"]\x86"])
def test_deep_nesting(tmp_path: Path, level: bytes) -> None:
    path = write_archive(tmp_path / "deep.pt", b"\x80\x02K\x01" + level * 100_000 + b".")
    with pytest.raises(WeightsFileError, match="deep.pt"):
        load_checkpoint(path)


# --- where the program stands ---


@pytest.mark.slow
def test_foreign_package_of_the_same_name(golden: Callable[[str], Path], tmp_path: Path) -> None:
    """Scripts and reader use this repository's modules whatever lies in the working directory or on PYTHONPATH."""
    for folder in ("models", "utils"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        (tmp_path / folder / "yolo.py").write_text("raise SystemExit('foreign module imported')\n")
    weights = golden("models/upstream_gelan-t_stripped.pt")
    line = [sys.executable, str(REPO_ROOT / "export.py"), "--weights", str(weights), "--include", "nothing"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "YOLO_DEBUG": ""}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "unknown format" in done.stdout + done.stderr
    code = (
        f"import sys; sys.path.append({str(REPO_ROOT)!r}); sys.path.remove({str(tmp_path)!r})\n"
        "sys.path = [folder for folder in sys.path if folder]\n"
        "from models.checkpoint import attempt_load\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"print(attempt_load({str(weights)!r}).name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
