"""A static LSTM in PyTorch's quantized dialect: quantized tensors in, a tuple of quantized tensors out."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx

#: Output, hidden state, cell state.
TENSORS = ((0,), (1, 0), (1, 1))
_TUPLES: tuple[tuple[int, ...], ...] = ((), (1,))


class Results(NamedTuple):
    """``items``: the node of each tensor that is read. ``readers``: who reads it, or the whole tuple at that
    place, and by which node."""

    items: dict[tuple[int, ...], fx.Node]
    readers: dict[tuple[int, ...], list[tuple[fx.Node, fx.Node]]]


def results_of(lstm: fx.Node) -> Results:
    """Read each tensor of a result by one new ``getitem`` right after the call.

    >>> graph = fx.symbolic_trace(lambda x: (x[1][0], x[1][0])).graph
    >>> source = next(iter(graph.nodes))
    >>> [(path, node.name) for path, node in results_of(source).items.items()]
    [((1, 0), 'getitem_5')]
    """
    readers: dict[tuple[int, ...], list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
    for path, user, through in _readers(lstm, ()):
        readers[path].append((user, through))
    wanted = [p for p in TENSORS if readers[p] or readers[()] or readers[p[:-1]]]
    items: dict[tuple[int, ...], fx.Node] = {(): lstm}
    last = lstm
    for path in sorted({p[:i] for p in wanted for i in range(1, len(p) + 1)}):
        with lstm.graph.inserting_after(last):
            last = lstm.graph.call_function(operator.getitem, (items[path[:-1]], path[-1]))
        items[path] = last
    return Results({path: items[path] for path in wanted}, readers)


def _readers(
    node: fx.Node, path: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], fx.Node, fx.Node]]:
    for user in list(node.users):
        index: Any = user.args[1] if user.target is operator.getitem else None
        if path in _TUPLES and type(index) is int and -2 <= index < 2:
            yield from _readers(user, (*path, index % 2))
        else:
            yield path, user, node


def put_together(results: Results, floats: dict[tuple[int, ...], fx.Node], last: fx.Node) -> None:
    """Tuples of ``floats``, after ``last``, for those that read a tuple whole."""
    graph, made = last.graph, dict(floats)
    for path in reversed(_TUPLES):
        if not (results.readers[path] or (path and results.readers[()])):
            continue
        parts = [made[part] for part in ((*path, 0), (*path, 1))]
        with graph.inserting_after(last):
            last = graph.call_function(tuple, (parts,))
        made[path] = last
        for user, through in results.readers[path]:
            user.replace_input_with(through, last)
