"""The bias of a quantized product as 32-bit integers, of the scale input × weight, dequantized.

ONNX Runtime runs a Gemm between dequantized operands on integers when its result is quantized (then it
quantizes a float bias itself), or when its bias is integers of the scale input × weight. A MatMul with a
following addition of a bias becomes such a Gemm where it knows the shapes. A Gemm without a bias is
written as a MatMul, which it runs on integers with a float result. The bias that is an operand (of a Gemm, of
a convolution) is stored so whatever becomes of the result. A Relu behind a Gemm or MatMul with a float result
keeps it in float, for what a later quantization might make needless: it is written as Max(x, 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backquant.backend_config import DTypeConfig
from backquant.deploy.onnx.blocks import is_plain
from backquant.deploy.onnx.provenance import ORIGIN
from backquant.deploy.onnx.rewrite import (
    OnnxCalls,
    array_of,
    comes_from,
    input_of,
    readers_of,
    replace,
    rewrite,
)

_LIMIT = 2**31 - 1
_PRODUCTS = ("Gemm", "MatMul", "Conv")


def store_integer_biases(model: Any) -> None:
    """Rewrite, in place, products on dequantized operands: biases that are operands, and those that are added
    behind a MatMul whose result nothing quantizes (before a quantized one, ONNX Runtime does that itself)."""
    rewrite(model, dict.fromkeys(_PRODUCTS, _with_integer_bias))


def _with_integer_bias(node: Any) -> Any:
    if not _is_quantized(node):
        return None
    found = _bias_reader(node)
    adds = node if found is None else found[0]
    is_float = not _is_requantized(adds)
    if found is not None and (adds is node or is_float):
        _store_bias(node, *found)
    if node.op_type == "Conv" or not is_float:
        return None
    _relu_as_max(adds)
    return _with_zeros(node) if found is None else None


def store_described_biases(model: Any, described: Mapping[str, DTypeConfig]) -> None:
    """Rewrite, in place, the constant biases of products on dequantized operands, of those nodes of the
    reference graph whose biases are ``described`` as integers of the scale input × weight."""

    def store(node: Any) -> None:
        config = described.get(node.metadata_props.get(ORIGIN, ""))
        is_described = config is not None and config.bias_scale == "input_times_weight"
        found = _bias_reader(node) if is_described and _is_quantized(node) else None
        if found is not None:
            _store_bias(node, *found)

    rewrite(model, dict.fromkeys((*_PRODUCTS, "ConvTranspose"), store))


def _bias_reader(node: Any) -> tuple[Any, int] | None:
    """The node that adds a constant bias, and the position of the bias among its inputs."""
    reader, place = node, 2
    if node.op_type == "MatMul":
        readers = readers_of(node)
        if [each.op_type for each in readers] != ["Add"]:
            return None
        reader, place = readers[0], int(readers[0].inputs[0] is node.outputs[0])
    return None if array_of(input_of(reader, place)) is None else (reader, place)


def _is_quantized(node: Any) -> bool:
    return is_plain(node) and all(comes_from(x, "DequantizeLinear") for x in node.inputs[:2])


def _is_requantized(node: Any) -> bool:
    readers = readers_of(node)
    if len(readers) == 1 and readers[0].op_type in ("Relu", "Clip"):
        readers = readers_of(readers[0])
    return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)


def _store_bias(product: Any, adds: Any, place: int) -> None:
    bias = adds.inputs[place]
    if bias.const_value.numpy().ndim == 1:
        made = _integers(product, array_of(bias), str(bias.name))
        if made is not None:
            adds.replace_input_with(place, made)


def _relu_as_max(node: Any) -> None:
    """The Relu that alone reads ``node`` as a maximum."""
    readers = readers_of(node)
    if [each.op_type for each in readers] == ["Relu"]:
        write = OnnxCalls(readers[0])
        replace(readers[0], write.Max(node.outputs[0], write.constant(np.float32(0))))


def _with_zeros(product: Any) -> Any:
    """A product without a bias as a Gemm with a bias of zeros: a following addition of another value is not
    taken for its bias."""
    x, weight, bias = (input_of(product, place) for place in range(3))
    is_flat = product.op_type == "Gemm" or (x.shape is not None and len(x.shape) == 2)
    integers = weight.producer().inputs[0]
    if not is_flat or bias is not None or integers.const_value is None:
        return None
    transposed = product.attributes.get_int("transB", 0)
    zeros = np.zeros(integers.const_value.shape[0 if transposed else 1], np.float32)
    made = _integers(product, zeros, f"{product.name}/no_bias")
    return None if made is None else OnnxCalls(product).Gemm(x, weight, made, transB=transposed)


def _integers(product: Any, bias: np.ndarray[Any, Any], name: str) -> Any:
    """``bias`` as a dequantized constant of the scale input × weight; ``None`` where it does not fit."""
    scales = [array_of(value.producer().inputs[1]) for value in product.inputs[:2]]
    if any(scale is None for scale in scales):
        return None
    step = scales[0].astype(np.float32) * scales[1].astype(np.float32)
    if (
        step.size > 1 and bias.size % step.size == 0
    ):  # groups of a transposed convolution share them
        step = np.tile(step, bias.size // step.size)
    scale = np.broadcast_to(step, bias.shape)
    integers = np.round(bias.astype(np.float64) / scale)
    if np.abs(integers).max(initial=0) > _LIMIT:
        return None
    write = OnnxCalls(product)
    return write.DequantizeLinear(
        write.constant(integers.astype(np.int32), name),
        write.constant(scale, f"{name}_scale"),
        write.constant(np.zeros(bias.shape, np.int32), f"{name}_zero_point"),
        axis=0,
    )
