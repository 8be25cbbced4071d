"""Small files whose reading would have no end in time or memory: each is refused by name, in seconds.

Every one is read in a process of its own, forked so that nothing is loaded anew, and ended when its time is up: what
C code does cannot be interrupted otherwise. Memory is bounded there too, and a crash of the process is seen.
"""

from __future__ import annotations

import collections
import os
import pickle
import resource
import select
import signal
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.safe_reader import WeightsFileError, foreign_state_dict, read_torch_file
from tests.models.archives import write_archive

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

DEADLINE_S = 20.0
"""Far more than any reading takes on a busy machine, and far less than one that has no end."""
MAX_GROWTH_BYTES = 900_000_000
"""Memory of one reading; what the reader allows for objects and for copies is inside."""
MAX_SPACE_BYTES = 3_000_000_000
"""Addresses that the process may take, so that a fault here does not fill the machine."""
LONGEST_MESSAGE = 1500
"""Letters of a message: parts of the file are shortened in it, the path is not."""


def apart(work: Callable[[], object]) -> str:
    """Do ``work`` in another process; return the error it ends with, or ``done``."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        _do(work, sender)
    os.close(sender)
    try:
        if not select.select([receiver], [], [], DEADLINE_S)[0]:
            pytest.fail(f"not done after {DEADLINE_S} s")
        with os.fdopen(receiver, "rb", closefd=False) as stream:
            told = stream.read().decode()
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(receiver)
    assert told, f"the process crashed (status {status})"
    growth, message = told.split(" ", 1)
    assert int(growth) < MAX_GROWTH_BYTES, f"{int(growth):,} bytes"
    return message


def _do(work: Callable[[], object], sender: int) -> None:
    """Work with bounded memory, tell how much it grew and how it ended, and end the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc/self/statm") else 0
    limit = pages * resource.getpagesize() + MAX_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        work()
        message = "done"
    except WeightsFileError as error:
        message = str(error)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE]
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    os.write(sender, f"{growth} {message}"[:60_000].encode())
    os._exit(0)


PROTOCOL_4 = b"\x80\x04"

# Instructions of pickles that are written as letters below; pickletools lists them all.
#   push: N None, K M J integer of 1, 2, 4 bytes, X text, B bytes, ) ] } \x8f empty tuple, list, dict, set
#   make: ( mark, t l d \x91 tuple, list, dict, frozenset of all above it, \x85 \x86 \x87 tuple of 1, 2, 3 values
#   fill: a list by one, e by all above the mark, s u dict likewise, \x90 set by all
#   again: 0 drop, 2 push once more, p q r store under a number, g h j push by number
#   call: c class by name, \x93 class by two texts, R call, \x81 new object, b give it a state, Q storage
#   \x95 frame, . end


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(raw)) + raw


def put(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def integer(value: int, size: int) -> bytes:
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def raw(content: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(content)) + content


def doubled(start: bytes, pair: bytes, depth: int = 60) -> bytes:
    """``depth`` containers, each of which holds the one below twice; the outermost is on the stack and number 0."""
    return start + put(0) + (b"0" + pair.replace(b"@", get(0)) + put(0)) * depth


def often(what: bytes, count: int) -> bytes:
    """A list of ``count`` times the same instructions."""
    return b"](" + what * count + b"e"


PAIRS = doubled(b"K\x01", b"@@\x86")
ORDERED = name("collections", "OrderedDict")
CONV = name("models.common", "Conv")
STORAGE = b"(" + text("storage") + name("torch", "FloatStorage")
REBUILD = name("torch._utils", "_rebuild_tensor_v2")
LONG_LIST = b"](" + b"N" * 1_000_000 + b"e" + put(1) + b"0"
LONG_DICT = b"}(" + b"".join(integer(number, 4) + b"N" for number in range(300_000)) + b"u" + put(1)
FLAT = STORAGE + text("0") + text("cpu") + b"K\x04tQ"
TENSOR = REBUILD + b"(" + FLAT + b"K\x00K\x04\x85K\x01\x85\x89" + ORDERED + b")RtR"
CODE = name("numpy", "dtype") + text("u1") + b"\x89\x88\x87R"
SCALAR = name("numpy.core.multiarray", "scalar")

KEYS: dict[str, bytes] = {
    "key of a dictionary": PAIRS + b"0}" + get(0) + b"Ns",
    "keys of a dictionary": PAIRS + b"0}(" + text("a") + b"N" + get(0) + b"Nu",
    "dictionary from a mark": PAIRS + b"0(" + get(0) + b"Nd",
    "key of an ordered dictionary": PAIRS + b"0" + ORDERED + b")R" + get(0) + b"Ns",
    "pairs of an ordered dictionary": PAIRS + b"0" + ORDERED + b"](" + get(0) + b"N\x86e\x85R",
    "member of a set": PAIRS + b"0\x8f(" + get(0) + b"\x90",
    "member of a frozen set": PAIRS + b"0(" + get(0) + b"\x91",
    "member of a set from a list": PAIRS + b"0" + name("builtins", "set") + b"](" + get(0) + b"e\x85R",
    "frozen sets": doubled(b"(\x91", b"(K\x01@\x91") + b"0}" + get(0) + b"Ns",
    "state of a dictionary": PAIRS + b"0" + ORDERED + b")R}" + get(0) + b"Nsb",
    "key of a storage": PAIRS + b"0" + STORAGE + get(0) + text("cpu") + b"K\x01tQ",
    "key of a tensor": PAIRS + b"0" + TENSOR + get(0) + b"Ns",
    "deep tuple": b"}" + b"K\x01" + b"\x85" * 1_000_000 + b"Ns",
    "deep tuple in a set": name("builtins", "set") + b"](" + b"K\x01" + b"\x85" * 1_000_000 + b"e\x85R",
    "long integers": b"\x8b" + struct.pack("<I", 3_000_000) + b"\x7f" * 3_000_000 + put(0) + b"0}("
    + (get(0) + b"N") * 300_000 + b"u",
    "integers of one hash": b"}("
    + b"".join(integer((2**61 - 1) * number, 11) + b"N" for number in range(200_000)) + b"u",
    "long equal texts": text("a" * 2_000_000) + put(0) + b"0" + text("a" * 2_000_000) + put(1) + b"0}" + get(0) + b"Ns("
    + (get(1) + b"N") * 300_000 + b"u",
    "long tuples": b"(" + b"N" * 1_000_000 + b"t" + put(0) + b"0}(" + (get(0) + b"N") * 300_000 + b"u",
}  # fmt: skip

COPIES: dict[str, bytes] = {
    "sizes": LONG_LIST + often(name("torch", "Size") + get(1) + b"\x85R", 100_000),
    "sets": LONG_LIST + often(name("builtins", "set") + get(1) + b"\x85R", 100_000),
    "encoded texts": text("a" * 3_000_000)
    + put(1)
    + b"0"
    + often(name("_codecs", "encode") + get(1) + b"\x85R", 99_999),
    "states of objects": LONG_DICT + b"0" + often(CONV + b")\x81" + get(1) + b"b", 100_000),
    "states in parts": LONG_DICT + b"0" + often(CONV + b")\x81" + get(1) * 2 + b"\x86b", 100_000),
    "states of dictionaries": LONG_DICT + b"0" + often(ORDERED + b")R" + get(1) + b"b", 100_000),
    "doubled states": LONG_DICT + b"0" + often(CONV + b")\x81" + get(1) + b"2\x86b", 100_000),
    "arguments": b"(" + b"N" * 1_000_000 + b"t" + put(1) + b"0" + often(CONV + get(1) + b"R", 100_000),
    "arguments of new objects": b"(" + b"N" * 1_000_000 + b"t" + put(1) + b"0" + often(CONV + get(1) + b"\x81", 99_999),
    "ordered dictionaries": LONG_DICT + b"0" + often(ORDERED + get(1) + b"\x85R", 100_000),
    "names": text("a" * 3_000_000) + put(1) + b"0" + often(text("models.x") + get(1) + b"\x93", 100_000),
    "classes": b"(" + b"".join(name("models.x", f"A{number}") for number in range(300_000)) + b"l",
    "sets without members": b"](" + b"\x8f" * 7_000_000 + b"e",
    "dictionaries": ORDERED + b"q\x010](" + b"h\x01)R" * 1_900_000 + b"e",
    "texts": text("a" * 1_000_000) + put(1) + b"0" + often(get(1), 200_000),
    "keys": text("a" * 4000) + put(1) + b"0" + often(b"}" + get(1) + b"Ns", 200_000),
}


MANY = b"J" + struct.pack("<i", 3_000_000)  # an integer


def array(shape: bytes, content: bytes) -> bytes:
    return name("numpy.core.multiarray", "_reconstruct") + b"N\x85R(K\x01" + shape + CODE + b"\x89" + content + b"tb"


VALUES: dict[str, bytes] = {
    "tuples": PAIRS,
    "lists": doubled(b"]", b"](@@e"),
    "dictionaries": doubled(b"}", b"}(K\x01@K\x02@u"),
    "copied tops": b"K\x01" + b"2\x86" * 60,
    "attributes of an object": PAIRS + b"0" + CONV + b")\x81}" + text("names") + get(0) + b"sb",
    "arguments of an object": PAIRS + b"0" + CONV + get(0) + b"\x85R",
    "deep lists": b"]" * 500_000 + b"a" * 499_999,
    "deep tuples": b"K\x01" + b"\x85" * 500_000,
    "a ring": b"]" + put(0) + get(0) + b"a",
    "deep under shared": doubled(b"K\x01", b"@\x85", 90) + put(5) + b"0](" + get(5) + get(5) + b"\x85" * 90 + b"e",
    "number type": PAIRS + b"0" + name("numpy", "dtype") + get(0) + b"\x85R",
    "fields of a number type": name("numpy", "dtype") + text("f8,(99999,99999)f8") + b"\x85R",
    "device": PAIRS + b"0" + name("torch", "device") + get(0) + b"\x85R",
    "encoding": PAIRS + b"0" + name("_codecs", "encode") + text("a") + get(0) + b"\x86R",
    "codec": SCALAR + raw(b"a") + raw(b"idna") + b"\x86R",
    "shape of a tensor": REBUILD + b"(" + FLAT + b"K\x00J\xff\xff\xff\x7fK\x01\x85\x86K\x01\x85\x89NtR",
    "many dimensions": REBUILD + b"(" + FLAT + b"K\x00(" + b"K\x01" * 1_000_000 + b"tK\x01\x85\x89NtR",
    "items of a tensor": TENSOR + b"(K\x00K\x01u",
    "state of a tensor": TENSOR + b"(" + FLAT + b"K\x00J\xff\xff\xff\x7f\x85K\x01\x85tb",
    "tensor under an escaped name": b"V\\u0074orch._utils\n" + text("_rebuild_tensor_v2") + b"\x93"
    + TENSOR[len(REBUILD) :] + b"(NN\x88tb",
    "empty array": array(b"J\xff\xff\xff\x3fK\x00\x86", raw(b"")),
    "lists of an array": array(b"(" + MANY + b"K\x01" * 30 + b"t", raw(bytes(3_000_000))),
    "array in many places": array(MANY + b"\x85", raw(bytes(3_000_000))) + put(1) + b"0" + often(get(1), 300_000),
    "raw text of arrays": text("a" * 3_000_000) + put(1) + b"0" + often(array(MANY + b"\x85", get(1)), 20_000),
    "integer in bytes": b"\x8b" + struct.pack("<I", 7_000_000) + b"\x7f" * 7_000_000,
    "integer in digits": b"L" + b"9" * 7_000_000 + b"L\n",
    "floating point in digits": b"F" + b"9" * 7_000_000 + b"\n",
    "frame across an instruction": b"\x95" + struct.pack("<Q", 4) + text("ab")[:4] + text("ab")[4:],
    "frame in a frame": b"\x95" + struct.pack("<Q", 11) + b"\x95" + struct.pack("<Q", 1) + b"NN",
    "name of a storage": STORAGE + text("a" * 1_000_000) + text("cpu") + b"K\x01tQ",
    "refused name": name("os", "a" * 1_000_000),
    "extension": b"\x82\x01",
    "old instance": b"(icollections\nOrderedDict\n",
    "keyword arguments": LONG_DICT + b"0" + often(CONV + b")" + get(1) + b"\x92", 1000),
}  # fmt: skip


CASES = {
    f"{group}/{case}": program
    for group, programs in (("keys", KEYS), ("copies", COPIES), ("values", VALUES))
    for case, program in programs.items()
}


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name_in_seconds(tmp_path: Path, case: str) -> None:
    path = write_archive(tmp_path / "endless.pt", PROTOCOL_4 + CASES[case] + b".", {"data/0": bytes(16)})
    message = apart(lambda: read_torch_file(path))
    assert message.startswith(f"{path}: ") and len(message) < LONGEST_MESSAGE, message
    # Neither the limit of memory ended it, nor a mistake in the program above.
    assert "MemoryError" not in message and "underflow" not in message and "lacks" not in message, message


OBJECTS: dict[str, bytes] = {
    "deep": CONV + b"p0\n0K\x01" + (put(1) + b"0g0\n" + get(1) + b"\x85R") * 50_000,
    "many": CONV + b"p0\n0](" + b"g0\n)\x81" * 300_000 + b"e",
}


@pytest.mark.parametrize("case", OBJECTS)
def test_objects_are_read_however_many_and_deep(tmp_path: Path, case: str) -> None:
    path = write_archive(tmp_path / "large.pt", PROTOCOL_4 + OBJECTS[case] + b".")
    assert apart(lambda: read_torch_file(path)) == "done"


def module(attributes: bytes) -> bytes:
    return CONV + b")\x81}(" + attributes + b"ub"


WIDE = b"}(" + b"".join(text(str(number)) + get(9) for number in range(50_000)) + b"u"
MODULES: dict[str, bytes] = {
    "wide tables": TENSOR + put(9) + b"0" + module(text("_parameters") + WIDE) + put(8) + b"0"
    + module(text("_modules") + b"}(" + b"".join(text(str(number)) + get(8) for number in range(50_000)) + b"u"),
    "long names": CONV + b")\x81" + put(0)
    + (b"0" + module(text("_modules") + b"}" + text("a" * 4000) + get(0) + b"s") + put(0)) * 90,
    "deep": CONV + b")\x81" + put(0)
    + (b"0" + module(text("_modules") + b"}" + text("a") + get(0) + b"s") + put(0)) * 50_000,
    "names that are left out": TENSOR + put(9) + b"0"
    + module(text("_buffers") + WIDE + text("_non_persistent_buffers_set") + b"K\x01"),
    "table that is a tensor": TENSOR + put(9) + b"0" + module(text("_buffers") + get(9)),
}  # fmt: skip


@pytest.mark.parametrize("case", MODULES)
def test_modules_are_walked_to_an_end(tmp_path: Path, case: str) -> None:
    path = write_archive(tmp_path / "endless.pt", PROTOCOL_4 + MODULES[case] + b".", {"data/0": bytes(16)})
    message = apart(lambda: foreign_state_dict(read_torch_file(path)))
    assert "module" in message and "Error" not in message and len(message) < LONGEST_MESSAGE, message


def test_list_of_names_that_are_left_out_is_looked_up_quickly(tmp_path: Path) -> None:
    names = b"](" + b"".join(text(f"x{number}") for number in range(50_000)) + b"e"
    program = TENSOR + put(9) + b"0" + module(text("_buffers") + WIDE + text("_non_persistent_buffers_set") + names)
    path = write_archive(tmp_path / "wide.pt", PROTOCOL_4 + program + b".", {"data/0": bytes(16)})
    assert apart(lambda: foreign_state_dict(read_torch_file(path))) == "done"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_files_hold_is_read(tmp_path: Path, protocol: int) -> None:
    """Keys of every usual kind, shared values, sets, long texts and integers are no reason to refuse a file."""
    shared = (1, 2)
    content = {
        "shared": [shared] * 1000, 3: None, 2.5: True, None: b"x", True: 2, "set": {1, "a"}, "text": "x" * 100_000,
        "integer": 2**127, "deep": [[[[[[[[{}]]]]]]]], "list": list(range(10_000)), "key" * 300: (),
        "ordered": collections.OrderedDict(a=1), -(2**40): {"k": [shared, (shared, shared)]}, "bytes": bytes(200_000),
    }  # fmt: skip
    with zipfile.ZipFile(tmp_path / "sound.pt", "w") as target:
        target.writestr("archive/data.pkl", pickle.dumps(content, protocol))
    assert read_torch_file(tmp_path / "sound.pt") == content


@pytest.mark.parametrize("protocol", [2, 4])
def test_numpy_numbers_as_keys(tmp_path: Path, protocol: int) -> None:
    with zipfile.ZipFile(tmp_path / "sound.pt", "w") as target:
        target.writestr("archive/data.pkl", pickle.dumps({"names": {np.int64(3): "a"}}, protocol))
    assert read_torch_file(tmp_path / "sound.pt") == {"names": {3: "a"}}


def test_state_dict_keeps_its_versions(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm2d(2).state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert read_torch_file(tmp_path / "state.pt")._metadata == state._metadata
