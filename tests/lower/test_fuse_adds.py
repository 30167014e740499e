"""Convolution and addition, which the reference model quantizes apart, in one kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.lower.kernels.conv_add import OnednnConvAdd
from backquant.nn.quantized import reference as nnqr

_ONE_EACH = ["quantize", "OnednnConvAdd", "dequantize"]


def _conv(tools, conv=None):
    conv = nn.Conv2d(4, 4, 3, padding=1) if conv is None else conv
    return nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))


def _only(lowered):
    [kernel] = [m for m in lowered.graph_module.modules() if isinstance(m, OnednnConvAdd)]
    return kernel


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("conv_first", [False, True])
@pytest.mark.parametrize("out_zero_point", [0, 90])
def test_a_residual_block_is_one_kernel(tools, relu, conv_first, out_zero_point):
    middle, out = tools.qparams(0.03, 120), tools.qparams(0.04, out_zero_point)

    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        y = tools.qdq(self.conv(x), middle)
        z = y + x if conv_first else x + y
        return tools.qdq(F.relu(z) if relu else z, out)

    reference = tools.trace(forward, conv=_conv(tools))
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == _ONE_EACH
    [use] = lowered.kernels
    assert set(use.nodes) >= {"conv", "add"}
    assert "rounds once" in use.kernel
    for shape in ((1, 4, 8, 8), (3, 4, 5, 9), (0, 4, 8, 8)):
        x = torch.randn(shape)
        tools.assert_within(lowered.graph_module(x), reference(x), out.scale)
        again = x.clone()
        lowered.graph_module(x)
        assert torch.equal(x, again)


def test_the_other_tensor_is_overwritten_only_when_nothing_reads_it_later(tools):
    def early(self, x):
        wide = tools.qdq(self.first(tools.qdq(x, tools.u8)), tools.u8)
        pooled = tools.qdq(F.max_pool2d(wide, 2), tools.u8)
        y = tools.qdq(self.conv(tools.qdq(self.second(wide), tools.u8)), tools.u8)
        return tools.qdq(wide + y, tools.u8), pooled

    def late(self, x):
        wide = tools.qdq(self.first(tools.qdq(x, tools.u8)), tools.u8)
        y = tools.qdq(self.conv(tools.qdq(self.second(wide), tools.u8)), tools.u8)
        z = tools.qdq(wide + y, tools.u8)
        return z, tools.qdq(F.max_pool2d(wide, 2), tools.u8)

    def view(self, x):
        wide = tools.qdq(self.first(tools.qdq(x, tools.u8)), tools.u8)
        half = tools.qdq(wide[:, :2], tools.u8)
        y = tools.qdq(self.conv(tools.qdq(self.second(wide), tools.u8)), tools.u8)
        return tools.qdq(wide + y, tools.u8), tools.qdq(F.max_pool2d(half, 2), tools.u8)

    for forward in (early, late, view):
        children = {name: _conv(tools) for name in ("first", "second", "conv")}
        reference = tools.trace(forward, **children)
        lowered = tools.lower(reference)
        assert _only(lowered).config.overwrite is (forward is early)
        x = torch.randn(2, 4, 8, 8)
        for ours, wanted in zip(lowered.graph_module(x), reference(x), strict=True):
            tools.assert_within(ours, wanted, tools.u8.scale, steps=2)


def test_the_convolutions_own_input_is_not_overwritten(tools):
    def forward(self, x):
        x = tools.qdq(self.first(tools.qdq(x, tools.u8)), tools.u8)
        return tools.qdq(x + tools.qdq(self.conv(x), tools.u8), tools.u8)

    reference = tools.trace(forward, conv=_conv(tools), first=_conv(tools))
    lowered = tools.lower(reference)
    assert not _only(lowered).config.overwrite
    x = torch.randn(2, 4, 8, 8)
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale, steps=2)


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (2, 1, 8, 8), (4, 1, 1)])
def test_a_smaller_tensor_is_spread(tools, shape):
    def forward(self, x, y):
        y = tools.qdq(y, tools.u8)
        return tools.qdq(y + tools.qdq(self.conv(tools.qdq(x, tools.u8)), tools.u8), tools.u8)

    reference = tools.trace(forward, conv=_conv(tools))
    lowered = tools.lower(reference)
    assert _only(lowered) is not None
    x, y = torch.randn(2, 4, 8, 8), torch.randn(shape)
    tools.assert_within(lowered.graph_module(x, y), reference(x, y), tools.u8.scale)


@pytest.mark.parametrize("relu", [False, True])
def test_a_convolution_that_is_smaller_than_the_sum(tools, relu):
    def forward(self, x, y):
        y = tools.qdq(y, tools.u8)
        z = y + tools.qdq(self.conv(tools.qdq(x, tools.u8)), tools.u8)
        return tools.qdq(F.relu(z) if relu else z, tools.u8)

    reference = tools.trace(forward, conv=_conv(tools, nn.Conv2d(4, 4, 8)))
    lowered = tools.lower(reference)
    assert _only(lowered) is not None
    x, y = torch.randn(1, 4, 8, 8), torch.randn(3, 4, 5, 6)
    tools.assert_within(lowered.graph_module(x, y), reference(x, y), tools.u8.scale)


def test_a_coarse_convolution_keeps_its_own_rounding(tools):
    coarse, fine = tools.qparams(0.09, 128), tools.qparams(0.04, 128)

    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(x + tools.qdq(self.conv(x), coarse), fine)

    lowered = tools.lower(tools.trace(forward, conv=_conv(tools)))
    assert tools.targets(lowered) == ["quantize", "OnednnConv", "add", "dequantize"]


def test_values_with_other_readers_are_added_apart(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        y = tools.qdq(self.conv(x), tools.u8)
        return tools.qdq(x + y, tools.u8), y

    lowered = tools.lower(tools.trace(forward, conv=_conv(tools)))
    assert "OnednnConvAdd" not in tools.targets(lowered)


def test_an_activation_before_the_addition_keeps_it_apart(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(x + tools.qdq(F.relu(self.conv(x)), tools.u8), tools.u8)

    lowered = tools.lower(tools.trace(forward, conv=_conv(tools)))
    assert "OnednnConvAdd" not in tools.targets(lowered)


def test_of_two_convolutions_the_later_one_takes_the_addition(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        y, z = tools.qdq(self.one(x), tools.u8), tools.qdq(self.two(x), tools.u8)
        return tools.qdq(F.relu(y + z), tools.u8)

    reference = tools.trace(forward, one=_conv(tools), two=_conv(tools, nn.Conv2d(4, 4, 1)))
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "OnednnConv", "OnednnConvAdd", "dequantize"]
    assert _only(lowered).config.overwrite
    x = torch.randn(2, 4, 8, 8)
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)
