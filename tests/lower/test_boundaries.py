from __future__ import annotations

import torch
from torch import nn


def test_a_round_trip_between_operators_disappears(tools):
    def forward(self, x):
        return tools.qdq(tools.qdq(tools.qdq(x, tools.u8), tools.u8), tools.u8)

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "dequantize"]
    x = torch.randn(50)
    assert torch.equal(lowered.graph_module(x), reference(x))


def test_a_change_of_qparams_is_one_kernel(tools):
    other = tools.qparams(0.11, 20, 0, 127)

    def forward(self, x):
        return tools.qdq(tools.qdq(x, tools.u8), other)

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "requantize", "dequantize"]
    x = torch.randn(500) * 3
    tools.assert_within(lowered.graph_module(x), reference(x), other.scale)


def test_one_value_quantized_twice_keeps_both(tools):
    other = tools.qparams(0.11, 20)

    def forward(self, x):
        return tools.qdq(x, tools.u8), tools.qdq(x, other)

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert tools.targets(lowered).count("quantize") == 2
    x = torch.randn(50)
    for actual, expected in zip(lowered.graph_module(x), reference(x), strict=True):
        tools.assert_within(actual, expected, 0.11)


def test_the_boundary_kernels_are_found_by_their_path(tools):
    lowered = tools.lower(tools.trace(lambda self, x: tools.qdq(x, tools.u8)))
    for node in lowered.graph_module.graph.nodes:
        if node.op == "call_function":
            assert node.target.__module__ == "backquant.lower.kernels.boundary"


def test_custom_modules_get_integers_as_quantized_tensors_and_give_them_back(tools):
    scale, zero_point = tools.u8.scale, tools.u8.zero_point

    def forward(self, x):
        x = torch.quantize_per_tensor(tools.qdq(x, tools.u8), scale, zero_point, torch.quint8)
        return tools.qdq(self.custom(x).dequantize(), tools.u8)

    for custom in (nn.ReLU(), nn.Upsample(scale_factor=2)):
        reference = tools.trace(forward, custom=custom)
        lowered = tools.lower(reference)
        names = tools.targets(lowered)
        assert "quantized_tensor" in names and "integers_of" in names and len(names) == 5
        x = torch.randn(1, 2, 4, 4)
        assert torch.equal(lowered.graph_module(x), reference(x))
