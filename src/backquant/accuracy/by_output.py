"""SQNR of each output, and of each part of an output that the model joins last, on one batch.

One number over all outputs hides a head whose scores are lost beside boxes in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from backquant.accuracy.compare import as_float, compared
from backquant.accuracy.comparison import OperatorError
from backquant.accuracy.figures import ErrorSums
from backquant.graph import as_arguments
from backquant.operators.joined_outputs import joined_outputs
from backquant.prepare import PreparedModule, unobserved
from backquant.runtime import QuantizedModel

_MOST = 200.0  # dB: no error


@dataclass(frozen=True)
class OutputPlace:
    """An output by its position, or a part of one that the node ``join`` makes.

    >>> print(OutputPlace(0), OutputPlace(0, 1, "cat"), sep="; ")
    output 0; output 0, part 1 of 'cat'
    """

    output: int
    part: int | None = None
    join: str = ""

    def __str__(self) -> str:
        part = "" if self.part is None else f", part {self.part} of {self.join!r}"
        return f"output {self.output}{part}"


def sqnr_by_output(
    floating: nn.Module, made: QuantizedModel, prepared: PreparedModule, batch: Any
) -> tuple[dict[OutputPlace, float], list[ErrorSums]]:
    """In dB, of outputs that hold floats alone and of their joined parts. And the sums of these outputs."""
    wanted, found = _leaves(floating, batch), _leaves(made, batch)
    integers = list(made.output_qparams.values())
    args, kwargs = as_arguments(batch)
    joins = joined_outputs(unobserved(prepared), lambda module: module(*args, **kwargs))
    figures: dict[OutputPlace, float] = {}
    sums: list[ErrorSums] = []
    for place, (one, two) in enumerate(zip(wanted, found, strict=False)):
        if not one.is_floating_point() or not one.numel() or one.shape != two.shape:
            continue
        real = two if two.is_floating_point() else as_float(two, integers.pop(0))
        assert real is not None
        sums.append(_sums(one, real))
        figures[OutputPlace(place)] = _bounded(sums[-1])
        if (join := joins.get(place)) is not None:
            pieces = zip(join.parts(one), join.parts(real), strict=True)
            for number, (part, other) in enumerate(pieces):
                figures[OutputPlace(place, number, join.node)] = _bounded(_sums(part, other))
    return figures, sums


def costliest(
    made: QuantizedModel, prepared: PreparedModule, batch: Any, place: OutputPlace
) -> tuple[str, str]:
    """The operator that costs an output most, by its path or node, and what leaves it in float: the join of a
    part, else the operator that adds the largest error."""
    if place.join:
        operator = made.plan.decisions[place.join].operator.rpartition(".")[2]
        return place.join, f"set_object_type(torch.{operator}, None)"
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
