"""The data of a file with the line of each value, and YAML and JSON read to it.

Data are scalars, and ``Mapping`` and ``Listing``: a dict and a list that know their lines.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from backquant.backend_config.import_paths import Problem, SpecFileError
from backquant.backend_config.layout import Path
from backquant.errors import quoted

MAX_DEPTH = 60  # a spec nests about eight deep; deeper input is an attack or a mistake
MAX_VALUES = 50_000  # aliases may repeat a value; a file may not expand without bound


class Mapping(dict[str, Any]):
    """A mapping of a file, whose ``lines`` are those of its keys.

    ``size``: how many values there are, itself and those within; ``height``: how deep these nest.
    """

    size, height = 1, 0

    def __init__(self, line: int) -> None:
        self.line = line
        self.lines: dict[Any, int] = {}


class Listing(list[Any]):
    """A list of a file, whose ``lines`` are those of its items."""

    size, height = 1, 0

    def __init__(self, line: int) -> None:
        self.line = line
        self.lines: list[int] = []


Collection: TypeAlias = Mapping | Listing


@dataclass(frozen=True)
class Located:
    """What a file holds. ``line``: where that begins."""

    file: str
    data: Any
    line: int = 1

    def at(self, path: Path) -> Any:
        """The deepest value on ``path`` that exists; parts that lead nowhere are skipped.

        >>> read_yaml("a: [2]", "x.yaml").at(("a", 0, "int"))
        2
        """
        here = self.data
        for part in path:
            here = here[part] if _has(here, part) else here
        return here

    def line_of(self, path: Path) -> int:
        """The line of a key or an item; of what is not there, of the value that it is missing in."""
        here, line = self.data, self.line
        for part in path:
            if _has(here, part):
                here, line = here[part], here.lines[part]
            else:
                line = getattr(here, "line", line)
        return line

    def known_path(self, path: Path) -> Path:
        """``path`` without the parts that are not in the file (but with a missing last one)."""
        kept: list[str | int] = []
        here = self.data
        for part in path:
            if _has(here, part):
                kept.append(part)
                here = here[part]
        if path and (not kept or kept[-1] != path[-1]) and isinstance(here, dict):
            kept.append(path[-1])
        return tuple(kept)

    def place(self, path: Path) -> str:
        """``file:line: field``; the line of what is left out is that of what it is missing in."""
        left_out = path and isinstance(path[-1], str) and not _has(self.at(path[:-1]), path[-1])
        line = self.line_of(path[:-1] if left_out else path)
        return f"{self.file}:{line}: {field_name(path)}"

    def problem(self, path: Path, message: str, fix: str = "") -> Problem:
        """What is wrong with the value that ``path`` leads to."""
        known = self.known_path(path)
        return Problem(self.file, self.line_of(known), field_name(known), message, fix)

    def fail(self, path: Path, message: str, fix: str = "") -> SpecFileError:
        """The error for one problem (to be raised by the caller)."""
        return SpecFileError([self.problem(path, message, fix)])


def _has(here: Any, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(here, list) and 0 <= part < len(here)
    return isinstance(here, dict) and part in here


def field_name(path: Path) -> str:
    """A path as people write it.

    >>> field_name(("entries", 3, "dtype_configs", 0))
    'entries[3].dtype_configs[0]'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def fail(
    file: str, line: int | None, message: str, fix: str = "", field: str = ""
) -> SpecFileError:
    """The error for one problem of a file that is still read (to be raised by the caller)."""
    return SpecFileError([Problem(file, line, field, message, fix)])


def _too_deep(file: str, line: int | None) -> SpecFileError:
    return fail(file, line, f"nested deeper than {MAX_DEPTH} levels")


def _twice(file: str, key: str, line: int, known: Mapping) -> SpecFileError:
    message = f"the key {quoted(key)} appears twice (first on line {known.lines[key]})"
    return fail(file, line, message, "remove one of the two", key)


# JSON text to located values. Duplicate keys are errors, as are NaN and Infinity (not JSON).

_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|[{\[]|[^\s"{}\[\],:]+|\n'
)  # what begins a value or a key; lines
_MAX_DIGITS = 400


class _Refused(str):
    """What stands for a value that is none, with what is wrong with it."""


def read_json(text: str, file: str) -> Located:
    """Parse JSON text. ``file`` names it in errors. Raises SpecFileError (a SpecError).

    >>> read_json('{"a": 1,\\n "b": [2]}', "a.json").data.lines
    {'a': 1, 'b': 2}
    """
    text = text.removeprefix("\ufeff")
    try:
        tree = json.loads(
            text, object_pairs_hook=tuple, parse_int=_whole, parse_constant=_no_number
        )
    except json.JSONDecodeError as error:
        raise fail(file, error.lineno, f"not valid JSON: {error.msg}") from None
    except RecursionError:
        raise _too_deep(file, None) from None
    lines = _lines(text)
    first = next(lines)
    return Located(file, _located(tree, first, lines, file, 0), first)


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


def _located(value: Any, line: int, lines: Iterator[int], file: str, depth: int) -> Any:
    """``value``, whose mappings are tuples of pairs, with its line and the next of ``lines``."""
    if depth > MAX_DEPTH:
        raise _too_deep(file, line)
    if isinstance(value, _Refused):
        raise fail(file, line, f"not valid JSON: {value}")
    if isinstance(value, list):
        items = Listing(line)
        for item in value:
            items.lines.append(next(lines))
            items.append(_located(item, items.lines[-1], lines, file, depth + 1))
        return items
    if not isinstance(value, tuple):
        return value
    fields = Mapping(line)
    for key, item in value:
        at = next(lines)
        if key in fields:
            raise _twice(file, key, at, fields)
        fields.lines[key] = at
        fields[key] = _located(item, next(lines), lines, file, depth + 1)
    return fields


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

    >>> read_yaml("name: a\\nentries: []", "a.yaml").data.lines
    {'name': 1, 'entries': 2}
    """
    try:
        return _YamlReader(_events(text), file).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise fail(file, line, f"not valid YAML: {message}") from None
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise fail(file, None, f"not valid YAML: {first}") from None
    except (OverflowError, ValueError) as error:
        if isinstance(error, SpecFileError):
            raise
        raise fail(file, None, f"not valid YAML: {error}") from None  # "\\UFFFFFFFF"


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
    """One file being read: the collections that are open, and how many values it has expanded to."""

    def __init__(self, events: Iterator[Any], file: str) -> None:
        self.events = events
        self.file = file
        self.count = 0
        self.open: list[Collection] = []
        self.anchored: dict[str, Any] = {}
        self.scalar = functools.cache(plain_scalar)

    def document(self) -> Located:
        next(self.events)
        if isinstance(next(self.events), yaml.StreamEndEvent):
            raise fail(self.file, 1, "the file is empty", "start with: schema_version: 1")
        [whole], [line] = self.values()
        more = next(self.events)
        if not isinstance(more, yaml.StreamEndEvent):
            problem = "expected a single document in the stream but found another document"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=more.start_mark)
        return Located(self.file, whole, line)

    def values(self) -> tuple[list[Any], list[int]]:
        """The values up to the end of the document, which is one, and their lines."""
        whole = Listing(1)
        here: Any = whole
        self.open.append(whole)
        key: str | None = None  # of the value that comes, in a mapping
        for event in self.events:
            if isinstance(event, yaml.CollectionEndEvent):
                here = self.close()
                continue
            if isinstance(event, yaml.DocumentEndEvent):
                break
            value: Any
            line = event.start_mark.line + 1
            if key is None and type(here) is Mapping:
                key = self.key(event, here, line)
                continue
            if type(event) is yaml.ScalarEvent and not event.anchor and not event.tag:
                value = event.value if event.style else self.scalar(event.value)
                self.count += 1
            else:
                value = self.value(event, line)
            if self.count > MAX_VALUES or len(self.open) > MAX_DEPTH + 1:
                raise self.too_large(line)
            if key is None:
                here.append(value)
                here.lines.append(line)
            else:
                here[key], key = value, None
            if isinstance(event, yaml.CollectionStartEvent):
                self.open.append(here := value)
        return whole, whole.lines

    def close(self) -> Collection:
        """The collection around the one that ends."""
        ended, around = self.open.pop(), self.open[-1]
        ended.size += len(ended)
        _hold(around, ended)
        return around

    def key(self, event: Any, mapping: Mapping, line: int) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise fail(self.file, line, "a key must be a plain word")
        key: str = event.value
        if event.anchor:
            self.anchored[event.anchor] = plain_scalar(key)
        if key in mapping:
            raise _twice(self.file, key, line, mapping)
        mapping.lines[key] = line
        return key

    def value(self, event: Any, line: int) -> Any:
        """What is no plain scalar: a collection that begins, an alias, what has an anchor or a tag."""
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, line)
        if event.tag and event.tag != f"tag:yaml.org,2002:{_TAGS[type(event)]}":
            message = f"the tag {event.tag!r} is not supported"
            raise fail(self.file, line, message, "write plain values; no object is created")
        self.count += 1
        if isinstance(event, yaml.ScalarEvent):
            value = event.value if event.style else self.scalar(event.value)
        else:
            value = Mapping(line) if isinstance(event, yaml.MappingStartEvent) else Listing(line)
        if event.anchor in self.anchored:
            problem = f"found duplicate anchor {event.anchor!r}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        if event.anchor:
            self.anchored[event.anchor] = value
        return value

    def alias(self, event: Any, line: int) -> Any:
        if event.anchor not in self.anchored:
            problem = f"found undefined alias {event.anchor!r}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        value = self.anchored[event.anchor]
        self.count += 1
        if isinstance(value, Collection):
            holds_itself = any(each is value for each in self.open)
            if holds_itself or len(self.open) + value.height > MAX_DEPTH:
                raise _too_deep(self.file, line)
            self.count += value.size - 1
            _hold(self.open[-1], value)
        return value

    def too_large(self, line: int) -> SpecFileError:
        if self.count <= MAX_VALUES:
            return _too_deep(self.file, line)
        return fail(self.file, line, f"more than {MAX_VALUES} values (through aliases?)")


def _hold(outer: Collection, inner: Collection) -> None:
    """``outer``, whose own items are counted when it ends, holds ``inner``."""
    outer.size += inner.size - 1
    outer.height = max(outer.height, inner.height + 1)


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
