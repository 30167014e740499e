"""Which calls of modules stay one operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from backquant.graph import Captured


def _calls(captured: Captured) -> list[str]:
    return [
        str(node.target) if node.op == "call_module" else node.name
        for node in captured.module.graph.nodes
        if node.op.startswith("call")
    ]


def test_several_operators_in_one_module(export: Callable[..., Captured]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Flatten())
    captured = export(model, torch.randn(2, 3, 5, 5))
    assert _calls(captured) == ["0", "1"]
    assert type(captured.module.get_submodule("0")) is nn.Conv2d
    assert captured.module.get_submodule("0").weight is model[0].weight


def test_tied_weights(export: Callable[..., Captured]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    model = Tied()
    captured = export(model, torch.randn(2, 4))
    assert _calls(captured) == ["first", "second"]
    assert captured.module.second.weight is model.first.weight


def test_attention_comes_apart(export: Callable[..., Captured]) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    captured = export(Attention(), torch.randn(2, 5, 8))
    functions = [n.target for n in captured.module.graph.nodes if n.op == "call_function"]
    assert functions.count(F.linear) == 2
    assert F.scaled_dot_product_attention in functions
    scopes = {
        captured.scopes[n.name].path for n in captured.module.graph.nodes if n.target is F.linear
    }
    assert scopes == {"attention"}


def test_a_size_that_the_module_does_not_tell(export: Callable[..., Captured]) -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 4, 3, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.up.weight.mean() + x, output_size=(8, 8))

    captured = export(Up(), torch.randn(1, 3, 3, 3))
    assert _calls(captured)[-1] == "conv_transpose2d"
    plain = export(nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2)), torch.randn(1, 3, 3, 3))
    assert _calls(plain) == ["0"]


def test_parametrized_weights_are_computed_once(export: Callable[..., Captured]) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    captured = export(model, torch.randn(2, 4))
    assert _calls(captured) == ["linear"]
    [weight] = [n for n in captured.module.graph.nodes if n.name.startswith("constant")]
    assert captured.module.get_buffer(str(weight.target)).shape == (3, 4)


def test_a_subclass_is_traced_through(export: Callable[..., Captured]) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    captured = export(nn.Sequential(Scaled(4, 3)), torch.randn(2, 4))
    assert _calls(captured) == ["linear", "mul"]
    assert captured.scopes["linear"].path == "0"


def test_views_that_are_made_anew_in_front_of_a_module(export: Callable[..., Captured]) -> None:
    class InPlace(nn.Module):
        """The views are of a tensor that is changed before they are read."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            rows = y.flatten(2).transpose(1, 2)
            y.relu_()
            return self.linear(rows)

    model, x = InPlace(), torch.randn(2, 3, 6, 6)
    captured = export(model, x)
    calls = [n.target for n in captured.module.graph.nodes if n.op == "call_module"]
    assert calls == ["conv", "linear"]
    torch.testing.assert_close(captured.module(x), model(x))
