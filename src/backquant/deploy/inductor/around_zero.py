"""Scales measured at each call, which Inductor takes from ranges that need not hold zero.

Its decomposition of ``choose_qparams`` (torch 2.13, ``_inductor/decomposition.py``) divides the largest less
the smallest value by the number of steps, and clamps the zero point: values on one side of zero saturate,
such as those behind a sigmoid. So it reads the two ends of the range that holds zero, which is what the
operator itself computes from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from backquant.deploy.program import Program
from backquant.graph.decomposed import register_quantized_decomposed

_aten = torch.ops.aten


def hold_zero(program: Program) -> None:
    """Let each ``choose_qparams`` in ``program`` itself read the ends of a range with zero in it.

    >>> from backquant.deploy.program import export_program
    >>> made = export_program(fx.symbolic_trace(torch.nn.ReLU()), (torch.zeros(1, 8),), {}, None)
    >>> hold_zero(made)  # measures nothing
    >>> any("stack" in node.name for node in made.exported.graph.nodes)
    False
    """
    register_quantized_decomposed()
    target = torch.ops.quantized_decomposed.choose_qparams.tensor
    graph = program.exported.graph
    for node in graph.find_nodes(op="call_function", target=target):
        value = node.args[0]
        assert isinstance(value, fx.Node)
        with graph.inserting_before(node):
            low = _call(graph, _aten.clamp_max.default, _call(graph, _aten.amin.default, value), 0)
            high = _call(graph, _aten.clamp_min.default, _call(graph, _aten.amax.default, value), 0)
            ends = graph.call_function(_aten.stack.default, ([low, high],))
        ends.meta["val"] = value.meta["val"].new_empty(2)
        node.replace_input_with(value, ends)
    program.exported.graph_module.recompile()


def _call(graph: fx.Graph, operator: Any, value: fx.Node, *args: Any) -> fx.Node:
    """One number of ``value``."""
    made = graph.call_function(operator, (value, *args))
    made.meta["val"] = value.meta["val"].new_empty(())
    return made
