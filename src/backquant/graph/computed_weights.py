"""Linear layers whose weight depends on an input, as the products of two activations that they are.

The rows of such a weight are often samples (CLIP compares images with texts so). A scale for each row, as of
a weight, would be that of one sample of the calibration data, and another batch has other rows.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from backquant.graph.arithmetic import plain_name
from backquant.graph.provenance import Scope
from backquant.graph.shapes import GraphValues


def products_of_activations(
    module: fx.GraphModule,
    scopes: dict[str, Scope],
    values: GraphValues,
    kept: Collection[Any] = (),
) -> int:
    """Write linear layers whose weight depends on an input as ``torch.matmul``, in place; how many.

    ``values``: shapes of the tensors; a weight that has not two axes is left as it is, and so are operators
    in ``kept``.

    >>> module = fx.symbolic_trace(lambda x, w: F.linear(x, w.relu()))
    >>> x, w = torch.randn(2, 3), torch.randn(5, 3)
    >>> products_of_activations(module, {}, GraphValues(module, (x, w)))
    1
    >>> [node.name for node in module.graph.nodes]
    ['x', 'w', 'relu', 'transpose', 'matmul', 'output']
    """
    found = [
        node
        for node in module.graph.nodes
        if _is_linear(node)
        and node.target not in kept
        and isinstance(_given(node).get("weight"), fx.Node)
        and _given(node)["weight"].op != "get_attr"
    ]
    depending = _depending(module.graph) if found else frozenset()
    count = 0
    for node in found:
        given = _given(node)
        facts = values.of(given["weight"].name)
        if given["weight"] not in depending or facts is None or len(facts.shape) != 2:
            continue
        _write(module.graph, node, given, scopes)
        count += 1
    return count


def _is_linear(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        node.target is F.linear or plain_name(node.target) == "linear"
    )


def _given(node: fx.Node) -> dict[str, Any]:
    return dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs


def _depending(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that an input of the model leads to."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _write(graph: fx.Graph, node: fx.Node, given: dict[str, Any], scopes: dict[str, Scope]) -> None:
    with graph.inserting_before(node):
        made = [graph.call_method("transpose", (given["weight"], 0, 1))]
        made.append(graph.call_function(torch.matmul, (given["input"], made[0])))
        if given.get("bias") is not None:
            made.append(graph.call_function(operator.add, (made[1], given["bias"])))
    made[-1].meta.update(node.meta)
    scope = scopes.pop(node.name, Scope("", None))
    scopes.update((new.name, scope) for new in made)
    node.replace_all_uses_with(made[-1])
    graph.erase_node(node)
