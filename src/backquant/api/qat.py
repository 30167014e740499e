"""Quantization-aware training: fake quantize modules where calibration has observers."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import fx, nn

from backquant.api.arguments import given_model, given_request
from backquant.api.skipped import skipped_in_standalone, warn_of_skipped
from backquant.backend_config import BackendConfig
from backquant.calibrate.examples import example_that_runs
from backquant.fuse import apply_fusion, put_back, without_sync
from backquant.graph import (
    DeferredGraphModule,
    capture_for_training,
    own_tensors,
    rebuilt,
)
from backquant.graph.values import GraphValues
from backquant.match import plan_fusion
from backquant.observe import is_fake_quantize, is_placeholder
from backquant.pipeline.capture import captured_with
from backquant.pipeline.plan import FusedGraph, decided, evaluation_copy
from backquant.pipeline.prepare import observed, with_standalone_modules
from backquant.prepare import (
    PreparedModule,
    Request,
    observe_quantized_inputs,
    prepared_state,
    swap_for_training,
)
from backquant.qconfig import PrepareCustomConfig, QConfigMapping
from backquant.report.recorded import with_reporting

_SHOWN = 10


def prepare_qat_fx(
    model: nn.Module,
    qconfig_mapping: QConfigMapping | dict[str, Any],
    example_inputs: Any,
    prepare_custom_config: PrepareCustomConfig | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> PreparedModule:
    """A copy of ``model`` to train, in which weights and activations are rounded as on the backend.

    Convolution or linear with batch norm (and ReLU) become QAT modules of ``backquant.nn``; fake
    quantize modules stand where ``prepare_fx`` has observers. Train the result as any module, then
    convert it with ``convert_fx`` or ``convert_to_reference_fx``. ``docs/qat.md`` shows all of it.

    The model is not changed: the result has parameters and buffers of its own (tied ones stay tied).
    As in PyTorch, an evaluation-mode model is accepted. *Different:* the result is then in evaluation
    mode throughout, until ``train()`` is called; arguments such as ``training=self.training`` of
    functional dropout follow ``train()`` and ``eval()``; and a batch norm without a module for
    training (behind a transposed convolution) is trained as it is and folded at conversion, where
    PyTorch raises.

    As in PyTorch, what the backend does not admit is skipped; one warning lists it with the reasons,
    and says so if the model computes something else in the other mode, or if the QConfigs make
    observers, which round nothing.

    Args:
        model: a module that can be traced symbolically, in training mode as a rule.
        qconfig_mapping: QConfigs that make fake-quantizers: ``get_default_qat_qconfig_mapping(backend)``.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments. As
            PyTorch never runs them, inputs that the model does not accept are no error: the warning
            says so.
        prepare_custom_config: modules to leave untraced, attributes to keep, and the like.
        backend_config: the backend to train for. Default: native.

    Raises:
        CaptureError: the model cannot be traced.
        ConfigError: convolution and batch norm in different modes, or a batch norm that cannot be
            fused for training; a QAT class without ``from_float``; a QConfig that makes no observer.

    >>> import torch
    >>> from backquant.qconfig import get_default_qat_qconfig_mapping
    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    >>> mapping = get_default_qat_qconfig_mapping("qnnpack")
    >>> prepared = prepare_qat_fx(model, mapping, torch.zeros(2, 3, 4, 4))
    >>> prepared(torch.randn(2, 3, 4, 4)).sum().backward()
    >>> type(prepared.get_submodule("0")).__name__, prepared.get_submodule("0").weight.grad.shape
    ('ConvBnReLU2d', torch.Size([3, 3, 1, 1]))
    """
    request = given_request(backend_config, qconfig_mapping, prepare_custom_config)
    # in evaluation mode: there a batch of one is no error
    frozen = evaluation_copy(given_model(model))
    example, shapes = example_that_runs(frozen, example_inputs)
    graph = _fused(model, request.backend_config, request.custom, example)
    prepared = _prepared(graph, request, example)
    with_reporting(observe_quantized_inputs(prepared), frozen, example_inputs)
    notes = (graph.difference, _unrounded(prepared, request.backend_config.name), shapes)
    inside = skipped_in_standalone(prepared)
    warn_of_skipped(prepared_state(prepared).plan, *inside, *filter(None, notes))
    return prepared


def _unrounded(prepared: PreparedModule, backend: str) -> str:
    """The modules whose weight is only measured, because the QConfig makes observers."""
    trained = (
        (path, getattr(module, "weight_fake_quant", None))
        for path, module in prepared.named_modules()
    )
    names = [
        path
        for path, measures in trained
        if measures is not None and not (is_fake_quantize(measures) or is_placeholder(measures))
    ]
    if not names:
        return ""
    more = f", … ({len(names)} in all)" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(names[:_SHOWN])}{more} train without rounding: their QConfig makes observers, "
        f"not fake quantize modules\n  fix    get_default_qat_qconfig_mapping({backend!r})"
    )


def _prepared(graph: _FusedForTraining, request: Request, example: Any = None) -> PreparedModule:
    step = decided(graph.fused, request, example)
    put_back(step.module, graph.made_plain)
    step = with_standalone_modules(step, request, _standalone)
    backend, mapping = request.backend_config, request.qconfig_mapping
    return observed(
        step._replace(module=swap_for_training(step.module, step.record.plan, backend, mapping))
    )


def _standalone(model: nn.Module, request: Request) -> PreparedModule:
    return _prepared(_fused(model, request.backend_config, request.custom), request)


def fuse_for_training(
    model: nn.Module, backend: BackendConfig, custom: PrepareCustomConfig
) -> fx.GraphModule:
    """A copy of ``model`` with fused modules that still have their batch norms."""
    graph = _fused(model, backend, custom)
    module = graph.fused.fused.module
    put_back(module, graph.made_plain)
    return rebuilt(DeferredGraphModule, module, own_tensors(module))


class _FusedForTraining(NamedTuple):
    """``difference``: what else the model does in the other mode. ``made_plain``: to be put back."""

    fused: FusedGraph
    difference: str
    made_plain: dict[nn.Module, nn.SyncBatchNorm]


def _fused(
    model: nn.Module,
    backend: BackendConfig,
    custom: PrepareCustomConfig | None,
    example: Any = None,
) -> _FusedForTraining:
    captured, difference = capture_for_training(model, partial(captured_with, custom))
    made_plain = without_sync(captured.module)
    values = GraphValues(captured.module, example)
    fusions = plan_fusion(captured.module, backend, is_qat=True, values=values)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=True)
    return _FusedForTraining(FusedGraph(fused, fusions), difference, made_plain)
