"""Values that depend on no input of the model."""

from __future__ import annotations

from torch import fx


def input_independent(graph: fx.Graph) -> set[str]:
    """Names of the nodes whose values depend on no placeholder; one pass.

    >>> graph = fx.Graph()
    >>> w = graph.get_attr("w")
    >>> x = graph.call_method("add", (graph.placeholder("x"), graph.call_method("neg", (w,))))
    >>> sorted(input_independent(graph))
    ['neg', 'w']
    """
    known: set[str] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if all(source.name in known for source in node.all_input_nodes):
            known.add(node.name)
    return known
