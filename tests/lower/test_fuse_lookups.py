"""An activation function behind a convolution or linear layer, which the reference model quantizes
apart, in one kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.nn.quantized import reference as nnqr

_ONE_EACH = ["quantize", "OnednnConv", "dequantize"]


def _weighted(tools, module):
    kind = nnqr.Linear if isinstance(module, nn.Linear) else nnqr.Conv2d
    return kind.from_float(module, tools.weight_qparams(module))


@pytest.mark.parametrize("function", [F.hardswish, F.silu])
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 6, 1),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.Conv2d(5, 7, 3, stride=2),
    ],
)
def test_a_convolution_and_its_activation_are_one_kernel(tools, function, conv):
    middle, out = tools.qparams(0.03, 120), tools.qparams(0.015, 25)

    def forward(self, x):
        y = tools.qdq(self.conv(tools.qdq(x, tools.u8)), middle)
        return tools.qdq(function(y), out)

    def rounded_once(self, x):
        return tools.qdq(function(self.conv(tools.qdq(x, tools.u8))), out)

    children = {"conv": _weighted(tools, conv)}
    reference, once = tools.trace(forward, **children), tools.trace(rounded_once, **children)
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == _ONE_EACH
    [use] = lowered.kernels
    assert "rounds once" in use.kernel and len(use.nodes) == 2
    for shape in ((1, conv.in_channels, 8, 8), (3, conv.in_channels, 5, 9)):
        x = torch.randn(shape)
        tools.assert_within(lowered.graph_module(x), once(x), out.scale)
        tools.assert_within(lowered.graph_module(x), reference(x), out.scale, steps=3)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_linear_layer_and_gelu_are_one_kernel(tools, approximate):
    middle, out = tools.qparams(0.03, 120), tools.qparams(0.02, 9)

    def forward(self, x):
        y = tools.qdq(self.fc(tools.qdq(x, tools.u8)), middle)
        return tools.qdq(F.gelu(y, approximate=approximate), out)

    reference = tools.trace(forward, fc=_weighted(tools, nn.Linear(8, 6)))
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "OnednnLinear", "dequantize"]
    x = torch.randn(5, 8)
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale, steps=2)


@pytest.mark.parametrize("why", ["coarse", "read twice", "narrow", "sigmoid"])
def test_what_is_not_one_kernel_stays_two(tools, why):
    middle = tools.qparams(0.5 if why == "coarse" else 0.03, 120)
    out = tools.qparams(0.02, 20, 0, 127) if why == "narrow" else tools.qparams(0.02, 20)
    function = torch.sigmoid if why == "sigmoid" else F.hardswish

    def forward(self, x):
        y = tools.qdq(self.conv(tools.qdq(x, tools.u8)), middle)
        z = tools.qdq(function(y), out)
        return (z, y) if why == "read twice" else z

    reference = tools.trace(forward, conv=_weighted(tools, nn.Conv2d(4, 6, 3)))
    lowered = tools.lower(reference)
    assert "Lookup" in tools.targets(lowered)
    assert not any("rounds once" in use.kernel for use in lowered.kernels)
    x = torch.randn(1, 4, 8, 8)
    found, wanted = lowered.graph_module(x), reference(x)
    pairs = zip(found, wanted, strict=True) if why == "read twice" else [(found, wanted)]
    for ours, theirs in pairs:
        tools.assert_within(ours, theirs, max(out.scale, middle.scale), steps=2)
