"""An operator that decomposition took apart, put together again: by the ``decompositions`` of the records."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

from torch import fx

from backquant.operators.decomposition import Decomposition
from backquant.operators.index import all_operators


def composed(node: fx.Node) -> fx.Node | None:
    """The operator that the calls ending in ``node`` are together, as one call before it, or ``None``.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x, w, b = (graph.placeholder(name) for name in "xwb")
    >>> turned = graph.call_function(torch.ops.aten.permute.default, (w, [1, 0]))
    >>> made = composed(graph.call_function(torch.ops.aten.addmm.default, (b, x, turned)))
    >>> made.target is torch.ops.aten.linear.default, made.args
    (True, (x, w, b))
    """
    is_item = node.target is operator.getitem and bool(node.args[1] == 0)
    last: Any = node.args[0] if is_item else node
    rules = _decompositions().get((getattr(last, "target", None), is_item), ())
    call = next((call for rule in rules if (call := rule.read(last)) is not None), None)
    if call is None:
        return None
    with node.graph.inserting_before(node):
        made = node.graph.call_function(*call)
    made.meta.update(node.meta)
    return made


@cache
def _decompositions() -> dict[tuple[Any, bool], list[Decomposition]]:
    found: dict[tuple[Any, bool], list[Decomposition]] = {}
    for known in all_operators():
        for each in known.decompositions:
            found.setdefault((each.ends_in, each.is_item), []).append(each)
    return found
