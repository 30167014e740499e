"""A kernel that float operators read gives floats itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from backquant.nn.quantized import reference as nnqr


def _linear(tools):
    linear = nn.Linear(8, 6)
    return nnqr.Linear.from_float(linear, tools.weight_qparams(linear))


def test_a_float_island_is_entered_without_rounding(tools):
    middle = tools.qparams(0.03, 120)

    def forward(self, x):
        y = tools.qdq(self.fc(tools.qdq(x, tools.u8)), middle)
        return F.layer_norm(y, (6,)) + y

    def unrounded(self, x):
        y = self.fc(tools.qdq(x, tools.u8))
        return F.layer_norm(y, (6,)) + y

    fc = _linear(tools)
    lowered = tools.lower(tools.trace(forward, fc=fc))
    assert "dequantize" not in tools.targets(lowered)
    use = next(use for use in lowered.kernels if "qlinear" in use.kernel)
    assert use.dtype == torch.float32 and "rounds once" in use.kernel
    x = torch.randn(5, 8)
    torch.testing.assert_close(lowered.graph_module(x), tools.trace(unrounded, fc=fc)(x))


def test_views_lie_between_and_sizes_may_be_read(tools):
    middle = tools.qparams(0.03, 120)

    def forward(self, x):
        y = tools.qdq(self.fc(tools.qdq(x, tools.u8)), middle)
        left, right = y.reshape(y.size(0), 2, 3).unbind(1)
        return torch.softmax(left, -1) * torch.exp(right)

    def unrounded(self, x):
        y = self.fc(tools.qdq(x, tools.u8))
        left, right = y.reshape(y.size(0), 2, 3).unbind(1)
        return torch.softmax(left, -1) * torch.exp(right)

    fc = _linear(tools)
    lowered = tools.lower(tools.trace(forward, fc=fc))
    assert "dequantize" not in tools.targets(lowered)
    x = torch.randn(5, 8)
    torch.testing.assert_close(lowered.graph_module(x), tools.trace(unrounded, fc=fc)(x))


def test_what_leaves_the_model_is_rounded(tools):
    out = tools.qparams(0.03, 120)

    def forward(self, x):
        y = tools.qdq(self.fc(tools.qdq(x, tools.u8)), out)
        return y, F.softplus(y)

    reference = tools.trace(forward, fc=_linear(tools))
    lowered = tools.lower(reference)
    assert "dequantize" in tools.targets(lowered)
    x = torch.randn(5, 8)
    tools.assert_within(lowered.graph_module(x)[0], reference(x)[0], out.scale)
    steps = (lowered.graph_module(x)[0] / out.scale).round() - lowered.graph_module(x)[
        0
    ] / out.scale
    assert steps.abs().max() < 1e-3


def test_integers_that_another_kernel_reads_stay_integers(tools):
    middle = tools.qparams(0.03, 120)

    def forward(self, x):
        y = tools.qdq(self.fc(tools.qdq(x, tools.u8)), middle)
        return tools.qdq(self.last(y), tools.u8), F.softplus(y)

    last = nn.Linear(6, 3)
    children = {
        "fc": _linear(tools),
        "last": nnqr.Linear.from_float(last, tools.weight_qparams(last)),
    }
    lowered = tools.lower(tools.trace(forward, **children))
    assert not any("rounds once" in use.kernel for use in lowered.kernels)
