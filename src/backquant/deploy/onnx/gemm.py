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
from typing import TYPE_CHECKING, Any

import numpy as np

from backquant.backend_config import DTypeConfig
from backquant.deploy.onnx.exporter import ORIGIN
from backquant.deploy.onnx.rewrite import (
    OnnxCalls,
    array_of,
    comes_from,
    input_of,
    is_plain,
    readers_of,
    replace,
    rewrite,
)

if TYPE_CHECKING:
    import onnx_ir as ir

_LIMIT = 2**31 - 1
_PRODUCTS = ("Gemm", "MatMul", "Conv")


def store_integer_biases(model: Any) -> None:
    """Rewrite, in place, products on dequantized operands: biases that are operands, and those that are added
    behind a MatMul whose result nothing quantizes (before a quantized one, ONNX Runtime does that itself)."""
    rewrite(model, dict.fromkeys(_PRODUCTS, _with_integer_bias))


def _with_integer_bias(node: ir.Node) -> Any:
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

    def store(node: ir.Node) -> None:
        config = described.get(node.metadata_props.get(ORIGIN, ""))
        is_described = config is not None and config.bias_scale == "input_times_weight"
        found = _bias_reader(node) if is_described and _is_quantized(node) else None
        if found is not None:
            _store_bias(node, *found)

    rewrite(model, dict.fromkeys((*_PRODUCTS, "ConvTranspose"), store))


def _bias_reader(node: ir.Node) -> tuple[Any, int] | None:
    """The node that adds a constant bias, and the position of the bias among its inputs."""
    reader, place = node, 2
    if node.op_type == "MatMul":
        readers = readers_of(node)
        if [each.op_type for each in readers] != ["Add"]:
            return None
        reader, place = readers[0], int(readers[0].inputs[0] is node.outputs[0])
    return None if array_of(input_of(reader, place)) is None else (reader, place)


def _is_quantized(node: ir.Node) -> bool:
    return is_plain(node) and all(comes_from(x, "DequantizeLinear") for x in node.inputs[:2])


def _is_requantized(node: ir.Node) -> bool:
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


def _relu_as_max(node: ir.Node) -> None:
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


# Dynamically quantized products on integers: DynamicQuantizeLinear → MatMulInteger → Cast → Mul (→ Add).
#
# Runtimes read ``DequantizeLinear(weight)`` behind a dynamic quantization as a float product, so the
# integer product is written out:
#
#     x @ w + b  ≈  float((x_q - x_zero) @ w_q) * (x_scale * w_scale) + b
#
# The weight is symmetric: its zero points are zero, and its scale is per column or one. Source: ONNX
# operator documentation, DynamicQuantizeLinear-11 and MatMulInteger-10.

_FLOAT = 1  # the ONNX type


def use_integer_products(model: Any) -> None:
    """Rewrite every MatMul and Gemm between such operands, in place.

    What reads a dynamically quantized value otherwise keeps its quantize and dequantize nodes.
    """
    rewrite(model, {"MatMul": _integer_product, "Gemm": _integer_product})


def settle_types(model: Any) -> None:
    """Give what DynamicQuantizeLinear makes its ONNX types: torch has others for them, in place."""
    import onnx_ir as ir

    for node in model.graph:
        if node.op_type != "DynamicQuantizeLinear":
            continue
        integers, scale, zero_point = node.outputs
        integers.type = zero_point.type = ir.TensorType(ir.DataType.UINT8)
        scale.type = ir.TensorType(ir.DataType.FLOAT)
        integers.shape = node.inputs[0].shape
        scale.shape = zero_point.shape = ir.Shape([])


def quantized_by(value: Any) -> Any:
    """The DynamicQuantizeLinear that ``value`` is quantized and dequantized by; ``None`` where it is not."""
    for kind in ("DequantizeLinear", "QuantizeLinear"):
        node = comes_from(value, kind)
        if node is None:
            return None
        value = node.inputs[0]
    return comes_from(node.inputs[1], "DynamicQuantizeLinear")


def _weight(node: ir.Node) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """The integers ``[K, N]`` and scales ``[N]`` or ``[]`` of the second operand."""
    dequantize = comes_from(node.inputs[1], "DequantizeLinear")
    constants = [] if dequantize is None else list(map(array_of, dequantize.inputs))
    if dequantize is None or any(value is None for value in constants):
        return None
    weight, scale, zero_point = constants
    if weight.ndim != 2 or zero_point.any() or not is_plain(node):
        return None
    axis = dequantize.attributes["axis"].as_int() % 2 if scale.ndim == 1 and scale.size > 1 else 1
    if node.attributes.get_int("transB", 0):
        weight, axis = weight.T, 1 - axis if scale.size > 1 else 1
    return (weight, scale) if axis == 1 else None


def _integer_product(node: ir.Node) -> Any:
    dynamic = quantized_by(node.inputs[0])
    found = None if dynamic is None else _weight(node)
    if found is None:
        return None
    integers, scale, zero_point = dynamic.outputs
    weight, factor = found
    write, bias = OnnxCalls(node), input_of(node, 2)
    scales = write.Mul(scale, write.constant(factor, f"{node.name}/weight_scale"))
    weights = write.constant(weight, f"{node.name}/weight")
    sums = write.MatMulInteger(integers, weights, zero_point)
    product = write.Mul(write.Cast(sums, to=_FLOAT), scales)
    return product if bias is None else write.Add(product, bias)
