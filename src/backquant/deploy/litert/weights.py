"""Weights and biases as kernels read them: arranged when the file is written, so that nothing moves them
when it runs.

Weights of integer kernels are int8 around zero, with one scale or one for each output channel; biases are
int32 (int64 beside int16 activations) in steps of input × weight scale. A kernel in float reads integer
weights after an operator that dequantizes them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from backquant.deploy.litert.call import Call
from backquant.deploy.litert.layouts import plain
from backquant.deploy.litert.lowered_values import (
    Constant,
    UnsupportedError,
    Value,
    as_array,
    constant_tensor,
)
from backquant.deploy.litert.network import Array, Scales, Tensor

__all__ = ["bias_of", "has_integer_weight", "stored_weight", "weight_of"]

_INT32 = (-(1 << 31), (1 << 31) - 1)


def weight_of(call: Call) -> Constant:
    """The weight of a layer. Raises ``UnsupportedError`` where it is computed."""
    held = call.constant("weight")
    if held is None:
        raise UnsupportedError("a weight that is computed")
    return held


def has_integer_weight(axis: int) -> Callable[[Call], bool]:
    """Whether the weight is one of an integer kernel; ``axis``: of its output channels."""

    def fits(call: Call) -> bool:
        weight = call.constant("weight")
        if weight is None or weight.integers is None or weight.scales is None:
            return False
        if weight.integers.dtype != torch.int8 or any(weight.scales.zero_point):
            return False
        if len(weight.scales.scale) > 1 and weight.scales.axis != axis:
            return False
        return call.args.get("bias") is None or call.constant("bias") is not None

    return fits


def stored_weight(call: Call, arrange: Callable[[Array], Array], axis: int) -> Tensor:
    """The weight, arranged; ``axis``: where its output channels are then."""
    held = weight_of(call)
    if held.integers is None or held.scales is None or any(held.scales.zero_point):
        return constant_tensor(held.name, np.ascontiguousarray(arrange(as_array(held.value))))
    made = constant_tensor(held.name, np.ascontiguousarray(arrange(as_array(held.integers))))
    made.scales = Scales(held.scales.scale, held.scales.zero_point, axis)
    if call.integer:
        return made
    return call.emitter.dequantize(Value(made, plain(len(made.shape)))).tensor


def bias_of(call: Call, source: Tensor, weight: Tensor, channels: int) -> Tensor:
    """The bias, zeros where the layer has none."""
    held = call.constant("bias")
    if held is None and call.has("bias"):
        raise UnsupportedError("a bias that is computed")
    name = "bias" if held is None else held.name
    value = np.zeros(channels) if held is None else as_array(held.value).astype(np.float64)
    if not call.integer:
        return constant_tensor(name, value.astype(np.float32))
    assert source.scales is not None and weight.scales is not None
    steps = source.scales.scale[0] * np.array(weight.scales.scale, np.float64)
    rounded = np.clip(np.rint(value / steps), *_INT32)
    made = constant_tensor(name, rounded.astype(np.int64 if call.dtype == "INT16" else np.int32))
    made.scales = Scales(tuple(map(float, steps.astype(np.float32))), (0,) * len(steps), 0)
    return made
