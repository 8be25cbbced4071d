"""The look over a pickle's instructions: it refuses the sizes that pickletools finds false, and passes true ones."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import random
import zipfile

import pytest
import torch

from models.load_claims import UnsafeWeightsError, WeightsFileError, check_claims

SIZES_ARE_FALSE = ("expected", "not enough data", "no newline", "pickle exhausted", "unknown")
"""Beginnings and words of what pickletools says of sizes, as opposed to text or numbers that cannot be decoded."""


def pickles() -> list[bytes]:
    """Values of every kind in every protocol, and what torch writes."""
    value = {"a": [1, 2.5, "x" * 300, b"y", None, True, {1}, (1, 2, 3), 10**30, -5], "b": collections.OrderedDict(c=1)}
    stream = io.BytesIO()
    torch.save({f"model.{index}.weight": torch.zeros(index) for index in range(300)}, stream)
    archive = zipfile.ZipFile(stream)
    written = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return [*(pickle.dumps(value, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)), written]


@pytest.mark.parametrize("pickled", pickles(), ids=[*(f"protocol {number}" for number in range(6)), "torch"])
def test_true_claims_pass_and_every_cut_is_noticed(pickled: bytes) -> None:
    check_claims(pickled)
    check_claims(pickled + b"\xff")  # behind its end nothing is read
    for size in range(0, len(pickled), 1 + len(pickled) // 500):
        with pytest.raises(WeightsFileError, match="damaged"):
            check_claims(pickled[:size])


def test_whatever_pickletools_finds_too_large_is_refused() -> None:
    originals, chance = pickles(), random.Random(0)
    refused = 0
    for _ in range(2000):
        changed = bytearray(chance.choice(originals)[-400:])
        for _ in range(chance.choice((1, 2, 4))):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            for _ in pickletools.genops(bytes(changed)):
                pass
            reason = ""
        except ValueError as error:
            reason = str(error)
        if any(words in reason for words in SIZES_ARE_FALSE):
            refused += 1
            with pytest.raises(WeightsFileError):
                check_claims(bytes(changed))
    assert refused > 200


@pytest.mark.parametrize(
    "instruction", [b"q\x30", b"r\x00\x00\x00\x70", b"p123456789\n"], ids=["one byte", "four bytes", "text"]
)
def test_places_beyond_use_are_refused(instruction: bytes) -> None:
    with pytest.raises(UnsafeWeightsError, match=r"claims [\d,]+ stored objects in [\d,]+ bytes"):
        check_claims(b"\x80\x02]" + instruction + b".")


def test_a_place_that_is_no_number() -> None:
    with pytest.raises(WeightsFileError, match="damaged"):
        check_claims(b"]pmany\n.")
