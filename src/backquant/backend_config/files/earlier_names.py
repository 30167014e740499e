"""Keys of spec files of earlier versions, read as the fields that they are called now."""

from __future__ import annotations

import warnings
from dataclasses import replace

from backquant.backend_config.defaults import EARLIER_NAMES as OF_OVERRIDES
from backquant.backend_config.files.located import Located, Path, fail, field_name, plain
from backquant.backend_config.leave_float import EARLIER_NAMES as OF_LEAVE_FLOAT

__all__ = ["with_current_names"]

_RULES = {
    ("defaults", "overrides"): OF_OVERRIDES,
    ("defaults", "leave_float"): OF_LEAVE_FLOAT,
    ("qdq", "leave_float"): OF_LEAVE_FLOAT,
}


def with_current_names(tree: Located, file: str) -> Located:
    """``tree``, sound in structure, with current names; warns of each earlier one, with file and line.

    Raises ``SpecError`` (SpecFileError) where a rule has both names, and they differ.
    """
    for (part, field), names in _RULES.items():
        given = tree.value.get(part)
        listed = (given.value or {}).get(field) if given is not None else None
        rules = listed.value if listed is not None else []
        for index, rule in enumerate(rules):
            for earlier, name in names.items():
                if earlier in rule.value:
                    path = (part, field, index, earlier)
                    rules[index] = _renamed(rule, name, path, file)
    return tree


def _renamed(rule: Located, name: str, path: Path, file: str) -> Located:
    values, lines, earlier = dict(rule.value), dict(rule.key_lines), str(path[-1])
    value, line = values.pop(earlier), lines.pop(earlier)
    if name in values and plain(values[name]) != plain(value):
        message = f"{earlier!r} and {name!r} are two names of one field, and differ"
        raise fail(file, line, path, message, f"keep {name!r} only")
    told = f"{file}:{line}: {field_name(path)} is called {name!r} now"
    warnings.warn(told, DeprecationWarning, stacklevel=2)
    values, lines = {name: value, **values}, {name: line, **lines}
    return replace(rule, value=values, key_lines=lines)
