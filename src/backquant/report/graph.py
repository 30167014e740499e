"""What a report needs of a graph, as data: the report outlives the graph that it was read from."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from backquant.convert import ReferenceModel
from backquant.dtypes import ObservedQParams, dtype_name
from backquant.operators import moves_values
from backquant.prepare import SiteTable
from backquant.report.rows import ObserverRow

_NO_OPERATOR = (getattr, operator.getitem, operator.neg, torch.neg, "neg")


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
    known = node.target in _NO_OPERATOR or getattr(node.target, "_opname", "") == "neg"
    return known or moves_values(node.target)


def _inputs(node: fx.Node, operators: Collection[str]) -> tuple[str, ...]:
    origins = (_origin(source, operators).name for source in node.all_input_nodes)
    return tuple(dict.fromkeys(origins))


def _origin(value: fx.Node, operators: Collection[str]) -> fx.Node:
    while value.name not in operators and value.op.startswith("call_") and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value


class Observers:
    """The observers of a model by operator; before calibration without qparams."""

    def __init__(self, sites: SiteTable | None, qparams: Mapping[str, ObservedQParams]) -> None:
        self._sites = SiteTable() if sites is None else sites
        self._outputs: dict[str, list[ObserverRow]] = {}
        self._inputs: dict[str, list[ObserverRow]] = {}
        values = {site.name: self._value(site.name) for site in self._sites.sites}
        groups = self._sites.groups()
        for site in self._sites.sites:
            others = dict.fromkeys(values[name] for name in groups[site.group])
            others.pop(values[site.name], None)
            measured = measured_row(qparams.get(site.name))
            row = replace(measured, value=values[site.name], shared_with=tuple(others))
            if site.producer:
                self._outputs.setdefault(site.producer, []).append(replace(row, role="output"))
            # An output is an input of those that read it.
            role = "input" if site.producer else site.role.value
            for reader in site.readers:
                self._inputs.setdefault(reader, []).append(replace(row, role=role))

    def of(self, node: str, weights: Iterable[ObserverRow]) -> tuple[ObserverRow, ...]:
        """The observers of the operator of this name: of its inputs, ``weights``, and of its output."""
        inputs, outputs = self._inputs.get(node, []), self._outputs.get(node, [])
        return (*inputs, *weights, *outputs)

    def _value(self, name: str) -> str:
        """The node of the unobserved graph whose value a site observes."""
        value = self._sites[name].value
        while value in self._sites:
            value = self._sites[value].value
        return value


def measured_row(measured: ObservedQParams | None) -> ObserverRow:
    """What was measured; role and value are still empty.

    >>> scale, zero_point = torch.tensor(0.5), torch.tensor(3)
    >>> measured_row(ObservedQParams(scale, zero_point, 0, 255, torch.quint8)).qparams
    'quint8 [0, 255], scale 0.5, zero point 3'
    """
    if measured is None:
        return ObserverRow("", "")
    row = ObserverRow("", "", dtype_name(measured.dtype))
    if measured.scale is None or measured.zero_point is None:
        return replace(row, detail="measured at run time" if measured.is_dynamic else "")
    row = replace(row, quant_min=measured.quant_min, quant_max=measured.quant_max)
    if measured.axis is not None or measured.scale.numel() > 1:
        return replace(row, detail=_scales(measured.scale, measured.axis))
    return replace(row, scale=float(measured.scale), zero_point=int(measured.zero_point))


def weight_rows(module: nn.Module) -> tuple[ObserverRow, ...]:
    """Those of a reference module, and of the reference modules inside a fused one."""
    return tuple(row for part in module.modules() for row in _own_weights(part))


def _own_weights(module: Any) -> list[ObserverRow]:
    rows = []
    for name in getattr(module, "weight_names", ()):
        scale, dtype = (
            getattr(module, f"{name}_scale", None),
            getattr(module, f"{name}_dtype", None),
        )
        if not isinstance(scale, torch.Tensor) or not isinstance(dtype, torch.dtype):
            continue
        row = ObserverRow(
            role="weight",
            value=name,
            dtype=dtype_name(dtype),
            quant_min=getattr(module, f"{name}_quant_min", None),
            quant_max=getattr(module, f"{name}_quant_max", None),
        )
        if scale.numel() == 1:
            rows.append(replace(row, scale=float(scale)))
        else:
            rows.append(replace(row, detail=_scales(scale, getattr(module, f"{name}_axis", None))))
    return rows


def _scales(scale: torch.Tensor, axis: Any) -> str:
    ends = f"{float(scale.min()):.3g} … {float(scale.max()):.3g}"
    if scale.dim() > 1:
        return f"{scale.numel()} scales, a grid of {' × '.join(map(str, scale.shape))} ({ends})"
    return f"{scale.numel()} scales on axis {0 if axis is None else int(axis)} ({ends})"
