"""Operators: every spelling of each, where its weight is, what it becomes, and an example."""

from __future__ import annotations

from backquant.operators.described import entries_of
from backquant.operators.example import Example, Sample, Weight
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
from backquant.operators.operator import FixedQParams, Operator, QParamsRule
from backquant.operators.written import overload

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
    "module_for_call",
    "moves_values",
    "named",
    "overload",
    "overloads",
    "spellings",
]
