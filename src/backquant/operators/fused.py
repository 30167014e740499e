"""Entries of operators that run as one kernel, from their names: ``conv2d+batch_norm2d+relu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backquant.backend_config import BackendPatternConfig
from backquant.errors import SpecError
from backquant.operators import conv, linear
from backquant.operators.entry import observed, swapped
from backquant.operators.index import find, named
from backquant.operators.operator import Operator

__all__ = ["fused_entries"]

_Names = tuple[str, ...]


def fused_entries(name: str) -> list[BackendPatternConfig]:
    """Entries for a weighted operator with what follows it, in each spelling, without dtype configs.

    1. What this package has fused modules for (batch norms, ReLU) becomes these, for training, too.
    2. Another operator behind it belongs to the pattern, and stays a node of its own.

    Raises SpecError for a name that no operator has, and for sequences that are neither.

    >>> [str(entry.normal_pattern) for entry in fused_entries("conv2d+hardswish")][:1]
    ['torch.nn.Hardswish(torch.nn.Conv2d)']
    """
    operators = [named(part) for part in name.split("+")]
    names = tuple(operator.name for operator in operators)
    known = [row for row, row_names in _known(operators[0]) if row_names == names]
    patterns = {row.pattern for row in known}
    pairs = [row for row in _pairs(operators) if row.pattern not in patterns]
    if not known and not pairs:
        raise SpecError(
            f"{name} is not known to be one kernel",
            where=f"operator {name!r}",
            fix="a weighted operator and one after it (conv2d+relu6), or with batch norm and ReLU "
            "(conv2d+batch_norm2d+relu)",
        )
    return [*known, *pairs]


def _table(root: Operator) -> list[BackendPatternConfig]:
    if root.name == "linear":
        return linear.entries([])
    dimension = int(root.name[-2]) if root.name[-2:-1].isdigit() else 0
    if root.name == f"conv{dimension}d":
        return conv.conv_entries(conv.CONV[dimension])
    if root.name == f"conv_transpose{dimension}d":
        return conv.transposed_entries(conv.TRANSPOSED[dimension])
    return []


def _known(root: Operator) -> Iterator[tuple[BackendPatternConfig, _Names]]:
    """The rows of the tables, each with the operators that it stands for."""
    classes: dict[Any, _Names] = {}
    for row in _table(root):
        names = classes.get(row.pattern, (root.name,))
        if isinstance(row.pattern, tuple):
            found = [find(part) for part in row.pattern]
            names = tuple(operator.name for operator in found if operator is not None)
        for made in (row.fused_module, row.qat_module):
            if made is not None:
                classes[made] = names
        if row.root_module is not None and root.reference is not None:
            row.set_reference_quantized_module(root.reference)
        yield row, names


def _pairs(operators: list[Operator]) -> Iterator[BackendPatternConfig]:
    """Rule 2."""
    root, *tails = operators
    if len(tails) != 1 or not root.is_weighted or tails[0].is_weighted:
        return
    if tails[0].name.startswith("batch_norm"):
        return
    for first in root.calls:
        if isinstance(first, str):
            continue
        for last in tails[0].calls:
            pair = (first, last)
            if isinstance(first, type) and root.reference is not None:
                yield swapped(pair, first, root.reference)
            else:
                yield observed(pair)
