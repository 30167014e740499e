"""Values that a model writes where a mask says so (``scores[:, mask] = -inf``), as a choice for each place.

Few runtimes take ``index_put`` with a boolean mask, and ONNX has no form of it behind other axes. Where the
value is the same for all places of the mask, ``torch.where`` gives the same; other writes stay as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from backquant.deploy.edits import AtenCalls, replace
from backquant.deploy.program import Program, origins_of_stacks
from backquant.operators import overload

__all__ = ["choose_where_masked"]


def choose_where_masked(program: Program) -> Program:
    """``program`` with such writes replaced; the same object where there is none.

    >>> from backquant.deploy.program import export_program
    >>> class Hidden(torch.nn.Module):
    ...     def forward(self, x, mask, value): return torch.ops.aten.index_put(x, [None, mask], value)
    >>> values = torch.ones(2, 3, 4), torch.ones(3, dtype=torch.bool), torch.zeros(())
    >>> made = export_program(torch.fx.symbolic_trace(Hidden()), values, {}, None)
    >>> [node.name for node in choose_where_masked(made).exported.graph.nodes if node.op == "call_function"]
    ['unsqueeze_default', 'where_self']
    """
    graph = program.exported.graph
    writes = graph.find_nodes(op="call_function", target=overload("index_put"))
    if not writes:
        return program
    for node in writes:
        _choose(node)
    program.exported.graph_module.recompile()
    return dataclasses.replace(program, origins=origins_of_stacks(graph))


def _choose(node: Any) -> None:
    given = dict(zip(("self", "indices", "values", "accumulate"), node.args, strict=False))
    given.update(node.kwargs)
    source, mask, value = given["self"], _mask(given["indices"]), given["values"]
    if mask is None or given.get("accumulate") or value.meta["val"].dtype != node.meta["val"].dtype:
        return
    shape, covered = source.meta["val"].shape, mask.meta["val"].shape
    first = len(given["indices"]) - 1  # whole axes before those of the mask
    inner = shape[first + len(covered) :]
    if not _same(shape[first : first + len(covered)], covered):
        return
    value_shape = value.meta["val"].shape
    more = max(len(value_shape) - len(inner), 0)
    if not _fits(value_shape, (*[1] * more, *inner)):
        return
    write = AtenCalls(node)
    for _ in inner:
        mask = write.unsqueeze(mask, -1)
    for _ in range(more):
        value = write.squeeze(value, 0)
    replace(node, write.call(overload("where", "self"), mask, value, source))


def _mask(indices: Any) -> Any:
    """The mask, where it is the only index, behind whole axes."""
    *whole, last = indices
    if any(index is not None for index in whole) or last is None:
        return None
    return last if last.meta["val"].dtype is torch.bool else None


def _same(found: Any, wanted: Any) -> bool:
    pairs = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and all(statically_known_true(a == b) for a, b in pairs)


def _fits(given: Any, shape: Any) -> bool:
    """Whether values of the sizes ``given`` are written to each place alike."""
    last = shape[len(shape) - len(given) :]
    return all(
        statically_known_true(size == 1) or (statically_known_true(size == room))
        for size, room in zip(given, last, strict=True)
    )
