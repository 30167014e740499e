"""Where rules leave operators in float (``LeaveFloat``, conditions 1 to 3), found in one walk each way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import fx

from backquant.backend_config import LeaveFloat
from backquant.backend_config.pattern import normal_form
from backquant.graph import GraphIndex, OperatorKey
from backquant.graph.export import interface_of
from backquant.match.matcher import key_of
from backquant.operators.index import find, find_root, moves_values


class FloatPlace(NamedTuple):
    """A node that stays float, and the rule that says so, by position."""

    node: str
    rule: int


def find_float_places(
    graph: GraphIndex,
    rules: Sequence[LeaveFloat],
    is_float_input: Callable[[str], bool] | None = None,
) -> tuple[FloatPlace, ...]:
    """The nodes that ``rules`` leave in float, in graph order.

    Args:
        graph: the (fused) graph.
        is_float_input: whether an input of this name may hold floats; others are indices and masks.
            Default: as an export says; all of a symbolic trace.

    >>> import operator, torch
    >>> def f(x, y):
    ...     return torch.nn.functional.layer_norm(x + y, (2,)) + 1
    >>> rule = LeaveFloat((operator.add,), before=(torch.nn.functional.layer_norm,))
    >>> find_float_places(GraphIndex(fx.symbolic_trace(f)), [rule])
    (FloatPlace(node='add', rule=0),)
    """
    found: dict[str, int] = {}
    tables: set[fx.Node] | None = None
    for position, rule in enumerate(rules):
        if not rule.at_places:
            continue
        if rule.with_table and tables is None:
            tables = _tables(graph, is_float_input or _float_inputs(graph))
        for node in _left_by(graph, rule, tables or set()):
            found.setdefault(node.name, position)
    return tuple(FloatPlace(name, found[name]) for name in graph.nodes if name in found)


def keys_of(operators: Iterable[Any]) -> set[OperatorKey | None]:
    """The keys under which calls of ``operators`` are found in a graph.

    >>> import torch
    >>> keys_of((torch.add,)) == {OperatorKey("function", torch.add)}
    True
    """
    return {key_of(normal_form(one).anchor) for one in operators}


def _left_by(graph: GraphIndex, rule: LeaveFloat, tables: set[fx.Node]) -> set[fx.Node]:
    wanted = keys_of(rule.operators)
    own = [node for node in graph.calls() if graph.key(node) in wanted]
    if not own:
        return set()
    after, before = keys_of(rule.after), keys_of(rule.before)
    left = {node for node in own if any(_made_by(graph, v, after) for v in _read(graph, node))}
    for node in reversed(own):
        readers = _readers(graph, node)
        if any(calls_one_of(graph, user, before) for user in readers) or (
            before and any(user in left for user in readers)
        ):
            left.add(node)
    return left | (_with_tables(graph, own, tables) if rule.with_table else set())


def _read(graph: GraphIndex, node: fx.Node) -> list[fx.Node]:
    return [value for value in node.all_input_nodes if not graph.has_no_tensors(value)]


# -- what is looked through ------------------------------------------------------------------------------


def _moves(graph: GraphIndex, node: fx.Node) -> bool:
    """Whether a node only moves the values of its first argument, drops some, or scales them."""
    key = graph.key(node)
    if key is None or not node.all_input_nodes:
        return False
    known = find(key.op)
    if known is None:
        return moves_values(key.op)
    if known.name == "mul":
        return any(value.op == "get_attr" for value in node.all_input_nodes)
    return known.family == "dropout" or (known.family == "shape" and known.shares_qparams)


def _moved(node: fx.Node) -> fx.Node:
    """The activation that a move reads."""
    values = [value for value in node.all_input_nodes if value.op != "get_attr"]
    return values[0] if values else node.all_input_nodes[0]


def _made_by(graph: GraphIndex, value: fx.Node, operators: set[OperatorKey | None]) -> bool:
    while not calls_one_of(graph, value, operators):
        if not _moves(graph, value):
            return False
        value = _moved(value)
    return True


def _readers(graph: GraphIndex, node: fx.Node) -> list[fx.Node]:
    """The nodes that read a value, directly or through operators that only move values."""
    found: list[fx.Node] = []
    pending = list(node.users)
    seen: set[fx.Node] = set()
    while pending:
        user = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        found.append(user)
        if _moves(graph, user):
            pending.extend(user.users)
    return found


def calls_one_of(graph: GraphIndex, node: fx.Node, operators: set[OperatorKey | None]) -> bool:
    """Whether a node calls one of ``operators``; a fused module counts as its root.

    >>> import torch
    >>> gm = fx.symbolic_trace(lambda x: torch.relu(x))
    >>> calls_one_of(GraphIndex(gm), list(gm.graph.nodes)[1], keys_of((torch.relu,)))
    True
    """
    key = graph.key(node)
    if key is None:
        return False
    if key in operators:
        return True
    root = find_root(key.op) if key.kind == "module" else None
    return root is not None and any(OperatorKey("module", cls) in operators for cls in root.modules)


# -- masks and tables ------------------------------------------------------------------------------------


def _float_inputs(graph: GraphIndex) -> Callable[[str], bool]:
    interface = interface_of(graph.module)
    floats = {} if interface is None else {a.name: a.holds_floats for a in interface.arguments}
    return lambda name: floats.get(name, True)


def _tables(graph: GraphIndex, is_float_input: Callable[[str], bool]) -> set[fx.Node]:
    """The values that depend on no float input and on no parameter of an operator."""
    found: set[fx.Node] = set()
    for node in graph.nodes.values():
        if node.op == "placeholder":
            is_table = not is_float_input(str(node.target))
        elif node.op == "get_attr":
            is_table = not _is_parameter(graph, str(node.target))
        elif node.op == "call_module":
            is_table = False
        else:
            is_table = all(value in found for value in node.all_input_nodes)
        if is_table:
            found.add(node)
    return found


def _is_parameter(graph: GraphIndex, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in graph.modules[owner]._parameters


def _with_tables(graph: GraphIndex, own: list[fx.Node], tables: set[fx.Node]) -> set[fx.Node]:
    left: set[fx.Node] = set()
    for node in own:
        values = _read(graph, node)
        if any(value in tables for value in values) or (
            values and all(value in left for value in values)
        ):
            left.add(node)
    return left
