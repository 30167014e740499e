"""SQNR of each output, and of each part of an output that the model joins last, on one batch.

One number over all outputs hides a head whose scores are lost beside boxes in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from backquant.accuracy.compare import as_float, compared
from backquant.accuracy.comparison import OperatorError
from backquant.accuracy.figures import ErrorSums
from backquant.graph import as_arguments
from backquant.operators import find
from backquant.prepare import PreparedModule, unobserved
from backquant.runtime import QuantizedModel

_MOST = 200.0  # dB: no error
_JOINS = ("cat", "stack")


def sqnr_by_output(
    floating: nn.Module, made: QuantizedModel, prepared: PreparedModule, batch: Any
) -> tuple[dict[str, float], list[ErrorSums]]:
    """In dB, by ``"output 0"`` and ``"output 0, part 1 of 'cat'"``; of outputs that hold floats alone.
    And the sums of these outputs."""
    wanted, found = _leaves(floating, batch), _leaves(made, batch)
    integers = list(made.output_qparams.values())
    parts = _parts(prepared, batch)
    figures: dict[str, float] = {}
    sums: list[ErrorSums] = []
    for place, (one, two) in enumerate(zip(wanted, found, strict=False)):
        if not one.is_floating_point() or not one.numel() or one.shape != two.shape:
            continue
        real = two if two.is_floating_point() else as_float(two, integers.pop(0))
        assert real is not None
        label = f"output {place}"
        sums.append(_sums(one, real))
        figures[label] = _bounded(sums[-1])
        if place in parts:
            name, dim, sizes = parts[place]
            pieces = zip(one.split(sizes, dim), real.split(sizes, dim), strict=True)
            for number, (part, other) in enumerate(pieces):
                figures[f"{label}, part {number} of {name!r}"] = _bounded(_sums(part, other))
    return figures, sums


def costliest(
    made: QuantizedModel, prepared: PreparedModule, batch: Any, output: str
) -> tuple[str, str]:
    """The operator that costs an output most, by its path or node, and what leaves it in float: the join of a
    part, else the operator that adds the largest error."""
    _, _, part = output.partition(", part ")
    if part:
        name = part.partition(" of ")[2].strip("'")
        return (
            name,
            f"set_object_type(torch.{made.plan.decisions[name].operator.split('.')[-1]}, None)",
        )
    comparison = compared(unobserved(prepared), made, [batch])
    rows = {row.node: row for row in comparison.rows}
    row = min((row for row in rows.values() if not row.rounds), key=lambda each: each.added)
    read = [rows[name] for name in comparison.inputs[row.node]]
    # what is rounded may lose what this operator needs: its makers stay float, too
    makers = [rows[n] for one in read for n in (comparison.inputs[one.node] if one.rounds else ())]
    paths = [_path(made, each) for each in (row, *read, *makers) if not each.rounds]
    rules = [f"set_module_name({path!r}, None)" for path in dict.fromkeys(paths) if path]
    return row.name, ".".join(rules)


def _path(made: QuantizedModel, row: OperatorError) -> str:
    decision = made.plan.decisions.get(row.operators[0])
    return "" if decision is None else decision.module_path


def _sums(wanted: torch.Tensor, found: torch.Tensor) -> ErrorSums:
    sums = ErrorSums()
    sums.add(wanted, found)
    return sums


def _bounded(sums: ErrorSums) -> float:
    return max(-_MOST, min(_MOST, sums.sqnr))


def _leaves(module: nn.Module, batch: Any) -> list[torch.Tensor]:
    args, kwargs = as_arguments(batch)
    with torch.no_grad():
        made = tree_leaves(module(*args, **kwargs))
    return [leaf for leaf in made if isinstance(leaf, torch.Tensor)]


def _parts(prepared: PreparedModule, batch: Any) -> dict[int, tuple[str, int, list[int]]]:
    """Of each output that is a join: its name, the axis, and the sizes of the parts."""
    plain = unobserved(prepared)
    output = plain.graph.output_node()
    leaves = [leaf for leaf in tree_leaves(output.args[0]) if isinstance(leaf, fx.Node)]
    joins = dict(_joins(leaves))
    if not joins:
        return {}
    output.args = ([read for read, _ in joins.values()],)
    plain.recompile()
    args, kwargs = as_arguments(batch)
    with torch.no_grad():
        made = plain(*args, **kwargs)
    found = {}
    for (place, (_, dim)), tensors in zip(joins.items(), made, strict=True):
        is_stack = _operator(leaves[place]) == "stack"
        sizes = [1 if is_stack else int(tensor.shape[dim]) for tensor in tensors]
        found[place] = (leaves[place].name, dim, sizes)
    return found


def _operator(node: fx.Node) -> str:
    known = find(node.target)
    return "" if known is None else known.name


def _joins(leaves: list[fx.Node]) -> Iterator[tuple[int, tuple[Any, int]]]:
    for place, leaf in enumerate(leaves):
        if _operator(leaf) not in _JOINS:
            continue
        read = leaf.args[0] if leaf.args else leaf.kwargs.get("tensors")
        dim = leaf.args[1] if len(leaf.args) > 1 else leaf.kwargs.get("dim", 0)
        if isinstance(read, (list, tuple)) and type(dim) is int:
            yield place, (list(read), dim)
