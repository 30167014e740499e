"""Several graphs as one, side by side: what costs seconds for any model is paid once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from backquant.deploy import ExportJob
from backquant.match import Plan


def named(at: int, name: str) -> str:
    """What a node of the graph at this position is called in all of them.

    >>> named(3, "conv")
    'case3_conv'
    """
    return f"case{at}_{name}"


def joined_graphs(modules: Sequence[fx.GraphModule]) -> fx.GraphModule:
    """One graph of all: their inputs one after the other, and of each the first tensor of its result.

    >>> import torch
    >>> made = joined_graphs([fx.symbolic_trace(nn.ReLU()), fx.symbolic_trace(nn.Tanh())])
    >>> [tuple(result.shape) for result in made(torch.zeros(2), torch.zeros(3))]
    [(2,), (3,)]
    """
    root, graph = nn.Module(), fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for at, module in enumerate(modules):
        root.add_module(f"case{at}", module)
        for node in module.graph.find_nodes(op="placeholder"):
            made[node] = graph.placeholder(named(at, node.name))
    results: list[Any] = []
    for at, module in enumerate(modules):
        for node in module.graph.nodes:
            if node.op == "output":
                results.append(made[_first(node.args[0])])
            elif node.op != "placeholder":
                made[node] = _copied(graph, at, node, made)
    for node, copied in made.items():
        copied.meta = dict(node.meta)
    graph.output(tuple(results))
    return fx.GraphModule(root, graph)


def _copied(graph: fx.Graph, at: int, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
    inside = node.op in ("call_module", "get_attr")
    target = f"case{at}.{node.target}" if inside else node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
    return graph.create_node(node.op, target, args, kwargs, name=named(at, node.name))


def _first(result: Any) -> Any:
    while isinstance(result, (tuple, list)):
        result = result[0]
    return result


def joined_jobs(jobs: Sequence[ExportJob]) -> ExportJob:
    """One export of all; nodes are named by ``named``."""
    plan = Plan(
        jobs[0].config.name,
        decisions={
            named(at, name): decision
            for at, job in enumerate(jobs)
            for name, decision in job.plan.decisions.items()
        },
    )
    return replace(
        jobs[0],
        module=joined_graphs([job.module for job in jobs]),
        args=tuple(value for job in jobs for value in job.args),
        plan=plan,
        multiply_adds={
            named(at, name): count
            for at, job in enumerate(jobs)
            for name, count in job.multiply_adds.items()
        },
        expected=tuple(
            replace(
                operator,
                node=named(at, operator.node),
                nodes=tuple(named(at, name) for name in operator.nodes),
            )
            for at, job in enumerate(jobs)
            for operator in job.expected
        ),
        uncounted=tuple(named(at, name) for at, job in enumerate(jobs) for name in job.uncounted),
    )
