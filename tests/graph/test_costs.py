from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.graph import capture
from backquant.graph.costs import multiply_adds


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x):
        return self.inner(x)


def _count(module: nn.Module, x: torch.Tensor) -> int:
    return sum(multiply_adds(capture(Wrapped(module)).module, x).values())


STEPS, BATCH = 5, 3
LAYERS = [
    (nn.LSTM(4, 6), 4 * 6 * (4 + 6)),
    (nn.GRU(4, 6), 3 * 6 * (4 + 6)),
    (nn.RNN(4, 6), 6 * (4 + 6)),
    (nn.LSTM(4, 6, 2, bidirectional=True), 2 * 4 * 6 * (4 + 6) + 2 * 4 * 6 * (12 + 6)),
]


@pytest.mark.parametrize(("layer", "expected"), LAYERS)
def test_recurrent_layers_cost_their_weights_at_each_step(layer, expected):
    assert _count(layer, torch.randn(STEPS, BATCH, 4)) == STEPS * BATCH * expected
    assert _count(layer, torch.randn(STEPS, 4)) == STEPS * expected


@pytest.mark.parametrize(
    ("cell", "gates"), [(nn.LSTMCell(4, 6), 4), (nn.GRUCell(4, 6), 3), (nn.RNNCell(4, 6), 1)]
)
def test_cells_cost_their_weights(cell, gates):
    assert _count(cell, torch.randn(BATCH, 4)) == BATCH * gates * 6 * (4 + 6)


def test_what_multiplies_nothing_is_not_listed():
    gm = capture(nn.Sequential(nn.Linear(4, 8), nn.ReLU())).module
    assert multiply_adds(gm, torch.zeros(2, 4)) == {"_0": 64}


def test_keywords_go_to_their_arguments() -> None:
    """Also where an argument between them is left out."""

    class Scaled(nn.Module):
        def forward(self, x, bias=None, scale=1.0):
            return torch.matmul(x, x) * scale

    module = capture(Scaled()).module
    assert multiply_adds(module, {"x": torch.ones(2, 2), "scale": torch.ones(1)}) == {"matmul": 8}


def test_attention_is_counted() -> None:
    """PyTorch's counter knows the kernels of GPUs only."""

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16)
    [count] = multiply_adds(torch.fx.symbolic_trace(Attention()), (q, k, v)).values()
    assert count == 2 * 4 * 5 * 7 * (16 + 16)
