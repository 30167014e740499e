"""Keys of spec files of earlier versions, read as the fields that they are called now."""

from __future__ import annotations

import warnings
from dataclasses import replace

from backquant.backend_config.declared import Declared, declared
from backquant.backend_config.description import Description
from backquant.backend_config.files.located import Located, Path, fail, field_name, plain
from backquant.backend_config.kinds import Nested, Several

__all__ = ["with_current_names"]


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
