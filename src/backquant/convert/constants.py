"""Values of a graph that depend on no input."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from backquant.graph import get_module
from backquant.observe import is_observer_or_fake_quantize


class Constants:
    """The constant values of one graph; each node is looked at once and computed at most once.

    Observers on the way pass their input on and measure nothing.

    >>> from torch import nn
    >>> class Twice(nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = nn.Parameter(torch.ones(1))
    ...     def forward(self, x):
    ...         return x + 2 * self.w
    >>> gm = fx.symbolic_trace(Twice())
    >>> node, constants = {n.name: n for n in gm.graph.nodes}, Constants(gm)
    >>> constants.tensor(node["mul"]), constants.tensor(node["add"])
    (tensor([2.]), None)
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._values: dict[fx.Node, Any] = {}
        self._constant: set[fx.Node] = set()
        for node in module.graph.nodes:
            known = all(source in self._constant for source in node.all_input_nodes)
            if known and node.op not in ("placeholder", "output"):
                self._constant.add(node)

    def tensor(self, node: fx.Node) -> torch.Tensor | None:
        """The tensor that ``node`` computes, detached; None if it depends on an input."""
        if node not in self._constant:
            return None
        stack = [node]
        with torch.no_grad():
            while stack:
                missing = [s for s in stack[-1].all_input_nodes if s not in self._values]
                if missing:
                    stack.extend(missing)
                else:
                    current = stack.pop()
                    if current not in self._values:
                        self._values[current] = self._evaluate(current)
        value = self._values[node]
        return value.detach() if isinstance(value, torch.Tensor) else None

    def _evaluate(self, node: fx.Node) -> Any:
        args = fx.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._values.__getitem__)
        if node.op == "get_attr":
            return attrgetter(str(node.target))(self._module)
        if node.op == "call_method":
            first, *rest = args
            return getattr(first, str(node.target))(*rest, **kwargs)
        call: Callable[..., Any] = node.target  # type: ignore[assignment]
        if node.op == "call_module":
            call = get_module(self._module, str(node.target))
            if is_observer_or_fake_quantize(call):
                return args[0]
        return call(*args, **kwargs)
