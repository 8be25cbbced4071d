"""Reading of ``torch.save`` files as data, without running anything that the file asks for.

A weights file is a zip archive with a pickle inside, and a pickle is a small program. The reader here unpickles with a
table: a handful of names have a harmless substitute written in this module, classes of ``models.*`` and of
``torch.nn.modules.*`` become inert :class:`ForeignObject` records, and every other name ends the reading with an error
that says which name it was. No class or function named by a file is ever looked up, imported or called.
"""

from __future__ import annotations

import io
import lzma
import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from models.file_kinds import HEAD_BYTES, describe_foreign_file
from models.load_claims import UnsafeWeightsError, WeightsFileError, check_claims
from models.load_entries import Entries

FOREIGN_PREFIXES = ("models.", "torch.nn.modules.")
"""Modules whose classes are recorded, never imported: the network definition inside an upstream file."""

FOREIGN_RECORDS = ("argparse.Namespace", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath")
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


class ForeignObject:
    """Inert record of a pickled instance whose class is not ours.

    Attributes:
        path: dotted name of the class in the file, such as ``models.common.Conv``.
        args: positional arguments the pickle would have given to the constructor.
        attributes: the instance attributes stored in the file.
    """

    __slots__ = ("args", "attributes")
    path = ""

    def __new__(cls, *args: object) -> ForeignObject:
        record = object.__new__(cls)
        record.args = args
        record.attributes = {}
        return record

    def __init__(self, *args: object) -> None:
        """Accept what the pickle passes; :meth:`__new__` has stored it."""

    def __setstate__(self, state: object) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.attributes.update(part)

    def __repr__(self) -> str:
        return f"<{self.path} from a file, {len(self.attributes)} attributes>"

    @property
    def class_name(self) -> str:
        """Last part of the class path."""
        return self.path.rsplit(".", 1)[-1]


class _ArrayType:
    """Substitute for ``numpy.dtype``: a checked type code and its byte order."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = str(code)
        self.order = "="
        if self.code[:1] not in "biuf":
            raise WeightsFileError(f"NumPy values of type {self.code!r} are not plain numbers")

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1] if state[1] in ("<", ">") else "="

    def decode(self, raw: bytes) -> np.ndarray:
        """Interpret raw bytes as a flat array."""
        return np.frombuffer(raw, dtype=np.dtype(self.code).newbyteorder(self.order))


class _ArrayRecord:
    """Substitute for ``numpy.ndarray``: filled by the pickle, turned into numbers afterwards."""

    def __init__(self, *_: object) -> None:
        self.shape: tuple[int, ...] = ()
        self.flat = np.zeros(0)

    def __setstate__(self, state: tuple) -> None:
        _, self.shape, array_type, column_major, raw = state
        if column_major and len(self.shape) > 1:
            raise WeightsFileError("column-major NumPy arrays are not expected in a weights file")
        self.flat = array_type.decode(raw.encode("latin1") if isinstance(raw, str) else raw)

    def plain(self) -> float | int | list:
        """One number for an array of one element, else nested lists."""
        return self.flat.item() if self.flat.size == 1 else self.flat.reshape(self.shape).tolist()


class _Storage:
    """Substitute for a storage class: only its number type matters."""

    def __init__(self, name: str) -> None:
        self.dtype = STORAGE_DTYPES[name]


def read_torch_file(path: str | Path) -> Any:
    """Read a ``torch.save`` file and return plain containers, CPU tensors and :class:`ForeignObject` records.

    NumPy scalars and arrays of one element come back as Python numbers, ``torch.Size`` as a tuple.

    Raises:
        FileNotFoundError: no such file.
        UnsafeWeightsError: the file refers to a name outside the table.
        WeightsFileError: the file is something else (web page, Git LFS pointer, ONNX, ...) or damaged.
    """
    path = Path(path)
    check_is_archive(path)
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            _check_entries(archive, path.stat().st_size)
            return _replace_arrays(_TableUnpickler(archive, stream).load(), {})
    except WeightsFileError as error:
        raise type(error)(f"{path}: {error}") from None
    except zipfile.BadZipFile as error:
        raise WeightsFileError(
            f"{path}: damaged or cut off at {path.stat().st_size} bytes ({error}); copy or download it again"
        ) from error
    except (*MALFORMED, zlib.error, lzma.LZMAError) as error:
        raise WeightsFileError(f"{path}: the data inside are damaged ({type(error).__name__}: {error})") from error
    except OSError as error:
        if error.filename is not None:
            raise
        # Reading at a place that does not exist, or a compressed entry that is damaged: neither knows its file.
        raise WeightsFileError(f"{path}: cannot be read ({error}); copy or download it again") from error


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
    """Collect the tensors of a recorded module under the keys and in the order of ``state_dict()``."""
    try:
        return dict(_walk_tensors(module, "", (), iter(range(MAX_MODULES))))
    except RecursionError:
        raise WeightsFileError("the modules in the file are nested too deeply") from None


def _walk_tensors(
    module: ForeignObject, prefix: str, parents: tuple[int, ...], visits: Iterator[int]
) -> Iterator[tuple[str, Tensor]]:
    if id(module) in parents:
        raise WeightsFileError(f"the modules in the file form a ring at {prefix!r}")
    if next(visits, None) is None:  # modules that share their parts can unfold to any number
        raise WeightsFileError(f"the network in the file has more than {MAX_MODULES:,} modules")
    values = module.attributes
    skipped = values.get("_non_persistent_buffers_set") or ()
    for table, hidden in (("_parameters", ()), ("_buffers", skipped)):
        for name, tensor in (values.get(table) or {}).items():
            if isinstance(tensor, Tensor) and name not in hidden:
                yield f"{prefix}{name}", tensor
    for name, child in (values.get("_modules") or {}).items():
        if isinstance(child, ForeignObject):
            yield from _walk_tensors(child, f"{prefix}{name}.", (*parents, id(module)), visits)


class _Substitute:
    """Call of one function of this module; unlike the function itself it cannot be altered by a pickle."""

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
        self.table = _substitutes()
        entry = archive.getinfo(f"{self.folder}data.pkl")
        if entry.file_size > MAX_PICKLE_BYTES:
            raise UnsafeWeightsError(
                f"holds {entry.file_size:,} bytes of instructions, the most that is read is {MAX_PICKLE_BYTES:,}; "
                "save weights only, without data beside them"
            )
        pickled = archive.read(entry)
        check_claims(pickled)
        super().__init__(io.BytesIO(pickled))

    def find_class(self, module: str, name: str) -> Any:
        """Give the substitute for a global name of the file, or refuse it."""
        full = f"{module}.{name}".replace("__builtin__.", "builtins.", 1)
        if full in self.table:
            return self.table[full]
        if module == "torch" and name in STORAGE_DTYPES:
            return _Storage(name)
        if f"{module}.".startswith(FOREIGN_PREFIXES):
            return self.table.setdefault(full, _foreign_class(full))
        hint = next((text for word, text in REFUSAL_HINTS.items() if word in full), "weights do not need it")
        raise UnsafeWeightsError(f"refers to {full!r}, which is not allowed ({hint}); nothing in the file was run")

    def persistent_load(self, identity: tuple) -> Tensor:
        """Return the numbers of one storage as a flat CPU tensor, whatever device it was saved from."""
        _, kind, key, _, count = identity
        if key not in self.storages:
            info = self.archive.getinfo(f"{self.folder}data/{key}")
            expected = count * kind.dtype.itemsize
            if info.file_size != expected:
                raise WeightsFileError(f"storage {key} has {info.file_size} bytes instead of {expected}")
            raw = self.entries.read(info)
            flat = torch.frombuffer(raw, dtype=kind.dtype) if raw else torch.empty(0, dtype=kind.dtype)
            self.storages[key] = flat
        return self.storages[key]


def _foreign_class(path: str) -> type[ForeignObject]:
    return type(path.rsplit(".", 1)[-1], (ForeignObject,), {"__slots__": (), "path": path})


def _substitutes() -> dict[str, Any]:
    """Everything a file may name with what it gets instead, besides storages and network classes."""
    scalar, array = _Substitute(_scalar), _Substitute(_ArrayRecord)
    parameter = _Substitute(_first_argument)
    return {
        "collections.OrderedDict": OrderedDict,
        "builtins.set": set,
        "_codecs.encode": _Substitute(_encode_latin1),
        "torch.Size": tuple,
        "torch.device": _Substitute(_device_name),
        "torch._utils._rebuild_tensor_v2": _Substitute(_rebuild_tensor),
        "torch._utils._rebuild_parameter": parameter,
        "torch._utils._rebuild_parameter_with_state": parameter,
        "numpy.dtype": _Substitute(_ArrayType),
        "numpy.ndarray": None,
        "numpy.core.multiarray.scalar": scalar,
        "numpy._core.multiarray.scalar": scalar,
        "numpy.core.multiarray._reconstruct": array,
        "numpy._core.multiarray._reconstruct": array,
        **{name: _foreign_class(name) for name in FOREIGN_RECORDS},
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
    if math.prod(size) > storage.numel():
        raise WeightsFileError(f"a tensor of shape {tuple(size)} does not fit its storage of {storage.numel()} numbers")
    return torch.as_strided(storage, tuple(size), tuple(stride), offset)


def _first_argument(data: Tensor, *_: object) -> Tensor:
    return data


def _device_name(*parts: object) -> str:
    return ":".join(str(part) for part in parts)


def _encode_latin1(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise WeightsFileError(f"text in encoding {encoding!r} is not expected in a weights file")
    return text.encode("latin1")


def _scalar(array_type: _ArrayType, raw: bytes) -> float | int:
    return array_type.decode(raw).item()


def _replace_arrays(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """Turn array records into numbers throughout; containers are changed in place, tuples rebuilt.

    ``seen`` maps the identity of a container to itself, which keeps the identity taken, and to its replacement.
    """
    if isinstance(value, _ArrayRecord):
        return value.plain()
    if not isinstance(value, (tuple, dict, list, ForeignObject)):
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, tuple):
        seen[id(value)] = value, tuple(_replace_arrays(item, seen) for item in value)
        return seen[id(value)][1]
    seen[id(value)] = value, value
    items: Any = value.attributes if isinstance(value, ForeignObject) else value
    for key in list(items) if isinstance(items, dict) else range(len(items)):
        items[key] = _replace_arrays(items[key], seen)
    return value
