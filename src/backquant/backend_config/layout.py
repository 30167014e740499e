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
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_COLLECTIONS = ("array", "object")
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
    pending: list[Wrong | tuple[Any, Layout, Path]] = [(value, layout, ())]
    while pending:
        next_one = pending.pop()
        if isinstance(next_one, Wrong):
            found.append(next_one)
            continue
        value, layout, path = next_one
        kind = _TYPES.get(type(value)) or _COLLECTIONS[isinstance(value, dict)]
        while "$ref" in layout:
            layout = _pieces()[layout["$ref"].removeprefix(_REF)]
        options: tuple[Layout, ...] = (layout,)
        if "type" not in layout:
            options = (layout.get("members") or _members(layout)).get(kind) or _first(layout)
            layout = options[0] if len(options) == 1 else _chosen(value, options)
        if "anyOf" in layout:
            found.append(Wrong(path, f"expected {layout['expected']}, got {_short(value)}"))
            continue
        is_free = kind == layout["type"] != "number" and _BOUNDS.isdisjoint(layout)
        wrong = None if is_free else _misfit(value, kind, layout, path)
        if wrong is not None:
            found.append(wrong)
        elif kind == "array":
            for at in reversed(range(len(value))):
                pending.append((value[at], layout["items"], (*path, at)))
        elif kind == "object":
            pending.extend(reversed(_of_mapping(value, layout, path, options)))
    return found


def _first(layout: Layout) -> tuple[Layout]:
    """The layout that is told of where none of the alternatives is for a value of its type."""
    while "type" not in layout and "expected" not in layout:
        following = layout.get("anyOf") or [_pieces()[layout["$ref"].removeprefix(_REF)]]
        layout = following[0]
    return (layout,)


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
        for option in options:
            if _compiled(option.get("pattern", "")).search(value):
                return option
        return options[-1]
    for option in options:
        if option.get("required", [None])[0] in value:
            return option
    return options[0]


def _misfit(value: Any, kind: str, layout: Layout, path: Path) -> Wrong | None:
    """What is wrong with a value by itself."""
    if "enum" in layout or "const" in layout:
        words = layout.get("enum") or [layout["const"]]
        if any(type(value) is type(word) and value == word for word in words):
            return None
        fix = suggestion(str(value), map(str, words))
        return Wrong(path, f"{value!r} is not one of the values allowed here", fix)
    wanted, message = layout["type"], ""
    if kind != wanted and (kind, wanted) != ("integer", "number"):
        message = f"should be a valid {_NAMES.get(wanted, wanted)}"
    elif wanted == "number" and not math.isfinite(value):
        message = "should be a finite number"
    elif "minimum" in layout and value < layout["minimum"]:
        message = f"should be greater than or equal to {layout['minimum']}"
    elif "pattern" in layout and not _compiled(layout["pattern"]).search(value):
        return Wrong(path, f"{value!r} {layout['misspelt']}")
    elif not _LENGTHS.isdisjoint(layout):
        message = _length(len(value), layout)
    return Wrong(path, f"{message}, got {_short(value)}") if message else None


_LENGTHS = {"minItems", "maxItems", "minLength"}
_BOUNDS = {*_LENGTHS, "minimum", "enum", "const", "pattern"}
_compiled = cache(re.compile)


def _length(given: int, layout: Layout) -> str:
    least: int = layout.get("minItems") or layout.get("minLength") or 0
    most: int = layout.get("maxItems", given)
    if least <= given <= most:
        return ""
    bound, word = (least, "least") if given < least else (most, "most")
    unit = "item" if "items" in layout else "character"
    return f"should have at {word} {bound} {unit}{'' if bound == 1 else 's'}, not {given}"


def _of_mapping(
    value: Mapping[str, Any], layout: Layout, path: Path, alternatives: tuple[Layout, ...]
) -> list[Wrong | tuple[Any, Layout, Path]]:
    """What is wrong with a mapping by itself, and the values in it with their layouts, in order."""
    fields, others = layout.get("properties", {}), layout.get("additionalProperties")
    missing = [name for name in layout.get("required", ()) if name not in value]
    found: list[Any] = [Wrong((*path, name), MISSING) for name in missing]
    for key, item in value.items():
        if key in fields:
            found.append((item, fields[key], (*path, key)))
        elif others:
            if "propertyNames" in layout:
                found.append((key, layout["propertyNames"], (*path, key)))
            found.append((item, others, (*path, key)))
        else:
            known = (field for each in alternatives for field in each["properties"].items())
            names = [name for name, field in known if "deprecated" not in field]
            found.append(Wrong((*path, key), "unknown field", suggestion(key, names)))
    return found


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
