"""From a planned graph to a prepared model, standalone modules first."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from backquant.api.steps import Planned, planned
from backquant.prepare import (
    Asked,
    Origin,
    PreparedModule,
    insert_observers,
    prepare_standalone_modules,
)

__all__ = ["observed", "planned_for_inference", "with_standalone_modules"]


def planned_for_inference(model: nn.Module, asked: Asked) -> Planned:
    """The planned graph of ``model``, in which standalone modules are prepared already.

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.qconfig import QConfigMapping
    >>> step = planned_for_inference(nn.ReLU(), Asked(BackendConfig("b"), QConfigMapping(), None))
    >>> [node.name for node in step.module.graph.nodes]
    ['input_1', 'relu', 'output']
    """
    step = planned(model, asked.backend_config, asked.qconfig_mapping, asked.custom)
    return with_standalone_modules(step, asked, _prepared)


def with_standalone_modules(
    step: Planned, asked: Asked, prepare: Callable[[nn.Module, Asked], PreparedModule]
) -> Planned:
    """``step`` with its standalone modules prepared by ``prepare``."""
    module = prepare_standalone_modules(step.module, step.plan, asked, prepare)
    return Planned(step.fused._replace(module=module), step.plan)


def observed(step: Planned, asked: Asked) -> PreparedModule:
    """``step`` with observers."""
    return insert_observers(
        step.module,
        step.plan,
        asked.backend_config,
        asked.qconfig_mapping,
        origin=Origin(step.fused.scopes, step.fused.provenance),
        custom=asked.custom,
    )


def _prepared(model: nn.Module, asked: Asked) -> PreparedModule:
    return observed(planned_for_inference(model, asked), asked)
