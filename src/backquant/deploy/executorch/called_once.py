"""A module of its own for each call: XNNPACK (ExecuTorch 1.5) gives other numbers where a linear layer or
a convolution is called twice with inputs on different scales, and refuses convolutions of 1d that are."""

from __future__ import annotations

import copy

from torch import fx

from backquant.graph import copied_graph, get_module, set_module


def called_once(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, or one whose modules with parameters are called once each: further calls have copies.

    >>> import torch
    >>> class Twice(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = torch.nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return self.fc(self.fc(x))
    >>> made = called_once(fx.symbolic_trace(Twice()))
    >>> [node.target for node in made.graph.find_nodes(op="call_module")]
    ['fc', 'fc_call1']
    """
    seen: dict[str, int] = {}
    made = fx.GraphModule(module, copied_graph(module.graph))
    for node in made.graph.find_nodes(op="call_module"):
        target = str(node.target)
        called = get_module(made, target)
        if not [*called.parameters(), *called.buffers()]:
            continue
        count = seen[target] = seen.get(target, -1) + 1
        if count:
            node.target = f"{target}_call{count}"
            set_module(made, node.target, copy.deepcopy(called))
    if not any(seen.values()):
        return module
    made.recompile()
    return made
