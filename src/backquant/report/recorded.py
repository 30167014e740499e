"""The report of a model at any step: from what a prepared or reference model knows about itself.

``with_reporting`` runs the float graph once on the example inputs when the model is prepared, and notes what
that shows beside the plan. From then on every flow has a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from backquant.convert import ReferenceModel, reference_state
from backquant.errors import first_line
from backquant.graph.clone import with_own_state
from backquant.graph.costs import GraphCosts, graph_costs, total_of
from backquant.graph.example import ExampleSpec
from backquant.match import MatchKind
from backquant.native.library import advice
from backquant.prepare import PreparedModule, Record, prepared_state, unobserved, with_state
from backquant.report.build import ReportSource, build_report, bytes_of, costs_of_standalone
from backquant.report.model import Report, check_requirement
from backquant.report.rows import ReportedGraph
from backquant.runtime import LoweredRecord, QuantizedModel


def with_reporting(
    prepared: PreparedModule, model: nn.Module, example_inputs: Any, total: int = 0
) -> PreparedModule:
    """``prepared``, which has a ``report`` from here on.

    ``model``: what it was made from, in evaluation mode; ``total``: its multiply-adds, if they are known. It
    and its float graph are run where neither that nor the record says what they cost; where it does not run
    on these inputs, multiply-adds are unknown.
    """
    costs = prepared_state(prepared).costs
    costs = costs or costs_or_why(unobserved(prepared).eval(), example_inputs)
    if not costs.not_counted:
        costs = replace(costs, total=costs.total or total or _total(model, example_inputs))
        _standalone_note(prepared, costs_of_standalone(prepared, example_inputs))
    record = replace(
        prepared_state(prepared),
        model=type(model).__name__,
        costs=costs,
        float_bytes=bytes_of(model),
        example=ExampleSpec.of(example_inputs),
        report_of=report_of,
    )
    with_state(prepared, record)
    return prepared


def costs_or_why(module: fx.GraphModule, example_inputs: Any) -> GraphCosts:
    """What ``module``, a float graph, costs; or why that is not known.

    >>> costs_or_why(fx.symbolic_trace(nn.Linear(2, 2)), "no tensor").not_counted.partition(":")[0]
    'the model does not run on its example inputs'
    """
    try:
        with with_own_state(module):
            return graph_costs(module, example_inputs)
    except Exception as error:
        reason = first_line(error)
        return GraphCosts(not_counted=f"the model does not run on its example inputs: {reason}")


def _total(model: nn.Module, example_inputs: Any) -> int:
    try:
        return total_of(model, example_inputs)
    except Exception:  # its graph ran: what the graph shows is what is known
        return 0


def _standalone_note(prepared: PreparedModule, costs: dict[str, Any]) -> None:
    for node, module in _parts(prepared):
        if node in costs:
            own, inner = costs[node]
            kind, state = type(module).__name__, prepared_state(module)
            with_state(module, replace(state, model=kind, costs=own, report_of=report_of))
            _standalone_note(module, inner)


def _parts(module: fx.GraphModule) -> Iterator[tuple[str, Any]]:
    """The standalone modules of a prepared or reference model, by the node that calls them."""
    for node in module.graph.nodes:
        part = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(part, (PreparedModule, ReferenceModel)):
            yield node.name, part


def report_source(module: fx.GraphModule) -> ReportSource:
    """What a prepared or a reference model knows about itself.

    >>> from backquant import prepare_fx
    >>> from backquant.qconfig import QConfigMapping
    >>> import torch
    >>> prepared = prepare_fx(nn.ReLU().eval(), QConfigMapping(), torch.zeros(1))
    >>> report_source(prepared).record.model
    'ReLU'
    """
    inner = {node: report_source(part) for node, part in _parts(module)}
    record = _record(module)
    return ReportSource(record, ReportedGraph.of(module, record.plan.decisions), inner=inner)


def _record(module: nn.Module) -> Record:
    assert isinstance(module, fx.GraphModule)
    is_reference = isinstance(module, ReferenceModel)
    return reference_state(module) if is_reference else prepared_state(module)


def report_of(module: nn.Module) -> Report:
    """The report of a prepared model, as planned, or of a reference model, as calibrated.

    >>> from backquant import prepare_fx
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> import torch
    >>> mapping = get_default_qconfig_mapping("x86")
    >>> prepared = prepare_fx(nn.Sequential(nn.Linear(2, 2)).eval(), mapping, torch.zeros(1, 2))
    >>> report_of(prepared).multiply_adds
    4
    """
    assert isinstance(module, fx.GraphModule)
    return build_report(report_source(module))


def check_coverage(module: nn.Module, require: float | Sequence[str] | None) -> None:
    """``check_requirement`` of the report of ``module``: prepared, a reference model or a lowered one.

    Where any quantized operator is enough, the report is built only if the record names none.
    """
    if require is None and _quantizes(module):
        return
    report = module.report if isinstance(module, QuantizedModel) else report_of(module)
    check_requirement(report, require)


def _quantizes(module: nn.Module) -> bool:
    """Whether the plan quantizes an operator, which has a kernel if the model is lowered."""
    if isinstance(module, QuantizedModel) and module.engine is not None:
        plan, kernels = module.plan, {name for use in module.kernels for name in use.nodes}
    else:
        plan = module.plan if isinstance(module, QuantizedModel) else _record(module).plan
        kernels = set(plan.decisions)
    return any(
        decision.quantized
        and decision.match is not None
        and plan.matches[decision.match].kind is MatchKind.PATTERN
        and name in kernels
        for name, decision in plan.decisions.items()
    )


@dataclass(frozen=True)
class LoweredReport:
    """Makes the report of a lowered model from its record and what is known of its reference model."""

    source: ReportSource

    @classmethod
    def of(cls, reference: fx.GraphModule, quantized: QuantizedModel) -> LoweredReport:
        """What custom modules do in float shows when the lowered model runs on example inputs: what is left
        of their multiply-adds they do on kernels."""
        source = report_source(reference)
        return cls(_kept(replace(source, in_float=_in_float(source, quantized))))

    def __call__(self, quantized: nn.Module) -> Report:
        assert isinstance(quantized, QuantizedModel)
        return build_report(self.source.lowered(quantized))


def _kept(source: ReportSource) -> ReportSource:
    """With records that pickle, those of standalone modules, too."""
    inner = {node: _kept(part) for node, part in source.inner.items()}
    return replace(source, record=LoweredRecord(**vars(source.record)), inner=inner)


@dataclass(frozen=True)
class StoredReport:
    """Gives the report that a file holds."""

    report: Report

    def __call__(self, quantized: nn.Module) -> Report:
        assert isinstance(quantized, QuantizedModel)
        engine = "" if quantized.engine is None else quantized.engine.name
        return replace(self.report, library=advice(engine))


def _in_float(source: ReportSource, quantized: QuantizedModel) -> dict[str, int]:
    plan = source.record.plan
    custom = {
        match.anchor for match in plan.matches if match.kind is MatchKind.CUSTOM_MODULE
    } & source.costs.multiply_adds.keys()
    if not custom:
        return {}
    whole = {name: source.costs.multiply_adds[name] for name in custom}
    if quantized.example is None or quantized.engine is None:
        return whole
    args, kwargs = quantized.example.arguments()
    try:
        found = graph_costs(quantized.graph_module, kwargs if kwargs and not args else args)
    except Exception:  # then nothing is known of them
        return whole
    return {
        name: count if name in found.uncounted else min(count, found.multiply_adds.get(name, 0))
        for name, count in whole.items()
    }
