"""Entries of a description from the names of operators: every spelling, and what the record says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from backquant.backend_config import (
    AnyOrder,
    BackendPatternConfig,
    DTypeConfig,
    GraphPattern,
    MatchAllNode,
    ObservationType,
)
from backquant.errors import SpecError
from backquant.graph.arguments import argument_counts
from backquant.operators import conv, linear
from backquant.operators.entry import admit, functional, observed, sharing, swapped
from backquant.operators.fixed_qparams import constrain
from backquant.operators.index import find, named
from backquant.operators.operator import Operator, QParamsRule

__all__ = ["fused_entries", "entries_of"]


# Entries of operators that run as one kernel, from their names: ``conv2d+batch_norm2d+relu``.

_Names = tuple[str, ...]
_MOST_ARGUMENTS = 3  # of an operator inside of a chain, beyond those that it must have


def fused_entries(name: str) -> list[BackendPatternConfig]:
    """Entries for operators that run as one kernel, in each spelling, without dtype configs.

    1. What this package has fused modules for (batch norms, ReLU) becomes these, for training, too.
    2. What follows belongs to the pattern, and stays nodes of its own. Of an operator with two operands one
       is what was computed before, on either side.
    3. What is folded before it is named in ``folding_entries``.

    Raises SpecError for a name that no operator has, and for what no kernel can be.

    >>> [str(entry.normal_pattern) for entry in fused_entries("conv2d+hardswish")][:1]
    ['torch.nn.Hardswish(torch.nn.Conv2d)']
    >>> str(fused_entries("linear+add+relu")[0].normal_pattern)
    'torch.nn.ReLU(operator.add(torch.nn.Linear, *; any order))'
    """
    operators = [named(part) for part in name.split("+")]
    names = tuple(operator.name for operator in operators)
    known = [row for row, row_names in _known(operators[0]) if row_names == names]
    patterns = {row.pattern for row in known}
    chains = [row for row in _chains(operators, name) if row.pattern not in patterns]
    if not known and not chains:
        raise SpecError(
            f"{name} cannot be one kernel",
            where=f"operator {name!r}",
            fix="operators after one with a weight, or after another (conv2d+batch_norm2d+relu6, "
            "linear+add+relu, add+relu); batch norms come right after the layer",
        )
    return [*known, *chains]


def folding_entries(name: str) -> list[BackendPatternConfig]:
    """Entries that fold a batch norm in ``name`` before the rest is matched, and those of what is left then.
    A description that has other entries for these patterns keeps its own.

    >>> str(folding_entries("conv2d+batch_norm2d+relu6")[0].normal_pattern)
    'torch.nn.BatchNorm2d(torch.nn.Conv2d)'
    >>> folding_entries("conv2d+relu6"), folding_entries("conv2d+batch_norm2d")
    ([], [])
    """
    operators = [named(part) for part in name.split("+")]
    names = tuple(operator.name for operator in operators)
    count = _folded(operators)
    if count == len(operators) or not any(map(_is_norm, operators[1:count])):
        return []
    folding = [row for row, row_names in _known(operators[0]) if row_names == names[:count]]
    left = [operator for operator in operators if not _is_norm(operator)]
    return [*folding, *(row for row in _chains(left, name) if row.root_module is not None)]


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


def _folded(operators: Sequence[Operator]) -> int:
    """How many operators at the start are fused to one module; 0 if none are."""
    names = tuple(operator.name for operator in operators)
    fused = {row_names for _, row_names in _known(operators[0])}
    return next((n for n in range(len(names), 1, -1) if names[:n] in fused), 0)


def _is_norm(operator: Operator) -> bool:
    return operator.name.startswith("batch_norm")


def _chains(operators: list[Operator], name: str) -> Iterator[BackendPatternConfig]:
    """Rule 2."""
    root, folded = operators[0], _folded(operators)
    for start in (1, folded) if folded else (1,):
        tails = operators[start:]
        if not tails or not _can_start(root) or not all(map(_can_follow, tails)):
            continue
        follow = [list(_calls_after(tail)) for tail in tails]
        for head in _heads(operators[:start]):
            for calls in product(*follow):
                entry = _row(root, head, _pattern(head, tails, calls, name))
                is_graph = isinstance(entry.pattern, GraphPattern)
                yield entry._set_root_node_getter(root.name) if is_graph else entry


def _can_start(root: Operator) -> bool:
    is_plain = root.family in ("norm", *_PLAIN) and root.qparams is not QParamsRule.NONE
    return root.is_weighted or (is_plain and not root.gives_items)


def _can_follow(tail: Operator) -> bool:
    is_plain = tail.family in _PLAIN and tail.qparams is not QParamsRule.NONE
    return is_plain and not (tail.takes_list or tail.gives_items or tail.weight_index)


_PLAIN = ("activation", "fixed_qparams", "elementwise", "pooling", "shape")


def _heads(operators: Sequence[Operator]) -> Iterator[Any]:
    """What the first operators are in a graph: several are one module."""
    root = operators[0]
    if len(operators) == 1:
        yield from (
            call for call in root.calls if not isinstance(call, str) or not root.is_weighted
        )
        return
    names = tuple(operator.name for operator in operators)
    known = (row.pattern for row, row_names in _known(root) if row_names == names)
    yield from [row for row in known if row in root.fused] or root.modules


def _calls_after(tail: Operator) -> Iterator[tuple[Any, ...]]:
    """Each spelling, with the number of its arguments and whether the value before is the second of them."""
    for call in tail.calls:
        if tail.takes_two:
            yield from ((call, 2, side) for side in range(1 if tail.commutative else 2))
            continue
        counts = argument_counts(call) or range(1, 2)
        yield from ((call, count, 0) for count in counts[:_MOST_ARGUMENTS])


def _pattern(head: Any, tails: list[Operator], calls: Sequence[tuple[Any, ...]], name: str) -> Any:
    """A tuple where that says it; a graph for operands in any order."""
    if all(count == 1 for _, count, _ in calls):
        return (head, *(call for call, _, _ in calls))
    last = name.split("+", maxsplit=1)[0]
    inputs: list[str] = []
    nodes: dict[str, Any] = {last: head}
    for number, (tail, (call, count, side)) in enumerate(zip(tails, calls, strict=True)):
        arguments: list[Any] = [last, *[MatchAllNode] * (count - 1)]
        last = tail.name if tail.name not in nodes else f"{tail.name}{number}"
        if tail.takes_two:
            inputs.append(f"other{len(inputs) or ''}")
            arguments[1] = inputs[-1]
        operands = reversed(arguments) if side else arguments
        nodes[last] = (AnyOrder(call) if tail.takes_two and tail.commutative else call, *operands)
    return GraphPattern(inputs, nodes, name=name)


def _row(root: Operator, head: Any, pattern: Any) -> BackendPatternConfig:
    if isinstance(head, type) and root.is_weighted and root.reference is not None:
        return swapped(pattern, root.modules[0], root.reference)
    return observed(pattern)


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
    found: list[BackendPatternConfig] = []
    needed: list[BackendPatternConfig] = []
    for name in names:
        if "+" in name:
            found += admit(fused_entries(name), dtype_configs)
            needed += admit(folding_entries(name), dtype_configs)
        else:
            operator = named(name)
            configs = _configs(operator, dtype_configs)
            found += [entry.set_dtype_configs(configs) for entry in _entries(operator)]
    own = {entry.normal_pattern for entry in found}
    more = {entry.normal_pattern: entry for entry in needed}
    return [*found, *(entry for pattern, entry in more.items() if pattern not in own)]


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
