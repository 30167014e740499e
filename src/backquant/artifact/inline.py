"""Functions that a trace left whole (``torch.fx.wrap``), taken apart for the file where that is possible.

A file holds operators, not anybody's functions. A wrapped function whose branches hang on constants alone,
such as the ``stochastic_depth`` of a model in evaluation mode, is no more than the operators that it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from backquant.artifact.functions import function_path
from backquant.errors import ArtifactError
from backquant.graph import copied_graph

__all__ = ["inlined"]


def inlined(graph: fx.Graph, allow: Sequence[str] = ()) -> fx.Graph:
    """``graph``, or one like it with the operators of functions in place of calls that no file can hold.

    A function that cannot be taken apart is left: storing it is refused by name.

    >>> def twice(x, times):
    ...     return x * 2 if times == 2 else x
    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.call_function(twice, (graph.placeholder("x"), 2)))
    >>> [node.name for node in inlined(graph).nodes], len(graph.nodes)
    (['x', 'mul', 'output'], 3)
    """
    if not any(_is_foreign(node, allow) for node in graph.nodes):
        return graph
    graph = copied_graph(graph)
    for node in list(graph.nodes):
        body = _body(node) if _is_foreign(node, allow) else None
        if body is not None:
            _replace(graph, node, body)
    return graph


def _is_foreign(node: fx.Node, allow: Sequence[str]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, FunctionType):
        return False
    try:
        function_path(node.target, allow)
    except ArtifactError:
        return True
    return False


def _body(node: fx.Node) -> fx.Graph | None:
    """What the function does with these arguments, one placeholder for each of ``node``'s inputs."""
    body = fx.Graph()
    tracer = GraphAppendingTracer(body)
    proxies: dict[fx.Node, Any] = {
        n: fx.Proxy(body.placeholder(n.name), tracer) for n in node.all_input_nodes
    }
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxies.__getitem__)
    assert callable(node.target)
    try:
        result = node.target(*args, **kwargs)
    except Exception:  # code of somebody else: it is refused by name
        return None
    if not isinstance(result, fx.Proxy):
        return None
    body.output(result.node)
    return body


def _replace(graph: fx.Graph, node: fx.Node, body: fx.Graph) -> None:
    inner = [n for n in body.nodes if n.op == "placeholder"]
    known: dict[fx.Node, fx.Node] = dict(zip(inner, node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        result = graph.graph_copy(body, known)
    assert isinstance(result, fx.Node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
