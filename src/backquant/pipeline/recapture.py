"""Models captured once more: in float, or for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from backquant.errors import CaptureError, ConfigError, InputError, PassError, UsageError
from backquant.fuse import (
    apply_fusion,
    decompose_attention,
    scaled_by_sample,
    separate_recurrent_layers,
    without_sync,
)
from backquant.graph import called_whole, is_leaf
from backquant.graph.example_call import ExampleCall
from backquant.match import Reason
from backquant.match.plan import Plan
from backquant.operators.equivalents import mapping_for_export
from backquant.pipeline.capture import Capturing, captured_with
from backquant.pipeline.plan import Planned, costs_of, evaluation_copy, named_by, planned
from backquant.prepare import Request
from backquant.qconfig import QConfigMapping, get_default_qconfig_mapping
from backquant.reason_codes import ReasonCode
from backquant.runtime.record import LoweredRecord

# The model in float, captured with PyTorch's layers as single calls, as fast as the original.


def planned_in_float(
    model: nn.Module,
    request: Request,
    capturing: Capturing,
    reason: Reason,
    without_kernel: Mapping[str, Reason] = MappingProxyType({}),
) -> Planned:
    """The graph of ``model`` with PyTorch's layers whole, as PyTorch's own tracer leaves them.

    Attention and transformer layers keep their fast paths. Only what ``request.custom`` names is
    quantized. Operators that could have been quantized stay float for ``reason``; the others for their
    own reason, from the plan for ``request`` or from ``without_kernel`` (by the names of operators).
    Raises ``CaptureError`` as ``planned``.

    >>> import torch
    >>> from backquant.backend_config import BackendConfig
    >>> request = Request(BackendConfig("b"), QConfigMapping())
    >>> layer = nn.TransformerEncoderLayer(4, 2).eval()
    >>> slow = Reason("", ReasonCode.SLOWER_THAN_FLOAT, "integers: 2 µs", "float: 1 µs")
    >>> step = planned_in_float(layer, request, Capturing(example_inputs=torch.ones(3, 1, 4)), slow)
    >>> [(name, found.reasons[0].rule) for name, found in step.record.plan.decisions.items()]
    [('transformerencoderlayer', 'slower-than-float')]
    """
    if request.custom is None and is_leaf(model):
        model = called_whole(model)
    nothing = replace(request, qconfig_mapping=QConfigMapping())
    step = planned(model, nothing, replace(capturing, own=None, decompose=False))
    costs, _ = costs_of(step.module, capturing.example_inputs)
    plan = step.record.plan
    asked = planned(model, request, replace(capturing, decompose=False)).record.plan.decisions
    modules = {node.name for node in step.module.graph.nodes if node.op == "call_module"}
    reasons: dict[str, Reason] = {}
    for name, decision in plan.decisions.items():
        own, multiplies = asked.get(name), bool(costs.multiply_adds.get(name))
        is_asked = any(found.rule == ReasonCode.QCONFIG_NONE for found in decision.reasons)
        if decision.quantized or not (multiplies or is_asked):
            continue
        # A layer that is whole here is taken apart where it is quantized: no entry names it.
        if own is None or own.quantized or (multiplies and name in modules):
            reasons[name] = replace(without_kernel.get(name, reason), node=name)
        elif own.reasons:
            reasons[name] = own.reasons[0]
    return step._replace(record=replace(step.record, plan=plan.explain(reasons), costs=costs))


# The float graph of a quantized model, captured once more from the model that it was made from.


def float_graph_of(model: nn.Module, record: LoweredRecord, example_inputs: Any) -> fx.GraphModule:
    """The graph that ``record.plan`` was made for, with the float weights of ``model``, which is not changed.

    The fusions are those of the plan, so that each node has the name that it has there.

    Raises ``UsageError`` when the model is not the one that was quantized: its graph is another one.
    """
    frozen, missing = evaluation_copy(model), ""
    called = None
    with suppress(InputError):  # said where the batch is compared
        called = ExampleCall.of(frozen, example_inputs)
    for capturing in _ways(record, Capturing("auto", example_inputs, called=called)):
        for mapping in _mappings(record):
            try:
                found = _captured(frozen, record, capturing, mapping)
            except CaptureError as error:
                missing = missing or error.what
                continue
            except (KeyError, IndexError, PassError):  # a fusion of the plan is not in this graph
                continue
            absent = _absent(found, record.plan)
            if not absent:
                return found
            missing = f"its graph has no {absent!r}"
    raise UsageError(
        f"this is not the model that was quantized: {missing or 'its graph is another one'}",
        where=f"{type(model).__name__}, beside a model quantized for {record.backend_config.name}",
        fix="pass the float model with the code and the weights that quantize was given",
    )


def _ways(record: LoweredRecord, base: Capturing) -> Iterator[Capturing]:
    """Ways to capture the model, in the order of trial: as for quantization, then as for a model that is
    given back in float.
    """
    how = "trace" if record.interface is None else "export"
    base = replace(base, how=how)
    backend = record.backend_config
    yield replace(
        base,
        decompose=True,
        whole_classes=named_by(backend, "module"),
        whole_functions=named_by(backend, "function"),
    )
    yield base


def _mappings(record: LoweredRecord) -> Iterator[QConfigMapping]:
    """The mapping of the record; for a loaded model, which has none, the default."""
    if any(rule.qconfig is not None for rule in record.qconfig_mapping.rules()):
        yield record.qconfig_mapping
        return
    try:
        mapping = get_default_qconfig_mapping(record.backend_config)
        yield mapping if record.interface is None else mapping_for_export(mapping)
    except ConfigError:  # it has no default
        pass
    yield record.qconfig_mapping


def _captured(
    model: nn.Module, record: LoweredRecord, capturing: Capturing, mapping: QConfigMapping
) -> fx.GraphModule:
    captured = captured_with(record.custom, model, capturing)
    without_sync(captured.module)
    decompose_attention(captured, record.backend_config, mapping, capturing.example_inputs)
    if record.plan.separate_layers:
        separate_recurrent_layers(captured, record.plan.separate_layers)
    if record.plan.by_sample:
        scaled_by_sample(captured, record.plan.by_sample)
    fusions, backend = record.plan.fusions, record.backend_config
    return apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=False).module


def _absent(graph: fx.GraphModule, plan: Plan) -> str:
    """The first operator of the plan that the graph lacks, but for those that a recipe has put in."""
    names = {node.name for node in graph.graph.nodes}
    missing = ((name, found.reasons) for name, found in plan.decisions.items() if name not in names)
    return next(
        (name for name, why in missing if not any(r.rule == ReasonCode.RECIPE for r in why)), ""
    )
