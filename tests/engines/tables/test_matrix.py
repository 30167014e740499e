from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backquant.lower.kernels.matrix import softmax

SOFTMAX = [
    nn.Softmax(-1),
    nn.Softmax(dim=1),
    lambda x: F.softmax(x, dim=-1),
    lambda x: torch.softmax(x, 1),
    lambda x: x.softmax(-1),
]


@pytest.mark.parametrize("number", range(len(SOFTMAX)))
def test_softmax(tools, number):
    op, out = SOFTMAX[number], tools.qparams(1 / 256, 0)
    module = op if isinstance(op, nn.Module) else None

    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(op(x) if module is None else self.op(x), out)

    reference = tools.trace(forward, op=module) if module is not None else tools.trace(forward)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    x = torch.randn(2, 3, 9) * 2
    tools.assert_within(lowered.graph_module(x), reference(x), out.scale)


@pytest.mark.parametrize("dim", [-1, -2, 1])
def test_softmax_whatever_engine_the_process_is_set_to(monkeypatch, dim):
    """The kernel that runs with qnnpack takes no negative dimension."""
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    x = torch.randint(0, 256, (3, 9), dtype=torch.uint8)
    found = softmax(x, 0.05, 100, dim, 1 / 256, 0).float() / 256
    expected = F.softmax((x.float() - 100) * 0.05, dim)
    assert (found - expected).abs().max() <= 1 / 256


SHAPES = [((5, 6), (6, 3)), ((2, 4, 5, 6), (2, 4, 6, 3)), ((4, 5, 6), (6,)), ((4, 5, 6), (6, 3))]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("function", [torch.matmul, operator.matmul, lambda a, b: a.matmul(b)])
def test_matmul(tools, function, shapes):
    a, b, out = tools.qparams(0.03, 90), tools.qparams(0.02, 70), tools.qparams(0.1, 100)

    def forward(self, x, y):
        return tools.qdq(function(tools.qdq(x, a), tools.qdq(y, b)), out)

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    x, y = (torch.randn(shape) for shape in shapes)
    tools.assert_within(lowered.graph_module(x, y), reference(x, y), out.scale)


def test_what_is_refused(tools):
    def implied(self, x):
        return tools.qdq(self.op(tools.qdq(x, tools.u8)), tools.u8)

    lowered = tools.lower(tools.trace(implied, op=nn.Softmax()))
    assert [r.rule for r in lowered.left_in_float] == ["arguments"]

    def float_factor(self, x, y):
        return tools.qdq(tools.qdq(x, tools.u8) @ y, tools.u8)

    lowered = tools.lower(tools.trace(float_factor))
    assert [r.rule for r in lowered.left_in_float] == ["float-input"]
