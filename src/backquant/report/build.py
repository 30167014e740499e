"""Builds the report from the plan and what the later steps recorded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from backquant.dtypes import dtype_name, stored_bytes
from backquant.graph import as_arguments
from backquant.graph.costs import GraphCosts, graph_costs
from backquant.graph.example import ExampleSpec
from backquant.identifiers import labelled_data
from backquant.lower import KernelUse
from backquant.match.plan import Decision, MatchKind, Outcome, Reason, TensorRequest
from backquant.match.refusal import entry_text
from backquant.native.library import advice
from backquant.prepare import PreparedModule, Record, unobserved
from backquant.reason_codes import ReasonCode
from backquant.report.model import ReasonRow, Report, Row
from backquant.report.rows import Observers, ReportedGraph
from backquant.runtime import QuantizedModel

# What a report says of the operators inside of standalone modules, and what they cost.


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


_LARGE = 0.3  # share of the size from which tables in float are worth a note


@dataclass(frozen=True)
class ReportSource:
    """What is known about a model at some step; later steps fill in more.

    ``graph`` is that of which the plan of ``record`` speaks: fused, prepared or converted.
    ``inner`` holds what is known of standalone modules, by the node that calls them. ``in_float``: the
    multiply-adds that quantized custom modules do in float, by node.
    """

    record: Record
    graph: ReportedGraph
    in_float: Mapping[str, int] = field(default_factory=dict)
    is_lowered: bool = False
    engine: str = ""
    library: str = ""
    kernels: Sequence[KernelUse] = ()
    left_in_float: Sequence[Reason] = ()
    quantized_bytes: int = 0
    float_table_bytes: int = 0
    inner: Mapping[str, ReportSource] = field(default_factory=dict)

    @property
    def costs(self) -> GraphCosts:
        """What a run on the example inputs showed; nothing where there was none."""
        return self.record.costs or GraphCosts()

    def lowered(self, quantized: QuantizedModel) -> ReportSource:
        """The same with what the lowering recorded."""
        record = quantized.record
        return replace(
            self,
            record=record,
            engine="" if record.engine is None else record.engine.describe(),
            library="" if record.engine is None else advice(record.engine.name),
            is_lowered=record.engine is not None,
            kernels=record.kernels,
            left_in_float=record.left_in_float,
            inner={
                node: self._inside(node, record.kernels, record.left_in_float)
                for node in self.inner
            },
            quantized_bytes=bytes_of(quantized.graph_module),
            float_table_bytes=_float_tables(quantized.graph_module),
        )

    def _inside(
        self, node: str, kernels: Sequence[KernelUse], left_in_float: Sequence[Reason]
    ) -> ReportSource:
        """The source of a standalone module with its part of what the lowering recorded."""
        path, source = self.graph.paths[node], self.inner[node]
        kernels = standalone_kernels(path, kernels)
        left = standalone_reasons(path, left_in_float)
        inner = {name: source._inside(name, kernels, left) for name in source.inner}
        lowered = source.record.backend_config.engine is not None
        return replace(source, kernels=kernels, left_in_float=left, inner=inner, is_lowered=lowered)


def bytes_of(module: nn.Module) -> int:
    """Bytes of parameters and buffers as a saved model holds them, each tensor once.

    >>> bytes_of(nn.Linear(2, 3))
    36
    """
    held = (t for t in (*module.parameters(), *module.buffers()) if t.numel())
    tensors = {t.data_ptr() if t.layout is torch.strided else id(t): t for t in held}
    return sum(stored_bytes(t) for t in tensors.values())


def _float_tables(module: nn.Module) -> int:
    """Bytes of the tables of embeddings that are float."""
    tables = {
        id(part.weight): part.weight
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    }
    return sum(map(stored_bytes, tables.values()))


def build_report(source: ReportSource) -> Report:
    """One row per operator of the plan, with everything that ``source`` knows about it, under the user's own
    names."""
    return labelled_data(_Builder(source).report())


class _Builder:
    """The lookups that rows share."""

    def __init__(self, source: ReportSource) -> None:
        self._source = source
        self._record = source.record
        self._entries = source.record.backend_config.shared_configs
        self._kernel_of = {name: use.kernel for use in source.kernels for name in use.nodes}
        self._observers = Observers(source.record.sites, source.record.qparams)
        self._costs = source.costs
        self._left: dict[str, list[Reason]] = {}
        for reason in source.left_in_float:
            self._left.setdefault(reason.node, []).append(reason)

    def report(self) -> Report:
        source, plan = self._source, self._record.plan
        inner = {node: build_report(part) for node, part in source.inner.items()}
        rows = tuple(self._rows(inner))
        counted = sum(row.multiply_adds for row in rows)
        return Report(
            backend=source.record.backend_config.name or "unnamed backend",
            model=source.record.model,
            engine=source.engine,
            samples=samples_of(source.record.example),
            figures=source.record.figures,
            library=source.library,
            rows=rows,
            unused_rules=(*map(str, plan.unused_rules), *_standalone_unused(inner)),
            notes=(
                *plan.notes,
                *_standalone_notes(inner),
                *self._unseen(),
                *self._tiny(),
                *self._tables(),
            ),
            unreached_entries=tuple(self._pattern(i) for i in plan.unreached_entries),
            kernels=tuple(use.kernel for use in source.kernels),
            unlowered=(*self._unlowered(), *_standalone_unlowered(inner)),
            float_bytes=source.record.float_bytes if source.graph.is_reference else 0,
            quantized_bytes=source.quantized_bytes,
            lowered=source.is_lowered,
            not_counted=source.costs.not_counted,
            computed_once=max(0, source.costs.total - counted),
            extras={"recipe": dict(source.record.recipe)} if source.record.recipe else {},
        )

    def _rows(self, inner: Mapping[str, Report]) -> Iterator[Row]:
        for decision in self._record.plan.decisions.values():
            row = self._row(decision)
            if decision.node not in inner:
                yield row
                continue
            placeholders = self._source.inner[decision.node].graph.placeholders
            yield from standalone_rows(row, inner[decision.node], placeholders)

    def _unseen(self) -> tuple[str, ...]:
        values = self._record.unseen
        return tuple(f"the observer of {value!r} saw no data" for value in values)

    def _tiny(self) -> Iterator[str]:
        names: dict[float, list[str]] = {}
        for name, smallest in self._record.tiny:
            names.setdefault(smallest, []).append(name)
        for smallest, values in names.items():
            more = f" and {len(values) - 1} more" if len(values) > 1 else ""
            yield (
                f"{values[0]!r}{more}: all measured values become zero, being smaller than half of the "
                f"smallest scale, {smallest:.3g}; observers with a smaller eps keep them"
            )

    def _tables(self) -> Iterator[str]:
        part, whole = self._source.float_table_bytes, self._source.quantized_bytes
        if whole and part >= _LARGE * whole:
            yield (
                f"embeddings in float are {part / whole:.0%} of the size: the fix that is given for them "
                "makes them integers"
            )

    def _unlowered(self) -> tuple[ReasonRow, ...]:
        """Reasons of the lowering about what the plan quantized; of the rest the plan says why."""
        decisions = self._record.plan.decisions
        paths = tuple(f"{self._source.graph.paths[node]}." for node in self._source.inner)
        return tuple(
            _reason_row(reason)
            for reason in self._source.left_in_float
            if not reason.node.startswith(paths)
            and (reason.node not in decisions or decisions[reason.node].quantized)
        )

    def _pattern(self, entry: int) -> str:
        return entry_text(self._entries[entry])

    def _row(self, decision: Decision) -> Row:
        plan = self._record.plan
        match = None if decision.match is None else plan.matches[decision.match]
        graph = self._source.graph
        outcome, reasons = self._outcome(decision)
        return Row(
            node=decision.node,
            operator=decision.operator,
            module_path=decision.module_path,
            outcome=outcome,
            inputs=graph.inputs.get(decision.node, ()),
            entry="" if match is None else match.pattern,
            dtype_config=self._dtype_config(decision),
            rule="" if decision.rule is None else str(decision.rule),
            asked=_requested(decision),
            observers=self._observers.of(decision.node, graph.weights.get(decision.node, ())),
            kernel=self._kernel_of.get(decision.node, ""),
            fused=self._fused(decision.node),
            multiply_adds=self._costs.multiply_adds.get(decision.node, 0),
            reasons=tuple(map(_reason_row, reasons)),
            uncounted=self._costs.uncounted.get(decision.node, ()),
            float_multiply_adds=self._source.in_float.get(decision.node, 0),
            moves=decision.node in graph.moving,
        )

    def _outcome(self, decision: Decision) -> tuple[str, Sequence[Reason]]:
        """What became of a node, with the reasons if it computes in float.

        1. A node whose value held no tensor when the graph was run is no operator.
        2. A quantized pattern of a lowered model runs on a kernel, or the lowering says why not; one
           that multiplies needs a kernel in any case.
        3. A quantized custom module that does all its multiplying in float is not lowered.
        """
        if decision.outcome is Outcome.FLOAT and decision.node in self._costs.bookkeeping:
            return Outcome.NOT_TENSOR.value, ()
        match = None if decision.match is None else self._record.plan.matches[decision.match]
        planned = decision.quantized and match is not None and match.kind is MatchKind.PATTERN
        cost = self._costs.multiply_adds.get(decision.node, 0)
        if decision.quantized and 0 < cost <= self._source.in_float.get(decision.node, 0):
            return "unlowered", (_standalone_float(decision),)
        if not planned or not self._source.is_lowered or decision.node in self._kernel_of:
            return decision.outcome.value, decision.reasons
        left = self._left.get(decision.node, [])
        if not left and cost:
            left = [
                Reason(
                    decision.node, ReasonCode.NO_KERNEL, "an integer kernel", "none was recorded"
                )
            ]
        return ("unlowered", left) if left else (decision.outcome.value, ())

    def _fused(self, node: str) -> tuple[str, ...]:
        """What became ``node``: paths of modules, names of other nodes; nothing if only itself did."""
        origins = self._record.provenance.origins(node)
        return () if origins == (node,) else tuple(map(self._origin, origins))

    def _origin(self, name: str) -> str:
        scope = self._record.scopes.get(name)
        return scope.path if scope is not None and _is_call_of(scope.path, name) else name

    def _dtype_config(self, decision: Decision) -> str:
        match = None if decision.match is None else self._record.plan.matches[decision.match]
        if match is not None and match.kind is not MatchKind.PATTERN and decision.quantized:
            return str(match.kind.value).replace("_", " ")
        if match is None or decision.dtype_config is None:
            return ""
        config = self._entries[match.entry].dtype_configs[decision.dtype_config]
        parts = {
            "input": config.input_dtype,
            "output": config.output_dtype,
            "weight": config.weight_dtype,
            "bias": config.bias_dtype,
        }
        text = ", ".join(f"{role} {dtype_name(dtype)}" for role, dtype in parts.items() if dtype)
        floats = config.input_dtype == config.output_dtype == torch.float32
        if floats and config.weight_dtype not in (None, torch.float32):
            return f"{text}, weight only"
        return text + (", dynamic" if config.is_dynamic else "")


def samples_of(example: ExampleSpec | None) -> int:
    """How many samples example inputs hold: the size of the first axis that all have, else one.

    >>> samples_of(ExampleSpec.of((torch.zeros(4, 3), torch.zeros(4)))), samples_of(None)
    (4, 1)
    """
    if example is None:
        return 1
    first = {sizes[0] if sizes else 1 for sizes in _sizes([example.args, example.kwargs])}
    return max(1, first.pop()) if len(first) == 1 else 1


def _sizes(value: Any) -> Iterator[list[int]]:
    """The sizes of the tensors in a part of an ``ExampleSpec``."""
    if isinstance(value, dict) and "tensor" in value:
        yield value["tensor"]
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _sizes(part)


def _standalone_float(decision: Decision) -> Reason:
    return Reason(
        decision.node,
        ReasonCode.NO_KERNEL,
        f"{decision.operator} on integers",
        "a custom module whose operators are kernels: this one computes in float, on values that are "
        "rounded as they would be",
    )


def _standalone_notes(inner: Mapping[str, Report]) -> Iterator[str]:
    for node, report in inner.items():
        yield from (f"in {node!r}: {note}" for note in report.notes)


def _standalone_unused(inner: Mapping[str, Report]) -> Iterator[str]:
    for node, report in inner.items():
        yield from (f"in {node!r}: {rule}" for rule in report.unused_rules)


def _standalone_unlowered(inner: Mapping[str, Report]) -> Iterator[ReasonRow]:
    for node, report in inner.items():
        yield from (replace(row, node=f"{node}.{row.node}") for row in report.unlowered)


def _is_call_of(path: str, name: str) -> bool:
    """Whether ``torch.fx`` names a call of the module at ``path`` so: ``_0``, ``block_conv1_2``."""
    squeezed = [re.sub(r"[\W_]", "", text).lower() for text in (path, name)]
    return bool(path) and re.fullmatch(re.escape(squeezed[0]) + r"\d*", squeezed[1]) is not None


def _request(role: str, request: TensorRequest | None) -> str:
    if request is None:
        return ""
    text = f"{role} {dtype_name(request.dtype)}"
    if request.quant_min is not None and request.quant_max is not None:
        text += f" [{request.quant_min}, {request.quant_max}]"
    return f"{text} by {request.observer}" + (", dynamic" if request.is_dynamic else "")


def _requested(decision: Decision) -> str:
    parts = (
        _request("activation", decision.asked_activation),
        _request("weight", decision.asked_weight),
        _request("output", decision.asked_output),
    )
    return "; ".join(part for part in parts if part)


def _reason_row(reason: Reason) -> ReasonRow:
    return ReasonRow(
        reason.rule, reason.asked, reason.admitted, reason.fix, reason.place, reason.node
    )
