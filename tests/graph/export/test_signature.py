"""Arguments and outputs: names, defaults, nested values, classes."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from backquant.errors import InputError
from backquant.graph import Captured
from backquant.graph.export import Interface, OutputRecord, interface_of

Pair = namedtuple("Pair", "left right")


@dataclass
class Found:
    logits: torch.Tensor
    extra: Any = None


pytree.register_dataclass(Found)


class Nested(nn.Module):
    def forward(
        self, x: torch.Tensor, parts: Any, *more: torch.Tensor, scale: float = 2.0, **named: Any
    ) -> Any:
        y = x * scale + parts["a"][0] + parts["b"] + more[0]
        return Found(y + named["z"], [Pair(y, None), {"k": (y, 3)}])


def _inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 3) for _ in range(5))


def test_nested_arguments_and_classes() -> None:
    from backquant.graph.export import ExportOptions, capture_export
    from backquant.operators.aten import AtenSpeller

    class Called(Nested):
        def forward(self, x: torch.Tensor, parts: Any, more: torch.Tensor, z: torch.Tensor) -> Any:
            return super().forward(x, parts, more, z=z)

    x, a, b, c, z = _inputs()
    example = (x, {"a": [a], "b": b}, c, z)
    model = Called().eval()
    captured = capture_export(model, example, AtenSpeller(), ExportOptions())
    interface = interface_of(captured.module)
    assert interface is not None
    wanted, raw = model(*example), captured.module(*example)
    got = interface.restored(raw)
    assert type(got) is Found and type(got.extra[0]) is Pair
    assert got.extra[0].right is None and got.extra[1]["k"][1] == 3
    assert torch.equal(got.logits, wanted.logits)
    interface.check((x[:1], {"a": [a[:1]], "b": b[:1]}, c[:1], z[:1]), {})
    with pytest.raises(InputError, match="input 'parts' was 2 tensors"):
        interface.check((x, {"a": [a]}, c, z), {})
    with pytest.raises(InputError, match="input 'x' is float64"):
        interface.check((x.double(), example[1], c, z), {})
    again = Interface.from_dict(interface.to_dict())
    loaded = again.restored(raw)
    assert isinstance(loaded, OutputRecord) and torch.equal(loaded.logits, wanted.logits)
    assert isinstance(loaded.extra[0], OutputRecord)
    with pytest.raises(AttributeError):
        loaded.missing  # noqa: B018


def test_defaults_and_constants(export: Callable[..., Captured]) -> None:
    class Options(nn.Module):
        def forward(
            self, x: torch.Tensor, mask: Any = None, double: bool = False, mode: str = "a"
        ) -> torch.Tensor:
            y = x * 2 if double else x
            return (y if mask is None else y * mask) + 1

    x = torch.randn(2, 3)
    captured = export(Options(), {"x": x, "double": True})
    interface = interface_of(captured.module)
    assert interface is not None
    places = [n for n in captured.module.graph.nodes if n.op == "placeholder"]
    assert [n.name for n in places] == ["x", "mask", "double", "mode"]
    interface.check((x,), {"double": True, "mask": None})
    with pytest.raises(
        InputError, match="'double' is False, and True is part of the exported graph"
    ):
        interface.check((x, None, False), {})
    with pytest.raises(InputError, match="'mask' is float32"):
        interface.check((x, x), {})


def test_sizes(export: Callable[..., Captured]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.fc(x) + y

    captured = export(Two(), (torch.randn(1, 5, 3), torch.randn(1, 5, 3)))
    interface = interface_of(captured.module)
    assert interface is not None
    assert interface.arguments[0].shapes[0][2] == 3
    for batch, length in ((1, 5), (4, 1), (3, 8)):
        x, y = torch.randn(batch, length, 3), torch.randn(batch, length, 3)
        interface.check((x, y), {})
        assert captured.module(x, y).shape == (batch, length, 3)
    with pytest.raises(InputError, match="they are the same size"):
        interface.check((torch.randn(2, 5, 3), torch.randn(3, 5, 3)), {})
    with pytest.raises(InputError, match="has 2 dimensions"):
        interface.check((torch.randn(5, 3), torch.randn(5, 3)), {})


class Two(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - 2 * right


@pytest.mark.parametrize("as_program", [False, True])
def test_keywords_in_another_order(as_program: bool) -> None:
    from backquant.graph.export import ExportedModel, capture_export
    from backquant.operators.aten import AtenSpeller

    left, right, *_ = _inputs()
    example = {"right": right, "left": left}
    model: nn.Module = Two().eval()
    if as_program:
        model = ExportedModel(torch.export.export(model, (), example))
    captured = capture_export(model, example, AtenSpeller())
    wanted = left - 2 * right
    assert torch.equal(captured.module(**example), wanted)
    assert torch.equal(captured.module(left=left, right=right), wanted)
