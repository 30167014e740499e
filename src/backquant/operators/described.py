"""Entries of a description from the names of operators: every spelling, and what the record says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from backquant.backend_config import BackendPatternConfig, DTypeConfig, ObservationType
from backquant.errors import SpecError
from backquant.operators import conv, linear
from backquant.operators.entry import admit, functional, observed, sharing, swapped
from backquant.operators.fixed_qparams import constrain
from backquant.operators.index import find, named
from backquant.operators.operator import Operator, QParamsRule

__all__ = ["fused_entries", "entries_of"]


# Entries of operators that run as one kernel, from their names: ``conv2d+batch_norm2d+relu``.

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


def entries_of(
    names: Iterable[str], dtype_configs: Sequence[DTypeConfig] = ()
) -> list[BackendPatternConfig]:
    """An entry for each module, function and method of the operators of these names.

    1. An output that keeps the input's qparams shares its observer; a result that is no tensor of values
       is not observed.
    2. A weighted module becomes its reference module, for training its QAT module, which has an entry,
       too; a function says where its weight and bias are.
    3. Where the range of the output is known, ``quint8`` activations have its scale and zero point.
    4. Names joined by ``+`` are operators that run as one kernel: ``conv2d+batch_norm2d+relu``.

    Raises SpecError for a name that no operator has.

    >>> import torch
    >>> uint8 = DTypeConfig(torch.quint8, torch.quint8)
    >>> [(str(e.normal_pattern), e.observation_type.name) for e in entries_of(["relu6"], [uint8])]
    [('torch.nn.ReLU6', 'OUTPUT_SHARE_OBSERVER_WITH_INPUT'), \
('torch.nn.functional.relu6', 'OUTPUT_SHARE_OBSERVER_WITH_INPUT')]
    """
    found = []
    for name in names:
        if "+" in name:
            found += admit(fused_entries(name), dtype_configs)
        else:
            operator = named(name)
            configs = _configs(operator, dtype_configs)
            found += [entry.set_dtype_configs(configs) for entry in _entries(operator)]
    return found


def _entries(operator: Operator) -> Iterator[BackendPatternConfig]:
    for spelling in operator.calls:
        entry = _entry(operator, spelling)
        yield entry
        if entry.qat_module is not None and operator.reference is not None:
            yield swapped(entry.qat_module, spelling, operator.reference)


def _entry(operator: Operator, spelling: Any) -> BackendPatternConfig:
    if operator.shares_qparams:
        return sharing(spelling)
    if operator.qparams is QParamsRule.NONE:
        none = ObservationType.INPUT_OUTPUT_NOT_OBSERVED
        return BackendPatternConfig(spelling).set_observation_type(none)
    if not isinstance(spelling, type):
        index = operator.weight_index
        if index is None or isinstance(spelling, str):
            return observed(spelling)
        return functional(spelling, weight=index, bias=operator.bias_index)
    if not operator.is_weighted or operator.reference is None:
        return observed(spelling)
    entry = swapped(spelling, spelling, operator.reference)
    return entry if operator.qat is None else entry.set_qat_module(operator.qat)


def _configs(operator: Operator, configs: Sequence[DTypeConfig]) -> list[DTypeConfig]:
    """Rule 3; a config that says something of scales itself stays as it is."""
    fixed = operator.fixed
    if fixed is None:
        return [config.copy() for config in configs]
    return [
        config.copy() if _says_scales(config) else constrain(config, fixed) for config in configs
    ]


_OF_SCALES = ("scales", "scale_range", "scale_dtype", "scale_exact_match", "zero_point_exact_match")


def _says_scales(config: DTypeConfig) -> bool:
    demands = (config.input_dtype_with_constraints, config.output_dtype_with_constraints)
    return any(
        demand.power_of_two_scale or getattr(demand, field) is not None
        for demand in demands
        for field in _OF_SCALES
    )
