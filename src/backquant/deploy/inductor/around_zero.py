"""Scales measured at each call, which Inductor takes from ranges that need not hold zero.

Its decomposition of ``choose_qparams`` (torch 2.13, ``_inductor/decomposition.py``) divides the largest less
the smallest value by the number of steps, and clamps the zero point: values on one side of zero saturate,
such as those behind a sigmoid. So it reads the two ends of the range that holds zero, which is what the
operator itself computes from.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from backquant.deploy.edits import AtenCalls
from backquant.deploy.program import Program
from backquant.graph.decomposed import register_quantized_decomposed


def hold_zero(program: Program) -> None:
    """Let each ``choose_qparams`` in ``program`` itself read the ends of a range with zero in it.

    >>> from backquant.deploy.program import export_program
    >>> register_quantized_decomposed()
    >>> def scale(x):
    ...     return torch.ops.quantized_decomposed.choose_qparams(x, 0, 255, 1e-7, torch.uint8)[0]
    >>> made = export_program(fx.symbolic_trace(scale), (torch.ones(8),), {}, None)
    >>> hold_zero(made)
    >>> [node.name for node in made.exported.graph.nodes][1:6]
    ['amin_default', 'clamp_max_default', 'amax_default', 'clamp_min_default', 'stack_default']
    """
    register_quantized_decomposed()
    target = torch.ops.quantized_decomposed.choose_qparams.tensor
    graph = program.exported.graph
    for node in graph.find_nodes(op="call_function", target=target):
        write, value = AtenCalls(node), cast("fx.Node", node.args[0])
        low, high = write.clamp_max(write.amin(value), 0), write.clamp_min(write.amax(value), 0)
        node.replace_input_with(value, write.stack([low, high]))
    program.exported.graph_module.recompile()
