"""``select``, ``unbind`` and ``split`` as slices: the delegate of ExecuTorch 1.5 lacks the former.

A split stays where the delegate would not take its slices: of integers, and of sizes that are free.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from backquant.deploy.edits import AtenCalls, replace, sizes_of
from backquant.operators import named, overload

__all__ = ["PARTS"]


def one(node: Any) -> None:
    """``select``."""
    source, axis, index = node.args
    size = source.meta["val"].shape[axis]
    if isinstance(index, int) and isinstance(size, int):
        replace(node, _one_of(node, source, axis, index % size))


def each(node: Any) -> None:
    """``unbind``."""
    source, axis = (*node.args, 0)[:2]
    for item in list(node.users):
        if item.target is operator.getitem:
            replace(item, _one_of(item, source, axis, item.args[1]))
    if not node.users:
        node.graph.erase_node(node)


def _one_of(node: Any, source: Any, axis: int, index: int) -> Any:
    write = AtenCalls(node)
    return write.reshape(write.slice(source, axis, index, index + 1), sizes_of(node))


def pieces(node: Any) -> None:
    """``split``, by a size or by sizes."""
    source = node.args[0]
    axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    value, found = source.meta["val"], node.meta["val"]
    free = not all(isinstance(size, int) for size in value.shape)
    if free or value.dtype is not torch.float32 or any(part.shape[axis] == 0 for part in found):
        return
    ends = list(accumulate(part.shape[axis] for part in found))
    for item in list(node.users):
        if item.target is operator.getitem:
            place = item.args[1] % len(ends)
            start = ends[place] - found[place].shape[axis]
            cut = AtenCalls(item).slice(source, axis % value.dim(), start, ends[place])
            replace(item, cut)
    if not node.users:
        node.graph.erase_node(node)


PARTS: dict[Any, Callable[[Any], None]] = {
    **dict.fromkeys(named("select").aten, one),
    **dict.fromkeys(named("unbind").aten, each),
    overload("split", "Tensor"): pieces,
    overload("split_with_sizes"): pieces,
}
