"""The reference model of kernels whose weights are float16, and whose inputs stay float32.

FBGEMM's do, where float16 is asked for at each call: a gate's sum of large inputs is off by its share of what
they were rounded by, and a state that the gate holds near 0 by that part of itself.
"""

from __future__ import annotations

import copy

from torch import fx

from backquant.lower.dynamic import dynamic_input


def with_float_inputs(reference: fx.GraphModule) -> fx.GraphModule | None:
    """``reference`` without casts to a narrower float and back at each call; ``None`` if it has none.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> half = graph.call_function(torch.ops.aten.to.dtype, (x, torch.float16))
    >>> _ = graph.output(graph.call_function(torch.ops.aten.to.dtype, (half, torch.float32)))
    >>> reference = fx.GraphModule(torch.nn.Module(), graph)
    >>> reference(torch.tensor([2049.0])), with_float_inputs(reference)(torch.tensor([2049.0]))
    (tensor([2048.]), tensor([2049.]))
    """
    made = copy.deepcopy(reference)
    changed = False
    for node in made.graph.nodes:
        cast = dynamic_input(node)
        if cast is not None and cast.dtype.is_floating_point:
            node.replace_all_uses_with(cast.source)
            changed = True
    if not changed:
        return None
    made.graph.eliminate_dead_code()
    made.recompile()
    return made
