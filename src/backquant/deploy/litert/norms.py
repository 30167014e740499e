"""Norms and attention, composed of the operators that LiteRT has; in float.

Statistics are over axes wherever these lie, so that a norm moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from backquant.deploy.litert.emitter import Call, Rule, Table
from backquant.deploy.litert.lowered_values import Constant, UnsupportedError, Value, plain, without
from backquant.deploy.litert.network import Tensor
from backquant.operators import overload


def _number(call: Call, value: float) -> Tensor:
    return call.emitter.constant(Constant("number", torch.tensor(value)), None, "").tensor


def _like(call: Call, tensor: Tensor) -> Tensor:
    return call.emitter.like(tensor, tensor.shape, signature=tensor.signature)


def _mean(call: Call, tensor: Tensor, places: Sequence[int]) -> Tensor:
    shape = [1 if i in places else n for i, n in enumerate(tensor.shape)]
    signature = [1 if i in places else n for i, n in enumerate(tensor.signature)]
    made = call.emitter.like(tensor, shape, signature=tuple(signature))
    axes = call.emitter.integers(places, "axes")
    return call.emitter.emit("MEAN", (tensor, axes), made, keepDims=True)


def _normalised(
    call: Call, tensor: Tensor, places: Sequence[int], eps: float, centred: bool = True
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over the stored axes ``places``."""
    emit = call.emitter.emit
    if centred:
        mean = _mean(call, tensor, places)
        tensor = emit("SUB", (tensor, mean), _like(call, tensor))
    square = emit("MUL", (tensor, tensor), _like(call, tensor))
    variance = _mean(call, square, places)
    shifted = emit("ADD", (variance, _number(call, eps)), _like(call, variance))
    factor = emit("RSQRT", (shifted,), _like(call, shifted))
    return emit("MUL", (tensor, factor), _like(call, tensor))


def _affine(call: Call, value: Value, axes: Sequence[int]) -> Value:
    """``value`` times the weight, plus the bias, which lie along ``axes`` of PyTorch's order."""
    tensor, rank = value.tensor, len(value.layout)
    for name, code in (("weight", "MUL"), ("bias", "ADD")):
        if not call.has(name):
            continue
        operand = call.read(name)
        shape = [1] * rank
        for axis, size in zip(axes, operand.shape, strict=True):
            shape[axis] = size
        wide = call.emitter.reshape(operand.tensor, shape, shape)
        other = call.emitter.laid(Value(wide, plain(rank)), value.layout)
        tensor = call.emitter.emit(code, (tensor, other), _like(call, tensor))
    return Value(tensor, value.layout)


def _layer_norm(call: Call) -> Value:
    value = call.read("input")
    rank, count = len(value.shape), len(call.arg("normalized_shape"))
    axes = list(range(rank - count, rank))
    places = sorted(value.layout.index(axis) for axis in axes)
    centred = "rms_norm" not in str(call.node.target)
    eps = call.arg("eps")
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    made = _normalised(call, value.tensor, places, eps, centred)
    return _affine(call, Value(made, value.layout), axes)


def _instance_norm(call: Call) -> Value:
    value = call.read("input")
    if not call.arg("use_input_stats", True):
        return _batch_norm(call)
    rank = len(value.shape)
    places = sorted(value.layout.index(axis) for axis in range(2, rank))
    made = _normalised(call, value.tensor, places, float(call.arg("eps", 1e-5)))
    return _affine(call, Value(made, value.layout), [1])


def _group_norm(call: Call) -> Value:
    value = call.read("input")
    groups, rank = int(call.arg("num_groups")), len(value.shape)
    channels = value.shape[1]
    tensor = call.emitter.laid(value, plain(rank))
    shape = (tensor.shape[0], groups, channels // groups, *tensor.shape[2:])
    signature = (tensor.signature[0], groups, channels // groups, *tensor.signature[2:])
    split = call.emitter.reshape(tensor, shape, signature)
    made = _normalised(call, split, range(2, rank + 1), float(call.arg("eps", 1e-5)))
    joined = call.emitter.reshape(made, tensor.shape, tensor.signature)
    return _affine(call, Value(joined, plain(rank)), [1])


def _first(write: Callable[[Call], Value]) -> Callable[[Call, fx.Node, int], Value]:
    """What gives statistics besides, of which nothing is read."""

    def item(call: Call, _: fx.Node, index: int) -> Value:
        if index:
            raise UnsupportedError("the statistics of a norm")
        return write(call)

    return item


def _batch_norm(call: Call) -> Value:
    """With statistics that are known: a product and a sum."""
    value = call.read("input")
    names = ("running_mean", "running_var", "weight", "bias")
    held = [call.constant(name) for name in names]
    if held[0] is None or held[1] is None or call.arg("training", False):
        raise UnsupportedError("a norm over the batch")
    mean, variance = held[0].value.double(), held[1].value.double()
    factor = (variance + float(call.arg("eps", 1e-5))).rsqrt()
    factor = factor if held[2] is None else factor * held[2].value.double()
    bias = -mean * factor if held[3] is None else held[3].value.double() - mean * factor
    tensor, rank = value.tensor, len(value.layout)
    for code, numbers in (("MUL", factor), ("ADD", bias)):
        shape = [1] * rank
        shape[1] = -1
        operand = Constant("batch_norm", numbers.float().reshape(shape))
        other = call.emitter.laid(call.emitter.constant(operand, None, ""), value.layout)
        tensor = call.emitter.emit(code, (tensor, other), _like(call, tensor))
    return Value(tensor, value.layout)


def _length(call: Call) -> Value:
    """The root of the sum of squares."""
    if call.arg("ord", 2) != 2 or call.arg("dim") is None:
        raise UnsupportedError("a norm that is not the root of a sum of squares along axes")
    value = call.read("self")
    rank, keep = len(value.shape), bool(call.arg("keepdim", False))
    axes = [axis % rank for axis in call.arg("dim")]
    places = sorted(value.layout.index(axis) for axis in axes)
    tensor = value.tensor
    square = call.emitter.emit("MUL", (tensor, tensor), _like(call, tensor))
    layout = value.layout if keep else without(value.layout, axes)
    total = call.output(layout)
    inputs = (square, call.emitter.integers(places, "axes"))
    call.emitter.emit("SUM", inputs, total, keepDims=keep)
    return call.emit("SQRT", (total,), layout)


def _attention(call: Call) -> Value:
    if call.arg("is_causal", False) or call.arg("enable_gqa", False):
        raise UnsupportedError("attention with a causal mask or shared heads")
    query, key, value = (call.read(name) for name in ("query", "key", "value"))
    rank = len(query.shape)
    scale = call.arg("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    emit, laid = call.emitter.emit, call.emitter.laid
    one, two, three = (laid(each, plain(rank)) for each in (query, key, value))
    scaled = emit("MUL", (one, _number(call, scale)), _like(call, one))
    shape = (*one.shape[:-1], two.shape[-2])
    signature = (*one.signature[:-1], two.signature[-2])
    scores = call.emitter.like(one, shape, signature=signature)
    scores = emit("BATCH_MATMUL", (scaled, two), scores, adjY=True)
    if call.has("attn_mask"):
        scores = _masked(call, scores)
    weights = emit("SOFTMAX", (scores,), _like(call, scores), beta=1.0)
    return call.emit("BATCH_MATMUL", (weights, three))


def _masked(call: Call, scores: Tensor) -> Tensor:
    mask = call.read("attn_mask")
    rank = len(mask.shape)
    tensor = call.emitter.laid(mask, plain(rank))
    made = _like(call, scores)
    if tensor.dtype == "BOOL":
        lowest = _number(call, torch.finfo(torch.float32).min)
        return call.emitter.emit("SELECT_V2", (tensor, scores, lowest), made)
    return call.emitter.emit("ADD", (scores, tensor), made)


PARTS: dict[Any, Callable[[Call, fx.Node, int], Value]] = {
    overload("_native_batch_norm_legit_no_training"): _first(_batch_norm),
    overload("native_layer_norm"): _first(_layer_norm),
}
TABLE: Table = {
    overload("layer_norm"): Rule(_layer_norm),
    overload("linalg_vector_norm"): Rule(_length),
    overload("rms_norm"): Rule(_layer_norm),
    overload("group_norm"): Rule(_group_norm),
    overload("instance_norm"): Rule(_instance_norm),
    overload("batch_norm"): Rule(_batch_norm),
    overload("scaled_dot_product_attention"): Rule(_attention),
}
