"""A ``torch.fx.Graph`` as a list of nodes in JSON, and back."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from backquant.artifact.callables import function_path, resolve
from backquant.artifact.values import Decoder, Encoder
from backquant.errors import ArtifactError

__all__ = ["decode_graph", "encode_graph"]


def encode_graph(graph: Graph, encoder: Encoder, path: str) -> list[dict[str, Any]]:
    """Nodes in order: op, name, target, args, kwargs. Node metadata is not stored."""
    rows = []
    for node in graph.nodes:
        where = f"{path}: node {node.name}".lstrip(": ")
        row = {"op": node.op, "name": node.name, "target": _encode_target(node, encoder)}
        if node.args:
            row["args"] = encoder.encode(list(node.args), where)
        if node.kwargs:
            row["kwargs"] = {
                key: encoder.encode(value, where) for key, value in node.kwargs.items()
            }
        rows.append(row)
    return rows


def _encode_target(node: Node, encoder: Encoder) -> str:
    if node.op == "call_function":
        assert callable(node.target)
        return function_path(node.target, encoder.allow)
    return str(node.target)


def decode_graph(rows: list[dict[str, Any]], decoder: Decoder) -> Graph:
    """The graph, with the very node names that were stored."""
    graph = Graph()
    nodes: dict[str, Node] = {}
    local = decoder.within(nodes)
    for row in rows:
        target = row["target"]
        if row["op"] == "call_function":
            target = resolve(target, decoder.allow)
        args = tuple(local.decode(row.get("args", [])))
        kwargs = {key: local.decode(value) for key, value in row.get("kwargs", {}).items()}
        node = graph.create_node(row["op"], target, args, kwargs, name=row["name"])
        if node.name != row["name"]:
            raise ArtifactError(f"the graph holds the node name {row['name']!r} twice")
        nodes[row["name"]] = node
    graph.lint()
    return graph
