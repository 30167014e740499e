"""The structure of a spec file: what is wrong in it, and keys of earlier versions under the names of now."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

from backquant.backend_config.declared import Declared, declared, layouts_of
from backquant.backend_config.description import Description
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.files.located import Located, fail, field_name, plain
from backquant.backend_config.import_paths import MOST_TOLD, Problem
from backquant.backend_config.kinds import Nested, Several
from backquant.backend_config.layout import (
    MISSING,
    TEXT,
    Layout,
    Path,
    Wrong,
    listed,
    maybe,
    published,
    ref,
    wrong_in,
)
from backquant.backend_config.pattern_config import BackendPatternConfig

SCHEMA_VERSION = 1


@cache
def file_layout() -> Layout:
    """The layout of a spec file, version 1: its own fields, and those that the classes declare."""
    entries = layouts_of(BackendPatternConfig, but=("pattern_complex_format",))
    names = maybe(listed(ref("OperatorNames"), 1), examples=[["relu", "conv2d+relu"]])
    names["description"] = "Names of operators: an entry for each module, function and method."
    added = "Appended to the dtype configs that the entry inherits."
    entry = {
        "patterns": maybe(listed(ref("Pattern"), 1)),
        "operators": names,
        "add_dtype_configs": {**entries["dtype_configs"], "description": added},
        **entries,
    }
    about = "What the backend can do with one pattern, with several that share every other field, or with "
    about += "every spelling of some operators."
    version = {
        "const": SCHEMA_VERSION,
        "description": "The version of this layout.",
        "type": "integer",
    }
    based = "A backend's name, or a file relative to this one, to start from."
    removed = {"description": "Patterns of the extended backend to leave out."}
    named = {"description": "Dtype configs by name, for the entries to refer to."}
    fields = {
        "schema_version": version,
        "name": {"description": "The name of the backend.", **TEXT},
        "extends": maybe(TEXT, description=based),
        "remove": {**removed, **listed(ref("Pattern"))},
        **layouts_of(Description, but=("name",)),
        "dtype_configs": {**named, "additionalProperties": DTypeConfig.layout(), "type": "object"},
        "entries": listed({"named": "Entry", **_object(about, entry)}),
    }
    whole = _object("A backend description for backquant.", fields)
    return {**whole, "required": ["schema_version", "name"]}


def _object(about: str, fields: dict[str, Layout]) -> Layout:
    head: Layout = {"additionalProperties": False, "description": about}
    return {**head, "properties": fields, "type": "object"}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of spec files of the current ``schema_version``, as a new dict.

    It is the content of ``schema_v1.json`` in this package. It checks structure; whether names can be
    imported is checked when a file is loaded.

    >>> json_schema()["required"]
    ['schema_version', 'name']
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:backquant:backend-config:schema:{SCHEMA_VERSION}",
        **published(file_layout()),
        "title": "backquant backend description",
    }


def structure_problems(tree: Located, file: str) -> list[Problem]:
    """What of ``tree`` is not laid out as a spec file; empty when the structure is sound.

    >>> tree = Located({"schema_version": Located(1, 1), "nmae": Located("x", 2)}, 1, {"nmae": 2})
    >>> for problem in structure_problems(tree, "x.yaml"): print(problem)
    x.yaml:1: name: this field is missing
    x.yaml:2: nmae: unknown field; did you mean "name"?
    """
    value = plain(tree)
    if not isinstance(value, dict):
        return [Problem(file, tree.line, "", "a spec file holds a mapping", "schema_version: 1")]
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return [Problem(file, tree.line, "", f"holds what is no text: {error.reason}", "")]
    found = [_problem(wrong, tree, file) for wrong in wrong_in(value, file_layout())[:MOST_TOLD]]
    # on one line a misspelt field comes before the field that is missing because of it
    return sorted(dict.fromkeys(found), key=lambda it: (it.line or 0, it.message == MISSING))


def _problem(wrong: Wrong, tree: Located, file: str) -> Problem:
    path, message, fix = tree.known_path(wrong.path), wrong.message, wrong.fix
    if path == ("schema_version",) and message != MISSING:
        given = tree.at(path).value
        whole = type(given) is int
        said = repr(given if whole else str(given))
        message = f"this version of backquant reads schema_version {SCHEMA_VERSION}, not {said}"
        fix = "upgrade backquant" if whole else f"schema_version: {SCHEMA_VERSION}"
    return Problem(file, tree.line_of(path), field_name(path), message, fix)


def with_current_names(
    tree: Located, file: str, cls: type = Description, path: Path = ()
) -> Located:
    """``tree``, sound in structure, with current names; warns of each earlier one, with file and line.

    Raises ``SpecError`` (SpecFileError) where a record has both names, and they differ.
    """
    for field in declared(cls):
        if field.earlier in tree.value:
            tree = _renamed(tree, field, (*path, field.earlier), file)
        below = tree.value.get(field.name)
        if below is None or below.value is None:
            continue
        if isinstance(field.kind, Nested):
            inside = with_current_names(below, file, field.kind.record, (*path, field.name))
            tree.value[field.name] = inside
        elif isinstance(field.kind, Several):
            for index, item in enumerate(below.value):
                place = (*path, field.name, index)
                below.value[index] = with_current_names(item, file, field.kind.record, place)
    return tree


def _renamed(record: Located, field: Declared, path: Path, file: str) -> Located:
    values, lines = dict(record.value), dict(record.key_lines)
    value, line = values.pop(field.earlier), lines.pop(field.earlier)
    if field.name in values and plain(values[field.name]) != plain(value):
        message = f"{field.earlier!r} and {field.name!r} are two names of one field, and differ"
        raise fail(file, line, path, message, f"keep {field.name!r} only")
    told = f"{file}:{line}: {field_name(path)} is called {field.name!r} now"
    warnings.warn(told, DeprecationWarning, stacklevel=2)
    values, lines = {field.name: value, **values}, {field.name: line, **lines}
    return replace(record, value=values, key_lines=lines)
