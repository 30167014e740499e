"""Patterns, functions, conditions and numbers as plain data, both ways.

A pattern is written as one of

1. an operator: ``torch.nn.Conv2d``, ``operator.add``, ``torch.ops.aten.add.Tensor``, ``.view``;
2. a list of operators in forward order: ``[torch.nn.Conv2d, torch.nn.ReLU]``;
3. ``{reversed: [torch.add, MatchAllNode, torch.nn.Conv2d]}``, the nested form, last operator first;
4. ``{nodes: [{op: torch.relu}, {op: torch.add, inputs: [0, 0]}]}``, a graph in dataflow order;
5. ``{inputs: [x], nodes: [{name: out, op: torch.relu, arguments: [x]}]}``, a graph with names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from backquant.backend_config.checks import number_text
from backquant.backend_config.conditions import Condition, condition_from
from backquant.backend_config.fusers import ForwardFuser, ReversedFuser, SequentialFuser
from backquant.backend_config.graph_pattern import (
    AnyOrder,
    GraphNode,
    GraphPattern,
    NamedNode,
    NamedNodes,
    Value,
)
from backquant.backend_config.import_paths import Resolver, SpellingError, path_of, suggestion
from backquant.backend_config.layout import Path
from backquant.backend_config.pattern import MatchAllNode, NormalPattern, PatternNode
from backquant.backend_config.pattern import from_reversed as normal_from_reversed
from backquant.errors import SpecError, quoted

_Value = TypeVar("_Value")


def at_path(path: Path, make: Callable[..., _Value], *arguments: Any) -> _Value:
    """``make(*arguments)``; a SpellingError inside gets ``path`` before its own."""
    try:
        return make(*arguments)
    except SpellingError as problem:
        problem.path = (*path, *problem.path)
        raise
    except SpecError as error:
        raise SpellingError(error.what, error.fix, path) from error


def is_operator_name(value: Any) -> bool:
    """Whether this text names an operator by its record, and not by an import path or a method.

    >>> is_operator_name("relu"), is_operator_name(".relu"), is_operator_name("torch.relu")
    (True, False, False)
    """
    return isinstance(value, str) and value.isidentifier() and value != ANY


def pattern_data(pattern: Any, reversed_form: bool = False) -> Any:
    """A pattern as strings, lists and dicts. Raises SpellingError.

    >>> import torch
    >>> from backquant.backend_config.pattern import MatchAllNode
    >>> pattern_data((torch.nn.Linear, torch.nn.ReLU))
    ['torch.nn.Linear', 'torch.nn.ReLU']
    >>> pattern_data((torch.add, MatchAllNode, "relu"), reversed_form=True)
    {'reversed': ['torch.add', 'MatchAllNode', '.relu']}
    """
    if isinstance(pattern, GraphPattern):
        return graph_data(pattern)
    if isinstance(pattern, NormalPattern):
        return {"nodes": [_node_data(node) for node in pattern.nodes]}
    text = operator_text(pattern)
    return {"reversed": text} if reversed_form else text


def _node_data(node: PatternNode) -> dict[str, Any]:
    if node.kind == "literal":
        if isinstance(node.op, str):
            return {"literal": node.op}
        value = operator_text(node.op)
        return {"constant" if isinstance(value, str) else "literal": value}
    data: dict[str, Any] = {"op": operator_text(node.op)}
    if node.inputs is not None:
        data["inputs"] = list(node.inputs)
    return {**data, "any_order": True} if node.any_order else data


def pattern_from(data: Any, resolver: Resolver) -> tuple[Any, bool]:
    """The pattern, and whether it is in reversed form. Raises SpellingError, or SpecError.

    >>> pattern_from({"reversed": ["torch.add", "MatchAllNode", 0]}, Resolver())[1]
    True
    """
    if isinstance(data, dict) and "inputs" in data:
        return graph_from(data, resolver), False
    if isinstance(data, dict) and "nodes" in data:
        nodes = [_node_from(node, resolver) for node in data["nodes"]]
        return NormalPattern(tuple(nodes)), False
    if isinstance(data, dict):
        return operator_from(data["reversed"], resolver), True
    return operator_from(data, resolver), False


def _node_from(data: dict[str, Any], resolver: Resolver) -> PatternNode:
    if "literal" in data:
        return PatternNode(data["literal"], None, "literal")
    if "constant" in data:
        return PatternNode(resolver.resolve(data["constant"]), None, "literal")
    inputs = data.get("inputs")
    [leaf] = normal_from_reversed(operator_from(data["op"], resolver)).nodes
    positions = None if inputs is None else tuple(inputs)
    return PatternNode(leaf.op, positions, leaf.kind, bool(data.get("any_order")))


_ORDERS = {"reversed_arguments": ReversedFuser, "forward_arguments": ForwardFuser}


def callable_data(function: Any) -> Any:
    """A fuser, getter or observer factory: its import path, or what it is made of.

    >>> import torch
    >>> callable_data(SequentialFuser(torch.nn.Sequential))
    {'sequential': 'torch.nn.Sequential'}
    >>> callable_data(torch.nn.functional.relu)
    'torch.nn.functional.relu'
    """
    if isinstance(function, NamedNode):
        return function.name
    if isinstance(function, NamedNodes):
        return list(function.names)
    if isinstance(function, SequentialFuser):
        data: dict[str, Any] = {"sequential": path_of(function.module_class)}
        return data if function.arity == 2 else {**data, "arity": function.arity}
    for key, order in _ORDERS.items():
        if isinstance(function, order):
            return {key: callable_data(function.fuser)}
    partial = getattr(function, "p", None)
    if isinstance(partial, functools.partial):
        return _factory_data(function, partial)
    return path_of(function)


def _factory_data(function: Any, partial: functools.partial[Any]) -> dict[str, Any]:
    if partial.args or getattr(function, "callable_args", None):
        raise SpellingError(
            f"{function!r} holds values made at call time", "use with_args(name=value) only"
        )
    arguments = {name: _argument_data(value) for name, value in partial.keywords.items()}
    return {"factory": path_of(partial.func), "with_args": arguments}


def _argument_data(value: Any) -> Any:
    if isinstance(value, str):
        raise SpellingError(f"the text argument {value!r} cannot be told from an import path")
    if value is None or isinstance(value, (bool, int, float)):
        return operator_text(value)
    return callable_data(value)


def callable_from(data: Any, resolver: Resolver) -> Any:
    """What ``callable_data`` wrote. Raises SpellingError.

    >>> callable_from({"sequential": "torch.nn.Sequential", "arity": 3}, Resolver()).arity
    3
    """
    if isinstance(data, list) or (isinstance(data, str) and "." not in data):
        return data  # names of the nodes of a graph pattern
    if not isinstance(data, dict):
        return resolver.resolve(data)
    if "sequential" in data:
        return SequentialFuser(resolver.resolve(data["sequential"]), data.get("arity", 2))
    for key, order in _ORDERS.items():
        if key in data:
            return order(callable_from(data[key], resolver))
    maker = resolver.resolve(data["factory"])
    with_args = getattr(maker, "with_args", None)
    if not isinstance(maker, type) or with_args is None:
        raise SpellingError(
            f"{data['factory']} is no class with with_args", "name an observer class"
        )
    arguments = {
        name: callable_from(item, resolver) if isinstance(item, (str, dict)) else item
        for name, item in data.get("with_args", {}).items()
    }
    return with_args(**arguments)


# Graph patterns, both ways.
#
# ``{inputs: [x], nodes: [{name: gate, op: torch.sigmoid, arguments: [x]}, …]}``. An argument is a name, a
# number, ``true``, ``false``, ``null``, ``MatchAllNode``, ``{text: tanh}``, or ``{constant: torch.float16}``.
# A node without ``arguments`` has any.

ANY = "MatchAllNode"


def operator_text(op: Any) -> Any:
    """One operator or literal of a pattern, or a tuple of them as a list.

    Raises SpellingError when one has no spelling.

    >>> import torch
    >>> operator_text("view"), operator_text(torch.add), operator_text(MatchAllNode), operator_text(0)
    ('.view', 'torch.add', 'MatchAllNode', 0)
    """
    if isinstance(op, str):
        return f".{op}"
    if isinstance(op, tuple):
        return [operator_text(item) for item in op]
    if isinstance(op, type) and op.__name__ == ANY:
        return ANY
    if isinstance(op, float):
        number_data(op)  # refuses what JSON cannot carry
    if op is None or isinstance(op, (bool, int, float)):
        return op
    return path_of(op)


def operator_from(text: Any, resolver: Resolver) -> Any:
    """What ``operator_text`` wrote. Raises SpellingError.

    >>> import torch
    >>> operator_from(".view", Resolver()), operator_from("torch.add", Resolver()) is torch.add
    ('view', True)
    """
    if isinstance(text, list):
        return tuple([operator_from(item, resolver) for item in text])
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
        "nodes": [_graph_node_data(node) for node in pattern.nodes],
    }


def _graph_node_data(node: GraphNode) -> dict[str, Any]:
    data: dict[str, Any] = {"name": node.name, "op": operator_text(node.op)}
    if node.arguments is not None:
        data["arguments"] = [_graph_argument_data(argument) for argument in node.arguments]
    return {**data, "any_order": True} if node.any_order else data


def _graph_argument_data(argument: Any) -> Any:
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
        written = at_path(("nodes", index), _written, node, resolver)
        if node["name"] in nodes:
            message = f"the name {node['name']!r} stands twice"
            raise SpellingError(message, path=("nodes", index, "name"))
        nodes[node["name"]] = written
    try:
        return GraphPattern(data["inputs"], nodes, name=data.get("name", ""))
    except SpecError as error:
        raise SpellingError(error.what, error.fix, _path(error.where, list(nodes))) from error


def _path(where: str, names: list[str]) -> Path:
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


# Dtypes, schemes and numbers as a file writes them.


def constant_from(text: str, kind: Any) -> Any:
    """The dtype, or the qscheme, of that name, with or without the prefix. Raises SpellingError.

    >>> constant_from("quint8", torch.dtype), constant_from("torch.float", torch.dtype)
    (torch.quint8, torch.float32)
    >>> constant_from("qint9", torch.dtype)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    SpellingError: unknown dtype "qint9"; did you mean "qint8"?
    """
    name = text.removeprefix("torch.")
    value = getattr(torch, name, None)
    if isinstance(value, kind):
        return value
    known = [word for word, item in vars(torch).items() if isinstance(item, kind)]
    message = f"unknown {kind.__name__} {quoted(text)}"
    raise SpellingError(message, suggestion(name, sorted(known)))


def number_data(value: Any) -> Any:
    """A number as it is, except that small powers of two become readable text.

    Raises SpellingError for what is no finite number: JSON cannot carry it.

    >>> number_data(2.0**-12), number_data(0.0078), number_data(-127)
    ('2**-12', 0.0078, -127)
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise SpellingError(f"{value} is not a finite number", "leave the bound out (None)")
    text = number_text(value)
    return text if text.startswith("2**") else value


def number_from(value: Any) -> Any:
    """The number that ``number_data`` wrote.

    >>> number_from("2**-12") == 2.0**-12, number_from(3)
    (True, 3)
    """
    if not isinstance(value, str):
        return value
    exponent = int(value.removeprefix("2**"))
    if not -1074 <= exponent <= 1023:
        raise SpellingError(f"{value} is outside of the range of a float")
    return math.ldexp(1.0, exponent)


# Conditions, with the place of what is wrong in one.

Accept = Callable[[Condition | None], None]


def _anything(_: Condition | None) -> None:
    """Every condition is accepted."""


def condition_at(data: Any, accept: Accept = _anything) -> Condition | None:
    """The condition of a mapping of the file; ``accept`` raises for one that is not to be there.

    Raises ``SpellingError`` with the path to the entry of the mapping that is wrong.

    >>> print(condition_at({"stride": [1, 2]}))
    stride one of 1, 2
    """
    try:
        condition = condition_from(data)
        accept(condition)
    except SpecError as error:
        raise SpellingError(error.what, error.fix, _place(data, accept)) from error
    return condition


def _place(data: Any, accept: Accept) -> Path:
    """The path to the first part of a condition that is wrong by itself."""
    if not isinstance(data, dict):
        return ()
    for key, value in data.items():
        if is_condition({key: value}, accept):
            continue
        if key == "not":
            return (key, *_place(value, accept))
        if key in ("all", "any") and isinstance(value, list):
            at = next(i for i, item in enumerate(value) if not is_condition(item, accept))
            return (key, at, *_place(value[at], accept))
        return (key,)
    return ()


def is_condition(data: Any, accept: Accept = _anything) -> bool:
    """Whether ``data`` writes a condition, which ``accept`` takes."""
    if data is None:
        return False
    try:
        condition = condition_from(data)
        accept(condition)
    except SpecError:
        return False
    return condition is not None
