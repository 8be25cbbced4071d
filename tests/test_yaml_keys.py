"""Keys that stand twice in a YAML text, at any depth."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.yaml_keys import refuse_repeated_keys

REPO_ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("train: a\nval: b\ntrain: c\n", "train", (1, 3)),
        ("a: 1\n\n# note\na: 1\n", "a", (1, 4)),  # the same value is a mistake as well
        ("names: [a]\nnc: 1\nnames:\n  0: a\n", "names", (1, 3)),
        ("names:\n  0: a\n  1: b\n  1: c\n", "names: 1", (3, 4)),
        ("names: {0: a, 00: b}\n", "names: 00", (1, 1)),
        ("names:\n  1: a\n  '1': b\n", "names: 1", (2, 3)),
        ("'a': 1\na: 2\n", "a", (1, 2)),
        ("list:\n  - {x: 1}\n  - {x: 1, x: 2}\n", "list: x", (3, 3)),
        ("<<: {a: 1}\nb: 1\nb: 2\n", "b", (2, 3)),
    ],
)
def test_both_lines_are_told(text: str, key: str, lines: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="delete one") as caught:
        refuse_repeated_keys(text, "file.yaml")
    assert f"file.yaml: the key '{key}' stands on line {lines[0]} and again on line {lines[1]}" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just text",
        "a: {x: 1}\nb: {x: 1}\n",
        "- {x: 1}\n- {x: 1}\n",
        "base: &b {x: 1}\nmore: {<<: *b, x: 2}\nsame: *b\n",
        "a: &loop [*loop]\n",
        "? [1, 2]\n: x\n? [1, 2]\n: y\n",
    ],
)
def test_keys_of_different_mappings_are_no_repetition(text: str) -> None:
    refuse_repeated_keys(text, "file.yaml")


def test_files_of_the_repository_have_none() -> None:
    files = [path for folder in ("data", "hyp", "models") for path in (REPO_ROOT / folder).rglob("*.yaml")]
    assert len(files) > 5
    for path in files:
        refuse_repeated_keys(path.read_text(encoding="utf-8"), path)
