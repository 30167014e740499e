"""Values that depend on no input are computed once; nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph import Scope, fold_constants


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.part = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.randn(5, 4))
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 6))
        self.embedding = nn.Embedding(5, 6)
        self.register_buffer("index", torch.arange(5))


def _folded(forward: Any) -> tuple[int, fx.GraphModule, Model]:
    class Made(Model):
        pass

    Made.forward = forward
    torch.manual_seed(0)
    model = Made().eval()
    traced = fx.symbolic_trace(model)
    return fold_constants(traced, {}), traced, model


def _same(traced: fx.GraphModule, model: nn.Module) -> None:
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(traced(x), model(x))


def _bias(self: Any, x: Any) -> Any:
    return F.linear(x, self.weight, torch.cat([self.part, torch.zeros_like(self.part)]))


def _standardized(self: Any, x: Any) -> Any:
    weight = F.batch_norm(self.weight.reshape(1, 6, -1), None, None, training=True, momentum=0.0)
    return F.linear(x, weight.reshape_as(self.weight))


def _layers(self: Any, x: Any) -> Any:
    return F.linear(x, self.weight) + self.mlp(self.table)


def _two_readers(self: Any, x: Any) -> Any:
    scaled = self.weight * 2
    return F.linear(x, scaled) + F.linear(x + 1, scaled.abs())


@pytest.mark.parametrize(
    ("forward", "count"), [(_bias, 1), (_standardized, 1), (_layers, 1), (_two_readers, 2)]
)
def test_what_is_folded(forward: Any, count: int) -> None:
    found, traced, model = _folded(forward)
    assert found == count
    read = {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"}
    assert {name for name in read if name.startswith("constant_")} == {
        f"constant_{i}" for i in range(count)
    }
    _same(traced, model)


def _random(self: Any, x: Any) -> Any:
    return F.linear(x, torch.rand_like(self.weight))


def _dropped(self: Any, x: Any) -> Any:
    return F.linear(x, F.dropout(self.weight, training=True))


def _changed(self: Any, x: Any) -> Any:
    self.weight.add_(1)
    return F.linear(x, self.weight.abs())


def _changed_view(self: Any, x: Any) -> Any:
    self.weight.view(-1).mul_(2)
    return F.linear(x, self.weight.abs())


def _looked_up(self: Any, x: Any) -> Any:
    return F.linear(x, self.weight) + self.embedding(self.index)


def _large(self: Any, x: Any) -> Any:
    return x.sum() + self.part.view(3, 1).repeat(1, 2_000_000)


@pytest.mark.parametrize(
    "forward", [_random, _dropped, _changed, _changed_view, _looked_up, _large]
)
def test_what_is_not(forward: Any) -> None:
    count, traced, model = _folded(forward)
    assert count == 0
    torch.manual_seed(0)
    assert torch.equal(model.weight, Model().weight)
    assert "constant_0" not in dict(traced.named_buffers())


def test_scopes_follow() -> None:
    traced = fx.symbolic_trace(_make(_bias))
    node = next(n for n in traced.graph.nodes if n.name == "cat")
    scopes = {node.name: Scope("block", nn.Linear)}
    fold_constants(traced, scopes)
    assert scopes == {"constant_0": Scope("block", nn.Linear)}


def _make(forward: Any) -> nn.Module:
    class Made(Model):
        pass

    Made.forward = forward
    return Made().eval()
