"""What export adds is taken away, and calls in place become calls that return a value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from backquant.errors import CaptureError
from backquant.graph import Captured


class Cluttered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x.to(torch.float32).clone().detach() * 2
        with torch.no_grad():
            y = nn.functional.dropout(y, 0.5, self.training)[:]
        return y + torch.tensor(3.0)


def test_contexts_copies_and_casts(export: Callable[..., Captured]) -> None:
    captured = export(Cluttered(), torch.randn(2, 3))
    names = [node.name for node in captured.module.graph.nodes]
    assert names == ["x", "mul", "constant_0", "add", "output"]


class Moved(nn.Module):
    """As CTRL's positions: a table that is brought to the device of the input, where it is already."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table.to(device=x.device, dtype=x.dtype)
        return x * self.table


def test_a_buffer_that_is_assigned_to_itself(export: Callable[..., Captured]) -> None:
    captured = export(Moved(), torch.randn(2, 3))
    names = [node.name for node in captured.module.graph.nodes]
    assert names == ["x", "table", "mul", "output"]
    x = torch.randn(4, 3)
    assert torch.equal(captured.module(x), Moved()(x))


@pytest.mark.parametrize("change", [1, 0.5])
def test_a_value_that_is_cast_without_a_copy_is_changed(
    export: Callable[..., Captured], change: float
) -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = y.to(torch.float32)
            kept = y.to(torch.float32, copy=True)
            z += change
            return y - kept

    x = torch.arange(3.0)
    assert torch.equal(export(Cast(), torch.ones(3)).module(x), Cast()(x))


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_in_place(export: Callable[..., Captured], shape: tuple[int, ...]) -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            z = y
            y += 2
            y.clamp_(min=0)
            return z * y

    captured = export(InPlace(), torch.randn(shape))
    assert [n.name for n in captured.module.graph.nodes][1:-1] == [
        "mul",
        "add",
        "clamp",
        "mul_1",
    ]


def test_views_of_what_is_changed(export: Callable[..., Captured]) -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            first = y[:, 0]
            y[:, 1:].mul_(3)
            y[0] = 5
            first.add_(1)
            return y + first.sum()

    export(Views(), torch.randn(3, 4))


def test_tensors_assigned_to_slices(export: Callable[..., Captured]) -> None:
    """As RWKV's states, one position after the other."""

    class Assigned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.zeros_like(x)
            y[:, 0] = x[:, 1]
            y[:, 1:] = x[:, :-1] * 2
            return y

    captured = export(Assigned(), torch.randn(2, 3))
    x = torch.randn(2, 3)
    assert torch.equal(captured.module(x), Assigned()(x))
    assert not [
        node for node in captured.module.graph.nodes if str(node.target).startswith("aten.copy_")
    ]


def test_inputs_and_control_flow_operators() -> None:
    from backquant.graph.export import capture_export
    from backquant.operators.aten import AtenSpeller

    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    class Cond(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))

    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x

    reasons = {Writes: "changes 'x' in place", Cond: "uses torch.cond", Cast: "uses torch.autocast"}
    for kind, reason in reasons.items():
        with pytest.raises(CaptureError, match=reason):
            capture_export(kind().eval(), torch.ones(2, 2), AtenSpeller())
        if kind is Writes:
            continue  # behind a layer it writes to a value of the graph
        inside = nn.Sequential(nn.Linear(2, 2), kind()).eval()
        captured = capture_export(inside, torch.ones(2, 2), AtenSpeller())
        assert list(captured.whole) == ["1"] and reason in captured.whole["1"]
        assert [n.target for n in captured.module.graph.nodes if n.op == "call_module"] == [
            "0",
            "1",
        ]
        with torch.no_grad():
            assert torch.equal(captured.module(torch.ones(2, 2)), inside(torch.ones(2, 2)))
