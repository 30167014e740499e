"""Linear layers, products of matrices, and tables.

1. A linear layer that reads a flattened image with its channels last has the columns of its weight in
   that order.
2. A matrix whose last two axes are swapped is read so by the kernel.
"""

from __future__ import annotations

import numpy as np

from backquant.deploy.litert.call import Call, Rule, Table
from backquant.deploy.litert.images import activation
from backquant.deploy.litert.layouts import Layout, plain
from backquant.deploy.litert.network import Array, Tensor
from backquant.deploy.litert.values import UnsupportedError, Value
from backquant.deploy.litert.weights import bias_of, has_integer_weight, stored_weight
from backquant.operators import overload

__all__ = ["TABLE"]

_MOST_AXES = 5  # of the kernel of matrix products


def _linear(call: Call) -> Value:
    value = call.read("input")
    rank = len(value.shape)
    layout = value.layout if value.layout[-1] == rank - 1 else plain(rank)
    source = call.emitter.laid(value, layout)
    if call.constant("weight") is None:
        return _by_computed(call, source, layout)

    def arrange(weight: Array) -> Array:
        """Rule 1."""
        return weight if value.columns is None else np.ascontiguousarray(weight[:, value.columns])

    weight = stored_weight(call, arrange, 0)
    with_bias = call.has("bias") or call.integer
    bias = bias_of(call, source, weight, weight.shape[0]) if with_bias else None
    return call.emit(
        "FULLY_CONNECTED",
        (source, weight, bias),
        layout,
        keepNumDims=rank != 2,
        fusedActivationFunction=activation(call),
    )


def _by_computed(call: Call, source: Tensor, layout: Layout) -> Value:
    if call.has("bias"):
        raise UnsupportedError("a linear layer whose weight is computed")
    weight = call.emitter.laid(call.read("weight"), (0, 1))
    return call.emit("BATCH_MATMUL", (source, weight), layout, adjY=True)


def _matmul(call: Call) -> Value:
    second = "mat2" if "mat2" in call.args else "other"
    values = call.read("self"), call.read(second)
    if min(len(value.shape) for value in values) < 2:
        raise UnsupportedError("a product with a vector")
    (one, adjoint_x), (two, adjoint_y) = (_matrix(call, value) for value in values)
    return call.emit("BATCH_MATMUL", (one, two), adjX=adjoint_x, adjY=adjoint_y)


def _matrix(call: Call, value: Value) -> tuple[Tensor, bool]:
    """The operand with its axes in order, and whether its last two are swapped; rule 2."""
    rank = len(value.shape)
    if value.layout == (*range(rank - 2), rank - 1, rank - 2):
        return value.tensor, True
    return call.emitter.laid(value, plain(rank)), False


def _embedding(call: Call) -> Value:
    rank = len(call.shape)
    places = call.emitter.laid(call.read("indices"), plain(rank - 1))
    return call.emit("GATHER", (call.read("weight").tensor, places), axis=0)


def _few_axes(call: Call) -> bool:
    return len(call.shape) <= _MOST_AXES


_PRODUCT = Rule(_matmul, _few_axes)
TABLE: Table = {
    overload("linear"): Rule(_linear, has_integer_weight(0), fuses=True),
    overload("matmul"): _PRODUCT,
    overload("bmm"): _PRODUCT,
    overload("mm"): _PRODUCT,
    overload("embedding"): Rule(_embedding),
}
