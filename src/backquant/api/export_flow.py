"""``prepare_export``: the first step of the torch-compatible flow, for graphs of ``torch.export``."""

from __future__ import annotations

from typing import Any

from backquant.api.arguments import (
    Model,
    given_backend,
    given_custom,
    given_mapping,
    opened_model,
)
from backquant.api.capturing import Capturing
from backquant.api.examples import checked_example
from backquant.api.prepared import prepared_for_inference
from backquant.api.reporting import with_reporting
from backquant.api.skipped import warn_of_skipped
from backquant.api.steps import evaluation_copy, planned
from backquant.backend_config import BackendConfig
from backquant.prepare import Asked, PreparedModule, observe_quantized_inputs, prepared_state
from backquant.qconfig import PrepareCustomConfig, QConfigMapping

__all__ = ["prepare_export"]


def prepare_export(  # size: prepare_fx's arguments, and the dynamic sizes
    model: Model,
    qconfig_mapping: QConfigMapping | dict[str, Any],
    example_inputs: Any,
    prepare_custom_config: PrepareCustomConfig | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> PreparedModule:
    """``prepare_fx`` for an exported program, or for a module that is exported first.

    Fuses and inserts observers, ready for calibration: call the result on data, then ``convert_fx``.
    Entries and rules are those for symbolic traces; see docs/capture.md for how they apply. What the
    backend does not admit is skipped; one warning lists it with the reasons. The model is not changed.

    Args:
        model: an ``ExportedProgram``, the name of a ``.pt2`` file, or a module (exported as in evaluation
            mode).
        qconfig_mapping: what is asked for.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        prepare_custom_config: as in ``prepare_fx``; names of modules need a module.
        backend_config: what is quantized for. Default: native.
        dynamic_shapes: of a module: which sizes may vary, as ``torch.export.export`` takes it.

    Raises:
        CaptureError: the model cannot be exported, or was exported in training mode.
        InputError: the example inputs do not fit the model.
        ConfigError: as in ``prepare_fx``.

    >>> import torch
    >>> from backquant.api.flow import convert_fx
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> x = torch.randn(2, 4)
    >>> program = torch.export.export(torch.nn.Linear(4, 3).eval(), (x,))
    >>> prepared = prepare_export(program, get_default_qconfig_mapping("x86"), x)
    >>> _ = prepared(x)
    >>> convert_fx(prepared)(x).shape
    torch.Size([2, 3])
    """
    asked = Asked(
        given_backend(backend_config),
        given_mapping(qconfig_mapping),
        given_custom(prepare_custom_config),
    )
    frozen = evaluation_copy(opened_model(model))
    example = checked_example(frozen, example_inputs)
    capturing = Capturing("export", example, dynamic_shapes)
    step = planned(frozen, asked.backend_config, asked.qconfig_mapping, asked.custom, capturing)
    prepared = observe_quantized_inputs(prepared_for_inference(step, asked))
    with_reporting(prepared, frozen, example)
    warn_of_skipped(prepared_state(prepared).plan)
    return prepared
