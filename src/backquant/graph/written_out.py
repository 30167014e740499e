"""Activations that a model writes out in arithmetic, as the functions that they are.

Hard-swish, ``x * relu6(x + 3) / 6``, and its gate alone, hard-sigmoid: models older than the functions, and
those that were imported from other formats, have them as three to five operators. Each rounds to integers
where it is quantized, and reads and writes a tensor where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph.arithmetic import arithmetic_of, plain_name
from backquant.graph.rewrite import GraphRewriter

_GATES = frozenset({F.hardsigmoid, "hardsigmoid"})
_CLAMPS = frozenset({torch.clamp, torch.clip, "clamp", "clip", F.hardtanh, "hardtanh"})
_CLAMPS_TO_6 = frozenset({F.relu6, "relu6"})
_BOUNDS = ("min", "max", "min_val", "max_val")


def hard_sigmoid(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """``F.hardsigmoid`` in the place of its arithmetic on floats."""
    return _written(node, write, _Reader.gate, F.hardsigmoid)


def hard_swish(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """``F.hardswish`` in the place of its arithmetic on floats.

    >>> from backquant.graph.shapes import GraphValues
    >>> module = fx.symbolic_trace(lambda x: x * F.relu6(x + 3) / 6)
    >>> values = GraphValues(module, (torch.zeros(2, 3),))
    >>> GraphRewriter(module, values=values).apply(hard_swish), [node.name for node in module.graph.nodes]
    (1, ['x', 'hardswish', 'output'])
    """
    return _written(node, write, _Reader.swish, F.hardswish)


def _written(
    node: fx.Node,
    write: GraphRewriter,
    read: Callable[[_Reader, fx.Node], fx.Node | None],
    function: Callable[..., Any],
) -> fx.Node | None:
    source = read(_Reader(write), node)
    facts = None if source is None else write.facts(source)
    if source is None or facts is None or not facts.dtype.is_floating_point:
        return None
    between = _between(node, source)
    if any(each.target in write.kept for each in between) or not _is_read_within(between, node):
        return None
    made = write.call(node, function, source)
    write.replace(node, made)
    for each in sorted(between - {node}, reverse=True):
        write.erase(each)
    return made


class _Reader:
    """Tells what the arithmetic that ends in a node is."""

    def __init__(self, write: GraphRewriter) -> None:
        self._write = write

    def gate(self, node: fx.Node) -> fx.Node | None:
        """``x`` of ``relu6(x + 3) / 6``."""
        return self._sixth(node, self._clamped)

    def swish(self, node: fx.Node) -> fx.Node | None:
        """``x`` of ``x * relu6(x + 3) / 6``, in either order; of ``x * hardsigmoid(x)``."""
        return self._sixth(node, self._by_clamped) or self._times(node, self._hard_sigmoid)

    def _sixth(self, node: Any, of: Any) -> fx.Node | None:
        """What ``of`` tells of the dividend, where ``node`` is the sixth of something."""
        kind = arithmetic_of(node) if isinstance(node, fx.Node) else None
        if kind not in ("mul", "div"):
            return None
        one, other = node.args
        if kind == "div":
            return of(one) if self._number(other) == 6 else None
        for dividend, factor in ((one, other), (other, one)):
            number = self._number(factor)
            if number is not None and abs(6 * number - 1) < 1e-5:
                found: fx.Node | None = of(dividend)
                return found
        return None

    def _by_clamped(self, node: Any) -> fx.Node | None:
        return self._times(node, self._clamped)

    def _times(self, node: Any, gate: Any) -> fx.Node | None:
        """``x`` of ``x * gate(x)``."""
        if not isinstance(node, fx.Node) or arithmetic_of(node) != "mul":
            return None
        for value, other in (node.args, node.args[::-1]):
            if isinstance(value, fx.Node) and gate(other) is value:
                return value
        return None

    def _hard_sigmoid(self, node: Any) -> fx.Node | None:
        if not isinstance(node, fx.Node) or not node.args or len(node.args) > 1:
            return None
        is_gate = _is_call(node) and plain_name(node.target) in _GATES
        if not is_gate and not isinstance(self._write.called(node), nn.Hardsigmoid):
            return None
        return node.args[0] if isinstance(node.args[0], fx.Node) else None

    def _clamped(self, node: Any) -> fx.Node | None:
        """``x`` of ``clamp(x + 3, 0, 6)``."""
        return self._raised(node.args[0]) if self._clamps_to_6(node) else None

    def _clamps_to_6(self, node: Any) -> bool:
        if not isinstance(node, fx.Node) or not node.args:
            return False
        called = self._write.called(node)
        if isinstance(called, nn.Hardtanh):  # ReLU6 is a subclass
            return (called.min_val, called.max_val) == (0, 6)
        if plain_name(node.target) in _CLAMPS_TO_6:
            return True
        return _is_call(node) and plain_name(node.target) in _CLAMPS and _bounds(node) == (0, 6)

    def _raised(self, node: Any) -> fx.Node | None:
        """``x`` of ``x + 3``."""
        if not isinstance(node, fx.Node) or arithmetic_of(node) != "add":
            return None
        for value, number in (node.args, node.args[::-1]):
            if isinstance(value, fx.Node) and self._number(number) == 3:
                return value
        return None

    def _number(self, value: Any) -> float | None:
        """A number, or a tensor that holds one and changes no shape."""
        if isinstance(value, int | float):
            return float(value)
        tensor = self._write.constants.value(value)
        if tensor is None or tensor.numel() != 1 or tensor.dim() > 1:
            return None
        return float(tensor.detach())


def _is_call(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    others = {name: value for name, value in node.kwargs.items() if name not in _BOUNDS}
    return others in ({}, {"inplace": False})


def _bounds(node: fx.Node) -> tuple[Any, ...]:
    given: Mapping[str, Any] = node.kwargs
    return (*node.args[1:], *(given[name] for name in _BOUNDS if name in given))


def _between(node: fx.Node, source: fx.Node) -> set[fx.Node]:
    """``node``, and what it reads up to ``source``: a handful, as they were just read."""
    found, waiting = {node}, [node]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each is not source and each.op != "get_attr" and each not in found:
                found.add(each)
                waiting.append(each)
    return found


def _is_read_within(between: set[fx.Node], last: fx.Node) -> bool:
    return all(each is last or between.issuperset(each.users) for each in between)
