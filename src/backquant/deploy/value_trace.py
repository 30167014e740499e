"""Traces one call with the values at hand: code may ask for sizes, and read tensors that are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn


def traced_with_values(run: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """The operators that ``run(*values)`` calls on ``values``, which become the placeholders.

    What is no tensor (sizes, dtypes) is read from the values and becomes a constant, as do all other tensors
    that ``run`` holds. Raises what ``run`` raises, and ``TraceError`` where it branches on a value.

    >>> shape = torch.tensor([3, 0])
    >>> def run(x):
    ...     return x.reshape([n or x.shape[i] for i, n in enumerate(shape.tolist())])
    >>> [(n.name, n.args) for n in traced_with_values(run, [torch.zeros(3, 1)]).graph.nodes][1]
    ('reshape', (value_0, [3, 1]))
    """
    tracer = _Tracer()
    given = [
        tracer.with_value(tracer.create_proxy("placeholder", f"value_{i}", (), {}), value)
        for i, value in enumerate(values)
    ]
    with torch.no_grad():
        result = run(*given)
    tracer.graph.output(tracer.create_arg(result))
    return fx.GraphModule(tracer.root, tracer.graph)


class _Valued(fx.Proxy):
    """A proxy of a tensor, or of a nest of tensors, that holds its value."""

    value: Any

    def __getattr__(self, k: str) -> Any:
        found = getattr(self.value, k)
        if callable(found) or isinstance(found, torch.Tensor):
            return super().__getattr__(k)
        return found

    def __len__(self) -> int:
        return len(self.value)


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.root, self.graph, self.tensor_attrs = nn.Module(), fx.Graph(), {}

    def with_value(self, proxy: Any, value: Any) -> Any:
        proxy.value = value
        return proxy

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Valued(node, self)

    def create_proxy(  # size: the signature of torch.fx
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> Any:
        if kind == "placeholder":
            return super().create_proxy(kind, target, args, kwargs, *rest, **more)
        inside: Any = torch.utils._pytree.tree_map_only(fx.Proxy, _value_of, (args, kwargs))
        call = getattr(inside[0][0], target) if kind == "call_method" else target
        given = inside[0][1:] if kind == "call_method" else inside[0]
        value = call(*given, **inside[1])
        if not any(isinstance(v, torch.Tensor) for v in torch.utils._pytree.tree_leaves(value)):
            return value
        return self.with_value(
            super().create_proxy(kind, target, args, kwargs, *rest, **more), value
        )

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, (np.integer, np.bool_)):
            return a.item()
        if isinstance(a, torch.Tensor):
            if a.dim() == 0 and (
                a.dtype == torch.float32 or not (a.is_floating_point() or a.is_complex())
            ):
                return a.item()
            path = f"value_constant_{len(self.tensor_attrs)}"
            self.tensor_attrs[path] = path  # type: ignore[index]
            self.root.register_buffer(path, a.detach())
            return self.create_node("get_attr", path, (), {})
        return super().create_arg(a)

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter([obj[i] for i in range(len(obj))])


def _value_of(proxy: Any) -> Any:
    return proxy.value
