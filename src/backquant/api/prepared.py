"""From a planned graph to a prepared model, standalone modules first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from backquant.api.steps import Planned, planned
from backquant.graph import released
from backquant.prepare import (
    Asked,
    Origin,
    PreparedModule,
    insert_observers,
    prepare_standalone_modules,
)

__all__ = ["observed", "prepared_for_inference", "with_standalone_modules"]


def prepared_for_inference(step: Planned, asked: Asked) -> PreparedModule:
    """``step`` with observers, and with its standalone modules prepared.

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.qconfig import QConfigMapping
    >>> asked = Asked(BackendConfig("b"), QConfigMapping(), None)
    >>> step = planned(nn.ReLU(), asked.backend_config, asked.qconfig_mapping)
    >>> [node.name for node in prepared_for_inference(step, asked).graph.nodes]
    ['input_1', 'relu', 'output']
    """
    return observed(with_standalone_modules(step, asked, _standalone), asked)


def with_standalone_modules(
    step: Planned, asked: Asked, prepare: Callable[[nn.Module, Asked], PreparedModule]
) -> Planned:
    """``step`` with its standalone modules prepared by ``prepare``."""
    module = prepare_standalone_modules(step.module, step.plan, asked, prepare)
    return replace(step, fused=step.fused._replace(module=module))


def observed(step: Planned, asked: Asked) -> PreparedModule:
    """``step`` with observers."""
    prepared = insert_observers(
        step.module,
        step.plan,
        step.backend,
        step.mapping,
        origin=Origin(step.fused.scopes, step.fused.provenance, step.shapes),
        custom=asked.custom,
    )
    released(step.module)
    return prepared


def _standalone(model: nn.Module, asked: Asked) -> PreparedModule:
    step = planned(model, asked.backend_config, asked.qconfig_mapping, asked.custom)
    return prepared_for_inference(step, asked)
