"""Pickling of graphs and configs, with the functions that ``pickle`` cannot find by their own name.

A plain ``GraphModule`` is pickled as code and traced again when it is loaded: nodes get other names,
reads of parameters move. Here the nodes themselves are stored.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx

from backquant.backend_config.naming import functional_name
from backquant.graph import register_quantized_decomposed

_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class _Pickler(pickle.Pickler):
    """Writes operators, and functions that a factory made (``F.max_pool2d``), by name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and "<locals>" in obj.__qualname__:
            path = functional_name(obj)
            if path:
                return _functional, (path.rpartition(".")[2],)
        if isinstance(obj, _OPERATORS):
            return _operator, tuple(str(obj).split("."))
        return NotImplemented


def _functional(name: str) -> Any:
    return getattr(torch.nn.functional, name)


def _operator(*names: str) -> Any:
    found: Any = torch.ops
    if names[0] == "quantized_decomposed":
        register_quantized_decomposed()
    for name in names:
        found = getattr(found, name)
    return found


def dump(value: Any) -> bytes:
    """``value`` as bytes; what it holds has to be picklable otherwise.

    >>> load(dump(torch.ops.aten.add.Tensor)) is torch.ops.aten.add.Tensor
    True
    """
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def load(data: bytes) -> Any:
    """The inverse of ``dump``. As with any pickle, load only what you trust.

    >>> load(dump(torch.nn.functional.max_pool2d)) is torch.nn.functional.max_pool2d
    True
    """
    return pickle.loads(data)


@dataclass(frozen=True)
class _Reference:
    """An argument that is the node in this row."""

    row: int


def graph_rows(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The nodes of a graph without the graph: operator, target, arguments and name of each.

    >>> graph = fx.symbolic_trace(lambda x: x + 1).graph
    >>> [row[3] for row in graph_rows(graph)]
    ['x', 'add', 'output']
    """
    rows: dict[fx.Node, _Reference] = {}
    found = []
    for number, node in enumerate(graph.nodes):
        arguments = fx.map_arg((node.args, node.kwargs), lambda source: rows[source])  # type: ignore[arg-type,return-value]
        found.append((node.op, node.target, arguments, node.name))
        rows[node] = _Reference(number)
    return found


def graph_from_rows(rows: list[tuple[Any, ...]]) -> fx.Graph:
    """The inverse of ``graph_rows``: names included.

    >>> again = graph_from_rows(graph_rows(fx.symbolic_trace(lambda x: [x, x + 1]).graph))
    >>> [(node.name, node.args) for node in again.nodes]
    [('x', ()), ('add', (x, 1)), ('output', ([x, add],))]
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def read(argument: Any) -> Any:
        return nodes[argument.row] if isinstance(argument, _Reference) else argument

    for op, target, (args, kwargs), name in rows:
        own = fx.node.map_aggregate(args, read), fx.node.map_aggregate(kwargs, read)
        nodes.append(graph.create_node(op, target, *own, name=name))
    return graph
