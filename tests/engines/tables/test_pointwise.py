"""Functions of one value: clamps of integers, and tables that equal the reference bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F


def _one(tools, op, before, after):
    module = op if isinstance(op, nn.Module) else None

    def forward(self, x):
        x = tools.qdq(x, before)
        return tools.qdq(op(x) if module is None else self.op(x), after)

    return tools.trace(forward) if module is None else tools.trace(forward, op=module)


CLAMPS = [
    nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.7, 0.9), F.relu, F.relu6, torch.relu, F.hardtanh,
    lambda x: x.relu(), lambda x: x.relu_(), lambda x: torch.clamp(x, -1, 1), lambda x: x.clamp(min=0.3),
    lambda x: x.clamp(max=0.3), lambda x: torch.clip(x, -0.5, 0.2), lambda x: F.hardtanh(x, 0.0, 3.0),
]  # fmt: skip
TABLES = [
    nn.Sigmoid(), nn.Hardsigmoid(), nn.Tanh(), nn.Hardswish(), nn.LeakyReLU(0.2), nn.ELU(), nn.GELU(),
    nn.SiLU(), nn.Softplus(), nn.PReLU(), torch.sigmoid, F.hardsigmoid, torch.tanh, F.hardswish, F.elu,
    nn.Softsign(), torch.asinh, torch.sign, lambda x: x % 0.7,
    F.silu, F.mish, torch.exp, torch.abs, lambda x: x.sigmoid(), lambda x: x + 1.5, lambda x: 2 - x,
    lambda x: x * 3, lambda x: x / 4, lambda x: torch.add(x, 1, alpha=2), lambda x: x.pow(2), lambda x: -x,
    lambda x: torch.relu(x + 0.25), lambda x: (x * 0.5).relu(), lambda x: 1 / (x * x + 1),
    lambda x: torch.rsub(x, 1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CLAMPS)))
@pytest.mark.parametrize("high", [255, 127])
def test_clamps_keep_the_qparams_and_are_exact(tools, number, high):
    qparams = tools.qparams(0.03, 50, 0, high)
    reference = _one(tools, CLAMPS[number], qparams, qparams)
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "clamp", "dequantize"]
    x = torch.randn(1000) * 3
    assert torch.equal(lowered.graph_module(x), reference(x))


@pytest.mark.parametrize("number", range(len(CLAMPS)))
def test_clamps_to_other_qparams_are_exact_too(tools, number):
    before, after = tools.qparams(0.03, 50), tools.qparams(0.02, 7, 0, 127)
    reference = _one(tools, CLAMPS[number], before, after)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    x = torch.randn(1000) * 3
    tools.assert_within(lowered.graph_module(x), reference(x), after.scale)


@pytest.mark.parametrize("number", range(len(TABLES)))
@pytest.mark.parametrize("signed", [False, True])
def test_tables_equal_the_reference_bit_for_bit(tools, number, signed):
    shift, low, high = (128, -128, 127) if signed else (0, 0, 255)
    before = tools.qparams(0.03, 100 - shift, low, high)
    after = tools.qparams(0.011, 70 - shift, low, high if signed else 127)
    reference = _one(tools, TABLES[number], before, after)
    lowered = tools.lower(reference)
    if number == len(TABLES) - 2:  # three operators, of which no two have a quantized value between
        assert lowered.left_in_float
        return
    assert lowered.left_in_float == ()
    assert lowered.kernels[0].kernel.startswith("lookup(")
    # the middle of each step: no ties
    x = (torch.arange(low, high + 1) - before.zero_point) * before.scale
    assert torch.equal(lowered.graph_module(x), reference(x))


def test_a_relu_that_floats_read_runs_on_integers(tools):
    def forward(self, x):
        return torch.relu(tools.qdq(x, tools.u8)).cumsum(0)

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert tools.targets(lowered) == ["quantize", "clamp", "dequantize", "cumsum"]
    x = torch.randn(20)
    assert torch.equal(lowered.graph_module(x), reference(x))


def test_the_mode_of_a_function_means_nothing(tools):
    """As after ``convert_fx`` of a model that was trained, and not put into evaluation mode."""

    def forward(self, x):
        return tools.qdq(self.op(tools.qdq(x, tools.u8)), tools.u8)

    for op in (nn.Hardswish(), nn.ELU(), nn.PReLU()):
        reference = tools.trace(forward, op=op.train())
        lowered = tools.lower(reference)
        assert lowered.left_in_float == ()
        x = torch.randn(20)
        assert torch.equal(lowered.graph_module(x), reference(x))


@pytest.mark.parametrize("size", [(3, 4), (3, 4, 5, 5), (0, 4, 2)])
def test_a_slope_for_each_channel(tools, size):
    def forward(self, x):
        return tools.qdq(self.op(tools.qdq(x, tools.u8)), tools.u8)

    op = nn.PReLU(4)
    nn.init.uniform_(op.weight, -1.0, 2.0)
    reference = tools.trace(forward, op=op)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == () and "table(prelu)" in lowered.kernels[0].kernel
    x = torch.randn(size)
    assert torch.equal(lowered.graph_module(x), reference(x))


def test_what_is_refused(tools):
    reference = tools.trace(lambda self, x: torch.sigmoid(tools.qdq(x, tools.u8)))
    lowered = tools.lower(reference)
    assert [reason.rule for reason in lowered.left_in_float] == ["float-output"]
    x = torch.randn(2, 4)
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)
