"""Reading of ``torch.save`` files as data, without running anything that the file asks for.

A weights file is a zip archive with a pickle inside, and a pickle is a small program. It is read in three steps:

1. ``load_claims`` follows its instructions without doing them, and refuses what would have no end.
2. The reader here unpickles with a table: a handful of names have a harmless substitute written in this module, classes
   of ``models.*`` and of ``torch.nn.modules.*`` become inert :class:`ForeignObject` records, and every other name ends
   the reading with an error that says which name it was. No class or function named by a file is ever looked up,
   imported or called.
3. ``load_records`` settles what came out: arrays become numbers, and containers that unfold to any size are refused.
"""

from __future__ import annotations

import io
import lzma
import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch import Tensor

from models.file_kinds import HEAD_BYTES, describe_foreign_file
from models.load_claims import UnsafeWeightsError, WeightsFileError, check_claims
from models.load_entries import Entries
from models.load_records import (
    ENTRY_BYTES,
    MAX_DIMENSIONS,
    Allowance,
    ArrayRecord,
    ArrayType,
    ForeignObject,
    is_key,
    is_shape,
    settle,
)

FOREIGN_PREFIXES = ("models.", "torch.nn.modules.")
"""Modules whose classes are recorded, never imported: the network definition inside an upstream file."""

PATH_CLASSES = tuple(
    f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")
)
FOREIGN_RECORDS = ("argparse.Namespace", *PATH_CLASSES)
"""Single classes that older files hold among their options; recorded in the same way."""

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}

MAX_MODULES = 100_000
"""Modules of a network that are visited before a file is given up; the largest published network has 2,000."""

MAX_ENTRIES = 200_000
"""Tensors and modules in the tables of all modules; the largest published network has 10,000."""

MAX_MODULE_LEVELS = 100
"""Modules inside each other; networks have 10 levels."""

MAX_PATH_LETTERS = 1000
"""Letters of the names of a module and of those around it."""

MAX_NAME_LETTERS = 200
"""Letters of the name of a class and its module."""

MAX_CLASSES = 1000
"""Different classes in a file; a training file has 40."""

LONGEST_REASON = 600
"""Letters of an error that are shown; parts of a file may stand in it."""

MAX_PICKLE_BYTES = 8_000_000
"""Instructions that a file may have; a training file of the largest network has 1,500,000 bytes of them."""

REFUSAL_HINTS = {
    "getattr": "a fused model was pickled; save the unfused model instead",
    "ultralytics": "this file belongs to the ultralytics package, whose networks are other ones",
    "torch.nn.parallel": "a wrapped model was pickled; save its attribute 'module' instead",
    "_rebuild_qtensor": "it holds quantized tensors; save the model as it was before quantization",
    "_rebuild_sparse": "it holds sparse tensors; save them with to_dense()",
    "_rebuild_meta": "it holds tensors without values, saved from the meta device",
    "_rebuild_tensor_v3": "it holds tensors of a number type that networks here do not have; save them with float()",
    "Complex": "it holds complex numbers, which networks here do not have",
}
"""Part of a refused name -> why it is there, or what to do; the first that fits is told."""

MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    MemoryError,
)
"""What a damaged pickle makes the unpickler raise; whatever the type, the file is at fault."""


class _Storage:
    """Substitute for a storage class: only its number type matters."""

    def __init__(self, name: str) -> None:
        self.dtype = STORAGE_DTYPES[name]


def read_torch_file(path: str | Path) -> Any:
    """Read a ``torch.save`` file and return plain containers, CPU tensors and :class:`ForeignObject` records.

    NumPy scalars and arrays of one element come back as Python numbers, ``torch.Size`` as a tuple.

    Raises:
        FileNotFoundError: no such file.
        UnsafeWeightsError: the file refers to a name outside the table, or asks for endless work or memory.
        WeightsFileError: the file is something else (web page, Git LFS pointer, ONNX, ...) or damaged.
    """
    path = Path(path)
    check_is_archive(path)
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            _check_entries(archive, path.stat().st_size)
            return settle(_TableUnpickler(archive, stream).load())
    except WeightsFileError as error:
        raise type(error)(f"{path}: {_shown(error)}") from None
    except zipfile.BadZipFile as error:
        raise WeightsFileError(
            f"{path}: damaged or cut off at {path.stat().st_size} bytes ({_shown(error)}); copy or download it again"
        ) from error
    except (*MALFORMED, zlib.error, lzma.LZMAError) as error:
        reason = f"{type(error).__name__}: {_shown(error)}"
        raise WeightsFileError(f"{path}: the data inside are damaged ({reason})") from error
    except OSError as error:
        if error.filename is not None:
            raise
        # Reading at a place that does not exist, or a compressed entry that is damaged: neither knows its file.
        raise WeightsFileError(f"{path}: cannot be read ({error}); copy or download it again") from error


def _shown(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"


def _check_entries(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse an archive whose entries point outside of it, stand twice, or claim more bytes than the file has.

    torch stores entries as they are, so together they are never larger than the archive. Of two entries of one name
    different programs read different ones, so what one of them has looked at says nothing about the other.
    """
    seen: set[str] = set()
    for entry in archive.infolist():
        if entry.filename in seen:
            raise UnsafeWeightsError(f"holds the entry {entry.filename!r} twice; copy or download it again")
        seen.add(entry.filename)
        name = entry.filename.replace("\\", "/")
        if name.startswith("/") or ".." in name.split("/") or ":" in name.split("/")[0]:
            raise UnsafeWeightsError(f"holds the entry {entry.filename!r}, which points outside of the archive")
    _pickle_folder(archive.namelist())  # says what other kind of archive it is
    claimed = sum(entry.file_size for entry in archive.infolist())
    if claimed > size:
        raise UnsafeWeightsError(
            f"claims to hold {claimed:,} bytes, but the file has {size:,}; torch writes no compressed "
            "entries, so somebody packed it anew: give the file as torch.save wrote it"
        )


def check_is_archive(path: Path) -> None:
    """Make sure that a file is a torch zip archive, or say what it is instead."""
    if not path.exists():
        raise FileNotFoundError(f"weights file {path} does not exist; check --weights")
    if path.is_dir():
        raise WeightsFileError(f"{path} is a folder; give the weights file inside it")
    if not path.is_file():  # reading would wait for ever for whoever writes into it
        raise WeightsFileError(f"{path} is a pipe or a device, not a file; write what it gives to a .pt file first")
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if head[:4] != b"PK\x03\x04":
        raise WeightsFileError(f"{path} {describe_foreign_file(head, path.suffix)}")


def foreign_state_dict(module: ForeignObject) -> dict[str, Tensor]:
    """Collect the tensors of a recorded module under the keys and in the order of ``state_dict()``.

    Raises:
        WeightsFileError: the modules form a ring, are nested too deeply or unfold to too many.
    """
    collector = _TensorCollector()
    collector.visit(module, "")
    return collector.tensors


class _TensorCollector:
    """Walk over recorded modules; those that share their parts are met again and again."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parents: list[int] = []
        self.modules = self.entries = 0

    def visit(self, module: ForeignObject, prefix: str) -> None:
        if id(module) in self.parents:
            raise WeightsFileError(f"the modules in the file form a ring at {prefix[-80:]!r}")
        self.modules += 1
        if self.modules > MAX_MODULES:
            raise WeightsFileError(f"the network in the file has more than {MAX_MODULES:,} modules")
        if len(self.parents) >= MAX_MODULE_LEVELS or len(prefix) > MAX_PATH_LETTERS:
            raise WeightsFileError(f"the modules in the file are nested too deeply, at {prefix[-80:]!r}")
        skipped = module.attributes.get("_non_persistent_buffers_set") or ()
        if not isinstance(skipped, (set, frozenset, tuple, list)):
            raise WeightsFileError(f"the module {prefix[-80:]!r} has no set of names of buffers")
        hidden = {name for name in skipped if isinstance(name, str)}
        for table, left_out in (("_parameters", ()), ("_buffers", hidden)):
            for name, tensor in self.table(module, table, prefix).items():
                if isinstance(tensor, Tensor) and name not in left_out:
                    self.tensors[f"{prefix}{name}"] = tensor
        self.parents.append(id(module))
        for name, child in self.table(module, "_modules", prefix).items():
            if isinstance(child, ForeignObject):
                self.visit(child, f"{prefix}{name}.")
        self.parents.pop()

    def table(self, module: ForeignObject, name: str, prefix: str) -> dict[Any, Any]:
        """Return one of the tables of a module, and count its entries."""
        table = module.attributes.get(name)
        if table is None:
            return {}
        if not isinstance(table, dict):
            raise WeightsFileError(f"entry {name} of the module {prefix[-80:]!r} is of type {type(table).__name__}")
        self.entries += len(table)
        if self.entries > MAX_ENTRIES:
            raise WeightsFileError(f"the modules in the file list more than {MAX_ENTRIES:,} tensors and modules")
        return table


class _Substitute:
    """Call of one function of this module; unlike the function itself it cannot be altered by a pickle.

    ``check_claims`` refuses such a pickle before; this holds even if the unpickler should see it differently.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: object) -> None:
        raise WeightsFileError("tries to alter a function of the reader")


class _TableUnpickler(pickle.Unpickler):
    """One reading of one archive; record classes are created per reading, so that no file can alter the next one."""

    def __init__(self, archive: zipfile.ZipFile, stream: BinaryIO) -> None:
        self.archive, self.entries = archive, Entries(archive, stream)
        names = archive.namelist()
        self.folder = _pickle_folder(names)
        order = f"{self.folder}byteorder"
        if order in names and (found := archive.read(order)) != b"little":
            raise WeightsFileError(
                f"says that its numbers have the byte order {found[:20].decode('latin1')!r}; only 'little' is read"
            )
        self.storages: dict[str, Tensor] = {}
        entry = archive.getinfo(f"{self.folder}data.pkl")
        if entry.file_size > MAX_PICKLE_BYTES:
            raise UnsafeWeightsError(
                f"holds {entry.file_size:,} bytes of instructions, the most that is read is {MAX_PICKLE_BYTES:,}; "
                "save weights only, without data beside them"
            )
        pickled = archive.read(entry)
        self.allowance = Allowance(len(pickled))
        self.table = _substitutes(self.allowance)
        self.most_classes = len(self.table) + MAX_CLASSES
        check_claims(pickled, self.find_class)
        super().__init__(io.BufferedReader(io.BytesIO(pickled)))  # allows it to look ahead, which is quicker

    def find_class(self, module: str, name: str) -> Any:
        """Give the substitute for a global name of the file, or refuse it."""
        if len(module) + len(name) > MAX_NAME_LETTERS:
            raise UnsafeWeightsError(f"refers to something with a name of {len(module) + len(name):,} letters")
        full = f"{module}.{name}".replace("__builtin__.", "builtins.", 1)
        if full in self.table:
            return self.table[full]
        if module == "torch" and name in STORAGE_DTYPES:
            return _Storage(name)
        if f"{module}.".startswith(FOREIGN_PREFIXES):
            if len(self.table) >= self.most_classes:
                raise UnsafeWeightsError(f"refers to more than {MAX_CLASSES:,} classes")
            return self.table.setdefault(full, _foreign_class(full, self.allowance))
        hint = next((text for word, text in REFUSAL_HINTS.items() if word in full), "weights do not need it")
        raise UnsafeWeightsError(f"refers to {full!r}, which is not allowed ({hint}); nothing in the file was run")

    def persistent_load(self, identity: tuple) -> Tensor:
        """Return the numbers of one storage as a flat CPU tensor, whatever device it was saved from."""
        _, kind, key, _, count = identity
        if not isinstance(kind, _Storage) or type(key) is not str or type(count) is not int:
            raise WeightsFileError("refers to the numbers of a tensor by something else than type, name and count")
        if key not in self.storages:
            info = self.archive.getinfo(f"{self.folder}data/{key}")
            expected = count * kind.dtype.itemsize
            if info.file_size != expected:
                raise WeightsFileError(f"storage {key} has {info.file_size} bytes instead of {expected}")
            raw = self.entries.read(info)
            self.storages[key] = torch.frombuffer(raw, dtype=kind.dtype) if raw else torch.empty(0, dtype=kind.dtype)
        return self.storages[key]


def _foreign_class(path: str, allowance: Allowance) -> type[ForeignObject]:
    content = {"__slots__": (), "path": path, "allowance": allowance}
    return type(path.rsplit(".", 1)[-1], (ForeignObject,), content)


def _substitutes(allowance: Allowance) -> dict[str, Any]:
    """Everything a file may name with what it gets instead, besides storages and network classes."""
    scalar, array = _Substitute(_scalar), _Substitute(lambda *_: ArrayRecord(allowance))
    parameter = _Substitute(_first_argument)
    return {
        "collections.OrderedDict": OrderedDict,  # only called without arguments and never altered: check_claims
        "builtins.set": _Substitute(partial(_set, allowance)),
        "_codecs.encode": _Substitute(partial(_encode_latin1, allowance)),
        "torch.Size": _Substitute(_size),
        "torch.device": _Substitute(_device_name),
        "torch._utils._rebuild_tensor_v2": _Substitute(_rebuild_tensor),
        "torch._utils._rebuild_parameter": parameter,
        "torch._utils._rebuild_parameter_with_state": parameter,
        "numpy.dtype": _Substitute(ArrayType),
        "numpy.ndarray": None,
        "numpy.core.multiarray.scalar": scalar,
        "numpy._core.multiarray.scalar": scalar,
        "numpy.core.multiarray._reconstruct": array,
        "numpy._core.multiarray._reconstruct": array,
        **{name: _foreign_class(name, allowance) for name in FOREIGN_RECORDS},
    }


def _pickle_folder(names: list[str]) -> str:
    """Find the folder of ``data.pkl`` inside the archive, with a trailing slash."""
    pickles = [PurePosixPath(name).parts for name in names if ".pkl" in name]  # a path takes long to make
    found = [parts for parts in pickles if parts[-1] == "data.pkl"]
    if any(parts[-1] == "constants.pkl" for parts in pickles):
        raise WeightsFileError(
            "is a TorchScript program; run it with detect_dual.py or val_dual.py under a name with .torchscript"
        )
    if len(found) > 1:
        raise WeightsFileError(f"holds {len(found)} files data.pkl, expected one; copy or download it again")
    if not found or len(found[0]) != 2:
        raise WeightsFileError(
            f"is a zip archive without weights (it holds {', '.join(names[:3]) or 'nothing'}); unpack it first"
        )
    return f"{found[0][0]}/"


def _rebuild_tensor(storage: Tensor, offset: int, size: tuple, stride: tuple, *_: object) -> Tensor:
    """Place a tensor on its storage; torch itself refuses a view that leaves the storage."""
    if not (type(storage) is Tensor and is_shape(size) and is_shape(stride)):
        raise WeightsFileError("a tensor has no storage, shape and strides")
    if math.prod(size) > storage.numel():
        raise WeightsFileError(f"a tensor of shape {size} does not fit its storage of {storage.numel()} numbers")
    return torch.as_strided(storage, size, stride, offset)


def _first_argument(data: Tensor, *_: object) -> Tensor:
    return data


def _size(*sizes: object) -> tuple:
    if len(sizes) > 1 or not all(is_shape(size) for size in sizes):
        raise WeightsFileError(f"a size of a tensor is not made of up to {MAX_DIMENSIONS} numbers")
    return sizes[0] if sizes else ()


def _set(allowance: Allowance, members: Any = ()) -> set:
    """Return a set of numbers and short text; nobody knows how long hashing and comparing anything else takes."""
    if not isinstance(members, (list, tuple)):
        raise WeightsFileError(f"a set is made of a {type(members).__name__}, expected a list")
    allowance.spend(ENTRY_BYTES * len(members))
    for member in members:
        if not is_key(member):
            raise UnsafeWeightsError(f"has a {type(member).__name__} in a set; expected numbers or short text")
    return set(members)


def _device_name(*parts: object) -> str:
    if len(parts) > 2 or not all(is_key(part) for part in parts):
        raise WeightsFileError("a device is named by something else than text and number")
    return ":".join(str(part) for part in parts)


def _encode_latin1(allowance: Allowance, text: str, encoding: str = "latin1") -> bytes:
    if not isinstance(text, str) or not isinstance(encoding, str) or encoding not in ("latin1", "latin-1"):
        shown = repr(encoding[:20]) if isinstance(encoding, str) else f"a {type(encoding).__name__}"
        raise WeightsFileError(f"text in encoding {shown} is not expected in a weights file")
    allowance.spend(len(text))
    return text.encode("latin1")


def _scalar(array_type: ArrayType, raw: bytes) -> float | int:
    if not isinstance(array_type, ArrayType):  # of bytes, decode would look for a codec of any name
        raise WeightsFileError(f"a NumPy number is of type {type(array_type).__name__}")
    return array_type.decode(raw).item()
