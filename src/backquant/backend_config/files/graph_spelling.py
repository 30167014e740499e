"""Graph patterns as plain data, both ways.

``{inputs: [x], nodes: [{name: gate, op: torch.sigmoid, arguments: [x]}, …]}``. An argument is a name, a
number, ``true``, ``false`` or ``null``, ``MatchAllNode``, ``{text: tanh}``, or ``{constant: torch.float16}``.
A node without ``arguments`` has any.
"""

from __future__ import annotations

from typing import Any

from backquant.backend_config.files.import_paths import Resolver, SpellingError, path_of
from backquant.backend_config.files.located import number_data
from backquant.backend_config.graph_pattern import AnyOrder, GraphNode, GraphPattern, Value
from backquant.backend_config.pattern import MatchAllNode
from backquant.errors import SpecError

ANY = "MatchAllNode"


def operator_text(op: Any) -> Any:
    """One operator or literal of a pattern. Raises SpellingError when it has no spelling.

    >>> import torch
    >>> operator_text("view"), operator_text(torch.add), operator_text(MatchAllNode), operator_text(0)
    ('.view', 'torch.add', 'MatchAllNode', 0)
    """
    if isinstance(op, str):
        return f".{op}"
    if isinstance(op, type) and op.__name__ == ANY:
        return ANY
    if op is None or isinstance(op, (bool, int, float)):
        return op if not isinstance(op, float) else _literal_float(op)
    return path_of(op)


def _literal_float(value: float) -> float:
    number_data(value)  # refuses what JSON cannot carry
    return value


def operator_from(text: Any, resolver: Resolver) -> Any:
    """What ``operator_text`` wrote. Raises SpellingError.

    >>> import torch
    >>> operator_from(".view", Resolver()), operator_from("torch.add", Resolver()) is torch.add
    ('view', True)
    """
    if not isinstance(text, str):
        return text
    if text == ANY:
        return MatchAllNode
    return text[1:] if text.startswith(".") else resolver.resolve(text)


def graph_data(pattern: GraphPattern) -> dict[str, Any]:
    """A graph pattern as strings, lists and dicts. Raises SpellingError.

    >>> import torch
    >>> graph_data(GraphPattern(["x"], {"out": (torch.add, "x", 1)}))["nodes"]
    [{'name': 'out', 'op': 'torch.add', 'arguments': ['x', 1]}]
    """
    data: dict[str, Any] = {"name": pattern.name} if pattern.name else {}
    return {
        **data,
        "inputs": list(pattern.inputs),
        "nodes": [_node_data(node) for node in pattern.nodes],
    }


def _node_data(node: GraphNode) -> dict[str, Any]:
    data: dict[str, Any] = {"name": node.name, "op": operator_text(node.op)}
    if node.arguments is not None:
        data["arguments"] = [_argument_data(argument) for argument in node.arguments]
    return {**data, "any_order": True} if node.any_order else data


def _argument_data(argument: Any) -> Any:
    if isinstance(argument, str):
        return argument
    if isinstance(argument, Value):
        return {"text": argument.value}
    text = operator_text(argument)
    return {"constant": text} if isinstance(text, str) and text != ANY else text


def graph_from(data: dict[str, Any], resolver: Resolver) -> GraphPattern:
    """What ``graph_data`` wrote. Raises SpellingError with the path of what is wrong.

    >>> node = {"name": "out", "op": "torch.relu", "arguments": ["x"]}
    >>> graph_from({"inputs": ["x"], "nodes": [node]}, Resolver())
    GraphPattern(['x'], {'out': (torch.relu, 'x')})
    """
    nodes: dict[str, Any] = {}
    for index, node in enumerate(data["nodes"]):
        try:
            written = _written(node, resolver)
        except SpellingError as problem:
            problem.path = ("nodes", index, *problem.path)
            raise
        if node["name"] in nodes:
            message = f"the name {node['name']!r} stands twice"
            raise SpellingError(message, path=("nodes", index, "name"))
        nodes[node["name"]] = written
    try:
        return GraphPattern(data["inputs"], nodes, name=data.get("name", ""))
    except SpecError as error:
        raise SpellingError(error.what, error.fix, _path(error.where, list(nodes))) from error


def _path(where: str, names: list[str]) -> tuple[str | int, ...]:
    """The place in the data that ``pattern.nodes.<name>`` stands for."""
    _, *parts = where.split(".")
    if len(parts) == 2 and parts[0] == "nodes" and parts[1] in names:
        return ("nodes", names.index(parts[1]))
    return tuple(parts[:1])


def _written(node: dict[str, Any], resolver: Resolver) -> Any:
    op = operator_from(node["op"], resolver)
    head = AnyOrder(op) if node.get("any_order") else op
    if node.get("arguments") is None:
        return head
    return (head, *(_argument(item, resolver) for item in node["arguments"]))


def _argument(data: Any, resolver: Resolver) -> Any:
    if isinstance(data, dict):
        return Value(data["text"]) if "text" in data else resolver.resolve(data["constant"])
    return MatchAllNode if data == ANY else data
