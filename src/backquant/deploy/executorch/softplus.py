"""``softplus`` and ``mish`` by operators that XNNPACK has.

ExecuTorch 1.5 takes ``softplus`` apart into a comparison, which runs outside of the delegate, and an
exponential inside of it. Behind a convolution the delegate then gives two results whose layouts differ, one
is rearranged twice, and the program stops at run time. As ``max(x, 0) + log(1 + exp(-|x|))``, the same in
exact arithmetic and without overflow for any ``x``, all of it stays inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backquant.deploy.edits import AtenCalls, replace
from backquant.operators import overload

__all__ = ["SOFTPLUS"]


def _softplus(node: Any) -> None:
    source, beta, _ = (*node.args, 1.0, 20.0)[: max(3, len(node.args))]
    beta = float(node.kwargs.get("beta", beta))
    if not source.meta["val"].is_floating_point() or beta <= 0:
        return
    write = AtenCalls(node)
    scaled = source if beta == 1 else write.mul(source, beta)
    value = _written(write, scaled)
    replace(node, value if beta == 1 else write.mul(value, 1 / beta))


def _mish(node: Any) -> None:
    [source] = node.args
    if source.meta["val"].is_floating_point():
        write = AtenCalls(node)
        replace(node, write.mul(source, write.tanh(_written(write, source))))


def _written(write: AtenCalls, value: Any) -> Any:
    small = write.exp(write.neg(write.abs(value)))
    return write.add(write.relu(value), write.log(write.add(small, 1.0)))


SOFTPLUS: dict[Any, Callable[[Any], None]] = {
    overload("softplus"): _softplus,
    overload("mish"): _mish,
}
