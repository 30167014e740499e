"""What a report needs of a graph, as data: the report outlives the graph that it was read from."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from backquant.convert import ReferenceModel
from backquant.operators import moves_values
from backquant.report.observers import weight_rows
from backquant.report.rows import ObserverRow

_NO_OPERATOR = (
    getattr,
    operator.getitem,
    operator.neg,
    torch.neg,
    "neg",
    torch.ops.aten.neg.default,
)


@dataclass(frozen=True)
class ReportedGraph:
    """A graph by the names of its nodes.

    ``inputs``: the operators and inputs whose values a node reads (observers and boundaries are neither).
    ``weights``: the quantized weights of a module, where it ``is_reference``. ``paths``: the modules that
    nodes call. ``placeholders``: its inputs. ``moving``: nodes that arrange values and compute none.

    >>> from torch import nn
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    >>> ReportedGraph.of(gm, {"input_1", "_0"}).inputs["_0"]
    ('input_1',)
    """

    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weights: Mapping[str, tuple[ObserverRow, ...]] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    placeholders: tuple[str, ...] = ()
    is_reference: bool = False
    moving: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: fx.GraphModule, operators: Collection[str]) -> ReportedGraph:
        """Read ``module``, where ``operators`` are the nodes that the plan knows."""
        nodes = list(module.graph.nodes)
        paths = {node.name: str(node.target) for node in nodes if node.op == "call_module"}
        is_reference = isinstance(module, ReferenceModel)
        weights = {}
        if is_reference:
            called = dict(module.named_modules())
            weights = {n: weight_rows(called[path]) for n, path in paths.items() if path in called}
        return cls(
            {node.name: _inputs(node, operators) for node in nodes if node.name in operators},
            {name: rows for name, rows in weights.items() if rows},
            paths,
            tuple(node.name for node in nodes if node.op == "placeholder"),
            is_reference,
            frozenset(n.name for n in nodes if n.name in operators and _moves(n, module)),
        )


def _moves(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a node is bookkeeping: it gives values of its inputs, or their negatives."""
    if node.op == "call_module":
        return moves_values(type(module.get_submodule(str(node.target))))
    return node.target in _NO_OPERATOR or moves_values(node.target)


def _inputs(node: fx.Node, operators: Collection[str]) -> tuple[str, ...]:
    origins = (_origin(source, operators).name for source in node.all_input_nodes)
    return tuple(dict.fromkeys(origins))


def _origin(value: fx.Node, operators: Collection[str]) -> fx.Node:
    while value.name not in operators and value.op.startswith("call_") and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value
