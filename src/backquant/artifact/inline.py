"""Functions that a trace left whole (``torch.fx.wrap``), taken apart for the file where that is possible.

A file holds operators, not anybody's functions; see ``backquant.graph.wrapped``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType

from torch import fx

from backquant.artifact.functions import function_path
from backquant.errors import ArtifactError
from backquant.graph import copied_graph, inline_call


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
        if _is_foreign(node, allow):
            inline_call(graph, node)
    return graph


def _is_foreign(node: fx.Node, allow: Sequence[str]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, FunctionType):
        return False
    try:
        function_path(node.target, allow)
    except ArtifactError:
        return True
    return False
