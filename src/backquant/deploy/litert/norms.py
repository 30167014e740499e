"""Norms and attention, composed of the operators that LiteRT has; in float.

Statistics are over axes wherever these lie, so that a norm moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from backquant.deploy.litert.emitter import (
    Call,
    Constant,
    Emitter,
    Table,
    UnsupportedError,
    Value,
    plain,
    without,
)
from backquant.deploy.litert.network import Tensor
from backquant.operators import overload

TABLE = Table()


def _mean(emitter: Emitter, tensor: Tensor, places: Sequence[int]) -> Tensor:
    made = emitter.like(tensor, [1 if i in places else n for i, n in enumerate(tensor.shape)])
    return emitter.emit("MEAN", (tensor, emitter.integers(places, "axes")), made, keepDims=True)


def _normalised(
    call: Call, tensor: Tensor, places: Sequence[int], eps: float, centred: bool = True
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over the stored axes ``places``."""
    write = call.emitter.same
    if centred:
        tensor = write("SUB", tensor, _mean(call.emitter, tensor, places))
    variance = _mean(call.emitter, write("MUL", tensor, tensor), places)
    factor = write("RSQRT", write("ADD", variance, call.emitter.number(eps)))
    return write("MUL", tensor, factor)


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
        wide = call.emitter.reshape(operand.tensor, shape)
        other = call.emitter.laid(Value(wide, plain(rank)), value.layout)
        tensor = call.emitter.same(code, tensor, other)
    return Value(tensor, value.layout)


@TABLE.rule("layer_norm rms_norm")
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


@TABLE.rule("instance_norm")
def _instance_norm(call: Call) -> Value:
    value = call.read("input")
    if not call.arg("use_input_stats", True):
        return _batch_norm(call)
    rank = len(value.shape)
    places = sorted(value.layout.index(axis) for axis in range(2, rank))
    made = _normalised(call, value.tensor, places, float(call.arg("eps", 1e-5)))
    return _affine(call, Value(made, value.layout), [1])


@TABLE.rule("group_norm")
def _group_norm(call: Call) -> Value:
    value = call.read("input")
    groups, rank = int(call.arg("num_groups")), len(value.shape)
    channels = value.shape[1]
    tensor = call.emitter.laid(value, plain(rank))
    shape = (tensor.shape[0], groups, channels // groups, *tensor.shape[2:])
    split = call.emitter.reshape(tensor, shape)
    made = _normalised(call, split, range(2, rank + 1), float(call.arg("eps", 1e-5)))
    joined = call.emitter.reshape(made, tensor.shape)
    return _affine(call, Value(joined, plain(rank)), [1])


def _first(write: Callable[[Call], Value]) -> Callable[[Call, fx.Node, int], Value]:
    """What gives statistics besides, of which nothing is read."""

    def item(call: Call, _: fx.Node, index: int) -> Value:
        if index:
            raise UnsupportedError("the statistics of a norm")
        return write(call)

    return item


@TABLE.rule("batch_norm")
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
        tensor = call.emitter.same(code, tensor, other)
    return Value(tensor, value.layout)


@TABLE.rule("linalg_vector_norm")
def _length(call: Call) -> Value:
    """The root of the sum of squares."""
    if call.arg("ord", 2) != 2 or call.arg("dim") is None:
        raise UnsupportedError("a norm that is not the root of a sum of squares along axes")
    value = call.read("self")
    rank, keep = len(value.shape), bool(call.arg("keepdim", False))
    axes = [axis % rank for axis in call.arg("dim")]
    places = sorted(value.layout.index(axis) for axis in axes)
    square = call.emitter.same("MUL", value.tensor, value.tensor)
    layout = value.layout if keep else without(value.layout, axes)
    inputs = (square, call.emitter.integers(places, "axes"))
    total = call.emit("SUM", inputs, layout, keepDims=keep)
    return call.emit("SQRT", (total.tensor,), layout)


@TABLE.rule("scaled_dot_product_attention")
def _attention(call: Call) -> Value:
    if call.arg("is_causal", False) or call.arg("enable_gqa", False):
        raise UnsupportedError("attention with a causal mask or shared heads")
    query, key, value = (call.read(name) for name in ("query", "key", "value"))
    rank = len(query.shape)
    scale = call.arg("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    write, laid = call.emitter.same, call.emitter.laid
    one, two, three = (laid(each, plain(rank)) for each in (query, key, value))
    scaled = write("MUL", one, call.emitter.number(scale))
    scores = call.emitter.like(one, (*one.shape[:-1], two.shape[-2]))
    scores = call.emitter.emit("BATCH_MATMUL", (scaled, two), scores, adjY=True)
    if call.has("attn_mask"):
        scores = _masked(call, scores)
    weights = write("SOFTMAX", scores, beta=1.0)
    return call.emit("BATCH_MATMUL", (weights, three))


def _masked(call: Call, scores: Tensor) -> Tensor:
    mask = call.read("attn_mask")
    tensor = call.emitter.laid(mask, plain(len(mask.shape)))
    if tensor.dtype != "BOOL":
        return call.emitter.same("ADD", scores, tensor)
    lowest = call.emitter.number(torch.finfo(torch.float32).min)
    return call.emitter.emit("SELECT_V2", (tensor, scores, lowest), call.emitter.like(scores))


PARTS: dict[Any, Callable[[Call, fx.Node, int], Value]] = {
    overload("_native_batch_norm_legit_no_training"): _first(_batch_norm),
    overload("native_layer_norm"): _first(_layer_norm),
}
