"""Paddings with negative sizes, which ExecuTorch 1.5 has no kernel for, as slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backquant.deploy.edits import AtenCalls, replace
from backquant.operators import overload

__all__ = ["PADS"]

_IN_A_MODE = overload("pad")


def cut(node: Any) -> None:
    """What a negative size takes off is sliced off; then what others add is put on."""
    source, sizes, *more = node.args
    mode = more[0] if node.target is _IN_A_MODE and more else node.kwargs.get("mode")
    if mode not in (None, "constant") or not all(isinstance(size, int) for size in sizes):
        return
    if min(sizes, default=0) >= 0:
        return
    write, value = AtenCalls(node), source
    rank = source.meta["val"].dim()
    for place in range(len(sizes) // 2):
        front, behind = (min(size, 0) for size in sizes[2 * place : 2 * place + 2])
        axis = rank - 1 - place
        if front or behind:
            end = behind or 2**63 - 1
            value = write.call(overload("slice", "Tensor"), value, axis, -front, end)
    rest = [max(size, 0) for size in sizes]
    if any(rest):
        value = write.call(node.target, value, rest, *more, **node.kwargs)
    replace(node, value)


PADS: dict[Any, Callable[[Any], None]] = {
    overload("constant_pad_nd"): cut,
    _IN_A_MODE: cut,
}
