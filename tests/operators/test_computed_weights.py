"""Linear layers whose weight depends on an input are products; others are left as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import backquant
from backquant.graph import GraphRewriter
from backquant.graph.shapes import GraphValues
from backquant.operators.computed_parameters import product_of_activations


class Compared(nn.Module):
    """Samples of one kind beside samples of another, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.linear(self.left(x), self.right(y), self.bias.expand(y.shape[0]))


def rewritten(function: Any, *inputs: Any, kept: Any = ()) -> tuple[int, fx.GraphModule]:
    module = fx.symbolic_trace(function)
    write = GraphRewriter(module, values=GraphValues(module, inputs), kept=kept)
    count = write.apply(product_of_activations)
    return count, module


def test_same_values() -> None:
    x, w, b = torch.randn(4, 2, 3), torch.randn(5, 3), torch.randn(5)
    count, module = rewritten(lambda x, w, b: F.linear(x, w.relu(), bias=b), x, w, b)
    assert count == 1
    assert not module.graph.find_nodes(op="call_function", target=F.linear)
    torch.testing.assert_close(module(x, w, b), F.linear(x, w.relu(), b))


def test_left_alone() -> None:
    x, w = torch.randn(2, 3), torch.randn(3)
    assert rewritten(lambda x, w: F.linear(x, w.relu()), x, w)[0] == 0  # a vector
    constant = torch.ones(5, 3)
    assert rewritten(lambda x: F.linear(x, torch.relu(constant)), x)[0] == 0
    w = torch.randn(5, 3)
    assert rewritten(lambda x, w: F.linear(x, w.relu()), x, w, kept={F.linear})[0] == 0


@pytest.mark.parametrize("backend", ["x86", "onnxruntime", "xnnpack"])
def test_other_numbers_of_samples(backend: str) -> None:
    """Each row of the weight had a scale of its own, from calibration: other numbers of rows failed."""
    torch.manual_seed(0)
    model = Compared().eval()
    batches = [(torch.rand(6, 8), torch.rand(6, 8)) for _ in range(8)]
    made = backquant.quantize(model, backend=backend, calibration=batches, slower="keep")
    outcomes = {row.operator: row.outcome for row in made.report.rows}
    assert outcomes["torch.matmul"] == ("float" if backend == "xnnpack" else "quantized")
    inputs = (torch.rand(2, 8), torch.rand(9, 8))
    torch.testing.assert_close(made(*inputs), model(*inputs), atol=0.2, rtol=0)
