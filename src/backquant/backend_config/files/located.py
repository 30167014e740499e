"""Values that remember their line, and JSON read to them (YAML: ``store``).

A ``Located`` holds a scalar, a list of ``Located``, or a dict from str to ``Located``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from backquant.backend_config.checks import number_text
from backquant.backend_config.files.import_paths import (
    Problem,
    SpecFileError,
    SpellingError,
    suggestion,
)
from backquant.errors import quoted

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


# JSON text to located values. Duplicate keys are errors, as are NaN and Infinity (not JSON).

_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|[{\[]|[^\s"{}\[\],:]+|\n'
)  # what begins a value or a key; lines
_MAX_DIGITS = 400


class _Refused(str):
    """What stands for a value that is none, with what is wrong with it."""


def read_json(text: str, file: str) -> Located:
    """Parse JSON text. ``file`` names it in errors. Raises SpecFileError (a SpecError).

    >>> read_json('{"a": 1,\\n "b": [2]}', "a.json").key_lines
    {'a': 1, 'b': 2}
    """
    text = text.removeprefix("\ufeff")
    try:
        tree = json.loads(
            text, object_pairs_hook=tuple, parse_int=_whole, parse_constant=_no_number
        )
    except json.JSONDecodeError as error:
        raise fail(file, error.lineno, (), f"not valid JSON: {error.msg}") from None
    except RecursionError:
        raise fail(file, None, (), f"nested deeper than {MAX_DEPTH} levels") from None
    return _located(tree, _lines(text), file, 0)


def _whole(digits: str) -> Any:
    if len(digits) <= _MAX_DIGITS:
        return int(digits)
    return _Refused(f"a number of more than {_MAX_DIGITS} digits")


def _no_number(name: str) -> Any:
    return _Refused(f"{name} is no number")


def _lines(text: str) -> Iterator[int]:
    """The line of each value and each key, in order."""
    line = 1
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
        else:
            yield line


def _located(value: Any, lines: Iterator[int], file: str, depth: int) -> Located:
    """``value``, whose mappings are tuples of pairs, with the next of ``lines``."""
    line = next(lines)
    if depth > MAX_DEPTH:
        raise fail(file, line, (), f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, _Refused):
        raise fail(file, line, (), f"not valid JSON: {value}")
    if isinstance(value, list):
        return Located([_located(item, lines, file, depth + 1) for item in value], line)
    if not isinstance(value, tuple):
        return Located(value, line)
    values: dict[str, Located] = {}
    key_lines: dict[str, int] = {}
    for key, item in value:
        at = next(lines)
        if key in values:
            message = f"the key {quoted(key)} appears twice (first on line {key_lines[key]})"
            raise fail(file, at, (key,), message, "remove one of the two")
        key_lines[key] = at
        values[key] = _located(item, lines, file, depth + 1)
    return Located(values, line, key_lines)


# Dtypes, schemes and numbers as a file writes them.


def constant_from(text: str, kind: Any) -> Any:
    """The dtype, or the qscheme, of that name, with or without the prefix. Raises SpellingError.

    >>> constant_from("quint8", torch.dtype), constant_from("torch.float", torch.dtype)
    (torch.quint8, torch.float32)
    >>> constant_from("qint9", torch.dtype)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    SpellingError: unknown dtype "qint9"; did you mean "qint8"?
    """
    name = text.removeprefix("torch.")
    value = getattr(torch, name, None)
    if isinstance(value, kind):
        return value
    known = [word for word, item in vars(torch).items() if isinstance(item, kind)]
    message = f"unknown {kind.__name__} {quoted(text)}"
    raise SpellingError(message, suggestion(name, sorted(known)))


def number_data(value: Any) -> Any:
    """A number as it is, except that small powers of two become readable text.

    Raises SpellingError for what is no finite number: JSON cannot carry it.

    >>> number_data(2.0**-12), number_data(0.0078), number_data(-127)
    ('2**-12', 0.0078, -127)
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise SpellingError(f"{value} is not a finite number", "leave the bound out (None)")
    text = number_text(value)
    return text if text.startswith("2**") else value


def number_from(value: Any) -> Any:
    """The number that ``number_data`` wrote.

    >>> number_from("2**-12") == 2.0**-12, number_from(3)
    (True, 3)
    """
    if not isinstance(value, str):
        return value
    exponent = int(value.removeprefix("2**"))
    if not -1074 <= exponent <= 1023:
        raise SpellingError(f"{value} is outside of the range of a float")
    return math.ldexp(1.0, exponent)
