"""The pass: whole chains of operators on integers, what stays in float, and why."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.lower import engine_info, find_engine, lower
from backquant.nn import intrinsic
from backquant.nn.quantized import reference as nnqr


def _conv(tools, *args, axis=0, **kwargs):
    conv = nn.Conv2d(*args, **kwargs)
    return nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv, axis))


def _fused(reference):
    fused = intrinsic.ConvReLU2d(nn.Conv2d(1, 1, 1), nn.ReLU())
    fused[0] = reference
    return fused


def _linear(tools, *args, **kwargs):
    linear = nn.Linear(*args, **kwargs)
    return nnqr.Linear.from_float(linear, tools.weight_qparams(linear))


@pytest.fixture
def residual(tools):
    """Convolutions, a residual addition, pooling and a classifier, every value quantized."""
    first, second = tools.qparams(0.03, 0), tools.qparams(0.05, 120)
    total, last = tools.qparams(0.06, 0), tools.qparams(0.02, 130)

    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        a = tools.qdq(self.stem(x), first)
        p = tools.qdq(F.max_pool2d(a, 3, 2, 1), first)
        b = tools.qdq(self.conv(p), second)
        c = tools.qdq(torch.relu(b + p), total)
        d = tools.qdq(F.adaptive_avg_pool2d(c, 1), total)
        e = tools.qdq(torch.flatten(d, 1), total)
        return tools.qdq(self.fc(e), last)

    return tools.trace(
        forward,
        stem=_fused(_conv(tools, 3, 16, 3, padding=1)),
        conv=_conv(tools, 16, 16, 3, padding=1),
        fc=_linear(tools, 16, 5),
    ), last


def test_a_residual_model_runs_on_integers_from_end_to_end(tools, residual):
    reference, last = residual
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    assert tools.targets(lowered) == [
        "quantize",
        "OnednnConv",
        "max_pool2d",
        "OnednnConvAdd",
        "adaptive_avg_pool2d",
        "flatten",
        "OnednnLinear",
        "dequantize",
    ]
    for batch in (1, 4):
        x = torch.randn(batch, 3, 16, 12) * 3
        tools.assert_within(lowered.graph_module(x), reference(x), last.scale)


def test_records_name_the_replaced_nodes(tools, residual):
    lowered = tools.lower(residual[0])
    first = lowered.kernels[0]
    assert first.nodes == ("stem",)
    assert first.kernel == "onednn.qconv2d_pointwise(relu)"
    assert first.dtype is torch.uint8
    assert first.engine == "x86"
    assert [use.nodes for use in lowered.kernels][2] == ("conv", "add", "relu")


def test_the_reference_model_is_unchanged(tools, residual):
    reference, _ = residual
    before = str(reference.graph), sorted(reference.state_dict())
    x = torch.randn(1, 3, 8, 8)
    expected = reference(x)
    tools.lower(reference)
    assert (str(reference.graph), sorted(reference.state_dict())) == before
    assert torch.equal(reference(x), expected)


def test_the_lowered_model_copies_and_loads(tools, residual):
    lowered = tools.lower(residual[0]).graph_module
    x = torch.randn(2, 3, 8, 8)
    expected = lowered(x)
    assert torch.equal(copy.deepcopy(lowered)(x), expected)
    assert all(isinstance(value, torch.Tensor) for value in lowered.state_dict().values())
    other = copy.deepcopy(lowered)
    for buffer in other.buffers():
        buffer.zero_()
    assert not torch.equal(other(x), expected)
    other.load_state_dict(lowered.state_dict())
    assert torch.equal(other(x), expected)


def test_an_empty_batch_goes_through(tools, residual):
    reference, _ = residual
    lowered = tools.lower(reference).graph_module
    x = torch.randn(0, 3, 8, 8)
    assert lowered(x).shape == reference(x).shape == (0, 5)


def test_an_operator_without_a_rule_stays_in_float_and_says_so(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(torch.cumsum(x, 1), tools.u8)

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    [reason] = lowered.left_in_float
    assert (reason.node, reason.rule) == ("cumsum", "no-kernel")
    assert tools.targets(lowered) == ["quantize", "dequantize", "cumsum", "quantize", "dequantize"]
    x = torch.randn(3, 4)
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)


def test_a_module_called_twice_gets_a_kernel_per_call(tools):
    out = tools.qparams(0.1, 90)

    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        x = tools.qdq(self.conv(x), out)
        return tools.qdq(self.conv(x), tools.u8)

    reference = tools.trace(forward, conv=_conv(tools, 4, 4, 1))
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "OnednnConv", "OnednnConv", "dequantize"]
    x = torch.randn(2, 4, 5, 5)
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)


def test_a_value_read_in_float_and_as_integers_is_computed_once_in_float(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        y = self.conv(x)
        return tools.qdq(y, tools.u8), y.exp()

    reference = tools.trace(forward, conv=_conv(tools, 4, 4, 1))
    lowered = tools.lower(reference)
    expected = ["quantize", "OnednnConv", "quantize", "dequantize", "exp"]
    assert sorted(tools.targets(lowered)) == sorted(expected)
    assert lowered.kernels[0].dtype is torch.float32
    x = torch.randn(2, 4, 5, 5)
    for actual, expected in zip(lowered.graph_module(x), reference(x), strict=True):
        assert torch.allclose(actual, expected, atol=tools.u8.scale)


def test_what_is_asked_in_float_computes_in_float_between_integers(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(torch.sigmoid(tools.qdq(torch.tanh(x), tools.u8)), tools.u8)

    reference = tools.trace(forward)
    rules = find_engine("x86").rules()
    lowered = lower(reference, rules, engine_info("x86"), in_float=["sigmoid"])
    assert [reason.node for reason in lowered.left_in_float] == ["sigmoid"]
    x = torch.randn(50)
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)
