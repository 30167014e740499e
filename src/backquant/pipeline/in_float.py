"""The model in float, captured with PyTorch's layers as single calls, as fast as the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from backquant.graph import called_whole, is_leaf
from backquant.match import Reason
from backquant.pipeline.capture import Capturing
from backquant.pipeline.costs import costs_of
from backquant.pipeline.plan import Planned, planned
from backquant.prepare import Request
from backquant.qconfig import QConfigMapping
from backquant.reason_codes import ReasonCode


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
