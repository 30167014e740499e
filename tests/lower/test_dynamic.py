"""Reading what is quantized at each call, as convert writes it."""

from __future__ import annotations

import operator

import pytest
import torch

from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.lower.qdq import (
    DynamicInput,
    dynamic_input,
    is_dynamic_boundary,
    narrow_constant,
    widened_constant,
)

register_quantized_decomposed()
OPS = torch.ops.quantized_decomposed


class Nodes:
    """The nodes of a dynamic quantization; a test changes one and asks again."""

    def __init__(self, choose=OPS.choose_qparams.tensor) -> None:
        graph = torch.fx.Graph()
        self.x = graph.placeholder("x")
        self.other = graph.placeholder("other")
        call = graph.call_function
        self.choose = call(choose, (self.x, 0, 127, 1e-5, torch.uint8))
        self.scale = call(operator.getitem, (self.choose, 0))
        self.zero_point = call(operator.getitem, (self.choose, 1))
        qparams = (self.scale, self.zero_point, 0, 127, torch.uint8)
        self.quantize = call(OPS.quantize_per_tensor.tensor, (self.x, *qparams))
        self.dequantize = call(OPS.dequantize_per_tensor.tensor, (self.quantize, *qparams))


def test_dynamic_integers():
    nodes = Nodes()
    assert dynamic_input(nodes.dequantize) == DynamicInput(nodes.x, torch.uint8, 0, 127, 1e-5)
    between = (nodes.choose, nodes.scale, nodes.zero_point, nodes.quantize, nodes.dequantize)
    assert all(map(is_dynamic_boundary, between))
    assert not any(map(dynamic_input, between[:-1]))
    assert not is_dynamic_boundary(nodes.x)
    assert dynamic_input(Nodes(OPS.choose_qparams_symmetric.tensor).dequantize).symmetric


def test_what_only_looks_like_it():
    nodes = Nodes()
    nodes.quantize.args = (nodes.other, *nodes.quantize.args[1:])
    assert dynamic_input(nodes.dequantize) is None
    nodes = Nodes()
    nodes.dequantize.args = (*nodes.dequantize.args[:3], -5, *nodes.dequantize.args[4:])
    assert dynamic_input(nodes.dequantize) is None
    nodes = Nodes()
    nodes.scale.args = (nodes.choose, 1)
    assert dynamic_input(nodes.dequantize) is None
    nodes = Nodes()
    nodes.choose.target = torch.aminmax
    assert dynamic_input(nodes.dequantize) is None
    assert dynamic_input("x") is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts(dtype):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    cast = torch.ops.aten.to.dtype
    narrow = graph.call_function(cast, (x, dtype))
    wide = graph.call_function(cast, (narrow, torch.float32))
    assert dynamic_input(wide) == DynamicInput(x, dtype)
    assert dynamic_input(narrow) is None
    assert widened_constant(wide) == (wide, None)
    static = OPS.convert_element_type.no_fuse
    narrow = graph.call_function(static, (x, dtype))
    wide = graph.call_function(static, (narrow, torch.float32))
    assert dynamic_input(wide) is None
    assert widened_constant(wide) == (x, dtype)
    assert is_dynamic_boundary(wide)
    assert is_dynamic_boundary(narrow)
    assert narrow_constant(wide) is None


def test_stored_narrow_weights():
    graph = torch.fx.Graph()
    weight = graph.create_node("get_attr", "weight")
    wide = graph.call_function(OPS.convert_element_type.no_fuse, (weight, torch.float32))
    assert narrow_constant(wide) is weight
    assert narrow_constant(weight) is None
