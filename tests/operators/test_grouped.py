"""Grouped products in graphs that are trained."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from backquant.graph import GraphRewriter, capture
from backquant.graph.grouped import grouped_linear
from backquant.operators.grouped import grouped_product_to_train

ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)


class Experts(nn.Module):
    """``turned``: as most of transformers have their matrices, ``[groups, out, in]``."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        shape = (3, 8, 4) if turned else (3, 4, 8)
        self.turned, self.weight = turned, nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        weight = self.weight.transpose(-2, -1) if self.turned else self.weight
        return F.grouped_mm(x, weight, offs=ends)


@pytest.mark.parametrize("turned", [True, False])
def test_values_and_gradients_are_those_of_the_product(turned: bool) -> None:
    torch.manual_seed(0)
    model = Experts(turned)
    other = copy.deepcopy(model)
    graph = fx.symbolic_trace(other)
    assert GraphRewriter(graph).apply(grouped_product_to_train) == 1
    x, y = (torch.arange(20.0).reshape(5, 4).requires_grad_() for _ in range(2))
    one, two = model(x, ENDS), graph(y, ENDS)
    torch.testing.assert_close(two, one)
    for made in (one, two):
        (made * torch.linspace(-1, 1, made.numel()).reshape(made.shape)).sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    torch.testing.assert_close(other.weight.grad, model.weight.grad)


def test_gradients_by_differences() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((6, 3), (6, 3)))
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, ENDS), (x, weight))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(True)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 4:
            raise ValueError
        one, two = self.experts(x, ends).chunk(2, -1)
        return one * two


def test_traces_with_an_example_know_what_a_product_gives() -> None:
    """PyTorch's stand-in takes bfloat16 alone."""
    x = torch.randn(5, 4)
    model = Halves()
    module = capture(model, example_inputs=(x, ENDS)).module
    torch.testing.assert_close(module(x, ENDS), model(x, ENDS))
