"""Follow the instructions of a pickle in kinds of values before anything is made: is there work or memory without end?

The unpickler of Python is as quick as C, and it hashes, copies and reserves whatever it is told to; nothing can stop
it on the way. A pickle is a program for a stack, though, and what kind of value lies where shows without making any:
here a number stands for each value. Sizes are held against the data, keys of dictionaries are text or numbers, and
only lists, dictionaries and sets are filled. ``pickletools`` knows the instructions, and its table is used here.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable

ARGUMENTS = {ord(code.code): code.arg for code in pickletools.opcodes}
"""Instruction of a pickle -> its argument."""

FIXED_LENGTHS = [
    1 + (argument.n if argument else 0) if code in ARGUMENTS and (argument is None or argument.n >= 0) else 0
    for code, argument in ((code, ARGUMENTS.get(code)) for code in range(256))
]
"""Instruction -> its length in bytes with the argument, 0 where that differs."""

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
MAX_PLACES = 1_000_000
"""Objects that a file may number to refer to them again; a training file of the largest network numbers 200,000."""
MAX_ARGUMENTS = 100
"""Arguments of a call, which are copied for it; a tensor has 7, a path as many as it has folders."""
MAX_OBJECT_BYTES = 500_000_000
"""Memory for empty containers and objects, which take one or two instructions each."""

FEW_BYTES = 2_000_000
"""Instructions that cannot reach MAX_OBJECT_BYTES."""

OBJECT_BYTES = {
    b"]": 72, b"}": 80, b"\x8f": 232, b"\x85": 64, b"\x86": 72, b"\x87": 80, b"t": 64, b"l": 72, b"d": 80,
    b"\x91": 232, b"R": 500, b"\x81": 200, b"\x92": 200, b"\x96": 72,
}  # fmt: skip
"""Instruction that makes a container or an object -> bytes of memory that this takes at most, without its content."""

# Kinds of values on the stack. Text that may be a key is no kind but the place of its instruction, which is not
# negative, so that everything from NUMBER on may be a key.
(
    NUMBER,
    LEAF,
    TUPLE,
    LIST,
    NEW_DICT,
    DICT,
    ORDERED,
    SET,
    VALUE,
    FIXED,
    CLASS,
    DICT_CLASS,
    NUMBER_CLASS,
    FIXED_CLASS,
    NOTHING,
) = range(-1, -16, -1)
KIND_NAMES = {
    LEAF: "long text or number", TUPLE: "tuple", LIST: "list", NEW_DICT: "dictionary", DICT: "dictionary",
    ORDERED: "dictionary", SET: "set", FIXED: "tensor", CLASS: "class", DICT_CLASS: "class", NUMBER_CLASS: "class",
    FIXED_CLASS: "class", NOTHING: "tuple",
}  # fmt: skip
"""LEAF is never a key, NEW_DICT a dictionary that is nowhere else, FIXED what must not be altered,
NOTHING an empty tuple."""
MAPPINGS = (NEW_DICT, DICT, ORDERED)
STATES_IN_USE = (DICT, ORDERED, FIXED)
"""Kinds that are no state of an object: copying the same large one to many objects has no end."""
RESULTS = {
    (DICT_CLASS, NOTHING): ORDERED,
    **{(CLASS, arguments): VALUE for arguments in (NOTHING, TUPLE)},
    (NUMBER_CLASS, TUPLE): NUMBER,
    (FIXED_CLASS, TUPLE): FIXED,
}
"""Kinds of a class or function and of its arguments -> kind of what it gives."""
CLASSES = {
    b"collections.OrderedDict": DICT_CLASS,
    b"numpy.core.multiarray.scalar": NUMBER_CLASS,
    b"numpy._core.multiarray.scalar": NUMBER_CLASS,
}
"""Name -> its kind, where that is not CLASS."""
MAKES_TENSORS = b"torch._utils."
"""Beginning of the names whose results are FIXED."""

PUSHED = [0] * 256
"""Instruction -> kind of the constant or empty container that it puts on the stack, 0 for all others."""
for _codes, _kind in ((b"N\x88\x89JKMG", NUMBER), (b")", NOTHING), (b"]", LIST), (b"}", NEW_DICT), (b"\x8f", SET)):
    for _code in _codes:
        PUSHED[_code] = _kind

MARK, STOP, FRAME, REDUCE, PERSISTENT = b"(.\x95RQ"
PUT_4, GET_1, TEXT_4, TUPLE_MARK, TUPLE_1 = b"rhXt\x85"
MEMOIZE, DUPLICATE, DROP_MARK, DICT_MARK, ADD_ITEMS, GLOBAL, NEW_WITH_KEYWORDS = b"\x9421d\x90c\x92"
PLAIN_TEXTS = b"\x8cX\x8d"
"""Instructions that push text as it stands; others have escapes, under which a name could hide."""
COUNTS = {0x86: 2, 0x87: 3}
"""Instruction that makes a container -> number of its items, of all others those above the mark."""
BUNDLES = {0x86: TUPLE, 0x87: TUPLE, ord("l"): LIST, ord("d"): NEW_DICT, 0x91: VALUE}
FILL_COUNTS = {ord("a"): 1, ord("s"): 2}
FILLABLE = {ord("a"): (LIST,), ord("e"): (LIST,), ord("s"): MAPPINGS, ord("u"): MAPPINGS, 0x90: (SET,)}
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
    look = _Look(pickled, check_name)
    try:
        position = look.follow(0, len(pickled))
    except (LookupError, struct.error) as error:
        raise WeightsFileError(
            f"the data inside are damaged (an instruction lacks its argument or value: {error})"
        ) from None
    if not look.is_stopped:
        raise WeightsFileError(
            f"the data inside are damaged (after {position:,} bytes an instruction or its argument is cut)"
        )


class _Look:
    """One passage through a pickle; the stack holds kinds.

    The stack may be taken for deeper than the unpickler's, which sees marks as a floor: that one stops then.
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
        while position < end:
            code = pickled[position]
            if kind := PUSHED[code]:
                push(kind)
                position += FIXED_LENGTHS[code]
            elif code == GET_1:
                kind = memo[pickled[position + 1]]
                push(kind if kind != NEW_DICT else DICT)
                position += 2
            elif code == PUT_4:
                (place,) = unpack_uint(pickled, position + 1)
                if place > MAX_PLACES or place > end:
                    self.refuse_place(place)
                memo[place] = stack[-1]
                position += 5
            elif code == TEXT_4:
                (size,) = unpack_uint(pickled, position + 1)
                push(position if size <= MAX_KEY_BYTES else LEAF)
                position += 5 + size
            elif code == REDUCE:
                kind = pop()
                stack[-1] = RESULTS.get((stack[-1], kind)) or self.refuse_call(stack[-1], kind, position)
                position += 1
            elif code == TUPLE_MARK:
                start = marks.pop()
                size = len(stack) - start
                stack[start:] = (TUPLE if 0 < size <= MAX_ARGUMENTS else LEAF if size else NOTHING,)
                position += 1
            elif code == MARK:
                marks.append(len(stack))
                position += 1
            elif code == TUPLE_1:
                stack[-1] = TUPLE
                position += 1
            elif code == PERSISTENT:
                stack[-1] = FIXED
                position += 1
            elif code == STOP:
                self.is_stopped = True
                return position
            elif code == FRAME:
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

    def put(self, position: int, after: int) -> None:
        """Number the value on top; MEMOIZE takes the next number."""
        code = self.pickled[position]
        place = len(self.memo) if code == MEMOIZE else self.place(position, after)
        if place > MAX_PLACES or not 0 <= place <= len(self.pickled):
            self.refuse_place(place)
        self.memo[place] = self.stack[-1]

    def get(self, position: int, after: int) -> None:
        """Put a numbered value on the stack once more, or the one on top."""
        kind = self.stack[-1] if self.pickled[position] == DUPLICATE else self.memo[self.place(position, after)]
        if self.pickled[position] == DUPLICATE and kind == NEW_DICT:
            self.stack[-1] = DICT
        self.stack.append(kind if kind != NEW_DICT else DICT)

    def place(self, position: int, after: int) -> int:
        """Return the number of a stored object, written as bytes or as a line."""
        argument = self.pickled[position + 1 : after]
        return _number(argument) if self.pickled[position] in b"pg" else int.from_bytes(argument, "little")

    def text(self, position: int, after: int) -> None:
        """Push text or bytes."""
        self.stack.append(position if after - position <= MAX_KEY_BYTES else LEAF)

    def number(self, position: int, after: int) -> None:
        """Push a number of any length, in bytes or as a line of digits."""
        is_line = self.pickled[position] in b"ILF"
        size = after - position - (2 if is_line else 1 + PREFIXES[ARGUMENTS[self.pickled[position]].n])
        if size > (MAX_NUMBER_LETTERS if is_line else MAX_INTEGER_BYTES):
            raise UnsafeWeightsError(f"claims a number of {size:,} {'digits' if is_line else 'bytes'}, expected a few")
        self.stack.append(NUMBER if size <= (2 * MAX_KEY_INTEGER_BYTES if is_line else MAX_KEY_INTEGER_BYTES) else LEAF)

    def bundle(self, position: int, _: int) -> None:
        """Make a container of the values on top: two or three of them, or those above the mark."""
        code = self.pickled[position]
        start = len(self.stack) - COUNTS[code] if code in COUNTS else self.marks.pop()
        if code in b"d\x91":
            self.check_keys(self.stack[start :: 2 if code == DICT_MARK else 1], position)
        self.stack[start:] = (BUNDLES[code],)

    def fill(self, position: int, _: int) -> None:
        """Put the values on top, one or two or those above the mark, into the container below."""
        code = self.pickled[position]
        start = len(self.stack) - FILL_COUNTS[code] if code in FILL_COUNTS else self.marks.pop()
        if code in b"su\x90":
            self.check_keys(self.stack[start :: 1 if code == ADD_ITEMS else 2], position)
        del self.stack[start:]
        if self.stack[-1] not in FILLABLE[code]:
            raise UnsafeWeightsError(
                f"puts items into a {self.name(self.stack[-1])} (at byte {position:,}), which weights never do"
            )

    def drop(self, position: int, _: int) -> None:
        """Take away the value or the mark on top, or all above the mark."""
        if self.pickled[position] == DROP_MARK:
            del self.stack[self.marks.pop() :]
        elif self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def name_class(self, position: int, after: int) -> None:
        """Push a class or function, named by a line or by the two texts on top."""
        if self.pickled[position] == GLOBAL:
            words = self.pickled[position + 1 : after - 1].split(b"\n")
        else:
            parts = self.stack[-2:]
            if any(part < 0 or self.pickled[part] not in PLAIN_TEXTS for part in parts):
                raise UnsafeWeightsError(f"refers to something whose name is no plain text (at byte {position:,})")
            words = [_text(self.pickled, part) for part in parts]
            del self.stack[-2:]
        if self.check_name is not None and len(words) == 2:
            self.check_name(*(word.decode() for word in words))
        full = b".".join(words)
        self.stack.append(CLASSES.get(full) or (FIXED_CLASS if full.startswith(MAKES_TENSORS) else CLASS))

    def make(self, position: int, _: int) -> None:
        """Make an object from a class, arguments and perhaps keyword arguments."""
        if self.pickled[position] == NEW_WITH_KEYWORDS and (keywords := self.stack.pop()) != NEW_DICT:
            self.check_arguments(keywords, position)
        self.check_arguments(self.stack.pop(), position)
        if self.stack[-1] != CLASS:
            raise UnsafeWeightsError(f"makes an object of a {self.name(self.stack[-1])} (at byte {position:,})")
        self.stack[-1] = VALUE

    def build(self, position: int, _: int) -> None:
        """Give an object its state."""
        state, target = self.stack.pop(), self.stack[-1]
        if target not in (VALUE, ORDERED) or state in STATES_IN_USE or (target == ORDERED and state != NEW_DICT):
            raise UnsafeWeightsError(
                f"tries to alter a {self.name(target)} by a {self.name(state)} (at byte {position:,})"
            )

    def refuse(self, position: int, _: int) -> None:
        """Refuse what only the pickles of special programs have."""
        raise UnsafeWeightsError(
            f"holds the instruction {self.pickled[position]:#04x} (at byte {position:,}), which torch never writes"
        )

    def refuse_call(self, kind: int, arguments: int, position: int) -> int:
        if kind == DICT_CLASS and arguments == TUPLE:
            raise UnsafeWeightsError(
                f"makes a dictionary of another one (at byte {position:,}), which torch never does"
            )
        self.check_arguments(arguments, position)
        raise UnsafeWeightsError(f"calls a {self.name(kind)} (at byte {position:,}), which weights never do")

    def check_arguments(self, kind: int, position: int) -> None:
        """Refuse arguments that are not a tuple of bearable length."""
        if kind not in (TUPLE, NOTHING):
            raise UnsafeWeightsError(
                f"passes a {self.name(kind)} as arguments (at byte {position:,}), expected up to {MAX_ARGUMENTS} values"
            )

    def check_keys(self, kinds: list[int], position: int) -> None:
        """Refuse keys of dictionaries and members of sets whose hashing or comparing may take for ever."""
        if kinds and min(kinds) < NUMBER:
            raise UnsafeWeightsError(
                f"has a {self.name(min(kinds))} as a key of a dictionary or in a set (at byte {position:,}); keys of "
                f"weights files are numbers or text of up to {MAX_KEY_BYTES:,} bytes: save weights only"
            )

    def refuse_place(self, place: int) -> None:
        raise UnsafeWeightsError(f"claims {place:,} stored objects in {len(self.pickled):,} bytes")

    @staticmethod
    def name(kind: int) -> str:
        return "text or number" if kind >= NUMBER else KIND_NAMES.get(kind, "object")


HANDLERS: dict[int, Callable[[_Look, int, int], None]] = {
    code: handler
    for codes, handler in (
        (b"qp\x94", _Look.put),
        (b"jg2", _Look.get),
        (b"\x8c\x8dUTBC\x8eVS\x96", _Look.text),
        (b"\x8a\x8bILF", _Look.number),
        (b"\x86\x87ld\x91", _Look.bundle),
        (b"aesu\x90", _Look.fill),
        (b"01", _Look.drop),
        (b"c\x93", _Look.name_class),
        (b"\x81\x92", _Look.make),
        (b"b", _Look.build),
        (b"ioP\x82\x83\x84\x97\x98", _Look.refuse),
    )
    for code in codes
}
"""Instruction -> what it does to the stack, for the rarer ones; PROTO does nothing."""


def _text(pickled: bytes, position: int) -> bytes:
    """Return the text that an instruction pushes."""
    code = pickled[position]
    length = _length(pickled, position)
    if ARGUMENTS[code].n not in PREFIXES:
        return pickled[position + 1 : position + length - 1]
    return pickled[position + 1 + PREFIXES[ARGUMENTS[code].n] : position + length]


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


def _number(line: bytes) -> int:
    try:
        return int(line)
    except ValueError as error:
        raise WeightsFileError(f"the data inside are damaged ({error})") from None
