from __future__ import annotations

import operator

import pytest
import torch
from torch.nn import functional as F

from backquant.lower.kernels import elementwise

ADDS = [torch.add, operator.add, lambda a, b: a.add(b), lambda a, b: torch.add(input=a, other=b)]
MULS = [torch.mul, operator.mul, lambda a, b: a.mul(b)]
SHAPES = [
    ((2, 3, 4, 5), (2, 3, 4, 5)),
    ((2, 3, 4, 5), (2, 3, 1, 1)),
    ((2, 3, 4, 5), (5,)),
    ((4,), (3, 4)),
    ((0, 3), (0, 3)),
    ((), ()),
]


def _binary(tools, function, signed=False, full=255):
    low, high = (-128, 127) if signed else (0, 255)
    shift = 128 if signed else 0
    a = tools.qparams(0.04, 100 - shift, low, high)
    b = tools.qparams(0.02, 31 - shift, low, high)
    out = tools.qparams(0.05, 90 - shift, low, high if full == 255 else full)

    def forward(self, x, y):
        return tools.qdq(function(tools.qdq(x, a), tools.qdq(y, b)), out)

    return tools.trace(forward), out


@pytest.mark.parametrize("function", [*ADDS, *MULS])
@pytest.mark.parametrize("shapes", SHAPES)
def test_two_tensors_of_any_shapes(tools, function, shapes):
    reference, out = _binary(tools, function)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    x, y = (torch.randn(shape) * 3 for shape in shapes)
    tools.assert_within(lowered.graph_module(x, y), reference(x, y), out.scale)


@pytest.mark.parametrize("relu", [torch.relu, F.relu, lambda v: v.relu(), lambda v: v.relu_()])
@pytest.mark.parametrize("function", [torch.add, torch.mul])
def test_a_relu_behind_is_part_of_the_kernel(tools, function, relu):
    reference, out = _binary(tools, lambda a, b: relu(function(a, b)))
    lowered = tools.lower(reference)
    assert [use.kernel for use in lowered.kernels] == [f"quantized.{function.__name__}_relu"]
    x, y = torch.randn(3, 7) * 3, torch.randn(3, 7) * 3
    tools.assert_within(lowered.graph_module(x, y), reference(x, y), out.scale)


def test_signed_integers(tools):
    reference, out = _binary(tools, torch.add, signed=True)
    lowered = tools.lower(reference)
    assert lowered.kernels[0].dtype is torch.uint8  # 128 further up, as is the zero point
    x, y = torch.randn(30) * 3, torch.randn(30) * 3
    tools.assert_within(lowered.graph_module(x, y), reference(x, y), out.scale)


def test_a_narrow_range_is_kept(tools):
    reference, out = _binary(tools, torch.add, full=127)
    lowered = tools.lower(reference)
    x, y = torch.randn(300) * 3, torch.randn(300) * 3
    tools.assert_within(lowered.graph_module(x, y), reference(x, y), out.scale)
    assert reference(x, y).max() == lowered.graph_module(x, y).max()


def test_layouts_may_differ(tools):
    reference, out = _binary(tools, torch.add)
    lowered = tools.lower(reference).graph_module
    x = torch.randn(2, 3, 4, 5)
    y = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    tools.assert_within(lowered(x, y), reference(x, y), out.scale)


def test_a_tensor_with_itself(tools):
    def forward(self, x):
        x = tools.qdq(x, tools.u8)
        return tools.qdq(x * x, tools.u8)

    reference = tools.trace(forward)
    lowered = tools.lower(reference)
    assert lowered.left_in_float == ()
    x = torch.randn(50) * 2
    tools.assert_within(lowered.graph_module(x), reference(x), tools.u8.scale)


def test_what_is_refused(tools):
    def alpha(self, x, y):
        return tools.qdq(
            torch.add(tools.qdq(x, tools.u8), tools.qdq(y, tools.u8), alpha=2), tools.u8
        )

    def float_input(self, x, y):
        return tools.qdq(tools.qdq(x, tools.u8) + y, tools.u8)

    def float_output(self, x, y):
        return tools.qdq(x, tools.u8) + tools.qdq(y, tools.u8)

    def far_apart(self, x, y):
        step = tools.qparams(tools.u8.scale * 2**22, 128)
        return tools.qdq(tools.qdq(x, step) + tools.qdq(y, tools.u8), tools.u8)

    for forward, rule in (
        (alpha, "arguments"),
        (far_apart, "kernel-defect"),
        (float_input, "float-input"),
        (float_output, "float-output"),
    ):
        reference = tools.trace(forward)
        lowered = tools.lower(reference)
        assert rule in [reason.rule for reason in lowered.left_in_float]
        x, y = torch.randn(20), torch.randn(20)
        tools.assert_within(lowered.graph_module(x, y), reference(x, y), tools.u8.scale)


@pytest.mark.parametrize("kernel", [elementwise.mul, elementwise.mul_relu])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 4, 3, 3), (2, 4, 1, 1)), ((4, 1, 1), (2, 4, 3, 3)), ((2, 1, 3), (1, 4, 1))],
)
def test_a_product_of_different_shapes_rounds_as_the_reference(kernel, dtype, left, right):
    low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
    x, y = (torch.randint(low, high, shape).to(dtype) for shape in (left, right))
    found = kernel(x, 0.05, 7, y, 0.03, 2, 0.1, 5)
    product = (x.float() - 7) * 0.05 * ((y.float() - 2) * 0.03)
    if kernel is elementwise.mul_relu:
        product = product.relu()
    wanted = torch.clamp(torch.round(product / 0.1) + 5, low, high - 1)
    assert found.dtype == dtype and found.shape == wanted.shape
    assert (found.float() - wanted).abs().max() <= 1
