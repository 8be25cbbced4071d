"""Keys that a YAML text gives twice: every loader keeps the last one and says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import yaml


class RepeatedKey(NamedTuple):
    """A key, as in ``names: 1`` for a nested one, and the lines (from 1 on) on which it stands first and again."""

    key: str
    line: int
    again: int

    def __str__(self) -> str:
        return (
            f"the key '{self.key}' stands on line {self.line} and again on line {self.again}, of which only the last "
            "would count: delete one of them or correct its name"
        )


def refuse_repeated_keys(text: str, origin: object) -> None:
    """Raise ValueError naming ``origin``, the key and both lines where a mapping has a key twice.

    Numbers are compared as numbers and quotes do not matter, so that ``1``, ``01`` and ``'1'`` are the same class.
    What is merged into a mapping (``<<``) may be replaced there. Raises yaml.YAMLError for what is no YAML.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for repeated in _repeated_below(root, "", set()):
        raise ValueError(f"{origin}: {repeated}")


def _repeated_below(node: yaml.Node | None, path: str, seen: set[int]) -> Iterator[RepeatedKey]:
    if node is None or id(node) in seen:  # an alias leads to a node that has been looked at
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_below(item, path, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str | int, int] = {}
    for key, value in node.value:
        name = f"{path}{key.value}" if isinstance(key, yaml.ScalarNode) else ""
        if name:
            same = int(key.value) if key.value.isdecimal() else key.value
            line = key.start_mark.line + 1
            if same in lines:
                yield RepeatedKey(name, lines[same], line)
            lines[same] = line
        yield from _repeated_below(value, f"{name}: " if name else path, seen)
