"""What a report says of the operators inside of standalone modules, and what they cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from backquant.graph import as_arguments
from backquant.graph.costs import GraphCosts, graph_costs
from backquant.lower import KernelUse
from backquant.match.plan import Reason
from backquant.prepare import PreparedModule, unobserved
from backquant.report.model import Report, Row


def standalone_kernels(path: str, kernels: Iterable[KernelUse]) -> tuple[KernelUse, ...]:
    """The kernels of the standalone module at ``path``, by the names of its own nodes.

    >>> import torch
    >>> use = KernelUse(("block.conv",), "conv2d", torch.uint8, "x86")
    >>> standalone_kernels("block", [use])[0].nodes
    ('conv',)
    """
    start = f"{path}."
    return tuple(
        replace(use, nodes=tuple(name.removeprefix(start) for name in use.nodes))
        for use in kernels
        if all(name.startswith(start) for name in use.nodes)
    )


def standalone_reasons(path: str, reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The reasons about nodes of the standalone module at ``path``, by their own names.

    >>> standalone_reasons("block", [Reason("block.conv", "no-kernel", "", "")])[0].node
    'conv'
    """
    start = f"{path}."
    return tuple(
        replace(reason, node=reason.node.removeprefix(start))
        for reason in reasons
        if reason.node.startswith(start)
    )


def standalone_rows(row: Row, report: Report, inputs: Collection[str]) -> list[Row]:
    """``row``, of a call of a standalone module, and those of the operators in it.

    Multiply-adds are counted where they are known: inside, the rest at the call. ``inputs`` are the
    names of the module's own inputs; what reads them reads what the call reads.

    >>> call = Row("block", "Block", "block", "quantized", inputs=("stem",), multiply_adds=10)
    >>> inner = Report("x86", rows=(Row("fc", "Linear", "fc", "float", ("x",), multiply_adds=8),))
    >>> [(r.node, r.module_path, r.inputs, r.multiply_adds) for r in standalone_rows(call, inner, ["x"])]
    [('block', 'block', ('stem',), 2), ('block.fc', 'block.fc', ('stem',), 8)]
    """
    inside = [
        replace(
            inner,
            node=f"{row.node}.{inner.node}",
            module_path=f"{row.module_path}.{inner.module_path}".rstrip("."),
            inputs=tuple(
                outer
                for name in inner.inputs
                for outer in (row.inputs if name in inputs else (f"{row.node}.{name}",))
            ),
        )
        for inner in report.rows
    ]
    known = sum(inner.multiply_adds for inner in inside)
    rest = max(0, row.multiply_adds - known)
    return [replace(row, multiply_adds=rest, uncounted=()), *inside]


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
