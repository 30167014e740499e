"""Records of what is slower on integers, in a spec file, with the place of what is wrong in one."""

from __future__ import annotations

from typing import Any

from backquant.backend_config.conditions import Condition, check_names
from backquant.backend_config.files.conditions import condition_at
from backquant.backend_config.files.dtype_values import at_path
from backquant.backend_config.files.scalars import number_from
from backquant.backend_config.known_slower import KnownSlower
from backquant.backend_config.records import operator_records


def known_slower_at(data: dict[str, Any]) -> KnownSlower:
    """The record of a mapping of the file. Raises ``SpellingError`` with the path to what is wrong.

    >>> where = {"hidden_size": {"max": 63}}
    >>> case = {"measured": "a case", "integer_us": 20, "float_us": 18}
    >>> known_slower_at({"operators": ["lstm"], "where": where, **case}).operators
    ('lstm',)
    """
    records = operator_records()
    for index, name in enumerate(data["operators"]):
        at_path(("operators", index), records.named, name)
    entries = records.entries_of(data["operators"], [])

    def accept(condition: Condition | None) -> None:
        for entry in entries:
            if condition is not None:
                check_names(condition, entry)

    where = at_path(("where",), condition_at, data["where"], accept)
    times = {name: at_path((name,), number_from, data[name]) for name in ("integer_us", "float_us")}
    return KnownSlower.from_dict({**data, **times, "where": where})
