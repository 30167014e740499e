"""Quantization-aware training: fake quantize modules in place of observers, trained with the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from backquant.api.arguments import given_backend, given_custom, given_mapping
from backquant.api.skipped import warn_of_skipped
from backquant.api.steps import evaluation_copy, planned
from backquant.backend_config import BackendConfig
from backquant.graph import check_inputs
from backquant.prepare import (
    Origin,
    PreparedModule,
    insert_observers,
    prepared_state,
    swap_for_training,
)
from backquant.qconfig import PrepareCustomConfig, QConfigMapping

__all__ = ["prepare_qat_fx"]


def prepare_qat_fx(
    model: nn.Module,
    qconfig_mapping: QConfigMapping | dict[str, Any],
    example_inputs: Any,
    prepare_custom_config: PrepareCustomConfig | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> PreparedModule:
    """Fuse ``model`` for training, swap in QAT modules and insert fake quantize modules.

    >>> import torch
    >>> from backquant.qconfig import get_default_qat_qconfig_mapping
    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    >>> prepared = prepare_qat_fx(
    ...     model, get_default_qat_qconfig_mapping("x86"), torch.zeros(2, 3, 4, 4))
    >>> type(prepared.get_submodule("0")).__name__
    'ConvBnReLU2d'
    """
    mapping, custom = given_mapping(qconfig_mapping), given_custom(prepare_custom_config)
    backend = given_backend(backend_config)
    check_inputs(evaluation_copy(model), example_inputs)
    step = planned(model, backend, mapping, custom, is_qat=True)
    trained = swap_for_training(step.module, step.plan, backend, mapping)
    origin = Origin(step.fused.scopes, step.fused.provenance)
    prepared = insert_observers(trained, step.plan, backend, mapping, origin=origin, custom=custom)
    warn_of_skipped(prepared_state(prepared).plan)
    return prepared
