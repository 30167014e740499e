from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.graph import capture
from backquant.graph.costs import graph_costs, total_of


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x):
        return self.inner(x)


def _count(module: nn.Module, x: torch.Tensor) -> int:
    return sum(graph_costs(capture(Wrapped(module)).module, x).multiply_adds.values())


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
    assert graph_costs(gm, torch.zeros(2, 4)).multiply_adds == {"_0": 64}


def test_keywords_go_to_their_arguments() -> None:
    """Also where an argument between them is left out."""

    class Scaled(nn.Module):
        def forward(self, x, bias=None, scale=1.0):
            return torch.matmul(x, x) * scale

    module = capture(Scaled()).module
    assert graph_costs(module, {"x": torch.ones(2, 2), "scale": torch.ones(1)}).multiply_adds == {
        "matmul": 8
    }


def test_attention_is_counted() -> None:
    """PyTorch's counter knows the kernels of GPUs only."""

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16)
    [count] = graph_costs(torch.fx.symbolic_trace(Attention()), (q, k, v)).multiply_adds.values()
    assert count == 2 * 4 * 5 * 7 * (16 + 16)


class Bookkeeping(nn.Module):
    """As torchvision's and timm's models check their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        batch, length, width = x.shape
        torch._assert(width == 4, "width")
        torch._assert(x.dim() == 3, "rank")
        half = length // 2
        y, _ = self.lstm(x)
        first = y.reshape(batch, length * 4)[:, :half]
        return first.to(x.dtype).T + getattr(x, "mT")[0, 0, 0]  # noqa: B009


def test_what_gives_no_tensor_is_bookkeeping() -> None:
    """Decided from the values, whatever it is called."""
    module = capture(Bookkeeping()).module
    costs = graph_costs(module, torch.ones(2, 6, 4))
    computing = [
        node.name
        for node in module.graph.nodes
        if node.op.startswith("call") and node.name not in costs.bookkeeping
    ]
    assert computing == [
        "lstm",
        "reshape",
        "getitem_5",
        "to",
        "getattr_3",
        "getitem_6",
        "getattr_4",
        "add",
    ]
    assert {
        "dim",
        "eq",
        "eq_1",
        "floordiv",
        "mul",
        "getattr_1",
        "_assert",
        "getitem_3",
    } <= costs.bookkeeping


def test_the_nodes_of_a_graph_cost_what_the_model_costs() -> None:
    """Leaf modules, custom and untraced ones included."""
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        nn.GRU(8, 4),
        Wrapped(nn.Linear(8, 2)),
    )
    model[2].forward = lambda x: x[0] @ torch.ones(4, 3)
    model.eval()
    x = torch.randn(2, 5, 8)
    module = capture(model, non_traceable_names=("2",)).module
    costs = graph_costs(module, x)
    assert sum(costs.multiply_adds.values()) == total_of(model, x)
    assert len(costs.multiply_adds) == 3 and not costs.uncounted


def test_counting_a_model_does_not_change_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    before = [value.clone() for value in model.state_dict().values()]
    state = torch.get_rng_state()
    assert total_of(model, torch.randn(3, 4)) == 48
    torch.set_rng_state(state)
    assert all(map(torch.equal, before, model.state_dict().values()))
