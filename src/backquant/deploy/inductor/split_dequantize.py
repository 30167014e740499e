"""Dequantize nodes that Inductor keeps apart.

Inductor merges equal dequantize nodes, and its matcher of linear layers (torch 2.13,
``_register_dequant_promotion``) then overlooks those that share their input with each other and with
anything else, as query, key and value do beside a residual addition: the reshape in between has several
users, and is looked at before its own input was divided. So operators without a weight read a dequantize
node that differs in a bound, which the operator does not use (its docstring says so).
"""

from __future__ import annotations

from torch import fx

from backquant.graph import copied_graph
from backquant.lower.qdq import is_dequantize
from backquant.nn.quantized.reference.integer_weights import IntegerWeights


def split_dequantize(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``module`` in which readers without a weight have dequantize nodes that equal no other.

    >>> from torch import nn
    >>> split_dequantize(fx.symbolic_trace(nn.Identity())).graph.find_nodes(op="output")
    [output]
    """
    made = fx.GraphModule(module, copied_graph(module.graph))
    for node in list(made.graph.nodes):
        if not is_dequantize(node):
            continue
        weighted = [user for user in node.users if reads_weight(made, user)]
        others = [user for user in node.users if user not in weighted]
        if not weighted or not others:
            continue
        tensor, scale, zero_point, low, high, dtype = node.args
        with made.graph.inserting_after(node):
            own = made.graph.call_function(
                node.target, (tensor, scale, zero_point, low - 1, high, dtype)
            )
        for user in others:
            user.replace_input_with(node, own)
    made.recompile()
    return made


def reads_weight(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether ``node`` computes with an integer weight.

    >>> from torch import nn
    >>> module = fx.symbolic_trace(nn.Identity())
    >>> [reads_weight(module, node) for node in module.graph.nodes]
    [False, False]
    """
    if node.op == "call_module":
        parts = module.get_submodule(str(node.target)).modules()
        return any(isinstance(part, IntegerWeights) for part in parts)
    return any("dequantize_per_channel" in str(arg.target) for arg in node.all_input_nodes)
