from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant


def _one(tools, function, out=None, module=None):
    """quantize, one operator, quantize; ``out`` None: the input's qparams."""
    out = out or tools.u8

    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(function(x) if module is None else self.op(x), out)

    return tools.trace(forward) if module is None else tools.trace(forward, op=module)


MAXIMA = [
    (lambda x: F.max_pool1d(x, 2), 1),
    (lambda x: F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True), 2),
    (lambda x: F.max_pool2d(x, (2, 3), dilation=2), 2),
    (lambda x: torch.max_pool2d(x, 2), 2),
    (lambda x: F.max_pool3d(x, 2, 1), 3),
    (nn.MaxPool1d(3, 2, 1), 1),
    (nn.MaxPool2d(3, 2, 1, ceil_mode=True), 2),
    (nn.MaxPool2d((2, 1)), 2),
    (nn.MaxPool3d(2), 3),
]
AVERAGES = [
    (lambda x: F.avg_pool1d(x, 2), 1),
    (lambda x: F.avg_pool2d(x, 3, 2, 1), 2),
    (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), 2),
    (lambda x: F.avg_pool2d(x, 2, divisor_override=3), 2),
    (lambda x: F.avg_pool3d(x, 2), 3),
    (lambda x: F.adaptive_avg_pool1d(x, 3), 1),
    (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), 2),
    (lambda x: F.adaptive_avg_pool2d(x, (None, 1)), 2),
    (lambda x: F.adaptive_avg_pool3d(x, 2), 3),
    (lambda x: torch.mean(x, (2, 3)), 2),
    (lambda x: x.mean([2, 3], keepdim=True), 2),
    (lambda x: x.mean(-1), 1),
    (nn.AvgPool1d(3, 2, 1), 1),
    (nn.AvgPool2d(3, 2, 1, count_include_pad=False), 2),
    (nn.AvgPool3d(2), 3),
    (nn.AdaptiveAvgPool1d(2), 1),
    (nn.AdaptiveAvgPool2d(1), 2),
    (nn.AdaptiveAvgPool2d((3, 2)), 2),
    (nn.AdaptiveAvgPool3d((2, None, 1)), 3),
]


def _inputs(dims):
    x = torch.randn(2, 3, *[9, 8, 7][:dims]) * 3
    yield x
    if dims == 2:
        yield x.contiguous(memory_format=torch.channels_last)
        yield torch.randn(0, 3, 9, 8)
    if dims == 3:
        yield x.contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("number", range(len(MAXIMA)))
def test_maxima_are_exact_and_keep_integers_even_if_a_float_is_read(tools, number):
    op, dims = MAXIMA[number]
    module = op if isinstance(op, nn.Module) else None
    other = tools.qparams(0.07, 80)
    for out in (tools.u8, other):
        reference = _one(tools, op, out, module)
        lowered = tools.lower(reference)
        assert lowered.left_in_float == ()
        assert ("requantize" in tools.targets(lowered)) is (out is other)
        for x in _inputs(dims):
            tools.assert_within(lowered.graph_module(x), reference(x), out.scale, steps=0)


@pytest.mark.parametrize("number", range(len(AVERAGES)))
def test_averages_round_once(tools, number):
    op, dims = AVERAGES[number]
    module = op if isinstance(op, nn.Module) else None
    reference = _one(tools, op, None, module)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    assert tools.targets(lowered)[0] == "quantize"
    for x in _inputs(dims):
        tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)


def test_what_is_refused(tools):
    indices = nn.MaxPool2d(2, return_indices=True)

    def with_indices(self, x):
        return self.op(tools.qdq(x, tools.u8))[0]

    def computed(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(F.avg_pool2d(x, x.shape[2]), tools.u8)

    def total(self, x):
        return tools.qdq(torch.mean(tools.qdq(x, tools.u8)), tools.u8)

    def float_result(self, x):
        return F.avg_pool2d(tools.qdq(x, tools.u8), 2)

    cases = (
        (with_indices, "return-indices", {"op": indices}),
        (computed, "arguments", {}),
        (total, "arguments", {}),
        (float_result, "float-output", {}),
    )
    for forward, rule, children in cases:
        reference = tools.trace(forward, **children)
        lowered = tools.lower(reference)
        assert lowered.left_in_float[0].rule == rule
        x = torch.randn(2, 3, 8, 8)
        tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)
    reference = _one(tools, lambda x: F.avg_pool2d(x, 2), tools.qparams(0.07, 80))
    assert [r.rule for r in tools.lower(reference).left_in_float] == ["other-qparams"]


class _Positions(nn.Module):
    def __init__(self, pool, is_whole):
        super().__init__()
        self.stem, self.pool, self.last = nn.Conv2d(4, 4, 1), pool, nn.Conv2d(4, 4, 1)
        self.is_whole = is_whole

    def forward(self, x):
        found = self.pool(self.stem(x))
        last = self.last(found[0])
        return (last, found[1]) if self.is_whole else last


@pytest.mark.parametrize("capture", ["auto", "export"])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("kind", [nn.MaxPool2d, nn.AdaptiveMaxPool2d])
def test_poolings_that_give_positions(kind, is_whole, capture):
    torch.manual_seed(0)
    x, model = torch.randn(2, 4, 8, 8), _Positions(kind(2, return_indices=True), is_whole).eval()
    made = backquant.quantize(model, x, calibration=[x], capture=capture, slower="keep")
    wanted, found = model(x), made(x)
    if is_whole:
        assert (found[1] == wanted[1]).float().mean() > 0.9
        wanted, found = wanted[0], found[0]
    assert (found - wanted).norm() < 0.05 * wanted.norm()
