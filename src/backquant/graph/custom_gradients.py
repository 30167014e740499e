"""Functions with a gradient of their own (``torch.autograd.Function``) in models that are trained.

A trace runs their ``forward`` and records what it computes, with the gradient of that: a rounding that passes
its gradient on (a straight-through estimator) would pass none, and say nothing.

1. While a model is captured for training, such a call is recorded as a call of a ``CustomGradient``.
2. A converted model has no gradients: there the call is what ``forward`` computes, where that can be traced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from backquant.graph.edit import get_module
from backquant.graph.own_thread import in_turn
from backquant.graph.wrapped import inline_call

__all__ = ["CustomGradient", "inline_custom_gradients", "kept_custom_gradients"]


class CustomGradient(nn.Module):
    """A call of ``function.apply``.

    >>> class Same(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x.clone()
    >>> CustomGradient(Same)
    CustomGradient(Same)
    """

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def extra_repr(self) -> str:
        return self.function.__name__


@contextmanager
def kept_custom_gradients() -> Iterator[None]:
    """Rule 1, for what this thread traces within the block.

    ``Function.apply`` itself may be bound already (``scan = Scan.apply``): up to torch 2.14 what it calls is
    replaced, in the class above. Since 2.15 it is C's own: there what was bound before keeps no gradient.
    """
    thread = threading.get_ident()
    function: Any = torch.autograd.Function
    own = vars(function).get("apply")
    is_python = isinstance(own, classmethod)
    holder: Any = function.__mro__[1] if is_python else function

    def apply(called: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            tracer = _tracer_of((args, kwargs))
            if tracer is not None:
                return _recorded(tracer, called, args, kwargs)
        plain = super(holder, called).apply if is_python else own.__get__(None, called)
        return plain(*args, **kwargs)

    with in_turn():
        if is_python and "apply" in vars(holder):  # a capture within
            yield
            return
        holder.apply = classmethod(apply)
        try:
            yield
        finally:
            if is_python:
                del holder.apply
            else:
                holder.apply = own


def _tracer_of(arguments: Any) -> fx.Tracer | None:
    """That of the first value of a trace among ``arguments``."""
    found: list[fx.Tracer] = []

    def note(value: Any) -> Any:
        if issubclass(type(value), fx.Proxy) and isinstance(value.tracer, fx.Tracer):
            found.append(value.tracer)
        return value

    fx.node.map_aggregate(arguments, note)
    return found[0] if found else None


def _recorded(
    tracer: fx.Tracer, function: type[torch.autograd.Function], args: Any, kwargs: Any
) -> Any:
    number = 0
    while f"custom_gradient_{number}" in tracer.root._modules:
        number += 1
    path = f"custom_gradient_{number}"
    tracer.root.add_module(path, CustomGradient(function).train(tracer.root.training))
    return tracer.create_proxy("call_module", path, args, kwargs)


def inline_custom_gradients(module: fx.GraphModule) -> None:
    """Rule 2, in place; a function that cannot be traced stays a call.

    >>> class Twice(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x * 2
    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.call_module("twice", (graph.placeholder("x"),)))
    >>> module = fx.GraphModule({"twice": CustomGradient(Twice)}, graph)
    >>> inline_custom_gradients(module)
    >>> [node.name for node in module.graph.nodes]
    ['x', 'mul', 'output']
    """
    for node in list(module.graph.nodes):
        called = get_module(module, str(node.target)) if node.op == "call_module" else None
        if isinstance(called, CustomGradient):
            inline_call(module.graph, node, partial(CustomGradient.forward, called))
