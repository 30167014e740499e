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


class Windows(nn.Module):
    """A mask that is filled part by part, as of shifted windows: its sizes are known, its values, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros((4, 4))
        mask[:2, :2] = 1
        mask[2:] = 2
        return x * mask + x.new_full((4,), 3.0)


def test_what_is_new_is_like_an_input_and_depends_on_none(export: Callable[..., Captured]) -> None:
    x = torch.randn(4, 4)
    captured = export(Windows(), x)
    calls = [n.name for n in captured.module.graph.nodes if n.op.startswith("call")]
    assert calls == ["mul", "add"]
    torch.testing.assert_close(captured.module(2 * x), Windows()(2 * x))


def test_sizes_that_are_free_are_read_at_each_call() -> None:
    from backquant.graph.export import ExportOptions, capture_export
    from backquant.operators.aten import AtenSpeller

    class Fresh(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x.new_ones(x.shape)

    options = ExportOptions(dynamic_shapes={"x": {0: "rows"}})
    module = capture_export(Fresh().eval(), torch.zeros(3, 2), AtenSpeller(), options).module
    assert torch.equal(module(torch.zeros(5, 2)), torch.ones(5, 2))
