"""Values that remember their line: what the YAML and the JSON reader both produce.

A ``Located`` holds a scalar, a list of ``Located``, or a dict from str to ``Located``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from backquant.backend_config.files.problems import Problem, SpecFileError

__all__ = ["MAX_DEPTH", "MAX_VALUES", "Located", "Path", "field_name", "fail", "plain"]

MAX_DEPTH = 60  # a spec nests about eight deep; deeper input is an attack or a mistake
MAX_VALUES = 50_000  # aliases may repeat a value; a file may not expand without bound

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Located:
    """One value of a file. ``key_lines`` has the line of each key when the value is a mapping."""

    value: Any
    line: int
    key_lines: dict[str, int] = field(default_factory=dict)

    def at(self, path: Iterable[str | int]) -> Located:
        """The deepest value on ``path`` that exists; parts that lead nowhere are skipped.

        >>> tree = Located({"a": Located([Located(1, 2)], 2)}, 1)
        >>> tree.at(("a", 0, "int")).line
        2
        """
        here = self
        for part in path:
            value = here.value
            in_list = isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)
            if in_list or (isinstance(value, dict) and part in value):
                here = value[part]
        return here

    def line_of(self, path: Path) -> int:
        """The line of a value, or of the key itself when the last part is a key."""
        parent = self.at(path[:-1])
        if path and isinstance(parent.value, dict) and path[-1] in parent.key_lines:
            return parent.key_lines[str(path[-1])]
        return self.at(path).line

    def known_path(self, path: Path) -> Path:
        """``path`` without the parts that are not in the file (but with a missing last one)."""
        kept: list[str | int] = []
        here = self
        for part in path:
            below = here.at((part,))
            if below is not here:
                kept.append(part)
            here = below
        if path and (not kept or kept[-1] != path[-1]) and isinstance(here.value, dict):
            kept.append(path[-1])
        return tuple(kept)


def field_name(path: Path) -> str:
    """A path as people write it.

    >>> field_name(("entries", 3, "dtype_configs", 0))
    'entries[3].dtype_configs[0]'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def fail(file: str, line: int | None, path: Path, message: str, fix: str = "") -> SpecFileError:
    """The error for one problem at one place (to be raised by the caller)."""
    return SpecFileError([Problem(file, line, field_name(path), message, fix)])


def plain(tree: Located) -> Any:
    """The value without its lines.

    >>> plain(Located({"a": Located([Located(1, 2)], 2)}, 1))
    {'a': [1]}
    """
    value = tree.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value
