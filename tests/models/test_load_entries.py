"""Reading of stored entries: the content is zipfile's, and so is every refusal."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

from models.load_entries import Entries


def saved() -> bytes:
    stream = io.BytesIO()
    torch.save({"a": torch.arange(1000), "b": torch.rand(7), "c": torch.zeros(0)}, stream)
    return stream.getvalue()


def outcome(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, entries: Entries | None = None) -> object:
    """Content of an entry, or the kind of error that reading it raises."""
    try:
        return bytes(archive.read(entry) if entries is None else entries.read(entry))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        return type(error)


def assert_read_alike(content: bytes) -> list[object]:
    """Compare both ways of reading all entries, and return what came out."""
    stream = io.BytesIO(content)
    with zipfile.ZipFile(stream) as archive:
        entries = Entries(archive, stream)
        expected = [outcome(archive, entry) for entry in archive.infolist()]
        assert [outcome(archive, entry, entries) for entry in archive.infolist()] == expected
        return expected


def test_entries_of_torch_do_not_need_zipfile(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved()
    assert torch.arange(1000).numpy().tobytes() in assert_read_alike(content)
    with zipfile.ZipFile(stream := io.BytesIO(content)) as archive:
        monkeypatch.setattr(archive, "read", lambda _: pytest.fail("read by zipfile"))
        for entry in archive.infolist():
            assert len(Entries(archive, stream).read(entry)) == entry.file_size


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_other_archives(compression: int) -> None:
    stream = io.BytesIO(b"something in front")
    stream.seek(0, io.SEEK_END)
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name in ("plain", "größe/数", "empty"):
            archive.writestr(name, b"" if name == "empty" else name.encode() * 50)
    assert b"plain" * 50 in assert_read_alike(stream.getvalue())


def test_every_damaged_byte_is_told_as_zipfile_tells_it() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a/data", b"0123456789")
        archive.writestr("a/more", b"abcdefghij")
    content, start = stream.getvalue(), stream.getvalue().index(b"PK\x01\x02")
    errors = 0
    for position in range(start):
        for value in (0x00, 0x01, 0x40, 0xFF, content[position] ^ 0x08):
            changed = content[:position] + bytes([value]) + content[position + 1 :]
            errors += any(isinstance(found, type) for found in assert_read_alike(changed))
    assert errors > start
