"""Operators that runtimes lack, taken apart as their records say (``Operator.portable``).

OpenVINO does not take what the ONNX exporter makes of ``embedding_bag``, and ExecuTorch has no kernel for it.
Equations that are no products of two matrices (``torch.einsum`` of three operands, or without a sum) are
written as PyTorch computes them: OpenVINO mistakes their axes. So are joins that add axes to lists of tensors
(``torch.column_stack``): the exporter makes sequences of them, which OpenVINO does not take. ONNX's LSTM has
no projections (``nn.LSTM(proj_size=8)``): such a layer is written step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from backquant.deploy.program import Program, origins_of_stacks
from backquant.graph.quiet import quiet
from backquant.operators import all_operators, overload

_LSTM = overload("lstm", "input")
_JOINS = ("column_stack", "hstack", "vstack", "dstack")


def decomposed_for_runtimes(program: Program) -> Program:
    """``program`` without operators that runtimes lack; the same object where there is none.

    >>> from backquant.deploy.program import export_program
    >>> made = export_program(torch.fx.symbolic_trace(torch.nn.ReLU()), (torch.zeros(2),), {}, None)
    >>> decomposed_for_runtimes(made) is made
    True
    """
    table = _table()
    calls = [node for node in program.exported.graph.nodes if node.target in table]
    if all(node.target is _LSTM and not _projects(node.args[1]) for node in calls):
        return program
    with quiet(), torch.no_grad():
        exported = program.exported.run_decompositions(dict(table))
    return replace(program, exported=exported, origins=origins_of_stacks(exported.graph))


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    found = {each: made for known in all_operators() for each, made in known.portable.items()}
    composed = [overload("einsum"), *map(overload, _JOINS)]
    composed += [overload(f"atleast_{rank}d", "Sequence") for rank in (1, 2, 3)]
    known = torch.export.default_decompositions()
    return {**{each: known[each] for each in composed}, **found, _LSTM: _steps}


def _projects(state: Any) -> bool:
    """Whether the states of an LSTM, nodes or values, are of two widths."""
    hidden, cell = (getattr(each, "meta", {}).get("val", each) for each in state)
    return bool(hidden.shape[-1] != cell.shape[-1])


def _steps(x: torch.Tensor, state: Any, *args: Any) -> Any:
    """An LSTM with projections, step by step; any other stays as it is."""
    if not _projects(state):
        return NotImplemented
    return torch._decomp.decomposition_table[_LSTM](x, state, *args)
