"""Clamps after an operator: what its kernel does itself, and what is written after it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from backquant.deploy.litert.call import bound_arguments
from backquant.deploy.litert.emitter import Emitter
from backquant.deploy.litert.lowered_values import Constant, Value
from backquant.deploy.litert.network import Scales, Tensor
from backquant.operators import overload

__all__ = ["CLAMPS", "bounds", "clamp_after", "fused_clamp", "is_clamp"]

CLAMPS = (overload("relu"), overload("relu6"), overload("hardtanh"), overload("clamp"))
#: The clamps that kernels have.
_CODES = {(0.0, math.inf): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}


def is_clamp(node: fx.Node) -> bool:
    """Whether ``node`` cuts its only operand off at two numbers."""
    if node.op != "call_function" or node.target not in CLAMPS:
        return False
    return not any(isinstance(each, fx.Node) for each in node.args[1:])


def bounds(node: fx.Node) -> tuple[float, float]:
    """The numbers that a clamp cuts off at; infinite where it does not."""
    if node.target is overload("relu"):
        return 0.0, math.inf
    if node.target is overload("relu6"):
        return 0.0, 6.0
    given: dict[str, Any] = bound_arguments(node)
    low = given.get("min_val", given.get("min"))
    high = given.get("max_val", given.get("max"))
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def fused_clamp(node: fx.Node, scales: Scales | None) -> str | None:
    """The clamp of a kernel that does the same as ``node``; none is needed where the integers end there
    anyway."""
    low, high = bounds(node)
    if scales is not None:
        low, high = effective(low, high, scales)
        if (low, high) == (-math.inf, math.inf):
            return "NONE"
        low, high = bounds(node)
    return _CODES.get((low, high))


def effective(
    low: float, high: float, scales: Scales, limits: tuple[int, int] = (-128, 127)
) -> tuple[float, float]:
    """``low`` and ``high``, infinite where no integer lies beyond.

    >>> effective(0.0, 6.0, Scales.one(0.02, -128))
    (-inf, inf)
    """
    [scale], [zero_point] = scales.scale, scales.zero_point
    first, last = (limit - zero_point for limit in limits)
    if low <= first * scale:
        low = -math.inf
    if round(high / scale) >= last if math.isfinite(high) else True:
        high = math.inf
    return low, high


def clamp_after(emitter: Emitter, node: fx.Node, value: Value) -> Value:
    """``node`` of a value, in the qparams of that."""
    tensor = value.tensor
    low, high = bounds(node)
    code = _CODES.get((low, high))
    if tensor.scales is not None:
        limits = (-128, 127) if tensor.dtype == "INT8" else (-32768, 32767)
        low, high = effective(low, high, tensor.scales, limits)
    if (low, high) == (-math.inf, math.inf):
        return value
    if code is not None:
        made = _like(emitter, tensor)
        return Value(emitter.emit(code, (tensor,), made), value.layout, value.columns)
    for name, bound in (("MAXIMUM", low), ("MINIMUM", high)):
        if math.isfinite(bound):
            number = Constant("bound", torch.tensor([bound]))
            dtype = tensor.dtype if tensor.scales is not None else ""
            other = emitter.constant(number, tensor.scales, dtype).tensor
            tensor = emitter.emit(name, (tensor, other), _like(emitter, tensor))
    return Value(tensor, value.layout, value.columns)


def _like(emitter: Emitter, tensor: Tensor) -> Tensor:
    return emitter.like(tensor, tensor.shape, signature=tensor.signature)
