"""From a planned graph to a prepared model, standalone modules first."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from backquant.backend_config import LeaveFloat
from backquant.graph import released
from backquant.graph.clone import with_plain_names
from backquant.pipeline.plan import Planned, planned
from backquant.prepare import (
    PreparedModule,
    Request,
    insert_observers,
    observe_quantized_inputs,
    prepare_standalone_modules,
)

Prepare = Callable[[nn.Module, Request], PreparedModule]


def prepared_for_inference(step: Planned, request: Request) -> PreparedModule:
    """``step`` with observers, and with its standalone modules prepared.

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.qconfig import QConfigMapping
    >>> request = Request(BackendConfig("b"), QConfigMapping())
    >>> step = planned(nn.ReLU(), request)
    >>> [node.name for node in prepared_for_inference(step, request).graph.nodes]
    ['input_1', 'relu', 'output']
    """
    if request.custom is None:
        return observed(step)
    return observe_quantized_inputs(observed(with_standalone_modules(step, request, _standalone)))


def with_standalone_modules(step: Planned, request: Request, prepare: Prepare) -> Planned:
    """``step`` with its standalone modules prepared by ``prepare``."""
    module = prepare_standalone_modules(step.module, step.record.plan, request, prepare)
    return step._replace(module=module)


def observed(step: Planned, results: tuple[LeaveFloat, ...] | None = None) -> PreparedModule:
    """``step`` with observers; ``results``: as in ``insert_observers``."""
    prepared = insert_observers(step.module, step.record, results)
    released(step.module)
    return prepared


def _standalone(model: nn.Module, request: Request) -> PreparedModule:
    step = planned(with_plain_names(model), request)
    return observed(with_standalone_modules(step, request, _standalone))
