"""What a trace held of its example inputs: checks of it in the graph, and how it is said."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

_SIGNS = {
    **{operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<="},
    **{operator.gt: ">", operator.ge: ">=", operator.add: "+", operator.sub: "-"},
    **{operator.mul: "*", operator.truediv: "/", operator.floordiv: "//", operator.mod: "%"},
    **{operator.pow: "**", operator.and_: "&", operator.or_: "|"},
}
_METHODS = frozenset({"size", "dim", "numel", "stride", "nelement", "is_floating_point"})
_SHOWN = 4
_OF_A_LINE = 2
_LONGEST = 120


class Held(NamedTuple):
    """``value`` of ``node``, which the lines at ``line`` (``file:line: source``) asked for."""

    value: Any
    line: str


def add_checks(graph: fx.Graph, held: dict[fx.Node, Held]) -> list[tuple[fx.Node, fx.Node]]:
    """Let ``graph`` raise ``AssertionError`` where a value is not what was held; returns the new nodes, each
    behind the one whose value it checks.

    >>> graph = fx.Graph()
    >>> size = graph.call_method("size", (graph.placeholder("x"), 0))
    >>> made = add_checks(graph, {size: Held(2, "")})
    >>> _ = graph.output(size)
    >>> module = fx.GraphModule({}, graph)
    >>> module(torch.ones(2))
    2
    >>> module(torch.ones(3))
    Traceback (most recent call last):
    AssertionError: prepared for x.size(0) == 2: prepare the model with example inputs like those of this call
    """
    made: list[tuple[fx.Node, fx.Node]] = []
    for node, (value, line) in held.items():
        said = (
            f"prepared for {_fact(node, value)}{_at(line)}: prepare the model with example inputs like those "
            "of this call"
        )
        with graph.inserting_before(_behind(node)):
            condition = _condition(graph, node, value)
            new = {condition, graph.call_function(torch._assert, (condition, said))} - {node}
        made += [(node, each) for each in new]
    return made


def _behind(node: fx.Node) -> fx.Node:
    """The first node behind ``node`` that may be: placeholders stay in front."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    return after


def _condition(graph: fx.Graph, node: fx.Node, value: Any) -> fx.Node:
    if value is True and node.op != "placeholder":
        return node
    if value is False and node.op != "placeholder":
        return graph.call_function(operator.not_, (node,))
    same: Callable[..., Any] = (
        operator.is_ if value is None or isinstance(value, bool) else operator.eq
    )
    return graph.call_function(same, (node, value))


def notes_of(held: dict[fx.Node, Held]) -> tuple[str, ...]:
    """What was held, for a report: arguments by name, answers by the lines that asked.

    >>> notes_of({fx.Graph().placeholder("flag"): Held(False, "")})
    ('arguments are held, and checked at each call: flag is False',)
    """
    arguments = [_fact(n, each.value) for n, each in held.items() if n.op == "placeholder"]
    by_line: dict[str, dict[str, None]] = {}
    for node, each in held.items():
        if node.op != "placeholder":
            by_line.setdefault(each.line, {})[_fact(node, each.value)] = None
    said = []
    if arguments:
        said.append(f"arguments are held, and checked at each call: {', '.join(arguments)}")
    if by_line:
        answers = [f"{_some(facts)}{_at(line)}" for line, facts in by_line.items()]
        more = f"; and {len(answers) - _SHOWN} more" if len(answers) > _SHOWN else ""
        listed = "; ".join(answers[:_SHOWN]) + more
        said.append(f"what forward asks of sizes is held, and checked at each call: {listed}")
    return tuple(said)


def _some(facts: Collection[str]) -> str:
    more = ", …" if len(facts) > _OF_A_LINE else ""
    return ", ".join(list(facts)[:_OF_A_LINE]) + more


def _fact(node: fx.Node, value: Any) -> str:
    text = text_of(node)
    if value is None or (isinstance(value, bool) and node.op == "placeholder"):
        return f"{text} is {value}"
    if isinstance(value, bool):
        return text if value else f"not ({text})"
    return f"{text} == {value!r}"


def _at(line: str) -> str:
    """Without the folders, and the end of a long line."""
    path, _, rest = line.partition(":")
    text = f"{Path(path).name}:{rest}"
    if not line:
        return ""
    return f" ({text})" if len(text) <= _LONGEST else f" ({text[:_LONGEST]}…)"


def text_of(node: Any, depth: int = 5) -> str:
    """What is asked of a tensor, as the expression that it is; tensors by their names.

    >>> graph = fx.Graph()
    >>> shape = graph.call_function(getattr, (graph.placeholder("x"), "shape"))
    >>> last = graph.call_function(operator.getitem, (shape, -1))
    >>> text_of(graph.call_function(operator.ne, (last, 3)))
    'x.shape[-1] != 3'
    """
    if not isinstance(node, fx.Node):
        return repr(node)
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    if not depth or node.kwargs or not _is_number(node):
        return str(node.name)
    args = [text_of(each, depth - 1) for each in node.args]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    if node.target is getattr:
        return f"{args[0]}.{node.args[1]}"
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    if node.target is len:
        return f"len({args[0]})"
    return f"{args[0]} {_SIGNS[node.target]} {args[1]}"  # type: ignore[index]


def _is_number(node: Any, depth: int = 5) -> bool:
    """Whether ``node`` is asked of a tensor, and no tensor, as far as the graph shows."""
    if not isinstance(node, fx.Node) or not depth:
        return not isinstance(node, fx.Node)
    if node.op == "call_method":
        return node.target in _METHODS
    if node.target is getattr or node.target is len:
        return True
    if node.target is operator.getitem:
        return _is_number(node.args[0], depth - 1)
    return node.target in _SIGNS and all(_is_number(each, depth - 1) for each in node.args)
