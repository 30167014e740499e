"""Biases that are computed, added behind the linear layer: no integer kernel takes them inside.

Those of Swin V2 and BEiT, ``torch.cat((q, zeros, v))``, are constants and folded.
A bias that depends on an input is an addition, and the product before it runs on integers.
"""

from __future__ import annotations

import operator

from torch import fx
from torch.nn import functional as F

from backquant.graph.rewrite import GraphRewriter, arguments_by_name


def added_bias(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """The computed bias of a linear layer with a constant weight as an addition.

    >>> import torch
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = torch.nn.Parameter(torch.ones(2, 3))
    ...     def forward(self, x, b):
    ...         return F.linear(x, self.w, b)
    >>> module = fx.symbolic_trace(Model())
    >>> GraphRewriter(module).apply(added_bias), [node.name for node in module.graph.nodes]
    (1, ['x', 'b', 'w', 'linear', 'add', 'output'])
    """
    if node.target is not F.linear:
        return None
    given = arguments_by_name(node, "input", "weight", "bias")
    bias, weight = given.get("bias"), given.get("weight")
    is_computed = isinstance(bias, fx.Node) and bias.op != "get_attr"
    if not is_computed or write.constants.value(weight) is None:
        return None
    node.args, node.kwargs = (given["input"], weight), {}
    write.follow(node, operator.add, bias)
    return node
