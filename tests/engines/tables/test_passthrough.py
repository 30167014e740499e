"""Operators that move values: they run on integers, exactly, and leave no boundary behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

MOVES = [
    lambda x: torch.flatten(x, 1), lambda x: x.flatten(2), lambda x: x.reshape(x.shape[0], -1),
    lambda x: x.view(-1, 4, 3, 2, 6), lambda x: torch.reshape(x, (x.size(0), -1)),
    lambda x: x.permute(0, 2, 3, 1), lambda x: torch.transpose(x, 1, 2), lambda x: x.transpose(-1, -2),
    lambda x: x.unsqueeze(1).squeeze(1), lambda x: torch.narrow(x, 1, 1, 2), lambda x: x.repeat(1, 2, 1, 1),
    lambda x: x.contiguous(), lambda x: x.detach(), lambda x: x[:, 1:], lambda x: x[:, :, ::2, 0],
    lambda x: F.pixel_shuffle(x, 2), lambda x: torch.channel_shuffle(x, 2), lambda x: x.expand(2, -1, -1, -1),
    lambda x: torch.roll(x, 1, 2), lambda x: torch.flip(x, (3,)), lambda x: x.clone(),
    lambda x: F.dropout(x, 0.5, training=False), lambda x: torch.cat([x, x], 1),
    lambda x: torch.stack((x, x)),
    lambda x: torch.cat((x, x[:, :1], x), dim=1), lambda x: torch.flatten(start_dim=1, input=x),
    lambda x: F.interpolate(x, scale_factor=2), lambda x: F.interpolate(x, size=(5, 3), mode="nearest"),
    lambda x: F.interpolate(x, size=x.shape[2:]), lambda x: F.pad(x, (1, 2)),
    lambda x: F.pad(x, (1, 1, 2, 0), value=0.0),
    lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"),
    nn.Flatten(), nn.PixelShuffle(2), nn.Identity(), nn.Dropout(0.3), nn.Unflatten(1, (2, 2)),
    nn.Upsample(scale_factor=2), nn.ZeroPad2d(1), nn.ConstantPad2d(1, 0.0),
]  # fmt: skip


def _one(tools, op, after):
    module = op if isinstance(op, nn.Module) else None

    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(op(x) if module is None else self.op(x), after)

    return tools.trace(forward) if module is None else tools.trace(forward, op=module)


@pytest.mark.parametrize("number", range(len(MOVES)))
def test_moves_are_exact_whatever_the_qparams_behind(tools, number):
    other = tools.qparams(0.07, 80)
    x = torch.randn(2, 4, 6, 6) * 2
    for after in (tools.u8, other):
        reference = _one(tools, MOVES[number], after)
        lowered = tools.lower(reference)
        assert lowered.left_in_float == ()
        found = tools.targets(lowered)
        assert found.count("quantize") == found.count("dequantize") == 1
        assert ("requantize" in found) is (after is other)
        for layout in (torch.contiguous_format, torch.channels_last):
            inputs = x.contiguous(memory_format=layout)
            if number == 3 and layout is torch.channels_last:
                continue  # .view() of that layout has no strides
            assert torch.equal(lowered.graph_module(inputs), reference(inputs))


def test_the_float_value_of_a_moved_tensor_is_dequantized_behind(tools):
    def forward(self, x):
        return torch.flatten(tools.qdq(x, tools.u8), 1)

    lowered = tools.lower(tools.trace(forward))
    assert tools.targets(lowered) == ["quantize", "flatten", "dequantize"]


@pytest.mark.parametrize(
    "split",
    [
        lambda x: x.chunk(2, 1),
        lambda x: torch.split(x, [1, 3], 1),
        lambda x: torch.tensor_split(x, 2, dim=1),
        lambda x: x.split(2, dim=1),
    ],
)
def test_parts_of_a_split_are_integers(tools, split):
    def forward(self, x):
        a, b = split(tools.qdq(x, tools.u8))[0], split(tools.qdq(x, tools.u8))[1]
        return tools.qdq(torch.cat([b, tools.qdq(a, tools.u8)], 1), tools.u8), b.sum()

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert [reason.node for reason in lowered.left_in_float] == ["sum_1"]
    x = torch.randn(2, 4, 6, 6)
    for one, two in zip(lowered.graph_module(x), reference(x), strict=True):
        assert torch.equal(one, two)


def test_a_split_that_is_used_whole_is_refused(tools):
    def forward(self, x):
        return torch.cat(tools.qdq(x, tools.u8).chunk(2, 1), 2)

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert lowered.left_in_float[0].rule == "whole-tuple"
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(lowered.graph_module(x), reference(x))


def test_parts_with_other_qparams_are_requantized_in_the_kernel(tools):
    a, b, out = tools.qparams(0.03, 90), tools.qparams(0.05, 11, 0, 127), tools.qparams(0.05, 11)

    def forward(self, x, y, z):
        parts = [tools.qdq(x, a), tools.qdq(y, b), tools.qdq(z, out)]
        return tools.qdq(torch.cat(parts, 1), out)

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert [use.kernel for use in lowered.kernels] == ["aten.cat(requantized)"]
    x, y, z = (torch.randn(2, n, 4, 4) * 3 for n in (1, 2, 3))
    tools.assert_within(lowered.graph_module(x, y, z), reference(x, y, z), out.scale)


def test_sizes_are_read_from_the_integers(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        n, c = x.shape[0], x.size(1)
        return tools.qdq(x.view(n * c, -1), tools.u8), x.dim(), x.numel(), x.shape

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    assert tools.targets(lowered).count("dequantize") == 1
    x = torch.randn(2, 4, 6, 6)
    actual, expected = lowered.graph_module(x), reference(x)
    assert torch.equal(actual[0], expected[0])
    assert actual[1:] == expected[1:]


def test_dropout_that_trains_stays_in_float(tools):
    def forward(self, x):
        return tools.qdq(F.dropout(tools.qdq(x, tools.u8), 0.0, True), tools.u8)

    assert [r.rule for r in tools.lower(tools.trace(forward)).left_in_float] == ["training"]
    reference = _one(tools, nn.Dropout(0.5), tools.u8)
    reference.train()
    assert [r.rule for r in tools.lower(reference).left_in_float] == ["training"]


def test_bilinear_interpolation_keeps_the_qparams(tools):
    for op in (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        nn.Upsample(size=(9, 4), mode="bilinear", align_corners=True),
    ):
        reference = _one(tools, op, tools.u8)
        lowered = tools.lower(reference)
        assert lowered.left_in_float == ()
        x = torch.randn(2, 4, 6, 6)
        tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)
    other = _one(tools, nn.Upsample(scale_factor=2, mode="bilinear"), tools.qparams(0.07, 80))
    assert [r.rule for r in tools.lower(other).left_in_float] == ["other-qparams"]
    cubic = _one(tools, nn.Upsample(scale_factor=2, mode="bicubic"), tools.u8)
    assert [r.rule for r in tools.lower(cubic).left_in_float] == ["mode"]


def test_padding_with_a_value_off_the_grid_needs_the_inputs_qparams(tools):
    def op(x):
        return F.pad(x, (1, 1), value=0.33)

    same = _one(tools, op, tools.u8)
    lowered = tools.lower(same)
    assert lowered.left_in_float == ()
    x = torch.randn(2, 3)
    assert torch.equal(lowered.graph_module(x), same(x))
    other = _one(tools, op, tools.qparams(0.07, 80))
    assert [r.rule for r in tools.lower(other).left_in_float] == ["other-qparams"]
