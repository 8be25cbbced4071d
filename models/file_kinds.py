"""What a file is that was given as weights but is no archive of ``torch.save``, told from its first bytes."""

from __future__ import annotations

HEAD_BYTES = 512
"""How much of a file's beginning is looked at."""

RUN_IT = "run it with detect_dual.py or val_dual.py under a name with"
WEB_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<head")

KNOWN_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "is a Git LFS pointer, not weights; run 'git lfs pull' in its repository"),
    (b"\x1f\x8b", "is gzip-compressed; unpack it first"),
    (b"BZh", "is bzip2-compressed; unpack it first"),
    (b"\xfd7zXZ\x00", "is xz-compressed; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "is a 7-Zip archive; unpack it first"),
    (b"Rar!", "is a RAR archive; unpack it first"),
    (b"PK\x05\x06", "is an empty zip archive; copy or download it again"),
    (b"\x89HDF", "is an HDF5 file (Keras), which is not supported; expected a .pt file of torch"),
    (b"GGUF", "is a GGUF file, which is not supported; expected a .pt file of torch"),
)
"""First bytes -> clause that says what such a file is and what to do."""

OLD_TORCH = (
    "is a bare pickle or a file of torch before 1.6; save it again with a current torch: "
    "torch.save(torch.load(FILE, weights_only=True), NEW_FILE)"
)


def describe_foreign_file(head: bytes, suffix: str = "") -> str:
    """Say in one clause what a file that is not a zip archive probably is, from its first bytes."""
    if not head:
        return "is empty (0 bytes); copy or download it again"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(WEB_PAGES):
        return "is a web page, not weights: the address answered with HTML; download the file itself"
    for start, clause in KNOWN_STARTS:
        if head.startswith(start):
            return clause
    if suffix == ".onnx" or (head[:1] == b"\x08" and head[2:3] in (b"\x12", b"\x1a", b"\x3a")):
        return f"is an ONNX graph; {RUN_IT} .onnx, and use a .pt file for training and export"
    if head[8:9] == b"{" and b'"dtype"' in head:
        return "is a safetensors file, which is not supported; save it with torch.save"
    if head[4:5] == b"{" and b'"stride"' in head:
        return f"is a TensorRT engine; {RUN_IT} .engine, and use a .pt file for training and export"
    if head[257:262] == b"ustar":
        return "is a tar archive; unpack it first"
    if head[:1] == b"\x80":
        return OLD_TORCH
    return f"is not a weights file (it starts with {head[:8]!r})"
