"""Linear layers whose weight depends on an input, as the products of two activations that they are.

The rows of such a weight are often samples (CLIP compares images with texts so). A scale for each row, as of
a weight, would be that of one sample of the calibration data, and another batch has other rows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from backquant.graph.arithmetic import plain_name
from backquant.graph.rewrite import GraphRewriter, arguments_by_name


def product_of_activations(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """A linear layer whose weight depends on an input as ``torch.matmul``, where the weight has two axes.

    >>> from backquant.graph.shapes import GraphValues
    >>> module = fx.symbolic_trace(lambda x, w: F.linear(x, w.relu()))
    >>> values = GraphValues(module, (torch.randn(2, 3), torch.randn(5, 3)))
    >>> GraphRewriter(module, values=values).apply(product_of_activations)
    1
    >>> [node.name for node in module.graph.nodes]
    ['x', 'w', 'relu', 'transpose', 'matmul', 'output']
    """
    is_function = node.op == "call_function"
    if not is_function or not (node.target is F.linear or plain_name(node.target) == "linear"):
        return None
    given = arguments_by_name(node, "input", "weight", "bias")
    weight: Any = given.get("weight")
    if not isinstance(weight, fx.Node) or weight.name in write.independent:
        return None
    facts = write.facts(weight)
    if facts is None or len(facts.shape) != 2:
        return None
    turned = write.call(node, "transpose", weight, 0, 1)
    made = write.call(node, torch.matmul, given["input"], turned)
    bias = given.get("bias")
    return made if bias is None else write.call(node, operator.add, made, bias)
