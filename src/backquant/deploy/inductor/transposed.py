"""Float transposed convolutions, into which Inductor folds constants along the wrong axis.

Its binary folding (torch 2.13, ``_inductor/fx_passes/binary_folding.py``) takes the first axis of the weight
for the output channels, which of a transposed convolution are the second: where there are as many inputs as
outputs, a batch norm behind it scales the inputs. So a clamp that changes no value is put in between.
"""

from __future__ import annotations

import math

from backquant.deploy.program import Program
from backquant.operators import overload, overloads

_TRANSPOSED = overloads("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def keep_transposed(program: Program) -> None:
    """Put such a bound, in ``program`` itself, behind each transposed convolution.

    >>> import torch
    >>> from torch import fx
    >>> from backquant.deploy.program import export_program
    >>> layer = fx.symbolic_trace(lambda x, weight: torch.conv_transpose1d(x, weight))
    >>> made = export_program(layer, (torch.zeros(1, 1, 4), torch.ones(1, 1, 2)), {}, None)
    >>> keep_transposed(made)
    >>> [node.name for node in made.exported.graph.nodes]
    ['x', 'weight', 'conv_transpose1d', 'clamp_min_default', 'output']
    """
    graph = program.exported.graph
    for node in [node for node in graph.nodes if node.target in _TRANSPOSED]:
        with graph.inserting_after(node):
            bounded = graph.call_function(overload("clamp_min"), (node, -math.inf))
        bounded.meta = dict(node.meta)
        node.replace_all_uses_with(bounded, delete_user_cb=lambda user, b=bounded: user is not b)
    program.exported.graph_module.recompile()
