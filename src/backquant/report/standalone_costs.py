"""What the operators inside of standalone modules cost, for reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from backquant.graph import as_arguments
from backquant.graph.costs import GraphCosts, graph_costs
from backquant.prepare import PreparedModule, unobserved

#: What a run shows of the nodes, and of those inside of standalone modules by the node that calls them.
Costs = tuple[GraphCosts, dict[str, Any]]


def costs_of_standalone(prepared: fx.GraphModule, example_inputs: Any) -> dict[str, Costs]:
    """Multiply-adds of the operators in each standalone module of ``prepared``, by calling node.

    No observer of ``prepared`` sees the example inputs.
    """
    inner = dict(_standalone(prepared))
    if not inner:
        return {}
    args, kwargs = as_arguments(example_inputs)
    recorder = _Recorder(unobserved(prepared), frozenset(inner))
    with torch.no_grad():
        recorder.run(*_in_order(prepared, args, kwargs))
    return {
        node: (
            graph_costs(unobserved(inner[node]), passed),
            costs_of_standalone(inner[node], passed),
        )
        for node, passed in recorder.passed.items()
    }


class _Recorder(fx.Interpreter):
    """Notes what the standalone modules are called with, by argument name."""

    def __init__(self, module: fx.GraphModule, nodes: frozenset[str]) -> None:
        super().__init__(module)
        self.nodes = nodes
        self.passed: dict[str, dict[str, Any]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.name in self.nodes:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            module = self.fetch_attr(str(n.target))
            names = [str(p.target) for p in module.graph.nodes if p.op == "placeholder"]
            self.passed[n.name] = {**dict(zip(names, args, strict=False)), **kwargs}
        return super().run_node(n)


def _in_order(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Any]:
    """The arguments of a call in the order of the graph's inputs, defaults filled in."""
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    for position, place in enumerate(places):
        if position < len(args):
            yield args[position]
        elif str(place.target) in kwargs:
            yield kwargs[str(place.target)]
        else:
            yield place.args[0] if place.args else None


def _standalone(prepared: fx.GraphModule) -> Iterator[tuple[str, PreparedModule]]:
    for node in prepared.graph.nodes:
        module = prepared.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, PreparedModule):
            yield node.name, module
