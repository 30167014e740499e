from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from backquant.dtypes import QParams
from backquant.lower.qdq import (
    integer_source,
    is_channel_dequantize,
    is_dequantize,
    is_quantize,
    qparams_of,
    quantized_value,
)

LITERALS = (0.5, 10, 0, 127, torch.uint8)


def _call(name, *args):
    graph = Graph()
    x = graph.placeholder("x")
    op = getattr(torch.ops.quantized_decomposed, name)
    return x, graph.call_function(op.default, (x, *args))


def test_nodes_with_literal_qparams_are_read(tools):
    x, quantize = _call("quantize_per_tensor", *LITERALS)
    assert is_quantize(quantize) and not is_dequantize(quantize)
    assert qparams_of(quantize) == QParams(*LITERALS)
    x, dequantize = _call("dequantize_per_tensor", *LITERALS)
    assert is_dequantize(dequantize) and not is_quantize(dequantize)
    assert integer_source(dequantize) is x


def test_everything_else_is_not_taken_for_one(tools):
    graph = Graph()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    ops = torch.ops.quantized_decomposed
    computed = graph.call_function(ops.quantize_per_tensor.default, (x, scale, *LITERALS[1:]))
    by_tensor = graph.call_function(ops.quantize_per_tensor.tensor, (x, scale, scale, 0, 1, None))
    half = graph.call_function(
        ops.dequantize_per_tensor.default, (x, *LITERALS), {"out_dtype": torch.float16}
    )
    for node in (x, computed, by_tensor, half, None, 3):
        assert not is_quantize(node)
        assert not is_dequantize(node)
    channel = graph.call_function(ops.dequantize_per_channel.default, (x, scale, None, 0, 0, 1, 2))
    assert is_channel_dequantize(channel)
    assert not is_channel_dequantize(half)


@pytest.mark.parametrize("value", [-1e9, -3.3, -0.25, 0.0, 0.25, 0.75, 1.1, 6.0, 1e9])
def test_quantized_value_is_what_the_operator_gives(tools, value):
    for qparams in (tools.u8, QParams(0.5, 3, -127, 127, torch.int8)):
        expected = tools.q(torch.tensor([value]), qparams).item()
        assert quantized_value(value, qparams) == expected


def test_qparams_say_what_they_are():
    full = QParams(0.5, 10, 0, 255, torch.uint8)
    narrow = QParams(0.5, 10, 0, 127, torch.uint8)
    assert full.is_full_range and not narrow.is_full_range
    assert narrow.bounds == (-5.0, 58.5)
    assert str(narrow) == "uint8 [0, 127] scale 0.5 zero point 10"
    assert QParams(*narrow.literals) == narrow
