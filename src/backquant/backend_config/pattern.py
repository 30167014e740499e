"""Patterns and their one normal form: a graph of operators in dataflow order.

Four spellings are read:

1. a single operator: ``torch.nn.Linear``;
2. a sequence in forward order: ``(torch.nn.Conv2d, torch.nn.ReLU)``, of two or more operators;
3. the reversed nested tuple: ``(op, argument, argument, ...)``, where an argument is a pattern of
   the same form, ``MatchAllNode``, or a literal value that the call must carry;
4. a ``GraphPattern`` (in its own module), for what no tuple can say.

(2) and (3) cannot be told apart by looking, so each has its own function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from string import ascii_lowercase
from types import BuiltinFunctionType
from typing import Any, Literal, TypeAlias

import torch

from backquant.backend_config.naming import operator_name
from backquant.errors import SpecError

# Patterns as nested calls, in which a value that is used twice has a letter.


def calls_text(pattern: NormalPattern, name: Callable[[Any], str]) -> str:
    """``last(before(…), …)`` with operators named by ``name``.

    Anything is ``*``; what is used twice gets a letter where it first stands.

    >>> import torch
    >>> from backquant.backend_config import GraphPattern
    >>> swish = GraphPattern(["x"], {"gate": (torch.sigmoid, "x"), "out": (torch.mul, "x", "gate")})
    >>> print(calls_text(swish.normal, lambda op: op.__name__))
    mul(a, sigmoid(a))
    """
    return _Text(pattern, name).whole()


class _Text:
    def __init__(self, pattern: NormalPattern, name: Callable[[Any], str]) -> None:
        self._pattern = pattern
        self._name = name
        uses = Counter(i for node in pattern.nodes for i in node.inputs or ())
        literals = {i for i, node in enumerate(pattern.nodes) if node.kind == "literal"}
        self._shared = {i for i, count in uses.items() if count > 1 and i not in literals}
        self._letters: dict[int, str] = {}
        self._free: Iterator[str] = _letters()

    def whole(self) -> str:
        return self._at(len(self._pattern.nodes) - 1)

    def _at(self, index: int) -> str:
        if index in self._letters:
            return self._letters[index]
        node = self._pattern.nodes[index]
        if index in self._shared:
            self._letters[index] = next(self._free)
            if node.kind == "any":
                return self._letters[index]
            return f"{self._letters[index]}={self._call(index)}"
        return "*" if node.kind == "any" else self._call(index)

    def _call(self, index: int) -> str:
        node = self._pattern.nodes[index]
        name = repr(node.op) if node.kind == "literal" else self._name(node.op)
        if node.inputs is None:
            return name
        inside = ", ".join(map(self._at, node.inputs))
        order = "; any order" if node.any_order else ""
        return f"{name.removesuffix('()')}({inside}{order})"


def _letters() -> Iterator[str]:
    """a, b, …, z, a1, b1, …"""
    number = 0
    while True:
        yield from (f"{letter}{number or ''}" for letter in ascii_lowercase)
        number += 1


#: A pattern as users write it: an operator, or a tuple in one of the two tuple forms.
Pattern: TypeAlias = Any

Kind: TypeAlias = Literal["module", "function", "method", "any", "literal"]


class MatchAllNode:
    """Stands in a pattern for an argument of any kind.

    >>> to_reversed(from_reversed((torch.add, MatchAllNode, torch.nn.Conv2d)))[1].__name__
    'MatchAllNode'
    """


@dataclass(frozen=True, repr=False)
class PatternNode:
    """One operator of a pattern.

    ``op``: a subclass of ``nn.Module``, a callable, a method's name, ``MatchAllNode``, or a
    literal. ``inputs``: positions of earlier nodes in argument order; then the call has exactly
    these arguments. ``None``: the arguments are not constrained.
    ``any_order``: the call may have its two arguments in either order.
    A ``"method"`` in argument position also stands for an equal string argument, as in PyTorch.
    """

    op: Any
    inputs: tuple[int, ...] | None
    kind: Kind
    any_order: bool = False

    def __repr__(self) -> str:
        order = ", any_order=True" if self.any_order else ""
        name = operator_name(self.op)
        return f"PatternNode({name}, inputs={self.inputs}, kind={self.kind!r}{order})"


@dataclass(frozen=True, repr=False)
class NormalPattern:
    """A pattern in dataflow order; two spellings of one pattern are equal and hash equally.

    Invariants

    1. The last node is the anchor, where matching starts; it is no literal.
    2. Every input precedes its user, and every node but the anchor has a user.
    3. Nodes stand in the order of a depth-first walk from the anchor, arguments first.

    Raises ``SpecError`` when one does not hold.

    >>> forward = normal_form((torch.nn.Conv2d, torch.nn.ReLU))
    >>> forward
    NormalPattern(torch.nn.ReLU(torch.nn.Conv2d))
    >>> forward == from_reversed((torch.nn.ReLU, torch.nn.Conv2d))
    True
    """

    nodes: tuple[PatternNode, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise SpecError("a pattern has at least one operator", where="pattern")
        if self.nodes[-1].kind == "literal":
            raise SpecError(
                f"a pattern ends in an operator, not in the value {self.nodes[-1].op!r}",
                where="pattern",
            )
        if _walk(self.nodes) != list(range(len(self.nodes))):
            raise SpecError(
                "the nodes of a normal pattern stand in depth-first order from the anchor",
                where="pattern",
                fix="build it with normal_form(...), from_reversed(...) or GraphPattern(...)",
            )

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")  # kept: it is often asked for
        if known is None:
            known = self.__dict__["_hash"] = hash(self.nodes)
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        return NormalPattern, (self.nodes,)  # hashes are those of a process

    @property
    def anchor(self) -> PatternNode:
        """The last operator of the pattern."""
        return self.nodes[-1]

    @cached_property
    def size(self) -> int:
        """Number of entries of the reversed nested tuple; larger patterns are tried first.

        >>> from_reversed((torch.add, MatchAllNode, (torch.nn.BatchNorm2d, torch.nn.Conv2d))).size
        4
        """
        implied = sum(_is_attribute_access(self.nodes, node) for node in self.nodes)
        return len(self.nodes) - implied

    @property
    def is_sequential(self) -> bool:
        """Whether each operator has the one before it as its only argument.

        >>> normal_form(torch.nn.Linear).is_sequential
        True
        """
        return self.nodes[0].inputs is None and all(
            node.inputs == (i,) for i, node in enumerate(self.nodes[1:])
        )

    def __str__(self) -> str:
        return calls_text(self, operator_name)

    def __repr__(self) -> str:
        return f"NormalPattern({self})"


class Spelling:
    """A pattern with a spelling of its own that knows its ``normal`` form."""

    normal: NormalPattern


def normal_form(pattern: Pattern) -> NormalPattern:
    """The normal form of a single operator or of a sequence in forward order.

    Raises ``SpecError`` for a tuple of one, a nested tuple, or what cannot be an operator.

    >>> normal_form((torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.ReLU))
    NormalPattern(torch.nn.ReLU(torch.nn.BatchNorm2d(torch.nn.Conv2d)))
    """
    if isinstance(pattern, _OPERATORS):
        return _single(pattern)
    if isinstance(pattern, NormalPattern):
        return pattern
    if isinstance(pattern, Spelling):
        return pattern.normal
    if not isinstance(pattern, tuple):
        return from_reversed(pattern)
    if len(pattern) < 2:
        raise SpecError(
            f"a sequence has two or more operators, got {pattern!r}",
            where="pattern",
            fix=f"BackendPatternConfig({operator_name(pattern[0])})" if pattern else "",
        )
    nested = next((item for item in pattern if isinstance(item, tuple)), None)
    if nested is not None:
        raise SpecError(
            f"a forward sequence holds single operators, got the tuple {nested!r}",
            where="pattern",
            fix="BackendPatternConfig()._set_pattern_complex_format(...) takes nested tuples",
        )
    reversed_pattern = pattern[0]
    for operator in pattern[1:]:
        reversed_pattern = (operator, reversed_pattern)
    return from_reversed(reversed_pattern)


def from_reversed(pattern: Pattern) -> NormalPattern:
    """The normal form of a pattern given as reversed nested tuple.

    ``(getattr, name)`` is read as ``getattr(anything, name)``, as in PyTorch.
    Raises ``SpecError`` for an empty tuple, a tuple in operator position, or arguments given to
    ``MatchAllNode`` or to a literal.

    >>> import operator
    >>> from_reversed((torch.nn.ReLU, (operator.add, MatchAllNode, torch.nn.Conv2d)))
    NormalPattern(torch.nn.ReLU(operator.add(*, torch.nn.Conv2d)))
    """
    if isinstance(pattern, NormalPattern):
        return pattern
    if isinstance(pattern, Spelling):
        return pattern.normal
    return _of_tuple(pattern)


def _of_tuple(pattern: Pattern) -> NormalPattern:
    nodes: list[PatternNode] = []
    _append(pattern, nodes)
    return NormalPattern(tuple(nodes))


_OPERATORS = (type, BuiltinFunctionType, str)  # no closures: the cache would keep what they hold
_single = lru_cache(maxsize=4096)(
    _of_tuple
)  # of one operator, whose normal form is asked for often


def to_reversed(pattern: NormalPattern) -> Pattern:
    """The reversed nested tuple of a normal pattern, PyTorch's key for it.

    Raises ``SpecError`` for patterns that nested tuples cannot express: a node with several readers,
    arguments in any order.

    >>> forward = (torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.ReLU)
    >>> last, before = to_reversed(normal_form(forward))
    >>> last.__name__, [op.__name__ for op in before]
    ('ReLU', ['BatchNorm2d', 'Conv2d'])
    """
    beyond = beyond_tuples(pattern)
    if beyond:
        raise SpecError(f"{pattern} {beyond}; nested tuples cannot say that", where="pattern")
    built: list[Pattern] = []
    for node in pattern.nodes:
        if node.inputs is None:
            built.append(node.op)
        elif _is_attribute_access(pattern.nodes, node):
            built.append((getattr, pattern.nodes[node.inputs[1]].op))
        else:
            built.append((node.op, *(built[i] for i in node.inputs)))
    return built[-1]


def to_forward(pattern: NormalPattern) -> Pattern:
    """The single operator, or the forward tuple, of a sequential pattern.

    Raises ``SpecError`` when the pattern is not sequential.

    >>> [op.__name__ for op in to_forward(from_reversed((torch.nn.ReLU, torch.nn.Conv2d)))]
    ['Conv2d', 'ReLU']
    """
    if not pattern.is_sequential:
        raise SpecError(
            f"{pattern} is no sequence, so it has no forward form",
            where="pattern",
            fix="to_reversed(pattern)",
        )
    operators = tuple(node.op for node in pattern.nodes)
    return operators if len(operators) > 1 else operators[0]


def beyond_tuples(pattern: NormalPattern) -> str:
    """What of a pattern nested tuples cannot say; empty for those that they can.

    >>> squared = [PatternNode(torch.nn.Conv2d, None, "module"), PatternNode(torch.mul, (0, 0), "function")]
    >>> beyond_tuples(NormalPattern(tuple(squared))), beyond_tuples(normal_form(torch.mul))
    ('uses one value twice', '')
    """
    uses = [i for node in pattern.nodes for i in node.inputs or ()]
    if len(uses) != len(set(uses)):
        return "uses one value twice"
    return "takes arguments in any order" if any(n.any_order for n in pattern.nodes) else ""


def part_of(pattern: NormalPattern, position: int) -> NormalPattern:
    """The part of ``pattern`` that ends in the node at ``position``.

    >>> part_of(normal_form((torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.ReLU)), 1)
    NormalPattern(torch.nn.BatchNorm2d(torch.nn.Conv2d))
    """
    order = _walk(pattern.nodes[: position + 1])
    places = {old: new for new, old in enumerate(order)}
    nodes = (pattern.nodes[old] for old in order)
    return NormalPattern(
        tuple(
            node
            if node.inputs is None
            else replace(node, inputs=tuple(places[i] for i in node.inputs))
            for node in nodes
        )
    )


def _append(pattern: Pattern, nodes: list[PatternNode]) -> int:
    """Append the nodes of a reversed pattern, arguments first; the position of its operator."""
    if not isinstance(pattern, tuple):
        op, kind = classify(pattern)
        nodes.append(PatternNode(op, None, kind))
        return len(nodes) - 1
    if not pattern:
        raise SpecError("an empty tuple is no pattern", where="pattern")
    head, *arguments = pattern
    op, kind = classify(head)
    if arguments and kind in ("any", "literal"):
        raise SpecError(
            f"{operator_name(op)} stands for an argument and takes none itself: {pattern!r}",
            where="pattern",
            fix="the operator comes first: (torch.add, MatchAllNode, torch.nn.Conv2d)",
        )
    inputs = _attribute_inputs(pattern, nodes) if op is getattr and arguments else None
    if inputs is None and arguments:
        inputs = tuple(_append(argument, nodes) for argument in arguments)
    nodes.append(PatternNode(op, inputs, kind))
    return len(nodes) - 1


def _attribute_inputs(pattern: tuple[Any, ...], nodes: list[PatternNode]) -> tuple[int, ...]:
    """Inputs of ``(getattr, name)`` and ``(getattr, argument, name)``; the name is a literal."""
    name = pattern[-1]
    if len(pattern) > 3 or not isinstance(name, str):
        raise SpecError(
            f"a getattr pattern is (getattr, 'name'), got {pattern!r}",
            where="pattern",
            fix="(getattr, 'shape')",
        )
    source = _append(pattern[1] if len(pattern) == 3 else MatchAllNode, nodes)
    nodes.append(PatternNode(name, None, "literal"))
    return (source, len(nodes) - 1)


def _is_attribute_access(nodes: tuple[PatternNode, ...], node: PatternNode) -> bool:
    """Whether ``node`` is ``getattr(anything, name)``, written ``(getattr, name)``."""
    return node.op is getattr and node.inputs is not None and nodes[node.inputs[0]].kind == "any"


def classify(op: Any) -> tuple[Any, Kind]:
    """``op`` with its kind. PyTorch's ``MatchAllNode`` (known by name) becomes ours.

    Raises ``SpecError`` for what cannot stand in a pattern.

    >>> classify(torch.add)[1], classify("view")[1], classify(0)[1]
    ('function', 'method', 'literal')
    """
    if isinstance(op, type) and issubclass(op, torch.nn.Module):
        return op, "module"
    if isinstance(op, type) and any(base.__name__ == "MatchAllNode" for base in op.__mro__):
        return MatchAllNode, "any"
    if isinstance(op, str) and op:
        return op, "method"
    fix = ""
    if isinstance(op, torch.nn.Module):
        fix = f"pass the class: {operator_name(type(op))}"
    elif isinstance(op, tuple):
        fix = "the first item of a reversed tuple is an operator: (torch.nn.ReLU, (...))"
    elif callable(op):
        return op, "function"
    elif _is_literal(op):
        return op, "literal"
    raise SpecError(f"{op!r} cannot stand in a pattern", where="pattern", fix=fix)


def _is_literal(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, str)):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _walk(nodes: tuple[PatternNode, ...]) -> list[int]:
    """Positions in depth-first order from the last node, arguments first, each once."""
    order: dict[int, None] = {}

    def visit(index: int) -> None:
        for i in nodes[index].inputs or ():
            if not 0 <= i < index:
                raise SpecError(f"node {index} of a pattern uses node {i}", where="pattern")
            if i not in order:
                visit(i)
        order[index] = None

    visit(len(nodes) - 1)
    return list(order)
