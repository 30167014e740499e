"""Operators: every spelling of each, where its weight is, what it becomes, and an example."""

from __future__ import annotations

from backquant.operators.aten import overload
from backquant.operators.described import entries_of, folding_entries
from backquant.operators.index import (
    all_operators,
    find,
    find_root,
    module_for_call,
    moves_values,
    named,
    overloads,
    spellings,
)
from backquant.operators.operator import (
    Example,
    FixedQParams,
    Operator,
    QParamsRule,
    Sample,
    Weight,
)

__all__ = [
    "Example",
    "FixedQParams",
    "Operator",
    "QParamsRule",
    "Sample",
    "Weight",
    "all_operators",
    "entries_of",
    "find",
    "find_root",
    "folding_entries",
    "module_for_call",
    "moves_values",
    "named",
    "overload",
    "overloads",
    "spellings",
]
