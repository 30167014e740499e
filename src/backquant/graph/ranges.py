"""The ranges of values in a float graph, as runs on some batches show them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from backquant.graph.arguments import signature_of
from backquant.graph.clone import own_buffers
from backquant.graph.example import as_arguments
from backquant.graph.objects import fresh

Range = tuple[float, float]


class _Runner(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, names: Collection[str]) -> None:
        super().__init__(module)
        self.names = frozenset(names)
        self.ranges: dict[str, Range] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.names and isinstance(value, torch.Tensor):
            self._note(n.name, value)
        return value

    def _note(self, name: str, value: torch.Tensor) -> None:
        if not value.is_floating_point() or not value.numel():
            return
        low, high = (float(end) for end in value.aminmax())
        before = self.ranges.get(name, (low, high))
        self.ranges[name] = min(low, before[0]), max(high, before[1])


def ranges_of(
    module: fx.GraphModule, batches: Iterable[Any], names: Collection[str]
) -> dict[str, Range]:
    """The smallest and the largest value of each float tensor that is named; those of batches that the graph
    can be run on. NaN stays NaN.

    >>> gm = fx.symbolic_trace(lambda x: x + 1)
    >>> ranges_of(gm, [torch.zeros(2), torch.ones(2)], ["add"])
    {'add': (1.0, 2.0)}
    """
    trial = own_buffers(module).eval()
    assert isinstance(trial, fx.GraphModule)
    runner = _Runner(trial, names)
    for batch in batches:
        args, kwargs = as_arguments(batch)
        try:
            bound = signature_of(trial).bind(*fresh(args), **fresh(kwargs))
            bound.apply_defaults()
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                runner.run(*bound.args, *bound.kwargs.values())
        except Exception:  # calibration comes to it, and says which batch it is
            break
    return runner.ranges


def joined_ranges(parts: Iterable[Mapping[str, Range]]) -> dict[str, Range]:
    """The ranges that hold each of those of their name.

    >>> joined_ranges([{"a": (0, 1)}, {"a": (-1, 0), "b": (2, 3)}])
    {'a': (-1, 1), 'b': (2, 3)}
    """
    found: dict[str, Range] = {}
    for part in parts:
        for name, (low, high) in part.items():
            before = found.get(name, (low, high))
            found[name] = min(low, before[0]), max(high, before[1])
    return found
