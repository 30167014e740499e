"""The layout of spec files: JSON Schema as data, what of a file is not laid out so, and its published form.

A layout is a JSON Schema of the few words that ``wrong_in`` knows. Besides these it says what messages need:
``expected``, where no alternative fits a value, ``misspelt``, where a text does not match its pattern.
``layout.json`` has the layouts of patterns, functions, conditions and names; those of records, which are
``named``, follow from their fields (``declared.Record``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TypeAlias

from backquant.backend_config.conditions.expressions import OPERATOR, TENSOR
from backquant.backend_config.import_paths import suggestion

Layout: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]

FLAG: Layout = {"type": "boolean"}
TEXT: Layout = {"type": "string"}
INTEGER: Layout = {"type": "integer"}
_NULL: Layout = {"type": "null"}
_REF = "#/$defs/"


def ref(name: str) -> Layout:
    """The layout of this name in ``layout.json``."""
    return {"$ref": _REF + name}


def listed(item: Layout, least: int = 0) -> Layout:
    """The layout of a list."""
    return {"items": item, **({"minItems": least} if least else {}), "type": "array"}


def one_of(expected: str, *options: Layout) -> Layout:
    """The layout of one of several values; mappings are told apart by the first key that each requires."""
    return {"anyOf": list(options), "expected": expected}


def maybe(layout: Layout, **said: Any) -> Layout:
    """The layout of what may be left out or ``null``.

    >>> maybe(FLAG)
    {'anyOf': [{'type': 'boolean'}, {'type': 'null'}]}
    """
    if "anyOf" not in layout or "named" in layout:
        return {"anyOf": [layout, _NULL], **said}
    kept = {key: item for key, item in layout.items() if key != "members"}
    return {**kept, "anyOf": [*layout["anyOf"], _NULL], **said}


@cache
def _pieces() -> dict[str, Layout]:
    text = FilePath(__file__).with_suffix(".json").read_text(encoding="utf-8")
    pieces: dict[str, Layout] = json.loads(text)
    about = pieces["Where"]["description"]
    pieces["Where"]["description"] = about.format(quantities=", ".join((*OPERATOR, *TENSOR)))
    return pieces


# -- what is not laid out so -------------------------------------------------------------------------

MISSING = "this field is missing"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
_TYPES |= {dict: "object", type(None): "null"}
_NAMES = {"array": "list", "object": "dictionary"}


class Wrong(NamedTuple):
    """Something that is not laid out as it has to be: where, what, and the fix."""

    path: Path
    message: str
    fix: str = ""


def wrong_in(value: Any, layout: Layout) -> list[Wrong]:
    """What of ``value`` is not laid out so; empty when all is.

    >>> wrong_in({"stride": {"mx": 3}}, ref("Where"))
    [Wrong(path=('stride', 'mx'), message='unknown field', fix='did you mean "max"?')]
    """
    found: list[Wrong] = []
    _check(value, layout, (), found)
    return found


def _check(value: Any, layout: Layout, path: Path, found: list[Wrong]) -> None:
    known: tuple[Layout, ...] = ()
    while "type" not in layout:
        if "$ref" in layout:
            layout = _pieces()[layout["$ref"].removeprefix(_REF)]
            continue
        known = (layout.get("members") or _members(layout)).get(_TYPES[type(value)], ())
        if not known and "expected" in layout:
            found.append(Wrong(path, f"expected {layout['expected']}, got {_short(value)}"))
            return
        known = known or (layout["anyOf"][0],)
        layout = known[0] if len(known) == 1 else _chosen(value, known)
    if "enum" in layout or "const" in layout:
        _check_word(value, layout, path, found)
    elif message := _misfit(value, layout):
        found.append(Wrong(path, message))
    elif layout["type"] == "array":
        for index, item in enumerate(value):
            _check(item, layout["items"], (*path, index), found)
    elif layout["type"] == "object":
        _check_mapping(value, layout, path, found, known or (layout,))


def _members(layout: Layout) -> dict[str, tuple[Layout, ...]]:
    """The alternatives for each type of value, which are kept in the layout."""
    members: dict[str, tuple[Layout, ...]] = {}
    for option in _options(layout):
        members[option["type"]] = (*members.get(option["type"], ()), option)
    members.setdefault("integer", members.get("number", ()))
    layout["members"] = members
    return members


def _options(layout: Layout) -> Iterator[Layout]:
    if "$ref" in layout:
        yield from _options(_pieces()[layout["$ref"].removeprefix(_REF)])
    elif "anyOf" in layout:
        for option in layout["anyOf"]:
            yield from _options(option)
    else:
        yield layout


def _chosen(value: Any, options: tuple[Layout, ...]) -> Layout:
    """The alternative that a value of its type is meant for: by its pattern, or the key that it has."""
    if isinstance(value, str):
        fits = (each for each in options if _pattern(each).search(value))
        return next(fits, options[-1])
    keyed = (each for each in options if each.get("required", [None])[0] in value)
    return next(keyed, options[0])


def _check_word(value: Any, layout: Layout, path: Path, found: list[Wrong]) -> None:
    words = layout.get("enum") or [layout["const"]]
    if not any(type(value) is type(word) and value == word for word in words):
        fix = suggestion(str(value), map(str, words))
        found.append(Wrong(path, f"{value!r} is not one of the values allowed here", fix))


def _misfit(value: Any, layout: Layout) -> str:
    """What is wrong with a value by itself; empty if nothing is."""
    own, wanted = _TYPES[type(value)], layout["type"]
    message = ""
    if own != wanted and (own, wanted) != ("integer", "number"):
        message = f"should be a valid {_NAMES.get(wanted, wanted)}"
    elif wanted == "number" and not math.isfinite(value):
        message = "should be a finite number"
    elif "minimum" in layout and value < layout["minimum"]:
        message = f"should be greater than or equal to {layout['minimum']}"
    elif "pattern" in layout and not _pattern(layout).search(value):
        return f"{value!r} {layout['misspelt']}"
    elif _LENGTHS & layout.keys():
        message = _length(len(value), layout)
    return message and f"{message}, got {_short(value)}"


def _pattern(layout: Layout) -> re.Pattern[str]:
    return _compiled(layout.get("pattern", ""))


_LENGTHS = {"minItems", "maxItems", "minLength"}
_compiled = cache(re.compile)


def _length(given: int, layout: Layout) -> str:
    least: int = layout.get("minItems") or layout.get("minLength") or 0
    most: int = layout.get("maxItems", given)
    if least <= given <= most:
        return ""
    bound, word = (least, "least") if given < least else (most, "most")
    unit = "item" if "items" in layout else "character"
    return f"should have at {word} {bound} {unit}{'' if bound == 1 else 's'}, not {given}"


def _check_mapping(
    value: Mapping[str, Any],
    layout: Layout,
    path: Path,
    found: list[Wrong],
    alternatives: tuple[Layout, ...],
) -> None:
    fields, others = layout.get("properties", {}), layout.get("additionalProperties")
    for name in layout.get("required", ()):
        if name not in value:
            found.append(Wrong((*path, name), MISSING))
    for key, item in value.items():
        if key in fields:
            _check(item, fields[key], (*path, key), found)
        elif others:
            if "propertyNames" in layout:
                _check(key, layout["propertyNames"], (*path, key), found)
            _check(item, others, (*path, key), found)
        else:
            known = (field for each in alternatives for field in each["properties"].items())
            names = [name for name, field in known if "deprecated" not in field]
            found.append(Wrong((*path, key), "unknown field", suggestion(key, names)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# -- the published form ------------------------------------------------------------------------------

_NOT_PUBLISHED = ("expected", "misspelt", "members", "named")


def published(layout: Layout) -> Layout:
    """A layout as JSON Schema (draft 2020-12), with what it refers to under ``$defs``.

    >>> published(listed(ref("NodeName")))["items"]
    {'$ref': '#/$defs/NodeName'}
    """
    defined: dict[str, Layout] = {}
    schema = _published(layout, defined)
    return {"$defs": dict(sorted(defined.items())), **schema}


def _published(node: Any, defined: dict[str, Layout]) -> Any:
    if isinstance(node, list):
        return [_published(item, defined) for item in node]
    if not isinstance(node, dict):
        return node
    own = _fields_published(node, defined) if "named" not in node else {}
    name = node.get("named") or own.get("$ref", "").removeprefix(_REF)
    if name and name not in defined:
        defined[name] = {}  # it may hold itself
        defined[name] = _fields_published(node if "named" in node else _pieces()[name], defined)
    return own | ref(name) if name else own


def _fields_published(node: Layout, defined: dict[str, Layout]) -> Layout:
    plain = {k: _published(item, defined) for k, item in node.items() if k not in _NOT_PUBLISHED}
    if "pattern" in plain.get("propertyNames", {}):
        pattern = plain.pop("propertyNames")["pattern"]
        plain["patternProperties"] = {pattern: plain.pop("additionalProperties")}
    return plain
