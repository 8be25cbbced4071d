"""Follow the instructions of a pickle without making anything, and refuse what may take time or memory without end.

Python's unpickler hashes, copies and reserves whatever a pickle tells it to, in C code that cannot be interrupted. So
the instructions are followed here first, on a stack that holds the kind of each value instead of the value. A pickle
passes if its sizes are no larger than its data, keys are numbers or short text, items go into lists, dictionaries and
sets only, and nothing but the file's own objects is given a state. ``pickletools`` describes the instructions.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import NoReturn, TypeVar

Value = TypeVar("Value")

CODES = {code.name: ord(code.code) for code in pickletools.opcodes}
"""Name of an instruction -> the byte that stands for it."""
ARGUMENTS = {ord(code.code): code.arg for code in pickletools.opcodes}


def by_code(table: dict[str, Value]) -> dict[int, Value]:
    """Look up instructions, which ``table`` has by name, several in one text, by their bytes."""
    return {CODES[name]: value for names, value in table.items() for name in names.split()}


FIXED_LENGTHS = [0] * 256
"""Instruction -> its length in bytes with the argument, 0 where that differs."""
for _code, _argument in ARGUMENTS.items():
    if _argument is None or _argument.n >= 0:
        FIXED_LENGTHS[_code] = 1 + (_argument.n if _argument else 0)

PREFIXES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
"""Kind of argument -> bytes of the number in front of it that says how long it is."""

MAX_KEY_BYTES = 4096
"""Text or bytes that may be a key: equal keys are compared letter by letter. The longest path of Linux is as long."""
MAX_KEY_INTEGER_BYTES = 8
"""Integers that may be a key: of longer ones any number can share a hash, and a dictionary of these takes for ever."""
MAX_INTEGER_BYTES = 32
"""Integers at all; random states hold some of 16 bytes."""
MAX_NUMBER_LETTERS = 80
"""Digits of numbers written as text; 32 bytes are 78."""
MAX_MEMO_INDEX = 1_000_000
"""Objects that a file may number to refer to them again; a training file of the largest network numbers 200,000."""
MAX_ARGUMENTS = 100
"""Arguments of a call, which are copied for it; a tensor has 7, a path as many as it has folders."""
MAX_OBJECT_BYTES = 500_000_000
"""Memory for empty containers and objects, which take one or two instructions each."""
FEW_BYTES = 2_000_000
"""Instructions that cannot reach MAX_OBJECT_BYTES: the costliest byte, an empty set, takes 232, as a call needs more
instructions than its own."""

OBJECT_BYTES = by_code({
    "EMPTY_LIST LIST BYTEARRAY8 TUPLE2": 72, "EMPTY_DICT DICT TUPLE3": 80, "EMPTY_SET FROZENSET": 232,
    "TUPLE TUPLE1": 64, "NEWOBJ": 200, "REDUCE": 500,
})  # fmt: skip
"""Instruction that makes a container or an object -> bytes of memory that this takes at most, without its content."""

# Kinds of values on the stack. Short text has none: the position of its instruction stands for it, so that the names of
# classes can be read. Thus whatever is not below NUMBER may be a key.
NUMBER = -1  # or None, True, False
LONG = -2  # text or a number too long for a key, or a tuple too long for arguments
TUPLE = -3
EMPTY_TUPLE = -4
LIST = -5
NEW_DICT = -6  # a dictionary that is nowhere else
DICT = -7
ORDERED = -8
SET = -9
OBJECT = -10  # whatever else the file makes
TENSOR = -11  # a tensor or its storage, which nothing may alter
CLASS = -12  # a class or function
DICT_CLASS = -13
NUMBER_CLASS = -14
TENSOR_CLASS = -15

KIND_NAMES = {
    LONG: "long text or number", TUPLE: "tuple", EMPTY_TUPLE: "tuple", LIST: "list", NEW_DICT: "dictionary",
    DICT: "dictionary", ORDERED: "dictionary", SET: "set", OBJECT: "object", TENSOR: "tensor", CLASS: "class",
    DICT_CLASS: "class", NUMBER_CLASS: "class", TENSOR_CLASS: "class",
}  # fmt: skip
MAPPINGS = (NEW_DICT, DICT, ORDERED)
NO_STATES = (DICT, ORDERED, TENSOR)
"""Kinds that are no state of an object: copying the same large one to many objects has no end."""
RESULTS = {
    (CLASS, EMPTY_TUPLE): OBJECT,
    (CLASS, TUPLE): OBJECT,
    (DICT_CLASS, EMPTY_TUPLE): ORDERED,
    (NUMBER_CLASS, TUPLE): NUMBER,
    (TENSOR_CLASS, TUPLE): TENSOR,
}
"""Kinds of a class or function and of its arguments -> kind of what it gives."""
CLASSES = {
    b"collections.OrderedDict": DICT_CLASS,
    b"numpy.core.multiarray.scalar": NUMBER_CLASS,
    b"numpy._core.multiarray.scalar": NUMBER_CLASS,
}
"""Name -> its kind, where that is neither CLASS nor TENSOR_CLASS."""
MAKES_TENSORS = b"torch._utils."
"""Beginning of the names whose kind is TENSOR_CLASS."""

_pushed = by_code({
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT": NUMBER, "EMPTY_TUPLE": EMPTY_TUPLE, "EMPTY_LIST": LIST,
    "EMPTY_DICT": NEW_DICT, "EMPTY_SET": SET,
})  # fmt: skip
PUSHED = [_pushed.get(code, 0) for code in range(256)]
"""Instruction -> kind of the constant or empty container that it pushes, 0 for all others."""

OP_MARK, OP_STOP, OP_FRAME, OP_REDUCE, OP_BINPERSID, OP_BINGET, OP_LONG_BINPUT, OP_BINUNICODE, OP_TUPLE, OP_TUPLE1 = (
    CODES[name] for name in "MARK STOP FRAME REDUCE BINPERSID BINGET LONG_BINPUT BINUNICODE TUPLE TUPLE1".split()
)
OP_MEMOIZE, OP_GLOBAL = CODES["MEMOIZE"], CODES["GLOBAL"]

PLAIN_TEXTS = (CODES["SHORT_BINUNICODE"], CODES["BINUNICODE"], CODES["BINUNICODE8"])
"""Instructions that push text as it stands; others have escapes, under which a name could hide."""
COUNTS = by_code({"APPEND": 1, "TUPLE2 SETITEM": 2, "TUPLE3": 3})
"""Instruction that makes or fills a container -> values that it takes, of all others those above the mark."""
KEY_STEPS = by_code({"FROZENSET ADDITEMS": 1, "DICT SETITEM SETITEMS": 2})
"""Instruction that hashes what it takes -> distance from one key to the next."""
CONTAINERS = by_code({"TUPLE2 TUPLE3": TUPLE, "LIST": LIST, "DICT": NEW_DICT, "FROZENSET": OBJECT})
"""Instruction -> kind of the container that it makes of what it takes."""
FILLABLE = by_code({"APPEND APPENDS": (LIST,), "SETITEM SETITEMS": MAPPINGS, "ADDITEMS": (SET,)})
"""Instruction that fills a container -> kinds of containers that it may fill."""

unpack_uint = struct.Struct("<I").unpack_from


class WeightsFileError(ValueError):
    """A file cannot be read as weights; the message names the file and the reason."""


class UnsafeWeightsError(WeightsFileError):
    """A file asks for a class or function outside the table, or for endless work; nothing of it was run."""


def check_claims(pickled: bytes, check_name: Callable[[str, str], object] | None = None) -> None:
    """Go through the instructions of a pickle without doing what they say.

    Args:
        check_name: called with module and name of every class and function that the pickle refers to; what it raises
            about a name says more than what is found later.

    Raises:
        UnsafeWeightsError: following them might take unbounded time or memory, or alter what was made before.
        WeightsFileError: an instruction is unknown, cut off, or finds the stack empty.
    """
    if len(pickled) > FEW_BYTES:
        filled = sum(pickled.count(code) * size for code, size in OBJECT_BYTES.items())
        if filled > MAX_OBJECT_BYTES:  # counts bytes of texts too, of which no file has that many
            raise UnsafeWeightsError(f"claims objects of {filled:,} bytes in {len(pickled):,} bytes of instructions")
    run = _DryRun(pickled, check_name)
    try:
        position = run.follow(0, len(pickled))
    except (LookupError, struct.error) as error:
        raise WeightsFileError(
            f"the data inside are damaged (an instruction lacks its argument or value: {error})"
        ) from None
    if not run.is_stopped:
        raise WeightsFileError(
            f"the data inside are damaged (after {position:,} bytes an instruction or its argument is cut)"
        )


class _DryRun:
    """One passage through a pickle, with kinds for values.

    Methods of instructions take the position of the instruction and that of the next one. The unpickler never takes
    values from below a mark and stops instead; here they are taken, as what follows is then never reached.

    Attributes:
        stack: kinds of the values.
        marks: heights of the stack at which marks lie.
        memo: number under which the file stored a value -> its kind.
    """

    def __init__(self, pickled: bytes, check_name: Callable[[str, str], object] | None) -> None:
        self.pickled, self.check_name = pickled, check_name
        self.is_stopped = self.in_frame = False
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo: dict[int, int] = {}

    def follow(self, position: int, end: int) -> int:
        """Follow the instructions from ``position`` to ``end``, and return where the last one ended."""
        pickled, stack, marks, memo = self.pickled, self.stack, self.marks, self.memo
        push, pop = stack.append, stack.pop
        while position < end:  # what torch writes most often stands here, as a call would take longer than the work
            code = pickled[position]
            if kind := PUSHED[code]:
                push(kind)
                position += FIXED_LENGTHS[code]
            elif code == OP_BINGET:
                kind = memo[pickled[position + 1]]
                push(kind if kind != NEW_DICT else DICT)
                position += 2
            elif code == OP_LONG_BINPUT:
                (index,) = unpack_uint(pickled, position + 1)
                if index > MAX_MEMO_INDEX or index > end:
                    self.refuse_memo_index(index)
                memo[index] = stack[-1]
                position += 5
            elif code == OP_BINUNICODE:
                (size,) = unpack_uint(pickled, position + 1)
                push(position if size <= MAX_KEY_BYTES else LONG)
                position += 5 + size
            elif code == OP_REDUCE:
                kind = pop()
                stack[-1] = RESULTS.get((stack[-1], kind)) or self.refuse_call(stack[-1], kind, position)
                position += 1
            elif code == OP_TUPLE:
                start = marks.pop()
                size = len(stack) - start
                stack[start:] = (TUPLE if 0 < size <= MAX_ARGUMENTS else LONG if size else EMPTY_TUPLE,)
                position += 1
            elif code == OP_MARK:
                marks.append(len(stack))
                position += 1
            elif code == OP_TUPLE1:
                stack[-1] = TUPLE
                position += 1
            elif code == OP_BINPERSID:
                stack[-1] = TENSOR
                position += 1
            elif code == OP_STOP:
                self.is_stopped = True
                return position
            elif code == OP_FRAME:
                position = self.follow_frame(position, end)
                if self.is_stopped:
                    break
            else:
                after = position + (FIXED_LENGTHS[code] or _length(pickled, position))
                if code in HANDLERS:
                    HANDLERS[code](self, position, after)
                position = after
        return position

    def follow_frame(self, position: int, end: int) -> int:
        """Follow a frame; an instruction across its end is read differently by different unpicklers."""
        last = position + 9 + int.from_bytes(self.pickled[position + 1 : position + 9], "little")
        if self.in_frame or last > end:
            raise WeightsFileError(f"the data inside are damaged (the frame at byte {position:,} does not fit)")
        self.in_frame = True
        reached = self.follow(position + 9, last)
        self.in_frame = False
        if reached != last and not self.is_stopped:
            raise WeightsFileError(f"the data inside are damaged (an instruction crosses the frame's end at {last:,})")
        return reached

    def argument(self, position: int, after: int) -> slice:
        """Return where the argument of an instruction is, without its length in front or the end of its line."""
        if self.is_line(position):
            return slice(position + 1, after - 1)
        return slice(position + 1 + PREFIXES.get(ARGUMENTS[self.pickled[position]].n, 0), after)

    def is_line(self, position: int) -> bool:
        """Whether the argument of an instruction is written as a line of text."""
        return ARGUMENTS[self.pickled[position]].n == pickletools.UP_TO_NEWLINE

    def memo_index(self, position: int, after: int) -> int:
        """Return the number of a stored value, which is written as bytes or as a line."""
        argument = self.pickled[self.argument(position, after)]
        if not self.is_line(position):
            return int.from_bytes(argument, "little")
        try:
            return int(argument)
        except ValueError as error:
            raise WeightsFileError(f"the data inside are damaged ({error})") from None

    def put(self, position: int, after: int) -> None:
        """Store the value on top; MEMOIZE takes the next number."""
        is_next = self.pickled[position] == OP_MEMOIZE
        index = len(self.memo) if is_next else self.memo_index(position, after)
        if not 0 <= index <= min(MAX_MEMO_INDEX, len(self.pickled)):
            self.refuse_memo_index(index)
        self.memo[index] = self.stack[-1]

    def get(self, position: int, after: int) -> None:
        """Push a stored value once more."""
        kind = self.memo[self.memo_index(position, after)]
        self.stack.append(kind if kind != NEW_DICT else DICT)

    def duplicate(self, _position: int, _after: int) -> None:
        """Push the value on top once more."""
        if self.stack[-1] == NEW_DICT:
            self.stack[-1] = DICT
        self.stack.append(self.stack[-1])

    def pop(self, _position: int, _after: int) -> None:
        """Drop the value or the mark on top."""
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def pop_to_mark(self, _position: int, _after: int) -> None:
        """Drop all values above the mark."""
        del self.stack[self.marks.pop() :]

    def push_text(self, position: int, after: int) -> None:
        """Push text or bytes."""
        self.stack.append(position if after - position <= MAX_KEY_BYTES else LONG)

    def push_number(self, position: int, after: int) -> None:
        """Push a number of any length, in bytes or as a line of digits."""
        is_line, argument = self.is_line(position), self.argument(position, after)
        size = argument.stop - argument.start  # as claimed, whether the data are there or not
        if size > (MAX_NUMBER_LETTERS if is_line else MAX_INTEGER_BYTES):
            raise UnsafeWeightsError(f"claims a number of {size:,} {'digits' if is_line else 'bytes'}, expected a few")
        digits_per_byte = 2 if is_line else 1
        self.stack.append(NUMBER if size <= digits_per_byte * MAX_KEY_INTEGER_BYTES else LONG)

    def push_class(self, position: int, after: int) -> None:
        """Push a class or function, named by a line or by the two texts on top."""
        if self.pickled[position] == OP_GLOBAL:
            words = self.pickled[self.argument(position, after)].split(b"\n")
        else:
            parts = self.stack[-2:]
            if any(part < 0 or self.pickled[part] not in PLAIN_TEXTS for part in parts):
                raise UnsafeWeightsError(f"refers to something whose name is no plain text (at byte {position:,})")
            words = [self.pickled[self.argument(part, part + _length(self.pickled, part))] for part in parts]
            del self.stack[-2:]
        if self.check_name is not None and len(words) == 2:
            self.check_name(*(word.decode() for word in words))
        full = b".".join(words)
        self.stack.append(CLASSES.get(full) or (TENSOR_CLASS if full.startswith(MAKES_TENSORS) else CLASS))

    def make_container(self, position: int, _after: int) -> None:
        """Make a container of the values on top."""
        self.take_items(position)
        self.stack.append(CONTAINERS[self.pickled[position]])

    def fill_container(self, position: int, _after: int) -> None:
        """Put the values on top into the container below."""
        self.take_items(position)
        if self.stack[-1] not in FILLABLE[self.pickled[position]]:
            raise UnsafeWeightsError(
                f"puts items into a {_name(self.stack[-1])} (at byte {position:,}), which weights never do"
            )

    def take_items(self, position: int) -> None:
        """Take the items of a container off the stack, and refuse keys whose hashing or comparing may never end."""
        code = self.pickled[position]
        start = len(self.stack) - COUNTS[code] if code in COUNTS else self.marks.pop()
        keys = self.stack[start :: KEY_STEPS[code]] if code in KEY_STEPS else ()
        if keys and min(keys) < NUMBER:
            raise UnsafeWeightsError(
                f"has a {_name(min(keys))} as a key of a dictionary or in a set (at byte {position:,}); keys of "
                f"weights files are numbers or text of up to {MAX_KEY_BYTES:,} bytes: save weights only"
            )
        del self.stack[start:]

    def make_object(self, position: int, _after: int) -> None:
        """Make an object from a class and arguments."""
        self.check_arguments(self.stack.pop(), position)
        if self.stack[-1] != CLASS:
            raise UnsafeWeightsError(f"makes an object of a {_name(self.stack[-1])} (at byte {position:,})")
        self.stack[-1] = OBJECT

    def set_state(self, position: int, _after: int) -> None:
        """Give an object its state."""
        state, target = self.stack.pop(), self.stack[-1]
        if target not in (OBJECT, ORDERED) or state in NO_STATES or (target == ORDERED and state != NEW_DICT):
            raise UnsafeWeightsError(f"tries to alter a {_name(target)} by a {_name(state)} (at byte {position:,})")

    def check_arguments(self, kind: int, position: int) -> None:
        """Refuse arguments that are not a tuple of bearable length."""
        if kind not in (TUPLE, EMPTY_TUPLE):
            raise UnsafeWeightsError(
                f"passes a {_name(kind)} as arguments (at byte {position:,}), expected up to {MAX_ARGUMENTS} values"
            )

    def refuse_call(self, kind: int, arguments: int, position: int) -> NoReturn:
        if kind == DICT_CLASS and arguments == TUPLE:
            raise UnsafeWeightsError(
                f"makes a dictionary of another one (at byte {position:,}), which torch never does"
            )
        self.check_arguments(arguments, position)
        raise UnsafeWeightsError(f"calls a {_name(kind)} (at byte {position:,}), which weights never do")

    def refuse_memo_index(self, index: int) -> NoReturn:
        raise UnsafeWeightsError(f"claims {index:,} stored objects in {len(self.pickled):,} bytes")

    def refuse(self, position: int, _after: int) -> NoReturn:
        """Refuse what only the pickles of special programs have."""
        raise UnsafeWeightsError(
            f"holds the instruction {self.pickled[position]:#04x} (at byte {position:,}), which torch never writes"
        )


HANDLERS: dict[int, Callable[[_DryRun, int, int], None]] = by_code({
    "PUT BINPUT MEMOIZE": _DryRun.put,
    "GET LONG_BINGET": _DryRun.get,
    "DUP": _DryRun.duplicate,
    "POP": _DryRun.pop,
    "POP_MARK": _DryRun.pop_to_mark,
    "SHORT_BINUNICODE BINUNICODE8 UNICODE STRING BINSTRING SHORT_BINSTRING": _DryRun.push_text,
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8": _DryRun.push_text,
    "INT LONG LONG1 LONG4 FLOAT": _DryRun.push_number,
    "GLOBAL STACK_GLOBAL": _DryRun.push_class,
    "TUPLE2 TUPLE3 LIST DICT FROZENSET": _DryRun.make_container,
    "APPEND APPENDS SETITEM SETITEMS ADDITEMS": _DryRun.fill_container,
    "NEWOBJ": _DryRun.make_object,
    "BUILD": _DryRun.set_state,
    "NEWOBJ_EX INST OBJ PERSID EXT1 EXT2 EXT4 NEXT_BUFFER READONLY_BUFFER": _DryRun.refuse,
})  # fmt: skip
"""Instruction -> what it does to the stack, for the rarer ones; PROTO does nothing."""


def _name(kind: int) -> str:
    return "text or number" if kind >= NUMBER else KIND_NAMES[kind]


def _length(pickled: bytes, position: int) -> int:
    """Return the length of an instruction whose argument says how long it is, or reaches to the end of a line."""
    code, start = pickled[position], position + 1
    if code not in ARGUMENTS:
        raise WeightsFileError(f"the data inside are damaged (byte {position:,} is no instruction: {code:#04x})")
    argument = ARGUMENTS[code]
    if argument.n in PREFIXES:
        end = start + PREFIXES[argument.n]
        return end - position + int.from_bytes(pickled[start:end], "little")
    end = start
    for _ in range(2 if argument is pickletools.stringnl_noescape_pair else 1):
        end = pickled.find(b"\n", end) + 1
        if not end:
            raise WeightsFileError(f"the data inside are damaged (the line at byte {start:,} has no end)")
    return end - position
