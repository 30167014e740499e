"""Values that remember their line, and YAML and JSON read to them.

A ``Located`` holds a scalar, a list of ``Located``, or a dict from str to ``Located``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from backquant.backend_config.import_paths import Problem, SpecFileError
from backquant.backend_config.layout import Path
from backquant.errors import quoted

MAX_DEPTH = 60  # a spec nests about eight deep; deeper input is an attack or a mistake
MAX_VALUES = 50_000  # aliases may repeat a value; a file may not expand without bound


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
            raise _twice(file, key, at, key_lines[key])
        key_lines[key] = at
        values[key] = _located(item, lines, file, depth + 1)
    return Located(values, line, key_lines)


# YAML text to located values.
#
# Read as events: no tag of the file can create an object. Scalars follow YAML 1.2's core schema (``on``,
# ``yes`` and dates are strings; ``1e-5`` is a number). Duplicate keys are errors.
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_TRUE = ("true", "True", "TRUE")
_FALSE = ("false", "False", "FALSE")
_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_SPECIAL = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf")}
_TAGS = {yaml.ScalarEvent: "str", yaml.SequenceStartEvent: "seq", yaml.MappingStartEvent: "map"}
_MOST_PLAIN_DIGITS = 40


def read_yaml(text: str, file: str) -> Located:
    """Parse YAML text. ``file`` names it in errors. Raises SpecFileError (a SpecError).

    >>> read_yaml("name: a\\nentries: []", "a.yaml").key_lines
    {'name': 1, 'entries': 2}
    """
    try:
        return _YamlReader(_events(text), file).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise fail(file, line, (), f"not valid YAML: {message}") from None
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise fail(file, None, (), f"not valid YAML: {first}") from None
    except (OverflowError, ValueError) as error:
        if isinstance(error, SpecFileError):
            raise
        raise fail(file, None, (), f"not valid YAML: {error}") from None  # "\\UFFFFFFFF"


def _events(text: str) -> Iterator[Any]:
    """The events of YAML text: of libyaml, and where it fails of the parser in Python, for its messages."""
    if yaml.__with_libyaml__:
        loader = yaml.CSafeLoader(text)
        events: list[Any] = []
        try:
            while loader.check_event() and len(events) < 4 * MAX_VALUES:  # more are too many values
                events.append(loader.get_event())
            return iter(events)
        except (yaml.YAMLError, ValueError):
            pass
        finally:
            loader.dispose()
    of_python: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
    return of_python


class _YamlReader:
    """One file being read. ``count``: how many values it has expanded to; ``deepest``: how deep."""

    def __init__(self, events: Iterator[Any], file: str) -> None:
        self.events = events
        self.file = file
        self.count = self.deepest = 0
        self.anchored: dict[str, tuple[Located, int, int] | None] = {}  # None: being read

    def document(self) -> Located:
        next(self.events)
        if isinstance(next(self.events), yaml.StreamEndEvent):
            raise fail(self.file, 1, (), "the file is empty", "start with: schema_version: 1")
        found = self.value(next(self.events), 0)
        next(self.events)
        more = next(self.events)
        if not isinstance(more, yaml.StreamEndEvent):
            problem = "expected a single document in the stream but found another document"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=more.start_mark)
        return found

    def value(self, event: Any, depth: int) -> Located:
        line = event.start_mark.line + 1
        self.count += 1
        if depth > self.deepest or self.count > MAX_VALUES:
            self.check_size(line, depth)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, depth)
        if event.tag and event.tag != f"tag:yaml.org,2002:{_TAGS[type(event)]}":
            message = f"the tag {event.tag!r} is not supported"
            raise fail(self.file, line, (), message, "write plain values; no object is created")
        if event.anchor:
            return self.anchor(event, depth)
        if isinstance(event, yaml.ScalarEvent):
            return Located(event.value if event.style else plain_scalar(event.value), line)
        return self.collection(event, line, depth)

    def check_size(self, line: int, depth: int) -> None:
        self.deepest = max(self.deepest, depth)
        if depth > MAX_DEPTH:
            raise fail(self.file, line, (), f"nested deeper than {MAX_DEPTH} levels")
        if self.count > MAX_VALUES:
            raise fail(self.file, line, (), f"more than {MAX_VALUES} values (through aliases?)")

    def collection(self, event: Any, line: int, depth: int) -> Located:
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(line, depth)
        items = []
        while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
            items.append(self.value(item, depth + 1))
        return Located(items, line)

    def anchor(self, event: Any, depth: int) -> Located:
        name, event.anchor = event.anchor, None
        if name in self.anchored:
            problem = f"found duplicate anchor {name!r}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.anchored[name] = None
        around, self.deepest = self.deepest, depth
        self.count -= 1
        before = self.count
        found = self.value(event, depth)
        self.anchored[name] = found, self.count - before - 1, self.deepest - depth
        self.deepest = max(self.deepest, around)
        return found

    def alias(self, event: Any, depth: int) -> Located:
        if event.anchor not in self.anchored:
            problem = f"found undefined alias {event.anchor!r}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        found, size, height = self.anchored[event.anchor] or (None, 0, MAX_DEPTH + 1)
        self.count += size
        self.check_size(event.start_mark.line + 1, depth + height)
        assert found is not None  # else it holds itself, which is too deep
        return found

    def mapping(self, line: int, depth: int) -> Located:
        values: dict[str, Located] = {}
        key_lines: dict[str, int] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key_line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise fail(self.file, key_line, (), "a key must be a plain word")
            key = event.value
            if event.anchor:
                self.anchored[event.anchor] = Located(plain_scalar(key), key_line), 0, 0
            if key in values:
                raise _twice(self.file, key, key_line, key_lines[key])
            key_lines[key] = key_line
            values[key] = self.value(next(self.events), depth + 1)
        return Located(values, line, key_lines)


def plain_scalar(text: str) -> Any:
    """An unquoted scalar by YAML 1.2's core schema.

    >>> [plain_scalar(text) for text in ("yes", "1e-5", "8", "true", "null", "2**-12")]
    ['yes', 1e-05, 8, True, None, '2**-12']
    """
    if _NULL.match(text):
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text.lower() in _SPECIAL:
        return _SPECIAL[text.lower()]
    if text.lower() == ".nan":
        return float("nan")
    if len(text) <= _MOST_PLAIN_DIGITS:
        if _INT.match(text):
            return int(text)
        if _FLOAT.match(text):
            return float(text)
    return text


def _twice(file: str, key: str, line: int, first: int) -> SpecFileError:
    message = f"the key {quoted(key)} appears twice (first on line {first})"
    return fail(file, line, (key,), message, "remove one of the two")
