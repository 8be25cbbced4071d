"""Look over the instructions of a pickle before anything follows them: do their sizes agree with the data?

``pickletools`` knows the instructions, and its table is used here. Its own walk, which also decodes every argument,
takes four times as long, and a training file has 150,000 instructions.
"""

from __future__ import annotations

import pickletools

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

STOP, PUT = ord("."), ord("p")
BINARY_PUTS = frozenset(b"qr")
"""Instructions that number an object: the argument is its place in a table."""


class WeightsFileError(ValueError):
    """A file cannot be read as weights; the message names the file and the reason."""


class UnsafeWeightsError(WeightsFileError):
    """A file asks for a class or function outside the table; nothing of it was run."""


def check_claims(pickled: bytes) -> None:
    """Read over the instructions of a pickle without following them; refuse sizes that the data do not have.

    The unpickler reserves memory for whatever a length or a memo number claims, before it looks for the data.

    Raises:
        UnsafeWeightsError: an object is to be stored at a place beyond any use.
        WeightsFileError: an instruction is unknown, or cut off.
    """
    position, end = 0, len(pickled)
    while position < end:
        code = pickled[position]
        if code == STOP:
            return
        length = FIXED_LENGTHS[code] or _length(pickled, position)
        if code in BINARY_PUTS:
            _check_place(int.from_bytes(pickled[position + 1 : position + length], "little"), end)
        position += length
    raise WeightsFileError(f"the data inside are damaged (after {end:,} bytes an instruction or its argument is cut)")


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
    if code == PUT:
        _check_place(_number(pickled[start:end]), len(pickled))
    return end - position


def _number(line: bytes) -> int:
    try:
        return int(line)
    except ValueError as error:
        raise WeightsFileError(f"the data inside are damaged ({error})") from None


def _check_place(place: int, size: int) -> None:
    """Refuse to store an object at a place that a file of so many bytes has no use for."""
    if place > size:
        raise UnsafeWeightsError(f"claims {place:,} stored objects in {size:,} bytes")
