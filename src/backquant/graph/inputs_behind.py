"""The inputs of a graph that reach a value with their infinities, by way of what passes them on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from backquant.graph.edit import get_module

__all__ = ["InputPart", "inputs_behind"]

InputPart = tuple[fx.Node, tuple[int | str, ...]]  # a placeholder, and keys and positions in it

# Names of operators (function, method or aten) that pass NaN and infinity on.
_ARITHMETIC = frozenset(
    "add sub rsub mul div truediv true_divide neg pad float to _to_copy half bfloat16 type_as".split()  # noqa: SIM905
)


def inputs_behind(
    graph_module: fx.GraphModule, values: Iterable[fx.Node], moves: Callable[[Any], bool]
) -> Iterator[InputPart]:
    """The inputs, or parts of them, that ``values`` are: as they come, or after what moves values, converts
    floats or computes with constants (``(x - mean) / std``). Not behind a sum of two values.

    ``moves``: whether an operator moves values.

    >>> from torch import nn
    >>> class Net(nn.Module):
    ...     def forward(self, x, mask):
    ...         y = (x["image"] - 0.5) / 2
    ...         return y + mask
    >>> net = fx.symbolic_trace(Net())
    >>> value = next(node for node in net.graph.nodes if node.name == "truediv")
    >>> list(inputs_behind(net, [value], lambda called: False))
    [(x, ('image',))]
    """
    seen: set[InputPart] = set()
    pending: list[InputPart] = [(value, ()) for value in values]
    while pending:
        node, path = pending.pop()
        if (node, path) in seen:
            continue
        seen.add((node, path))
        if node.op == "placeholder":
            yield node, path
        pending += _sources(graph_module, node, path, moves)


def _sources(
    graph_module: fx.GraphModule,
    node: fx.Node,
    path: tuple[int | str, ...],
    moves: Callable[[Any], bool],
) -> Iterator[InputPart]:
    """The values that ``node`` comes from, if it is not finite wherever they are not."""
    if node.target is operator.getitem:
        source, key = node.args
        if isinstance(source, fx.Node):
            yield source, (key, *path) if isinstance(key, (int, str)) else path
        return
    called = get_module(graph_module, str(node.target)) if node.op == "call_module" else None
    read = [source for source in node.all_input_nodes if source.op != "get_attr"]
    name = node.target if isinstance(node.target, str) else _name(node.target)
    if moves(node.target if called is None else type(called)) or (
        called is None and name in _ARITHMETIC and len(read) == 1
    ):
        yield from ((source, ()) for source in read)


def _name(target: Any) -> str:
    return str(getattr(target, "_opname", getattr(target, "__name__", "")))
