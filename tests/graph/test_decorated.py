"""Decorators around ``forward`` that take its arguments as they come."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn

from backquant.graph import capture
from backquant.graph.tracer import as_declared


def defaults_of_config(forward):
    """As of transformers: what is left out comes from the config, by keyword."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        if kwargs.get("twice") is None:
            kwargs["twice"] = self.twice
        return forward(self, *args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.twice = nn.Linear(4, 4), True

    @defaults_of_config
    def forward(self, x, mask=None, twice=None, **more):
        x = self.fc(x)
        if mask is not None:
            x = x * mask
        return x + x if twice else x


def test_a_decorated_forward_is_traced_with_the_arguments_of_the_call() -> None:
    model, x, mask = Decorated(), torch.randn(2, 4), torch.rand(2, 4)
    for example in ((x,), (x, mask)):
        module = capture(model, example_inputs=example).module
        module.recompile()
        assert torch.equal(module(*example), model(*example))
        assert any(node.op == "call_module" for node in module.graph.nodes)
    assert type(model).forward is Decorated.forward  # the class is as it was


def test_with_hooks_too() -> None:
    model, x = Decorated(), torch.randn(2, 4)
    model.register_forward_hook(lambda module, args, output: output + 1)
    module = capture(model, example_inputs=(x,)).module
    module.recompile()
    assert torch.equal(module(x), model(x))


def test_what_is_left_alone() -> None:
    def plain(self, x, **more):
        return x

    @functools.wraps(lambda self, x: x)
    def of_position(self, *args):
        return args[0]

    assert as_declared(plain) is None
    assert as_declared(of_position) is None  # its code is not rewritten


def test_arguments_without_names_and_by_keyword() -> None:
    def plain(self, x, /, y=2, *, z, w=4, **more):
        return x, y, z, w

    @functools.wraps(plain)
    def decorated(*args, **kwargs):
        return plain(*args, **kwargs)

    made = as_declared(decorated)
    assert made is not None
    assert made(None, 1, z=3) == (1, 2, 3, 4)
    assert list(inspect.signature(made).parameters) == ["self", "x", "y", "z", "w"]
