"""Biases that are computed, added behind the linear layer: no integer kernel takes them inside.

Those of Swin V2 and BEiT, ``torch.cat((q, zeros, v))``, are constants and folded.
A bias that depends on an input is an addition, and the product before it runs on integers.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from torch import fx
from torch.nn import functional as F

from backquant.graph.constant_products import Constants
from backquant.graph.provenance import Scope


def add_computed_biases(
    module: fx.GraphModule, scopes: dict[str, Scope], kept: Collection[Any] = ()
) -> int:
    """Let the computed biases of linear layers with constant weights be added, in place; how many.

    >>> import torch
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = torch.nn.Parameter(torch.ones(2, 3))
    ...     def forward(self, x, b):
    ...         return F.linear(x, self.w, b)
    >>> module = fx.symbolic_trace(Model())
    >>> add_computed_biases(module, {}), [node.name for node in module.graph.nodes]
    (1, ['x', 'b', 'w', 'linear', 'add', 'output'])
    """
    if F.linear in kept:
        return 0
    constants = Constants(module)
    count = 0
    for node in list(module.graph.find_nodes(op="call_function", target=F.linear)):
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        bias = given.get("bias")
        if not isinstance(bias, fx.Node) or bias.op == "get_attr":
            continue
        if constants.value(given.get("weight")) is None:
            continue
        node.args, node.kwargs = (given["input"], given["weight"]), {}
        with module.graph.inserting_after(node):
            added = module.graph.call_function(operator.add, (node, bias))
        node.replace_all_uses_with(added, lambda user, added=added: user is not added)
        added.meta.update(node.meta)
        scopes[added.name] = scopes.get(node.name, Scope("", None))
        count += 1
    return count
