"""Pictures that two sets have in common: the same file in both, or copies with the same content.

Validation on pictures that were trained on tells nothing about new ones. Only copies are found, not pictures that were
scaled or stored anew, nor neighbouring frames of a video.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from utils.data.listing import printable
from utils.data.scan import NETWORK_THREADS, SCAN_THREADS, ScanResult

MAX_READ_FILES = 1000  # opened to compare their content; of larger sets a part is compared, spread evenly
WHOLE_BYTES, PIECE_BYTES = 1 << 18, 1 << 16  # files up to the first are read whole, of others three pieces
Key = tuple[int, ...]


@dataclass
class Overlap:
    """Pictures of the second set that are in the first one, as pairs (second, first).

    candidates of the second set have the size, in bytes and in pixels, of pictures of the first; compared tells of how
    many of these the content was compared with all of those.
    """

    total: int = 0
    same_file: list[str] = field(default_factory=list)
    same_content: list[tuple[str, str]] = field(default_factory=list)
    candidates: int = 0
    compared: int = 0

    def description(self) -> dict[str, object]:
        """As plain data, lists complete."""
        return {
            "same_file": [printable(path) for path in self.same_file],
            "same_content": [[printable(path) for path in pair] for pair in self.same_content],
            "candidates": self.candidates,
            "compared": self.compared,
        }

    def warning(self) -> str:
        """One line for the terminal; '' where nothing is in common."""
        found = len(self.same_file) + len(self.same_content)
        if not found:
            return ""
        parts = [f"{len(self.same_file)} the same file"] if self.same_file else []
        if self.same_content:
            parts.append(f"{len(self.same_content)} a copy, such as {' = '.join(self.same_content[0])}")
        else:
            parts.append(f"such as {self.same_file[0]}")
        rest = f"; of {self.candidates} that may be copies only a part was compared"
        return printable(
            f"{'at least ' if self.compared < self.candidates else ''}{found} of {self.total} validation pictures are "
            f"training pictures too ({', '.join(parts)}){rest if self.compared < self.candidates else ''}: results "
            "look better than they will be on new pictures"
        )


def find_overlap(first: ScanResult, second: ScanResult) -> Overlap:
    """Compare the pictures that take part in two sets; the work is bounded, unreadable files count as different."""
    first, second = first.taking_part(), second.taking_part()
    known = {path: index for index, path in enumerate(first.im_files)}
    overlap = Overlap(len(second), [path for path in second.im_files if path in known])
    alike: dict[Key, list[int]] = defaultdict(list)
    for index, key in enumerate(_keys(first)):
        alike[key].append(index)
    candidates = [
        (index, key)
        for index, (path, key) in enumerate(zip(second.im_files, _keys(second), strict=True))
        if path not in known and key in alike
    ]
    chosen = _within_limit(candidates, {key: _spread(indices) for key, indices in alike.items()})
    overlap.candidates = len(candidates)
    overlap.compared = sum(len(partners) == len(alike[key]) for _, key, partners in chosen)
    pairs = [(second.im_files[index], [first.im_files[i] for i in partners]) for index, _, partners in chosen]
    digests = _digests(pairs, is_remote=bool(first.notes.network or second.notes.network))
    for path, partners in pairs:
        twin = next((other for other in partners if digests[path] and digests[other] == digests[path]), None)
        if twin is not None:
            overlap.same_content.append((path, twin))
    return overlap


def _keys(scan: ScanResult) -> list[Key]:
    """Bytes, width and height of each picture."""
    return list(map(tuple, np.column_stack((scan.file_bytes, scan.shapes)).tolist()))


def _spread(partners: Sequence[int]) -> Sequence[int]:
    """The partners, or as many as half of MAX_READ_FILES, spread evenly."""
    most = MAX_READ_FILES // 2
    return partners if len(partners) <= most else [partners[i * len(partners) // most] for i in range(most)]


def _within_limit(
    candidates: Sequence[tuple[int, Key]], partners_of: dict[Key, Sequence[int]]
) -> list[tuple[int, Key, Sequence[int]]]:
    """As many candidates, spread over the set, as MAX_READ_FILES allows; each with what it is to be compared with."""
    chosen, number_of_files, seen = [], 0, set()
    for number in np.random.default_rng(0).permutation(len(candidates)).tolist():
        index, key = candidates[number]
        more = 1 + (0 if key in seen else len(partners_of[key]))
        if number_of_files + more <= MAX_READ_FILES:
            chosen.append((index, key, partners_of[key]))
            number_of_files += more
            seen.add(key)
    return sorted(chosen, key=lambda choice: choice[0])


def _digests(pairs: Sequence[tuple[str, Sequence[str]]], *, is_remote: bool) -> dict[str, bytes]:
    """Digest of every file of the pairs, read by several threads."""
    files = list(dict.fromkeys(path for first, others in pairs for path in (first, *others)))
    with ThreadPoolExecutor(NETWORK_THREADS if is_remote else min(SCAN_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(files, pool.map(_digest, files), strict=True))


def _digest(path: str) -> bytes:
    """Digest of a file's content, of beginning, middle and end where it is large; b'' where it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            starts = (0, size // 2, size - PIECE_BYTES) if size > WHOLE_BYTES else (0,)
            for start in starts:
                file.seek(start)
                digest.update(file.read(PIECE_BYTES if len(starts) > 1 else WHOLE_BYTES))
    except OSError:
        return b""
    return digest.digest()
