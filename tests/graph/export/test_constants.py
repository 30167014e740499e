"""Values that depend on no input are computed once; random ones are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from backquant.graph import Captured


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(6, 4))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(4)
        return x * (self.table[positions] * self.scale).exp() + torch.zeros(4)


def test_they_are_buffers(export: Callable[..., Captured]) -> None:
    captured = export(Tables(), torch.randn(4, 4))
    calls = [n.name for n in captured.module.graph.nodes if n.op.startswith("call")]
    assert calls == ["mul", "add"]
    assert all(not t.requires_grad for t in captured.module.buffers())


def test_random_values_stay_random() -> None:
    from backquant.graph.export import capture_export
    from backquant.operators.aten import AtenSpeller

    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn(3)

    module = capture_export(Noise().eval(), torch.zeros(2, 3), AtenSpeller()).module
    assert not torch.equal(module(torch.zeros(2, 3)), module(torch.zeros(2, 3)))
