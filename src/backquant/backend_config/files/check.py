"""The structure of a spec file: what is wrong in it, and keys of earlier versions under the names of now."""

from __future__ import annotations

import json
import warnings
from functools import cache
from typing import Any

from backquant.backend_config.declared import Declared, declared, layouts_of
from backquant.backend_config.description import Description
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.files.located import Located, Mapping, field_name
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


def structure_problems(tree: Located) -> list[Problem]:
    """What of ``tree`` is not laid out as a spec file; empty when the structure is sound.

    >>> from backquant.backend_config.files.located import read_yaml
    >>> for problem in structure_problems(read_yaml("schema_version: 1\\nnmae: x", "x.yaml")): print(problem)
    x.yaml:1: name: this field is missing
    x.yaml:2: nmae: unknown field; did you mean "name"?
    """
    if not isinstance(tree.data, dict):
        return [tree.problem((), "a spec file holds a mapping", "schema_version: 1")]
    try:
        json.dumps(tree.data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return [tree.problem((), f"holds what is no text: {error.reason}")]
    found = [_problem(wrong, tree) for wrong in wrong_in(tree.data, file_layout())[:MOST_TOLD]]
    # on one line a misspelt field comes before the field that is missing because of it
    return sorted(dict.fromkeys(found), key=lambda it: (it.line or 0, it.message == MISSING))


def _problem(wrong: Wrong, tree: Located) -> Problem:
    message, fix = wrong.message, wrong.fix
    if wrong.path == ("schema_version",) and message != MISSING:
        given = tree.data["schema_version"]
        whole = type(given) is int
        said = repr(given if whole else str(given))
        message = f"this version of backquant reads schema_version {SCHEMA_VERSION}, not {said}"
        fix = "upgrade backquant" if whole else f"schema_version: {SCHEMA_VERSION}"
    return tree.problem(wrong.path, message, fix)


def take_current_names(
    tree: Located, cls: type = Description, data: Any = None, path: Path = ()
) -> None:
    """Give the keys of ``tree``, sound in structure, their current names; warn of each earlier one, with file
    and line.

    Raises ``SpecError`` (SpecFileError) where a record has both names, and they differ.
    """
    data = tree.data if data is None else data
    for field in declared(cls):
        if field.earlier in data:
            _rename(tree, data, field, (*path, field.earlier))
        below = data.get(field.name)
        if below is None:
            continue
        if isinstance(field.kind, Nested):
            take_current_names(tree, field.kind.record, below, (*path, field.name))
        elif isinstance(field.kind, Several):
            for index, item in enumerate(below):
                take_current_names(tree, field.kind.record, item, (*path, field.name, index))


def _rename(tree: Located, record: Mapping, field: Declared, path: Path) -> None:
    told = f"{tree.file}:{tree.line_of(path)}: {field_name(path)} is called {field.name!r} now"
    if field.name in record and record[field.name] != record[field.earlier]:
        message = f"{field.earlier!r} and {field.name!r} are two names of one field, and differ"
        raise tree.fail(path, message, f"keep {field.name!r} only")
    warnings.warn(told, DeprecationWarning, stacklevel=2)
    for values in (record, record.lines):
        values[field.name] = values.pop(field.earlier)
