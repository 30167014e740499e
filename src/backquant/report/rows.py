"""What a report knows: what became of every operator, and why.

Invariants

1. One row per operator of the fused graph, in graph order; behind that of a standalone module come
   those of the operators in it.
2. A row that stays float has at least one reason.
3. Totals are sums over the rows; nothing is counted that has no row.
4. Before lowering, a share is that of the plan; after it, of the kernels that were recorded: what the
   plan quantizes and no kernel runs is ``unlowered``, and computes in float.
5. What is not counted is not done: a share in which an operator's count is missing is not a number.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from backquant.convert import ReferenceModel
from backquant.dtypes import ObservedQParams, dtype_name
from backquant.figures import Figures
from backquant.operators import find, moves_values
from backquant.prepare import SiteTable

_FLOAT_KERNELS = frozenset(
    {"backquant.attention"}
)  # of what is float in the plan, whatever they multiply


@dataclass(frozen=True)
class ReasonRow:
    """Why something was refused: the rule, what was asked, what is admitted, and the fix in code."""

    rule: str
    asked: str
    admitted: str
    fix: str = ""
    place: str = ""
    node: str = ""  # which operator, where the reason does not stand in its row


@dataclass(frozen=True)
class ObserverRow:
    """One measured tensor of an operator. Before calibration it has a role, a value and a dtype only.

    ``detail`` is set where one scale does not say it all: per channel, or measured at run time.
    """

    role: str  # "input", "weight", "bias" or "output"
    value: str  # the node whose value it is; of weights, their name
    dtype: str = ""
    quant_min: int | None = None
    quant_max: int | None = None
    scale: float | None = None
    zero_point: int | None = None
    detail: str = ""
    shared_with: tuple[str, ...] = ()  # other values with the same qparams by construction

    @property
    def qparams(self) -> str:
        """Dtype, range, scale and zero point in one line."""
        text = self.dtype
        if self.quant_min is not None:
            text += f" [{self.quant_min}, {self.quant_max}]"
        if self.scale is not None:
            text += f", scale {self.scale:.6g}"
        if self.zero_point is not None:
            text += f", zero point {self.zero_point}"
        return f"{text}, {self.detail}" if self.detail else text

    @property
    def short(self) -> str:
        """Scale, zero point and range, and in short with whom they are shared.

        >>> ObserverRow("output", "cat", "quint8", 0, 255, 0.1, 3, shared_with=("a", "b")).short
        '0.1 zero 3 [0, 255] = a +1'
        """
        text = self.detail
        if self.scale is not None:
            zero = "" if self.zero_point is None else f" zero {self.zero_point}"
            text = f"{self.scale:.4g}{zero} [{self.quant_min}, {self.quant_max}]"
        if not self.shared_with:
            return text
        more = f" +{len(self.shared_with) - 1}" if len(self.shared_with) > 1 else ""
        return f"{text} = {self.shared_with[0]}{more}".lstrip()

    def __str__(self) -> str:
        """In one line.

        >>> print(ObserverRow("output", "cat", "quint8", 0, 255, 0.1, 3, shared_with=("pool",)))
        output cat: quint8 [0, 255], scale 0.1, zero point 3, shared with pool
        """
        shared = f"shared with {', '.join(self.shared_with)}" if self.shared_with else ""
        detail = ", ".join(part for part in (self.qparams, shared) if part)
        return f"{self.role} {self.value}" + (f": {detail}" if detail else "")


@dataclass(frozen=True)
class Row:
    """One operator."""

    node: str
    operator: str
    module_path: str
    outcome: str  # "quantized", "unlowered", "float" or "not_tensor"
    inputs: tuple[str, ...] = ()  # nodes whose values it reads, for drawing
    entry: str = ""  # the pattern of the backend's entry that matched
    dtype_config: str = ""
    rule: str = ""  # which rule of the QConfigMapping applied
    asked: str = ""
    observers: tuple[ObserverRow, ...] = ()  # inputs, weight, output
    kernel: str = ""  # what runs it; "" before lowering
    fused: tuple[str, ...] = ()  # modules and nodes of the original graph that became this one
    multiply_adds: int = 0
    reasons: tuple[ReasonRow, ...] = ()
    uncounted: tuple[str, ...] = ()  # operators in it whose multiply-adds are not known
    float_multiply_adds: int = 0  # of a quantized custom module: those that it does in float
    moves: bool = False  # it arranges values and computes none: nothing to quantize

    @property
    def quantized(self) -> bool:
        """Whether the plan quantizes it and, once lowered, nothing says that it computes in float."""
        return self.outcome == "quantized"

    @property
    def state(self) -> str:
        """``outcome`` with two differences: ``integers`` is what is float in the plan, yet an integer
        kernel computes it; ``unlowered`` is ``float``.

        >>> Row("fc", "Linear", "fc", "unlowered").state
        'float'
        """
        if self.outcome == "unlowered":
            return "float"
        on_integers = self.kernel and self.kernel not in _FLOAT_KERNELS
        return "integers" if self.outcome == "float" and on_integers else self.outcome

    @property
    def done(self) -> int:
        """Those of its multiply-adds that are quantized."""
        on_integers = self.state in ("quantized", "integers")
        return self.multiply_adds - self.float_multiply_adds if on_integers else 0

    @property
    def name(self) -> str:
        """What a person calls the operator: the path of its module, else its node."""
        return self.module_path or self.node

    @property
    def output(self) -> ObserverRow | None:
        """What was measured of its output."""
        return next((row for row in self.observers if row.role == "output"), None)


@dataclass(frozen=True)
class Facts:
    """What each operator became, and why; totals; and what did nothing."""

    backend: str
    model: str = ""  # its class
    engine: str = ""  # engine and instruction set; "" for a reference model
    rows: tuple[Row, ...] = ()
    unused_rules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unreached_entries: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()  # in the order of the graph, once for each call
    unlowered: tuple[ReasonRow, ...] = ()  # quantized by the plan, yet no integer kernel runs it
    float_bytes: int = 0
    quantized_bytes: int = 0
    lowered: bool = False  # whether ``kernels`` is what runs; else everything is as planned
    samples: int = 1  # in the example inputs, for which multiply-adds are counted
    figures: Figures = field(default_factory=Figures)
    library: str = ""  # why the faster library of kernels does not run it here, and what to do
    not_counted: str = ""  # why no multiply-adds are known
    computed_once: int = 0  # multiply-adds of the model that its graph has no longer: constants
    extras: dict[str, Any] = field(default_factory=dict)  # e.g. accuracy and latency of the demo

    @property
    def operators(self) -> tuple[Row, ...]:
        """Rows that compute on tensors."""
        return tuple(row for row in self.rows if row.outcome != "not_tensor")

    @property
    def counted(self) -> tuple[Row, ...]:
        """Operators that compute: those that arrange values are none to a reader."""
        return tuple(row for row in self.operators if not row.moves)

    @property
    def quantized(self) -> tuple[Row, ...]:
        """Rows that the plan quantizes."""
        return tuple(row for row in self.rows if row.quantized)

    @property
    def float_rows(self) -> tuple[Row, ...]:
        """Rows that compute in float."""
        return tuple(row for row in self.rows if row.state == "float")

    @property
    def float_counted(self) -> tuple[Row, ...]:
        """Those of ``counted`` that compute in float."""
        return tuple(row for row in self.counted if row.state == "float")

    @property
    def on_integers(self) -> tuple[Row, ...]:
        """Rows that the plan left in float, and that integer kernels took in."""
        return tuple(row for row in self.rows if row.state == "integers")

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of all operators, as far as they are counted."""
        return sum(row.multiply_adds for row in self.operators)

    @property
    def uncounted(self) -> tuple[Row, ...]:
        """Rows whose multiply-adds are not known, or not all of them."""
        return tuple(row for row in self.operators if row.uncounted)

    @property
    def coverage(self) -> float:
        """Share of all multiply-adds that are quantized; of operators, where nothing multiplies.

        Before lowering (``lowered`` is false) as planned; after it, of the kernels that run. Not a
        number where operators are not counted: see ``uncounted``, ``not_counted`` and ``at_most``.

        >>> rows = (Row("a", "Conv2d", "a", "quantized", multiply_adds=30),
        ...         Row("b", "Linear", "b", "float", multiply_adds=10))
        >>> Facts("x86", rows=rows).coverage
        0.75
        >>> custom = Row("c", "deform_conv2d", "", "float", uncounted=("deform_conv2d",))
        >>> Facts("x86", rows=(*rows, custom)).coverage
        nan
        """
        return math.nan if self.not_counted or self.uncounted else self.at_most

    @property
    def at_most(self) -> float:
        """The share of what is counted."""
        total = self.multiply_adds
        if total:
            return sum(row.done for row in self.operators) / total
        return len(self.quantized) / len(self.operators) if self.operators else 0.0

    @property
    def kernel_counts(self) -> dict[str, int]:
        """How often each kernel runs, the most frequent first; one that took in several operators once."""
        return dict(Counter(self.kernels).most_common())


# What a report needs of a graph, as data: the report outlives the graph that it was read from.

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
    """Whether a node is bookkeeping: it gives values of its inputs, or their negatives. Pooling compares
    them before."""
    is_module = node.op == "call_module"
    target = type(module.get_submodule(str(node.target))) if is_module else node.target
    if target in _NO_OPERATOR or getattr(target, "_opname", "") == "neg":
        return True
    known = find(target)
    return moves_values(target) and (known is None or known.family != "pooling")


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
