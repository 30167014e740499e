"""The reference model of kernels that quantize to 7 bits at each call, where 8 are asked for.

FBGEMM's and oneDNN's dynamic kernels in PyTorch do (``reduce_range``), whatever the range of the observer.
"""

from __future__ import annotations

import copy

from torch import fx

from backquant.lower.dynamic import is_dynamic_boundary

_EIGHT, _SEVEN = (0, 255), (0, 127)


def with_seven_bits(reference: fx.GraphModule) -> fx.GraphModule | None:
    """``reference`` whose ranges from 0 to 255, measured at each call, end at 127; ``None`` if it has none.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> choose = torch.ops.quantized_decomposed.choose_qparams.tensor
    >>> chosen = graph.call_function(choose, (x, 0, 255, 1e-5, torch.uint8))
    >>> _ = graph.output(chosen)
    >>> made = with_seven_bits(fx.GraphModule(torch.nn.Module(), graph))
    >>> [node.args[1:3] for node in made.graph.nodes if node.op == "call_function"]
    [(0, 127)]
    """
    made = copy.deepcopy(reference)
    changed = False
    for node in made.graph.nodes:
        if is_dynamic_boundary(node):
            args = _narrowed(node.args)
            changed = changed or args != node.args
            node.args = args
    if not changed:
        return None
    made.recompile()
    return made


def _narrowed(args: tuple[fx.node.Argument, ...]) -> tuple[fx.node.Argument, ...]:
    """``args`` with 0 and 255, one behind the other, as 0 and 127."""
    for place in range(len(args) - 1):
        if args[place : place + 2] == _EIGHT:
            return (*args[:place], *_SEVEN, *args[place + 2 :])
    return args
