"""Patterns that no tuple can express: several inputs, one value used twice, names for all of them.

A graph pattern is written in the order in which it runs. Its ports, the inputs and the output, have
names; a backend's entry says by name how each is observed (``BackendPatternConfig.set_ports``), which
node carries the fused module, and which inputs that takes besides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backquant.backend_config.checks import check_callable
from backquant.backend_config.naming import spelled
from backquant.backend_config.pattern import (
    MatchAllNode,
    NormalPattern,
    PatternNode,
    Spelling,
    classify,
)
from backquant.errors import SpecError, did_you_mean

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_ORDERS = 6  # each doubles the trials at a node that a pattern may end in


@dataclass(frozen=True)
class AnyOrder:
    """An operator that takes its two arguments in either order: ``(AnyOrder(torch.add), "x", "y")``.

    >>> import torch
    >>> AnyOrder(torch.add)
    AnyOrder(torch.add)
    """

    op: Any

    def __repr__(self) -> str:
        return f"AnyOrder({spelled(self.op)})"


@dataclass(frozen=True)
class Value:
    """A string argument that the call must have; a bare string would be a name: ``Value("tanh")``."""

    value: str

    def __repr__(self) -> str:
        return f"Value({self.value!r})"


@dataclass(frozen=True)
class GraphNode:
    """One operator of a graph pattern; ``arguments`` None: they are not constrained."""

    name: str
    op: Any
    arguments: tuple[Any, ...] | None
    any_order: bool = False

    @property
    def written(self) -> Any:
        """The node in the form that ``GraphPattern(nodes={name: …})`` takes."""
        op = AnyOrder(self.op) if self.any_order else self.op
        return op if self.arguments is None else (op, *self.arguments)


@dataclass(frozen=True, init=False, repr=False)
class GraphPattern(Spelling):
    """A pattern as a graph with names, in dataflow order; the last node is its output.

    ``inputs``: names of the values that the pattern reads from outside. An input that is used several times
    must be the same value at each use.
    ``nodes``: name → ``op``, with arguments that are not constrained, or ``(op, *arguments)`` with
    exactly these: the name of an input or of an earlier node, ``MatchAllNode`` for anything, or a
    literal (a text as ``Value``). ``op`` is a module class, a function, a method's name, or one of
    the latter two in ``AnyOrder``.
    ``name``: what reports call it.

    Only the value of the last node may be used outside of the pattern. Two are equal if everything is, names
    included. ``normal`` is the normal form, which has no names: it equals that of another spelling with the
    same arguments in the same order.

    Raises ``SpecError`` for a name that is not there, comes later (a cycle) or stands twice, for a
    node that nothing uses (a second output) or an input that nothing reads, and for arguments that
    do not fit.

    >>> import torch
    >>> GraphPattern(["x"], {"gate": (torch.sigmoid, "x"), "out": (torch.mul, "x", "gate")})
    GraphPattern(['x'], {'gate': (torch.sigmoid, 'x'), 'out': (torch.mul, 'x', 'gate')})
    >>> GraphPattern(["x", "y"], {"sum": (torch.add, "y", "x")}).names
    ('y', 'x', 'sum')
    """

    inputs: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    name: str
    normal: NormalPattern = field(compare=False)
    #: The name of each node of ``normal``; empty for literals and for unnamed values.
    names: tuple[str, ...] = field(compare=False)

    def __init__(self, inputs: Iterable[str], nodes: Mapping[str, Any], *, name: str = "") -> None:
        if not isinstance(name, str):
            raise SpecError(f"a name is a text, got {name!r}", where="pattern.name")
        own = tuple(_graph_node(name, written) for name, written in _items(nodes))
        self._set(inputs=_names(inputs, "inputs"), nodes=own, name=name)
        self._check_names()
        normal, names = _Builder(self).build()
        self._set(normal=normal, names=names)

    @property
    def output(self) -> str:
        """The name of the last node."""
        return self.nodes[-1].name

    @property
    def ports(self) -> tuple[str, ...]:
        """The inputs, then the output."""
        return (*self.inputs, self.output)

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the nodes, in the order of writing."""
        return tuple(node.name for node in self.nodes)

    def named(self, values: Iterable[Any]) -> dict[str, Any]:
        """The values by name, given the values by node of ``normal``.

        >>> import torch
        >>> GraphPattern(["x"], {"gate": (torch.sigmoid, "x")}).named(["value", "sigmoid"])
        {'x': 'value', 'gate': 'sigmoid'}
        """
        return {name: v for name, v in zip(self.names, values, strict=True) if name}

    def check_has(self, name: Any, names: Iterable[str], where: str) -> None:
        """Raise ``SpecError`` unless ``name`` is one of ``names``, which are of this pattern."""
        known = list(names)
        if name not in known:
            raise SpecError(
                f"the pattern has no {name!r} there",
                where=where,
                fix=did_you_mean(name, known, f"one of {', '.join(map(repr, known))}"),
            )

    def _check_names(self) -> None:
        [(name, count)] = Counter((*self.inputs, *self.operators)).most_common(1)
        if count > 1:
            raise SpecError(f"the name {name!r} stands twice", where="pattern")

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # frozen

    def __repr__(self) -> str:
        nodes = ", ".join(f"{node.name!r}: {_spelled(node.written)}" for node in self.nodes)
        name = f", name={self.name!r}" if self.name else ""
        return f"GraphPattern({list(self.inputs)}, {{{nodes}}}{name})"

    def __str__(self) -> str:
        return self.name or str(self.normal)


class _Builder:
    """The normal form: the nodes in depth-first order from the last, literals and wildcards included."""

    def __init__(self, pattern: GraphPattern) -> None:
        self.pattern = pattern
        self.by_name = {node.name: node for node in pattern.nodes}
        self.places = {name: i for i, name in enumerate((*pattern.inputs, *self.by_name))}
        self.built: list[PatternNode] = []
        self.names: list[str] = []
        self.position: dict[str, int] = {}

    def build(self) -> tuple[NormalPattern, tuple[str, ...]]:
        for node in self.pattern.nodes:
            for argument in node.arguments or ():
                if isinstance(argument, str):
                    self._check_earlier(argument, node.name)
        if sum(node.any_order for node in self.pattern.nodes) > _MOST_ORDERS:
            raise SpecError(
                f"more than {_MOST_ORDERS} operators take their arguments in any order",
                where="pattern.nodes",
                fix="several entries, each with a part of the orders",
            )
        self._add(self.pattern.output)
        self._check_connected()
        return NormalPattern(tuple(self.built)), tuple(self.names)

    def _check_connected(self) -> None:
        unused = [name for name in self.places if name not in self.position]
        if not unused:
            return
        read = {a for n in self.pattern.nodes for a in n.arguments or () if isinstance(a, str)}
        name = next(name for name in unused if name not in read)  # the last of them is read by none
        if name in self.pattern.inputs:
            message, field = f"nothing reads the input {name!r}", "inputs"
        else:
            output = self.pattern.output
            message = f"two outputs, {name!r} and {output!r}: a pattern computes one value"
            field = "nodes"
        raise SpecError(
            message,
            where=f"pattern.{field}",
            fix="leave it out, or name it among the arguments of a later node",
        )

    def _check_earlier(self, name: str, user: str) -> None:
        where = f"pattern.nodes.{user}"
        if name not in self.places:
            others = [other for other in self.places if other != user]
            raise SpecError(
                f"{user!r} reads {name!r}, which is neither an input nor a node",
                where=where,
                fix=did_you_mean(name, others, f"Value({name!r}) for the text itself"),
            )
        if self.places[name] >= self.places[user]:
            raise SpecError(
                f"{user!r} reads {name!r}, which does not come before it: a pattern has no cycle and "
                "stands in the order in which it runs",
                where=where,
            )

    def _add(self, name: str) -> int:
        """Append the node and what it reads, arguments first; its position."""
        if name in self.position:
            return self.position[name]
        node = self.by_name.get(name)
        if node is None:
            return self._append(PatternNode(MatchAllNode, None, "any"), name)
        inputs = None
        if node.arguments is not None:
            inputs = tuple(self._argument(argument) for argument in node.arguments)
        op, kind = classify(node.op)
        return self._append(PatternNode(op, inputs, kind, node.any_order), name)

    def _argument(self, argument: Any) -> int:
        if isinstance(argument, str):
            return self._add(argument)
        if isinstance(argument, Value):
            return self._append(PatternNode(argument.value, None, "literal"), "")
        op, kind = classify(argument)
        return self._append(PatternNode(op, None, kind), "")

    def _append(self, node: PatternNode, name: str) -> int:
        self.built.append(node)
        self.names.append(name)
        if name:
            self.position[name] = len(self.built) - 1
        return len(self.built) - 1


def _graph_node(name: str, written: Any) -> GraphNode:
    where = f"pattern.nodes.{name}"
    head, arguments = written, None
    if isinstance(written, tuple):
        if not written:
            raise SpecError("an empty tuple is no operator", where=where)
        head, arguments = written[0], written[1:]
    any_order = isinstance(head, AnyOrder)
    op, kind = classify(head.op if isinstance(head, AnyOrder) else head)
    if kind in ("any", "literal"):
        raise SpecError(
            f"a node is an operator, got {spelled(op)}",
            where=where,
            fix=f"name it among the inputs: GraphPattern([{name!r}, …], …)",
        )
    if any_order and (arguments is None or len(arguments) != 2):
        raise SpecError("AnyOrder is for operators with two arguments", where=where)
    for argument in arguments or ():
        _check_argument(argument, where)
    return GraphNode(name, op, arguments, any_order)


def _check_argument(argument: Any, where: str) -> None:
    if isinstance(argument, (str, Value)):
        return
    op, kind = classify(argument)
    if kind not in ("any", "literal"):
        raise SpecError(
            f"{spelled(op)} stands among the arguments, where names and literals stand",
            where=where,
            fix="give it a node of its own, and name that",
        )


def _items(nodes: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(nodes, Mapping) or not nodes:
        raise SpecError(
            f"nodes is a dict of one or more operators by name, got {nodes!r}",
            where="pattern.nodes",
            fix='{"out": (torch.add, "x", "y")}',
        )
    _names(nodes, "nodes")
    return nodes.items()


def _names(names: Any, field_name: str) -> tuple[str, ...]:
    where = f"pattern.{field_name}"
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise SpecError(
            f"{field_name} are several names, got {names!r}", where=where, fix=f"[{names!r}]"
        )
    given = tuple(names)
    wrong = [name for name in given if not isinstance(name, str) or not _NAME.fullmatch(name)]
    if wrong:
        raise SpecError(f"a name is made of letters, digits and _, got {wrong[0]!r}", where=where)
    return given


def _spelled(written: Any) -> str:
    if isinstance(written, tuple):
        return f"({', '.join(map(_spelled, written))}{',' if len(written) == 1 else ''})"
    return repr(written) if isinstance(written, (AnyOrder, Value)) else spelled(written)


# Choices of nodes by name.


@dataclass(frozen=True)
class NamedNode:
    """The getter that chooses one node of a graph pattern.

    >>> NamedNode("conv")({"conv": "the node", "x": "its input"})
    'the node'
    """

    name: str

    def __str__(self) -> str:
        return self.name

    def __call__(self, found: Mapping[str, Any]) -> Any:
        return found[self.name]


@dataclass(frozen=True)
class NamedNodes:
    """The getter that chooses several nodes of a graph pattern, in order.

    >>> NamedNodes(("y",))({"y": "the node"})
    ['the node']
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.names)

    def __call__(self, found: Mapping[str, Any]) -> list[Any]:
        return [found[name] for name in self.names]


def as_getter(value: Any, field: str, *, several: bool) -> Any:
    """A getter as it is, or the one that chooses by name; ``SpecError`` for anything else.

    >>> as_getter("conv", "root_node_getter", several=False)
    NamedNode(name='conv')
    >>> as_getter(["y"], "extra_inputs_getter", several=True)
    NamedNodes(names=('y',))
    """
    if isinstance(value, str) and not several:
        return NamedNode(value)
    is_list = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    if is_list and several:
        return NamedNodes(tuple(value))
    return check_callable(value, field)


def check_getters(pattern: Any, getters: Iterable[tuple[str, Any]]) -> None:
    """Raise ``SpecError`` for a choice by name where the pattern has no such node, or no names."""
    for place, getter in getters:
        if not isinstance(getter, (NamedNode, NamedNodes)):
            continue
        if not isinstance(pattern, GraphPattern):
            raise SpecError("only a GraphPattern has nodes with names", where=place)
        if isinstance(getter, NamedNode):
            pattern.check_has(getter.name, pattern.operators, place)
        else:
            for name in getter.names:
                pattern.check_has(name, pattern.inputs, place)
