"""Activations that a model writes out in arithmetic, as the functions that they are.

Hard-swish, ``x * relu6(x + 3) / 6``, and its gate alone, hard-sigmoid: models older than the functions, and
those that were imported from other formats, have them as three to five operators. Each rounds to integers
where it is quantized, and reads and writes a tensor where it is not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph.arithmetic import arithmetic_of, plain_name
from backquant.graph.constant_products import Constants
from backquant.graph.edit import get_module
from backquant.graph.provenance import Scope
from backquant.graph.shapes import GraphValues

_GATES = frozenset({F.hardsigmoid, "hardsigmoid"})
_CLAMPS = frozenset({torch.clamp, torch.clip, "clamp", "clip", F.hardtanh, "hardtanh"})
_CLAMPS_TO_6 = frozenset({F.relu6, "relu6"})
_BOUNDS = ("min", "max", "min_val", "max_val")


def hard_swishes(
    module: fx.GraphModule,
    scopes: dict[str, Scope],
    values: GraphValues,
    kept: Collection[Any] = (),
) -> int:
    """Write hard-swish and hard-sigmoid as ``F.hardswish`` and ``F.hardsigmoid``, in place; how many.

    Args:
        module: a graph in evaluation mode.
        scopes: of its nodes; a new node has that of the last one it stands for.
        values: the dtypes of its tensors: integers have no such functions.
        kept: operators that stay as they are.

    >>> class Swish(nn.Module):
    ...     def forward(self, x):
    ...         return x * F.relu6(x + 3) / 6
    >>> module = fx.symbolic_trace(Swish())
    >>> values = GraphValues(module, (torch.zeros(2, 3),))
    >>> hard_swishes(module, {}, values), [node.name for node in module.graph.nodes]
    (1, ['x', 'hardswish', 'output'])
    """
    reader = _Reader(module)
    count = 0
    for read, function in ((reader.gate, F.hardsigmoid), (reader.swish, F.hardswish)):
        for node in list(module.graph.nodes):
            source = read(node)
            facts = None if source is None else values.of(source.name)
            if source is None or facts is None or not facts.dtype.is_floating_point:
                continue
            between = _between(node, source)
            if any(each.target in kept for each in between) or not _is_read_within(between, node):
                continue
            _write(module.graph, node, source, function, scopes)
            count += 1
    return count


class _Reader:
    """Tells what the arithmetic that ends in a node is."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._constants = Constants(module)

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
        if not is_gate and not isinstance(self._called(node), nn.Hardsigmoid):
            return None
        return node.args[0] if isinstance(node.args[0], fx.Node) else None

    def _clamped(self, node: Any) -> fx.Node | None:
        """``x`` of ``clamp(x + 3, 0, 6)``."""
        return self._raised(node.args[0]) if self._clamps_to_6(node) else None

    def _clamps_to_6(self, node: Any) -> bool:
        if not isinstance(node, fx.Node) or not node.args:
            return False
        called = self._called(node)
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

    def _called(self, node: fx.Node) -> nn.Module | None:
        return get_module(self._module, str(node.target)) if node.op == "call_module" else None

    def _number(self, value: Any) -> float | None:
        """A number, or a tensor that holds one and changes no shape."""
        if isinstance(value, int | float):
            return float(value)
        tensor = self._constants.value(value)
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


def _write(
    graph: fx.Graph, node: fx.Node, source: fx.Node, function: Any, scopes: dict[str, Scope]
) -> None:
    between = _between(node, source)
    with graph.inserting_before(node):
        made = graph.call_function(function, (source,))
    made.meta.update(node.meta)
    scopes[made.name] = scopes.get(node.name, Scope("", None))
    node.replace_all_uses_with(made)
    for old in sorted(between, reverse=True):
        graph.erase_node(old)
        scopes.pop(old.name, None)
