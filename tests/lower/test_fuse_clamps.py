from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.nn.quantized import reference as nnqr

CLAMPS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.4, 0.9),
    "clamp": lambda x: x.clamp(max=0.7),
}


def _conv(tools):
    conv = nn.Conv2d(4, 8, 3, padding=1)
    return nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))


@pytest.mark.parametrize("first", [None, *CLAMPS])
@pytest.mark.parametrize("second", CLAMPS)
@pytest.mark.parametrize("high", [255, 127])
def test_a_clamp_that_is_quantized_on_its_own_joins_the_kernel(tools, first, second, high):
    qparams = tools.qparams(0.02, 40, 0, high)

    def forward(self, x):
        x = self.conv(tools.qdq(x, tools.u8))
        x = tools.qdq(x if first is None else CLAMPS[first](x), qparams)
        return tools.qdq(CLAMPS[second](x), qparams)

    reference = tools.trace(forward, conv=_conv(tools))
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "OnednnConv", "dequantize"]
    [use] = lowered.kernels
    assert len(use.nodes) == (2 if first is None else 3)
    assert use.kernel == "onednn.qconv2d_pointwise(hardtanh)"
    x = torch.randn(2, 4, 6, 6) * 3
    tools.assert_within(lowered.graph_module(x), reference(x), qparams.scale)
    original = dict(reference.named_modules())["conv"]
    assert isinstance(original, nnqr.Conv2d)


def test_a_linear_layer_absorbs_too(tools):
    def forward(self, x):
        x = tools.qdq(self.fc(tools.qdq(x, tools.u8)), tools.u8)
        return tools.qdq(F.relu6(x), tools.u8)

    fc = nn.Linear(6, 5)
    reference = tools.trace(forward, fc=nnqr.Linear.from_float(fc, tools.weight_qparams(fc)))
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "OnednnLinear", "dequantize"]
    x = torch.randn(20, 6) * 3
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)


def test_a_value_that_something_else_reads_is_not_clamped(tools):
    def forward(self, x):
        x = tools.qdq(self.conv(tools.qdq(x, tools.u8)), tools.u8)
        return tools.qdq(F.relu(x), tools.u8), x

    reference = tools.trace(forward, conv=_conv(tools))
    lowered = tools.lower(reference)
    assert "clamp" in tools.targets(lowered)
    x = torch.randn(2, 4, 6, 6) * 3
    for actual, expected in zip(lowered.graph_module(x), reference(x), strict=True):
        tools.assert_within(actual, expected, tools.u8.scale)


def test_other_activations_keep_the_clamp_behind(tools):
    def forward(self, x):
        x = tools.qdq(F.hardswish(self.conv(tools.qdq(x, tools.u8))), tools.u8)
        return tools.qdq(x.clamp(-0.1, 0.5), tools.u8)

    reference = tools.trace(forward, conv=_conv(tools))
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "OnednnConv", "clamp", "dequantize"]
    x = torch.randn(2, 4, 6, 6) * 3
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)


def test_a_module_of_two_calls_absorbs_each_calls_clamp(tools):
    def forward(self, x):
        x = tools.qdq(self.conv(tools.qdq(x, tools.u8)), tools.u8)
        x = tools.qdq(x.clamp(max=0.5), tools.u8)
        return tools.qdq(self.conv(x), tools.u8)

    conv = nn.Conv2d(4, 4, 1)
    reference = tools.trace(forward, conv=nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv)))
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "OnednnConv", "OnednnConv", "dequantize"]
    x = torch.randn(2, 4, 6, 6) * 3
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)
