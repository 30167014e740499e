"""``sort`` and ``histc``, which ExecuTorch 1.5 has no kernels for, by what it has. Mixtures of experts order
tokens by their experts, and count them.

1. ``sort`` and ``argsort`` along an axis of known length are ``topk`` of all. One that must be stable stays.
2. ``histc`` between two given bounds compares what it counts with the number of each bin.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from backquant.deploy.edits import AtenCalls, replace
from backquant.operators import overload

__all__ = ["ORDERS"]

_THAT_MAY_BE_STABLE = {overload("sort", "stable"), overload("argsort", "stable")}
_PLACES = {overload("argsort"), overload("argsort", "stable")}
_SUM = overload("sum", "dim_IntList")


def order(node: Any) -> None:
    """Rule 1, also for the places alone (``argsort``)."""
    source = node.args[0]
    names = ("stable", "dim", "descending")[node.target not in _THAT_MAY_BE_STABLE :]
    given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    axis, value = given.get("dim", -1), source.meta["val"]
    size = value.shape[axis] if value.dim() else None
    if given.get("stable") or not isinstance(size, int):
        return
    write = AtenCalls(node)
    found = write.topk(source, size, axis, bool(given.get("descending", False)))
    replace(node, write.call(operator.getitem, found, 1) if node.target in _PLACES else found)


def count(node: Any) -> None:
    """Rule 2."""
    given: list[Any] = [*node.args, *(None, 100, 0, 0)[len(node.args) :]]
    source, bins, low, high = given
    if node.kwargs or low >= high or source.meta["val"].dtype is not torch.float32:
        return
    write = AtenCalls(node)
    flat = write.reshape(source, [-1, 1])
    share = write.call(overload("div", "Tensor"), write.sub(flat, float(low)), float(high - low))
    places = write.floor(write.mul(share, float(bins)))
    last = write.call(overload("clamp"), places, None, float(bins - 1))
    numbers = write.call(overload("arange"), bins, dtype=torch.float32)
    falls = write.call(overload("eq", "Tensor"), last, numbers)
    inside = write.call(overload("le", "Scalar"), flat, float(high))
    counted = write.call(overload("logical_and"), falls, inside)
    floats = write.call(overload("_to_copy"), counted, dtype=torch.float32)
    replace(node, write.call(_SUM, floats, [0], False))


ORDERS: dict[Any, Callable[[Any], None]] = {
    **dict.fromkeys({overload("sort"), *_THAT_MAY_BE_STABLE, *_PLACES}, order),
    overload("histc"): count,
}
