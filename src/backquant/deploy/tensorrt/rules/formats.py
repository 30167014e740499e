"""Rules about single formats and operators: INT4 blocks, FP8, INT32 biases, operators that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from backquant.deploy.tensorrt.finding import (
    ONNX_QUANTIZE,
    OPERATORS,
    PARSER_BIAS,
    SCHEMES,
    Hit,
    Rule,
)
from backquant.deploy.tensorrt.rules.qparams import (
    FLOAT8,
    INT4,
    INT32,
    is_blocked,
    nodes_of,
    type_name,
)
from backquant.deploy.tensorrt.view import GraphView

REJECTED = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
    }
)
_BLOCKS = (64, 128)
_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")


def _float_bias(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("DequantizeLinear"):
        if view.element_type(view.input(node, 0)) == INT32:
            what = "an INT32 bias is dequantized"
            yield Hit(view.name(node), what, "the bias as float constants", "INT32")
    for node in view.of_type(*_WITH_BIAS):
        maker = view.producer(view.input(node, 2))
        if maker is None or maker.op_type != "DequantizeLinear":
            continue
        made = view.element_type(view.input(maker, 0))
        if made != INT32:  # that one is named above
            what = "the bias is quantized"
            yield Hit(view.name(node), what, "the bias as float constants", type_name(made))


def _int4_blocks(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        if INT4 not in (view.element_type(view.input(node, 0)), _made(view, node)):
            continue
        name, size = view.name(node), int(view.attribute(node, "block_size", 0))
        if not view.depends_on_constants(view.input(node, 0)):
            yield Hit(name, "INT4 is for weights only", "a constant", view.input(node, 0))
        if size not in _BLOCKS:
            yield Hit(name, "the size of INT4 blocks", "64 or 128", str(size or "no blocks"))
        yield from _block_axis(view, node, name)
        if view.input(node, 2):
            yield Hit(name, "INT4 blocks have no zero point", "none", view.input(node, 2))


def _made(view: GraphView, node: Any) -> int:
    return view.element_type(node.output[0]) if node.op_type == "QuantizeLinear" else 0


def _block_axis(view: GraphView, node: Any, name: str) -> Iterator[Hit]:
    shape = view.shape(view.input(node, 0))
    if shape is None or not is_blocked(view, node):
        return
    axis = view.attribute(node, "axis", 1)
    if axis % max(len(shape), 1) < len(shape) - 2:
        what = "INT4 blocks lie on one of the last two axes"
        yield Hit(name, what, f"axis {len(shape) - 2} or {len(shape) - 1}", str(axis))


def _fp8_range(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        if node.op_type == "QuantizeLinear":
            saturates = view.attribute(node, "saturate", 1)
            if _made(view, node) == FLOAT8 and not saturates:
                what = "values beyond ±448 become NaN"
                yield Hit(view.name(node), what, "saturate=1", "saturate=0")
            continue
        source = view.input(node, 0)
        tensor = view.constant(source)
        if tensor is None or tensor.data_type != FLOAT8:
            continue
        if np.any(np.isnan(view.array(source))):
            yield Hit(view.name(node), "FP8 weights hold NaN", "within ±448", source)


def _rejected(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type(*REJECTED):
        yield Hit(
            view.name(node),
            f"TensorRT has no {node.op_type}",
            "QuantizeLinear and DequantizeLinear around the float operator",
            node.op_type,
        )


FORMATS = (
    Rule(
        "float-bias",
        "Biases are float: no DequantizeLinear of INT32, no quantized bias",
        "error",
        PARSER_BIAS,
        "DequantizeLinear runs in INT8, FP8, FP4 or INT4 only (messages of TensorRT 10)",
        _float_bias,
    ),
    Rule(
        "int4-blocks",
        "INT4 is for weights: blocks of 64 or 128 on one of the last two axes, no zero point",
        "error",
        SCHEMES,
        "INT4 block quantization",
        _int4_blocks,
    ),
    Rule(
        "fp8-range",
        "FP8 E4M3 is clipped at ±448: QuantizeLinear saturates, weights hold no NaN",
        "error",
        f"{SCHEMES} {ONNX_QUANTIZE}",
        "the range of FP8; the attribute saturate",
        _fp8_range,
    ),
    Rule(
        "rejected-operator",
        "No DynamicQuantizeLinear, QLinearConv, QLinearMatMul, MatMulInteger, ConvInteger",
        "error",
        OPERATORS,
        "the support matrix of the ONNX parser",
        _rejected,
    ),
)
