"""Convolution and addition in one kernel that writes into one of its inputs."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from backquant.lower.kernels.conv_add import OnednnConvAdd
from backquant.nn import intrinsic
from backquant.nn.quantized import reference as nnqr


def _fused(tools, conv, relu=None, add=torch.add):
    made = intrinsic.ConvAddReLU2d(conv, add, relu) if relu else intrinsic.ConvAdd2d(conv, add)
    made[0] = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    return made


def _kernels(lowered):
    return [m for m in lowered.graph_module.modules() if isinstance(m, OnednnConvAdd)]


@pytest.mark.parametrize("relu", [None, nn.ReLU(), torch.relu])
@pytest.mark.parametrize("add", [torch.add, operator.add])
@pytest.mark.parametrize("full", [255, 127])
def test_the_fused_module_is_one_kernel(tools, relu, add, full):
    other, out = tools.qparams(0.03, 90), tools.qparams(0.04, 60, 0, full)

    def forward(self, x, y):
        x, y = tools.qdq(x, tools.u8), tools.qdq(y, other)
        return tools.qdq(self.op(x, y), out)

    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
    reference = tools.trace(forward, op=_fused(tools, conv, relu, add))
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    assert len(lowered.kernels) == 1
    for shape in ((2, 4, 9, 7), (1, 4, 8, 8), (0, 4, 8, 8)):
        x = torch.randn(shape) * 3
        y = torch.randn(shape[0], 6, (shape[2] + 1) // 2, (shape[3] + 1) // 2) * 3
        tools.assert_within(lowered.graph_module(x, y), reference(x, y), out.scale)


@pytest.mark.parametrize("shape", [(1, 6, 1, 1), (6, 1, 1), (1, 1, 8, 8), (2, 6, 8, 1)])
def test_the_added_tensor_may_broadcast(tools, shape):
    def forward(self, x, y):
        return tools.qdq(self.op(tools.qdq(x, tools.u8), tools.qdq(y, tools.u8)), tools.u8)

    reference = tools.trace(forward, op=_fused(tools, nn.Conv2d(4, 6, 3, padding=1)))
    lowered = tools.lower(reference).graph_module
    x, y = torch.randn(2, 4, 8, 8), torch.randn(shape)
    tools.assert_within(lowered(x, y), reference(x, y), tools.u8.scale)


def _overwrites(tools, forward, inputs=1, **extra):
    conv = nn.Conv2d(4, 4, 3, padding=1)
    plain = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    reference = tools.trace(forward, op=_fused(tools, conv), conv=plain, **extra)
    lowered = tools.lower(reference)
    tensors = [torch.randn(2, 4, 8, 8) * 2 for _ in range(inputs)]
    # Twice: memory that was written wrongly shows at the second call at the latest.
    for _ in range(2):
        actual, expected = lowered.graph_module(*tensors), reference(*tensors)
        actual = actual if isinstance(actual, tuple) else (actual,)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for one, two in zip(actual, expected, strict=True):
            tools.assert_within(one, two, tools.u8.scale, steps=3)
    [kernel] = _kernels(lowered)
    return kernel.config.overwrite


def test_a_value_that_was_read_before_is_overwritten(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        y = tools.qdq(self.conv(x), tools.u8)
        return tools.qdq(self.op(y, x), tools.u8)

    assert _overwrites(tools, forward)


def test_a_value_that_is_read_later_is_not(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        y = tools.qdq(self.conv(x), tools.u8)
        z = tools.qdq(self.op(y, x), tools.u8)
        return tools.qdq(z + x, tools.u8)

    assert not _overwrites(tools, forward)


def test_a_value_that_is_returned_is_not(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        y = tools.qdq(self.conv(x), tools.u8)
        return tools.qdq(self.op(y, x), tools.u8), x

    assert not _overwrites(tools, forward)


def test_a_view_is_not(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        y = tools.qdq(self.conv(x), tools.u8)
        z = tools.qdq(x.flatten(2).view(2, 4, 8, 8), tools.u8)
        return tools.qdq(self.op(y, z), tools.u8) + x

    assert not _overwrites(tools, forward)


def test_a_value_with_a_view_of_it_is_not(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        flat = tools.qdq(x.flatten(1), tools.u8)
        y = tools.qdq(self.conv(x), tools.u8)
        return tools.qdq(self.op(y, x), tools.u8), flat

    assert not _overwrites(tools, forward)


def test_the_convolutions_own_input_is_not(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(self.op(x, x), tools.u8)

    assert not _overwrites(tools, forward)


def test_a_float_input_is_refused(tools):
    def forward(self, x, y):
        return tools.qdq(self.op(tools.qdq(x, tools.u8), y), tools.u8)

    reference = tools.trace(forward, op=_fused(tools, nn.Conv2d(4, 4, 1)))
    lowered = tools.lower(reference)
    assert [reason.rule for reason in lowered.left_in_float] == ["float-input"]
    x, y = torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5)
    tools.assert_within(lowered.graph_module(x, y), reference(x, y), tools.u8.scale)
